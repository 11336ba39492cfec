"""`paclm train`: every world's adapter, many worlds at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paclm.cli.console import (
    STOP_MESSAGE,
    JsonFlag,
    WorkspaceArgument,
    format_size,
    layers_in_words,
    print_fields,
    print_json,
    warn_of_threads,
)
from paclm.cli.training_advice import after_training, learned_little
from paclm.cli.worker_options import InsecureNetworkFlag, RendezvousOption, WorkersOption, workers_of
from paclm.config import format_duration, in_shell
from paclm.errors import InvalidInput, WorkspaceError

if TYPE_CHECKING:
    from paclm.curator.dp_training import DpTrainingJob
    from paclm.engine.training import Trained
    from paclm.engine.training_job import TrainingJob
    from paclm.engine.training_plan import TrainingPlan
    from paclm.engine.workers import WorkerGroup
    from paclm.worlds.workspace import Workspace


def train(
    workspace: WorkspaceArgument,
    what: Annotated[
        str,
        typer.Option(
            help="worlds; dp:EPSILON: one adapter with differential privacy, for the promise corpus; full: one adapter "
            "on all records; shards:N: N disjoint parts of the records; for studies also collection:N, design:N and "
            "uncoupled."
        ),
    ] = "worlds",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what training will take, and exit.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Start over and replace existing adapters; DP trainings add up, whatever is kept."
        ),
    ] = False,
    delta: Annotated[
        float | None, typer.Option(help="δ of dp:EPSILON; default n^-1.1, n the number of records or groups.")
    ] = None,
    worlds_per_step: Annotated[
        str, typer.Option(help="How many worlds train together: a number, or auto by measured memory.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Arithmetic of the base model; auto: bfloat16 where the hardware has it, else float32."),
    ] = "auto",
    workers: WorkersOption = 1,
    rendezvous: RendezvousOption = None,
    insecure_network: InsecureNetworkFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """
    Train the adapter of every world

    All worlds are trained alike, with the settings in [training] of paclm.toml. A run that was stopped can be resumed
    and gives the same adapters.

    dp:EPSILON trains by DP-SGD, with the settings in [dp] besides. Every DP training over the same records adds to what
    the promise amounts to, from its first step on, also if it is stopped.

    Example usage:

    \b
        paclm train clinic --dry-run
        paclm train clinic
        paclm train clinic --resume
        paclm train clinic --workers 4
        paclm train clinic --what shards:16
        paclm train clinic --what dp:8 --dry-run
    """
    group_size = int(worlds_per_step) if worlds_per_step.isdecimal() else None
    if worlds_per_step != "auto" and not group_size:
        raise InvalidInput(f"--worlds-per-step must be auto or a number of at least 1, not {worlds_per_step!r}.")
    from paclm.curator.custody import keep_address, refuse_new_worlds
    from paclm.worlds.workspace import Workspace

    if resume and again:
        raise InvalidInput("--resume continues a stopped run and --again starts over: use one of them.")
    opened = Workspace.open(workspace)
    keep_address(opened.path)
    if what.partition(":")[0] == "dp":
        if worlds_per_step != "auto":
            raise InvalidInput("--worlds-per-step is not for dp, which trains one adapter.")
        if workers != 1:
            raise InvalidInput("--workers is not for dp, which trains one adapter.")
        from paclm.cli.train_dp import train_dp_adapter

        train_dp_adapter(
            workspace,
            opened,
            what,
            delta=delta,
            dtype=dtype,
            dry_run=dry_run,
            resume=resume,
            again=again,
            as_json=as_json,
        )
        return
    if delta is not None:
        raise InvalidInput("--delta is for --what dp:EPSILON.")
    if what != "worlds" and (changes := opened.training_changes()):
        typer.echo(
            f"Warning: the worlds were trained with other settings ({changes}). Adapters with other layers, targets, "
            "rank or alpha cannot run beside them.",
            err=True,
        )
    from paclm.engine.training_job import prepare_training
    from paclm.engine.training_workers import SILENT_SECONDS

    if dry_run:
        typer.echo("Measuring ...", err=True)
    shared = workers_of(opened, workers, rendezvous, is_insecure=insecure_network)
    local = workers if rendezvous is None else 1
    job = prepare_training(opened, what, dtype=dtype, workers=workers, processes=local)
    is_trained = job.file_name in job.workspace.manifest.adapters
    if is_trained and resume and not (job.is_unfinished or again or dry_run):
        typer.echo(f"{job.workspace.adapters_path / job.file_name} is trained already: nothing to resume.")
        return
    warn_of_load(job)
    options = {"--what": (what, "worlds"), "--dtype": (dtype, "auto")}  # without them it would be another run
    named = [f"{name} {value}" for name, (value, default) in options.items() if value != default]
    command = " ".join(["paclm train", in_shell(workspace), *named])
    if dry_run:
        _show_plan(job, job.plan(group_size, estimate_time=True), as_json)
        return
    if what == "worlds":
        refuse_new_worlds(opened)
    job.refuse_if_running()
    if not again:
        _refuse_to_overwrite(job, is_trained, resume, command)
    plan = job.plan(group_size)
    try:
        with shared as group:
            if group is not None:
                group.timeout = max(group.timeout, SILENT_SECONDS)
            _, trained = run_job(job, f"training {job.name}", plan.worlds_per_step, resume=resume, group=group)
    except KeyboardInterrupt:
        if job.has_kept_work:
            STOP_MESSAGE.set(f"Work so far is kept. To continue: {command} --resume")
        raise
    _show_result(job, plan, trained, workspace, command, as_json)


def warn_of_load(job: TrainingJob | DpTrainingJob) -> None:
    """Warn if training will be slower than the machine allows, because of its settings or other programs."""
    if job.model.device.type == "cpu":
        warn_of_threads(job.workspace)
    if job.threads is not None and job.threads.busy:
        typer.echo(
            f"Another program keeps {job.threads.busy} of {job.threads.cores} cores busy: training on "
            f"{job.threads.threads}. To set another number: threads in [runtime].",
            err=True,
        )


def run_job(
    job: TrainingJob,
    label: str,
    worlds_per_step: int | None = None,
    *,
    resume: bool,
    group: WorkerGroup | None = None,
) -> tuple[Workspace, Trained]:
    """Train with a progress bar; returns the workspace with its new adapters."""
    from paclm.cli.progress import progress
    from paclm.engine.training_queue import Progress

    with progress() as bar:
        task = bar.add_task(label, total=None)

        def show(now: Progress) -> None:
            description = f"{label}, group {now.group + 1}/{now.num_groups}, loss {now.loss:.3f}"
            bar.update(task, completed=now.step, total=now.num_steps, description=description)

        return job.run(worlds_per_step, resume=resume, on_progress=show, group=group)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _refuse_to_overwrite(job: TrainingJob, is_trained: bool, resume: bool, command: str) -> None:
    path = job.workspace.adapters_path / job.file_name
    if job.is_unfinished and not resume:
        stopped = f"{path} exists, and a later run to replace it" if is_trained else "An earlier run of this training"
        raise WorkspaceError(
            f"{stopped} was stopped. To continue it: {command} --resume; to start over and lose its work: "
            f"{command} --again"
        )
    if is_trained and not job.is_unfinished:
        raise WorkspaceError(f"{path} exists already. To replace it: {command} --again")


def _show_plan(job: TrainingJob, plan: TrainingPlan, as_json: bool) -> None:
    if as_json:
        figures = dataclasses.asdict(plan)
        named = {"what": job.name, "threads": _threads(), "layers": job.settings.layers}
        served = {"cache_bytes_per_token": job.cache_per_token()} if job.name == "worlds" else {}
        print_json({**named, "worlds": figures.pop("num_worlds"), **figures, **served})
        return
    seconds = plan.seconds or 0.0
    typer.echo(f"Training {job.name} will take")
    print_fields(
        {
            "adapters": f"{plan.num_worlds:,} of {plan.parameters_per_world:,} parameters, "
            f"{plan.worlds_per_step} trained together"
            + (f" by each of {plan.workers} workers" if plan.workers > 1 else ""),
            "layers": layers_in_words(plan, plan.num_worlds),
            "steps": f"{plan.num_steps:,}",
            "tokens": f"{plan.num_tokens:,} ({plan.num_tokens / plan.num_positions:.0%} of the positions computed)",
            "memory": f"{format_size(plan.memory_bytes)} beside the base model"
            + (", both in each process" if plan.workers > 1 else ""),
            **_trunk(plan),
            "disk": f"{format_size(plan.disk_bytes)} while it runs, about "
            f"{format_size(4 * plan.parameters_per_world * plan.num_worlds)} afterwards",
            "time": f"about {format_duration(seconds)} ({plan.num_tokens / max(seconds, 1e-9):,.0f} tokens per second)",
            **_served(job),
        }
    )


def _served(job: TrainingJob) -> dict[str, str]:
    """How many tokens of prompts and answers will fit into the cache, by the choice of layers."""
    if job.name != "worlds":
        return {}
    room = {layers: f"{2**30 // size:,}" for layers, size in job.cache_per_token().items()}
    own = room.pop(job.settings.layers if job.settings.layers in room else "all")
    others = [f'{tokens} with layers = "{layers}"' for layers, tokens in room.items() if tokens != own]
    return {"served": "; ".join([f"1 GiB of cache holds {own} tokens", *others])}


def _trunk(plan: TrainingPlan) -> dict[str, str]:
    """What happens to the layers that all worlds share, if there are any."""
    if not plan.trunk:
        return {}
    places = {"device": "beside the model", "host": "in the memory of the host", "disk": "in a file while it runs"}
    how = "layers below the adapters, computed in every step"
    if plan.trunk_place is not None:
        how = f"layers below the adapters, computed once: {format_size(plan.trunk_bytes)} {places[plan.trunk_place]}"
    return {"trunk": how}


def _show_result(
    job: TrainingJob, plan: TrainingPlan, trained: Trained, named: Path, command: str, as_json: bool
) -> None:
    improvement, steps = trained.improvement, round(float(job.schedule.num_steps.mean()))
    losses = float(improvement.public.mean()), float(improvement.trained.mean())
    figures: dict[str, Any] = {
        "what": job.name,
        "file": str(job.workspace.adapters_path / job.file_name),
        "worlds": plan.num_worlds,
        "parameters_per_world": plan.parameters_per_world,
        "layers": job.settings.layers,
        "num_layers": plan.num_layers,
        "adapted_layers": plan.adapted_layers,
        "trunk": plan.trunk,
        "worlds_per_step": trained.worlds_per_step,
        "threads": _threads(),
        "workers": job.workers,
        "num_steps": plan.num_steps,
        "steps_per_world": steps,
        "num_tokens": plan.num_tokens,
        "seconds": trained.seconds,
        "loss_public": losses[0],
        "loss_trained": losses[1],
        "least_improvement": float((improvement.public - improvement.trained).min()),
    }
    if as_json:
        print_json(figures)
        return
    least = f"; smallest gain of a world {figures['least_improvement']:.3f}" if plan.num_worlds > 1 else ""
    typer.echo(f"Trained {figures['file']}")
    print_fields(
        {
            "adapters": f"{plan.num_worlds:,} of {plan.parameters_per_world:,} parameters",
            "layers": layers_in_words(plan, plan.num_worlds),
            "loss": f"{losses[0]:.3f} → {losses[1]:.3f} nats per token on own records{least}",
            "time": format_duration(trained.seconds),
        }
    )
    if job.name == "worlds":
        if learned_little(*losses, steps):
            typer.echo(after_training(*losses, steps, job.settings, f"{command} --again"))
        typer.echo(_next_step(job.workspace, in_shell(named)))


def _next_step(workspace: Workspace, quoted: str) -> str:
    """The next commands, which work as printed: without a budget nothing is generated."""
    generate = f"paclm generate {quoted} --prompt TEXT --max-tokens 40"
    votes = f"paclm votes {quoted} --prompt TEXT"
    if {"per_token", "total"} <= workspace.settings.mechanism.keys():
        return f"Next: {generate}; for research, {votes}"
    return (
        f"Next, a budget: paclm plan --mia 51% --tokens 1M --write {quoted}; then {generate}. For research, without a "
        f"budget: {votes}"
    )
