"""`paclm study`: the paper's tables and figures, and what goes past them. Research: nothing here is private."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paclm.cli.console import JsonFlag, print_json, progress, tasks

study = typer.Typer(
    help="Rerun the paper's tables and figures on a workspace.", no_args_is_help=True, rich_markup_mode=None
)

WorkspaceArgument = Annotated[Path, typer.Argument(help="Folder made by paclm init, with trained worlds.")]


@study.command()
def run(
    workspace: WorkspaceArgument,
    regimes: Annotated[list[str], typer.Argument(help="Names such as census or sessions; all for every one.")],
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
    as_json: JsonFlag = False,
) -> None:
    """
    Run regimes and keep their results in the workspace

    What a regime needs beside the worlds (the full-corpus adapter, shards, another collection) is trained and kept.
    A run that was stopped goes on where it was. The realized world of the deployment is not involved: studies draw
    their own secrets, from a seed.

    Example usage:

    \b
        paclm study run clinic census accuracy
        paclm study run clinic all --preset quick
        paclm study report clinic
    """
    from paclm.study.lab import Lab
    from paclm.study.run import regimes_named, run_regimes
    from paclm.study.tables.tab_eval_regimes import scale_in_words
    from paclm.study.test_text import read_test_text
    from paclm.worlds.workspace import Workspace

    chosen = regimes_named(regimes)
    lab = Lab(Workspace.open(workspace), seed=seed)
    if test_text is not None:
        lab = Lab(lab.workspace, seed=seed, test_text=read_test_text(test_text, lab.tokenizer))
    finished: dict[str, float] = {}
    with progress(quiet=as_json) as bar:
        lab.start_task = tasks(bar)

        def show(regime: Any, result: Any) -> None:
            finished[regime.name] = result.seconds
            if not as_json:
                allotment = scale_in_words(result.scale)
                line = f"{regime.name}: {len(result.rows)} rows in {result.seconds:.0f} s ({allotment})"
                bar.console.print(line, highlight=False, markup=False)
                for sentence in regime.describe(result):
                    bar.console.print(f"  {sentence}", highlight=False, markup=False)

        run_regimes(lab, chosen, preset, collections, show)
    if as_json:
        print_json({"results": str(lab.folder / "results"), "seconds": finished})
    else:
        typer.echo(f"Results are in {lab.folder / 'results'}. Next: paclm study report {workspace}")


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
    from paclm.study.report import write_report
    from paclm.worlds.workspace import Workspace

    written = write_report(Workspace.open(workspace).study_path)
    if as_json:
        print_json({"report": str(written.page), "tables": len(written.tables), "figures": len(written.figures)})
    else:
        typer.echo(f"{len(written.tables)} tables and {len(written.figures)} figures. Open {written.page}")
