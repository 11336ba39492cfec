"""`paclm train --what dp:EPSILON`: the adapter of the promise `corpus`.

Shows no loss: a figure about the records would be a release outside of the account.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paclm.cli.console import STOP_MESSAGE, format_size, print_fields, print_json, print_wrapped, require_packages
from paclm.config import format_duration, in_shell
from paclm.errors import InvalidInput, WorkspaceError

if TYPE_CHECKING:
    from paclm.curator.dp_training import DpTrainingJob
    from paclm.engine.training_job import Dtype
    from paclm.privacy.dp import DpGuarantee
    from paclm.worlds.workspace import Workspace


def train_dp_adapter(
    named: Path,
    workspace: Workspace,
    what: str,
    *,
    delta: float | None,
    dtype: Dtype,
    dry_run: bool,
    resume: bool,
    again: bool,
    as_json: bool,
) -> None:
    """Train, or show what training will take."""
    require_packages("dp_accounting")
    from paclm.cli.train import warn_of_load
    from paclm.curator.dp_training import prepare_dp_training

    job = prepare_dp_training(workspace, parse_epsilon(what), delta, dtype=dtype)
    options = {"--delta": delta, "--dtype": None if dtype == "auto" else dtype}
    given = [f"{name} {value}" for name, value in options.items() if value is not None]
    command = " ".join(["paclm train", in_shell(named), "--what", what, *given])
    if resume and job.is_trained and job.unfinished is None and not dry_run:
        typer.echo(f"{job.file} is trained already: nothing to resume.")
        return
    resume = resume and job.unfinished is not None  # else it is the first training
    if not (dry_run or resume or again):
        _refuse_second(job, command)
    warn_of_load(job)
    composed = job.composed(resume=resume)
    if dry_run:
        _show_plan(job, composed, as_json)
        return
    if len(job.before()) > resume:
        _announce(job, composed, resume)
    began = time.monotonic()
    try:
        trained, card = _run(job, resume)
    except KeyboardInterrupt:
        STOP_MESSAGE.set(f"The training counts in full from its start. To continue it: {command} --resume")
        raise
    _show_result(trained, card, named, time.monotonic() - began, as_json)


def parse_epsilon(what: str) -> float:
    """ε of `dp:8`."""
    try:
        return float(what.removeprefix("dp").removeprefix(":"))
    except ValueError:
        raise InvalidInput(f"Cannot read ε in {what!r}. Write it like dp:8 or dp:0.5.") from None


def _refuse_second(job: DpTrainingJob, command: str) -> None:
    from paclm.privacy.dp import format_up

    if job.is_unfinished:
        raise WorkspaceError(
            f"An earlier DP training was stopped, and counts in full. To continue it: {command} --resume; to begin "
            f"another, which counts too: {command} --again"
        )
    if job.is_trained or job.unfinished is not None:
        state = "exists already" if job.is_trained else "was begun, and counts in full"
        raise WorkspaceError(
            f"A DP adapter of {job.workspace.path} {state}. Another training over the same records adds up to "
            f"ε = {format_up(job.composed().epsilon)} at δ = {format_up(job.delta)}. To begin it: {command} --again"
        )


def _announce(job: DpTrainingJob, composed: DpGuarantee, resume: bool) -> None:
    from paclm.privacy.dp import format_up

    others = len(job.before()) - resume
    print_wrapped(
        f"{others} other DP training{'s' if others > 1 else ''} over these records {'were' if others > 1 else 'was'} "
        f"begun, interrupted ones included. Together with this one: ε = {format_up(composed.epsilon)} at δ = "
        f"{format_up(composed.delta)}. That is what the promise amounts to, also for adapters trained before.",
        err=True,
    )


def _run(job: DpTrainingJob, resume: bool) -> tuple[Workspace, dict[str, Any]]:
    from paclm.cli.progress import progress
    from paclm.engine.dp_training import DpProgress

    with progress() as bar:
        task = bar.add_task("training dp", total=job.dp.steps)

        def show(now: DpProgress) -> None:
            bar.update(task, completed=now.step, total=now.num_steps)

        return job.run(resume=resume, on_progress=show)


def _show_plan(job: DpTrainingJob, composed: DpGuarantee, as_json: bool) -> None:
    from paclm.privacy.dp import format_up

    plan = job.plan(estimate_time=True)
    others = len(job.before())
    if as_json:
        figures = asdict(plan)
        figures["units_in_training"] = figures.pop("num_units")
        mechanism = {
            "epsilon": job.epsilon,
            "delta": job.delta,
            "noise_multiplier": job.noise_multiplier,
            "sampling_rate": job.dp.sampling_rate,
            "num_units": job.num_units,
            "earlier_trainings": others,
            "composed": asdict(composed),
        }
        print_json({"what": "dp", **mechanism, **figures})
        return
    seconds = plan.seconds or 0.0
    typer.echo("Training dp will take")
    print_fields(
        {
            "privacy": f"ε = {job.epsilon:g}, δ = {format_up(job.delta)}, of {job.num_units:,} units",
            "noise": f"σ = {job.noise_multiplier:g}, sampling rate {job.dp.sampling_rate:g}, {plan.num_steps} steps",
            "composed": f"ε = {format_up(composed.epsilon)} with {others} earlier DP trainings over these records",
            "adapter": f"{plan.num_parameters:,} parameters with noise",
            "each step": f"{plan.units_per_step:,.0f} units and {plan.tokens_per_step:,.0f} tokens, on average",
            "memory": f"{format_size(plan.memory_bytes)} beside the base model",
            "time": f"about {format_duration(seconds)}",
        }
    )


def _show_result(trained: Workspace, card: dict[str, Any], named: Path, seconds: float, as_json: bool) -> None:
    from paclm.curator.promises import NOTHING_PROMISED, is_corpus_promised
    from paclm.privacy.bounds import format_bound
    from paclm.privacy.dp import format_up
    from paclm.worlds.layout import DP_CARD_FILE, DP_FILE

    file, dp = trained.adapters_path / DP_FILE, card["dp"]
    composed, is_promised = dp["composed"], is_corpus_promised(trained)
    if as_json:
        print_json({"what": "dp", "file": str(file), "seconds": seconds, **dp, "is_promised": is_promised})
        return
    if not is_promised:
        print_wrapped(
            f"Warning: {NOTHING_PROMISED}: tokens left, or may have left, under the promise half. Without them:",
            err=True,
        )
    typer.echo(f"Trained {file}")
    print_fields(
        {
            "promise": f"ε = {format_up(composed['epsilon'])}, δ = {format_up(composed['delta'])}, for the presence of "
            f"one unit: {dp['unit']}",
            "bound": f"no attack on that succeeds more than {format_bound(composed['mia_bound'])} of the time "
            f"(a guess: 1/2), or finds more than {format_bound(composed['tpr_at_fpr_0_1_percent'])} of the members at "
            "0.1 % false positives",
            "noise": f"σ = {dp['noise_multiplier']:g}, sampling rate {dp['sampling_rate']:g}, {dp['steps']} steps",
            "card": str(trained.adapters_path / DP_CARD_FILE),
            "time": format_duration(seconds),
        }
    )
    typer.echo(f"Next: paclm generate {in_shell(named)} --promise corpus --prompt TEXT --max-tokens 40")
