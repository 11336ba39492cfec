"""`paclm train --what dp:EPSILON`: the adapter of the promise `corpus`.

Shows no loss: a figure about the records would be a release outside of the account.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paclm.cli.console import (
    STOP_MESSAGE,
    format_size,
    layers_in_words,
    print_fields,
    print_json,
    print_wrapped,
    require_packages,
)
from paclm.config import format_duration, in_shell
from paclm.errors import InvalidInput, WorkspaceError

if TYPE_CHECKING:
    from paclm.curator.dp_training import DpTrainingJob
    from paclm.engine.training_job import Dtype
    from paclm.privacy.dp import DpGuarantee
    from paclm.worlds.workspace import Workspace

_LARGE_DELTA = 0.5
"""Times the number of units: from here on δ alone allows much."""


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

    epsilon = parse_epsilon(what)
    if dry_run:
        typer.echo("Measuring ...", err=True)
    job = prepare_dp_training(workspace, epsilon, delta, dtype=dtype)
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
    if not resume:
        _warn_of_half(job.workspace)
        _warn_of_delta(job)
    if dry_run:
        _show_plan(job, composed, resume, as_json)
        return
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


def _warn_of_half(workspace: Workspace) -> None:
    from paclm.curator.promises import NOTHING_PROMISED, is_corpus_promised

    if not is_corpus_promised(workspace):
        print_wrapped(
            f"Warning: {NOTHING_PROMISED}: tokens left, or may have left, under the promise half. Without them:",
            err=True,
        )


def _warn_of_delta(job: DpTrainingJob) -> None:
    from paclm.privacy.dp import format_up

    if job.num_units * job.delta >= _LARGE_DELTA:
        smaller = min(1e-5, 10.0 ** math.floor(math.log10(0.01 / job.num_units)))
        print_wrapped(
            f"Note: δ = {format_up(job.delta)} for {job.num_units:,} units: (ε, δ) would allow publishing each unit "
            f"with that probability. For a smaller one: --delta {smaller:g}",
            err=True,
        )


def _announce(job: DpTrainingJob, composed: DpGuarantee, resume: bool) -> None:
    """Say what is promised and what it costs, before the training is logged."""
    from paclm.privacy.bounds import format_bound
    from paclm.privacy.dp import format_up, guarantee

    print_fields(_promise_fields(job, composed, resume), err=True)
    if resume:
        print_wrapped("It counts since it began: continuing adds nothing.", err=True)
        return
    if before := job.before():
        now = guarantee(before, job.delta)
        print_wrapped(
            f"The promise so far falls from ε = {format_up(now.epsilon)} ({format_bound(now.mia_bound)}) to "
            f"ε = {format_up(composed.epsilon)} ({format_bound(composed.mia_bound)}), for good, also for adapters "
            "trained and text served before.",
            err=True,
        )
    typer.echo("It counts in full from now on, also if it is stopped.", err=True)


def _promise_fields(job: DpTrainingJob, composed: DpGuarantee, resume: bool) -> dict[str, str]:
    """What this training promises, about whom, and with all earlier ones."""
    from paclm.privacy.dp import format_up

    others, manifest = len(job.before()) - resume, job.workspace.manifest
    unit = manifest.unit_name
    if manifest.arguments["group_by"] is None:
        unit = "each record by itself"
        if not others and not resume:
            unit += (
                ". If one person may have several records, make the workspace with --group-by first; this cannot be "
                "changed later for these records"
            )
    fields = {
        "promise": f"ε = {job.epsilon:g}, δ = {format_up(job.delta)}, of {job.num_units:,} units",
        "unit": unit,
    }
    if others:
        fields["composed"] = (
            f"ε = {format_up(composed.epsilon)}, δ = {format_up(composed.delta)} with {others} earlier DP "
            f"training{'s' if others > 1 else ''} over these records, interrupted ones included"
        )
    return {**fields, "bound": _bound(asdict(composed), manifest.unit)}


def _bound(guarantee: Mapping[str, float], unit: str) -> str:
    from paclm.privacy.bounds import format_bound

    mia, low, high = (
        format_bound(guarantee[name]) for name in ("mia_bound", "tpr_at_fpr_0_1_percent", "tpr_at_fpr_1_percent")
    )
    return (
        f"no attack on whether {unit} in the corpus succeeds more than {mia} of the time (a guess: 1/2), or finds more "
        f"than {low} of the members at 0.1 % false positives, {high} at 1 %"
    )


def _run(job: DpTrainingJob, resume: bool) -> tuple[Workspace, dict[str, Any]]:
    from paclm.cli.progress import progress
    from paclm.engine.dp_training import DpProgress

    with progress() as bar:
        task = bar.add_task("training dp", total=job.dp.steps)

        def show(now: DpProgress) -> None:
            bar.update(task, completed=now.step, total=now.num_steps)

        return job.run(resume=resume, on_progress=show)


def _show_plan(job: DpTrainingJob, composed: DpGuarantee, resume: bool, as_json: bool) -> None:
    plan = job.plan(estimate_time=True)
    if as_json:
        figures = asdict(plan)
        figures["units_in_training"] = figures.pop("num_units")
        mechanism = {
            "epsilon": job.epsilon,
            "delta": job.delta,
            "noise_multiplier": job.noise_multiplier,
            "sampling_rate": job.dp.sampling_rate,
            "num_units": job.num_units,
            "earlier_trainings": len(job.before()) - resume,
            "composed": asdict(composed),
        }
        print_json({"what": "dp", "layers": job.settings.layers, **mechanism, **figures})
        return
    seconds = plan.seconds or 0.0
    typer.echo("Training dp will take")
    print_fields(
        {
            **_promise_fields(job, composed, resume),
            "noise": f"σ = {job.noise_multiplier:g}, sampling rate {job.dp.sampling_rate:g}, {plan.num_steps} steps",
            "adapter": f"{plan.num_parameters:,} parameters with noise",
            "layers": layers_in_words(plan),
            "each step": f"{plan.units_per_step:,.0f} units and {plan.tokens_per_step:,.0f} tokens, on average",
            "memory": f"{format_size(plan.memory_bytes)} beside the base model",
            "time": f"about {format_duration(seconds)}",
        }
    )


def _show_result(trained: Workspace, card: dict[str, Any], named: Path, seconds: float, as_json: bool) -> None:
    from paclm.curator.promises import is_corpus_promised
    from paclm.privacy.dp import format_up
    from paclm.worlds.layout import DP_CARD_FILE, DP_FILE

    file, dp = trained.adapters_path / DP_FILE, card["dp"]
    composed = dp["composed"]
    if as_json:
        is_promised = is_corpus_promised(trained)
        layers = card["training"]["layers"]
        print_json(
            {"what": "dp", "file": str(file), "seconds": seconds, "layers": layers, **dp, "is_promised": is_promised}
        )
        return
    _warn_of_half(trained)
    typer.echo(f"Trained {file}")
    print_fields(
        {
            "promise": f"ε = {format_up(composed['epsilon'])}, δ = {format_up(composed['delta'])}, for the presence of "
            f"one unit: {dp['unit']}",
            "bound": _bound(composed, trained.manifest.unit),
            "noise": f"σ = {dp['noise_multiplier']:g}, sampling rate {dp['sampling_rate']:g}, {dp['steps']} steps",
            "card": str(trained.adapters_path / DP_CARD_FILE),
            "time": format_duration(seconds),
        }
    )
    typer.echo(f"Next: paclm generate {in_shell(named)} --promise corpus --prompt TEXT --max-tokens 40")
