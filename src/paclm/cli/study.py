"""`paclm study`: the paper's tables and figures, and what goes past them. Research: nothing here is private."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from paclm.cli.console import WHEN_STOPPED, JsonFlag, need, open_trained, print_json, progress, tasks
from paclm.config import in_shell
from paclm.errors import InvalidInput, PaclmError, WorkspaceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paclm.study.figure import Figure
    from paclm.study.regime import Regime
    from paclm.study.results import Result
    from paclm.study.table import Table
    from paclm.worlds.workspace import Workspace

study = typer.Typer(
    help="Rerun the paper's tables and figures on a workspace.", no_args_is_help=True, rich_markup_mode=None
)

WorkspaceArgument = Annotated[Path, typer.Argument(help="Folder made by paclm init, with trained worlds.")]


class _ListsRegimes(TyperCommand):
    """Ends its help with every regime and its tables; the study is imported only then."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from paclm.study.figures import all_figures
        from paclm.study.regimes import NAMES
        from paclm.study.tables import all_tables

        shown: list[Table | Figure] = [*all_tables(), *all_figures()]
        with formatter.section("Regimes, and the tables and figures made from them"):
            formatter.write_dl([(name, _labels(shown, name)) for name in NAMES])


def _labels(shown: Sequence[Table | Figure], regime: str) -> str:
    return ", ".join(one.label for one in shown if regime in one.regimes)


@study.command(cls=_ListsRegimes)
def run(
    workspace: WorkspaceArgument,
    regimes: Annotated[list[str], typer.Argument(help="Names, listed below; all for every one.")],
    preset: Annotated[
        Literal["quick", "paper"], typer.Option(help="Scale: minutes on two cores, or that of the paper.")
    ] = "quick",
    collections: Annotated[
        int, typer.Option(help="Collections of worlds to run on; from the second on they are drawn and trained anew.")
    ] = 1,
    test_text: Annotated[
        Path | None, typer.Option(help="Text to score on instead of the held-out records.", show_default="held-out")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    again: Annotated[
        bool, typer.Option("--again", help="Use no votes and finished parts of an earlier run; make all of them anew.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """
    Run regimes and keep their results in the workspace

    What a regime needs beside the worlds (the full-corpus adapter, shards, another collection) is trained and kept.
    A run that was stopped goes on where it was, unless the code it depends on was changed since. The realized world
    of the deployment is not involved: studies draw their own secrets, from a seed.

    Example usage:

    \b
        paclm study run clinic census accuracy
        paclm study run clinic all --preset quick
        paclm study report clinic
    """
    from paclm.study.regimes import check_names

    check_names(regimes)
    if collections < 1:
        raise InvalidInput(f"--collections must be at least 1, not {collections}.")
    opened = open_trained(workspace)
    _refuse_other_settings(opened, workspace)
    WHEN_STOPPED.set("Results of finished regimes are kept, and so is what was trained; the same command goes on.")
    from paclm.study.eval_text import read_test_text
    from paclm.study.lab import Lab
    from paclm.study.parts import Kept
    from paclm.study.regime import scale_in_words
    from paclm.study.run import regimes_named, run_regimes

    chosen = regimes_named(regimes)
    lab = Lab(opened, seed=seed, kept=Kept(again))
    if test_text is not None:
        lab = Lab(lab.workspace, seed=seed, test_text=read_test_text(test_text, lab.tokenizer), kept=lab.kept)
    finished: dict[str, float] = {}
    failed: dict[str, str] = {}
    with progress(quiet=as_json) as bar:
        lab.start_task = tasks(bar)

        def show(regime: Regime, result: Result) -> None:
            finished[regime.name] = result.seconds
            if not as_json:
                allotment = scale_in_words(result.scale)
                line = f"{regime.name}: {len(result.rows)} rows in {result.seconds:.0f} s ({allotment})"
                bar.console.print(line, highlight=False, markup=False)
                if used := result.provenance["kept_from_before"]:
                    told = f"  Files of an earlier run that were used (votes, finished parts): {used}. Anew: --again"
                    bar.console.print(told, highlight=False, markup=False)
                for figure in regime.summary(result):
                    bar.console.print(f"  {figure}", highlight=False, markup=False)

        def note(regime: Regime, error: PaclmError) -> None:
            failed[regime.name] = str(error)
            bar.console.print(f"{regime.name}: not run. {error}", highlight=False, markup=False)

        run_regimes(lab, chosen, preset, collections, show, note if len(chosen) > 1 else None)
    if as_json:
        print_json({"results": str(lab.folder / "results"), "seconds": finished, "failed": failed})
    elif finished:
        typer.echo(f"Results are in {lab.folder / 'results'}. Next: paclm study report {in_shell(workspace)}")
    if failed:
        raise InvalidInput(f"Not all regimes were run. What they said stands above: {', '.join(failed)}.")


def _refuse_other_settings(opened: Workspace, named: Path) -> None:
    """What a study trains beside the worlds must be trained as they were, or its comparisons mean nothing."""
    if changes := opened.training_changes():
        has_served = opened.ledger_path.exists()
        again = "" if has_served else f", or train the worlds again: paclm train {in_shell(named)} --again"
        raise WorkspaceError(
            f"[training] was changed after the worlds were trained: {changes}. What a study trains beside them would "
            f"not compare. Change it back{again or '.'}"
        )


@study.command()
def report(
    workspace: WorkspaceArgument,
    as_json: JsonFlag = False,
) -> None:
    """
    Write tables, figures and report.html from the results

    Tables come as Markdown, CSV and LaTeX, figures as SVG and PDF, beside one HTML file that opens offline.

    Example usage:

    \b
        paclm study report clinic
    """
    need("matplotlib", "jinja2")
    from paclm.worlds.workspace import Workspace

    folder = Workspace.open(workspace).study_path
    if not any((folder / "results").glob("*.json")):
        raise InvalidInput(f"{workspace} has no results yet. Make some: paclm study run {in_shell(workspace)} all")
    from paclm.study.report import write_report

    written = write_report(folder)
    if as_json:
        print_json({"report": str(written.page), "tables": len(written.tables), "figures": len(written.figures)})
    else:
        counts = {"table": len(written.tables), "figure": len(written.figures)}
        made = " and ".join(f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items())
        typer.echo(f"{made}. Open {written.page}")
