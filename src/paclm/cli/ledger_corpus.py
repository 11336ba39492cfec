"""The promise `corpus` in `paclm ledger show` and `verify`: DP trainings, what they promise together, their log."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from paclm.cli.console import print_fields, print_json, print_wrapped

_SHOWN = ("epsilon", "delta", "sampling_rate", "noise_multiplier", "steps", "num_units", "unit")


def has_dp_log(place: Path) -> bool:
    """Whether a workspace, or a place where one was, has a log of DP trainings."""
    from paclm.worlds.layout import dp_log_path

    return place.is_dir() and dp_log_path(place).exists()


def corpus_figures(place: Path) -> dict[str, Any]:
    """(ε, δ), bounds, and every training that counts."""
    from paclm.curator.dp_account import all_trainings, promise_figures
    from paclm.curator.dp_decoder import check_dp_adapter
    from paclm.ledger.dp_log import DpLog
    from paclm.worlds.layout import dp_log_path
    from paclm.worlds.workspace import Workspace

    workspace = Workspace.open(place)
    log = DpLog(dp_log_path(workspace.path))
    own, finished = log.trainings(), set(log.trained().values())
    if not own:
        check_dp_adapter(workspace)  # raises: says what is missing
    runs = [
        {
            "run": run,
            **{name: training.get(name) for name in ("at", *_SHOWN)},
            "is_here": run in own,
            "is_finished": run in finished if run in own else None,
        }
        for run, training in all_trainings(workspace).items()
    ]
    return {**promise_figures(workspace), "is_served": log.has("served"), "runs": runs}


def show_corpus(place: Path, as_json: bool) -> None:
    """Print what is promised about the corpus."""
    from paclm.privacy.bounds import format_bound
    from paclm.privacy.dp import format_up

    figures = corpus_figures(place)
    if as_json:
        print_json(figures)
        return
    if not figures["is_promised"]:
        print_wrapped(
            "Nothing is promised about the corpus: tokens left, or may leave, under the promise half too. Without them "
            "the DP trainings would promise:"
        )
    bounds = {name: format_bound(figures[name]) for name in figures if name.startswith(("mia", "tpr"))}
    print_fields(
        {
            "Guarantee": f"ε = {format_up(figures['epsilon'])}, δ = {format_up(figures['delta'])}, for the presence of "
            f"one unit: {figures['unit']}",
            "Bound": f"no attack on whether a unit is in the corpus succeeds more than {bounds['mia_bound']} of the "
            f"time (a guess: 1/2), or finds more than {bounds['tpr_at_fpr_0_1_percent']} of the units at 0.1 % false "
            f"positives and {bounds['tpr_at_fpr_1_percent']} at 1 %",
            "DP trainings": f"{figures['trainings']} over these records, all composed",
        },
        indent=0,
    )
    for run in figures["runs"]:
        state = {True: "finished", False: "not finished; counts in full", None: "elsewhere"}[run["is_finished"]]
        typer.echo(
            f"  {run['run']}  {run['at'] or '':<25}  ε = {run['epsilon']:g}, δ = {format_up(run['delta'])}, "
            f"σ = {run['noise_multiplier']:g}, q = {run['sampling_rate']:g}, {run['steps']} steps ({state})"
        )


def verify_corpus(place: Path) -> dict[str, Any] | None:
    """Whether the log of DP trainings is whole, and the DP adapter one of them; None where DP was never used."""
    from paclm.curator.dp_account import verify_dp
    from paclm.worlds.layout import ADAPTERS_FOLDER, DP_FILE

    if not has_dp_log(place) and not (place / ADAPTERS_FOLDER / DP_FILE).exists():
        return None
    report = verify_dp(place)
    return {**asdict(report), "intact": report.intact}


def print_corpus_report(report: dict[str, Any]) -> None:
    """Print what `verify_corpus` found."""
    if report["intact"]:
        typer.echo(f"DP trainings: {report['num_events']} events, intact.")
    else:
        typer.echo(f"DP trainings NOT INTACT: {report['problem']}", err=True)
