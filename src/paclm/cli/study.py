"""`paclm study`: the tables and figures of the paper and more. Research: nothing here is private."""

from __future__ import annotations

import os
import sys
import textwrap
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from paclm.cli.console import (
    STOP_MESSAGE,
    JsonFlag,
    TrainedArgument,
    WorkspaceArgument,
    open_trained,
    print_json,
    require_packages,
)
from paclm.cli.worker_options import WorkersOption, workers_of
from paclm.config import in_shell
from paclm.errors import InvalidInput, PaclmError, WorkspaceError

if TYPE_CHECKING:
    from paclm.study.figure import Figure
    from paclm.study.regime import Regime
    from paclm.study.results import Result
    from paclm.study.table import Table

study = typer.Typer(
    help="Rerun the paper's tables and figures on a workspace.", no_args_is_help=True, rich_markup_mode=None
)


class _ListsRegimes(TyperCommand):
    """Lists every regime with its tables at the end of --help; imports the study only then."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from paclm.plugins import find_plugins
        from paclm.study.figures import all_figures
        from paclm.study.regimes import NAMES
        from paclm.study.tables import all_tables

        shown: list[Table | Figure] = [*all_tables(), *all_figures()]
        with formatter.section("Regimes, and the tables and figures made from them"):
            labels = {name: ", ".join(one.label for one in shown if name in one.regimes) for name in NAMES}
            labels = {p.name: f"plugin of {p.origin}" for p in find_plugins("regimes", ())} | labels
            column = max(map(len, labels)) + 4
            for name, made in labels.items():  # not `write_dl`, which breaks labels at their hyphens
                start = f"  {name}".ljust(column)
                lines = textwrap.wrap(
                    made, formatter.width, initial_indent=start, subsequent_indent=" " * column, break_on_hyphens=False
                )
                formatter.write("\n".join([*lines, ""]))


@study.command(cls=_ListsRegimes)
def run(
    workspace: TrainedArgument,
    regimes: Annotated[
        list[str],
        typer.Argument(help="Names, listed below; or all: without dp, controls, attacks, baselines, lm_eval, plugins."),
    ],
    preset: Annotated[Literal["quick", "paper"], typer.Option(help="Scale: minutes, or the paper's.")] = "quick",
    collections: Annotated[
        int, typer.Option(help="Collections of worlds to run on; all but the first are drawn and trained here.")
    ] = 1,
    test_text: Annotated[
        Path | None, typer.Option(help="Text to score on instead of the held-out records.", show_default="held-out")
    ] = None,
    public_text: Annotated[
        Path | None,
        typer.Option(help="Text that is no record, on which pmixed searches settings.", show_default="no search"),
    ] = None,
    other_text: Annotated[
        str | None,
        typer.Option(help="Public records of another source, as init --corpus reads them, on which controls trains."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(help="What knowledge asks, as JSONL.", show_default="of the embedded corpus"),
    ] = None,
    release: Annotated[
        list[str] | None,
        typer.Option(
            help="A plugin's release, or module:NAME, beside the built-in ones in releases, pmixed, attacks, baselines."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Reuse no votes or finished parts of an earlier run.")] = False,
    workers: WorkersOption = 1,
    as_json: JsonFlag = False,
) -> None:
    """
    Run regimes and keep their results in the workspace

    What a regime needs besides the worlds (the full-corpus adapter, shards, another collection) is trained and kept. A
    stopped run continues where it was, unless the code it depends on has changed. The deployment's secret is not read:
    studies draw their own secrets, from a seed. The trainings of dp count against what is promised about the corpus.
    knowledge asks questions about the records: of a corpus of your own they are a file with one JSON object a line,
    with prompt, answer and perhaps kind and about. Without questions, all leaves it out. With --workers the worlds of
    every engine are shared among processes, and results are the same; capacity, controls, cost, depth and dp run in
    this one. controls trains on public text of another source, given with --other-text. Regimes of installed plugins
    are run by name; attacks and baselines run what plugins bring. Results record the package, version and code of each
    plugin.
    lm_eval runs nothing: it reads what `lm_eval --model paclm --output_path WORKSPACE/study/lm-eval` has written.

    Example usage:

    \b
        paclm study run clinic census accuracy
        paclm study run clinic all --preset quick
        paclm study run notes knowledge --questions questions.jsonl
        paclm study run clinic releases --release my_rules:RULE
        paclm study report clinic
    """
    from paclm.ledger.address import exists
    from paclm.study.regimes import ASKING, ON_REQUEST, check_names

    check_names(regimes)
    if collections < 1:
        raise InvalidInput(f"--collections must be at least 1, not {collections}.")
    opened = open_trained(workspace)
    if changes := opened.training_changes():
        remedy = (
            "." if exists(opened.ledger_address) else f", or train again: paclm train {in_shell(workspace)} --again"
        )
        raise WorkspaceError(
            f"[training] was changed after the worlds were trained: {changes}. Adapters that a study trains would not "
            f"be comparable. Change it back{remedy}"
        )
    STOP_MESSAGE.set("Finished regimes and trained adapters are kept. Run the same command to continue.")
    from paclm.cli.progress import progress, task_starter
    from paclm.study.eval_text import read_test_text
    from paclm.study.extensions import TAKING, load_for_run
    from paclm.study.lab import Lab
    from paclm.study.parts import Kept
    from paclm.study.questions import read_questions
    from paclm.study.regime import scale_in_words
    from paclm.study.run import regimes_named, run_regimes
    from paclm.worlds.readers import read_corpus

    asked = None if questions is None else read_questions(questions)
    plugged = load_for_run([name for name in regimes if name != "all"], release or ())
    if any(loaded.plugin.group == "releases" for loaded in plugged) and set(regimes).isdisjoint((*TAKING, "all")):
        raise InvalidInput(f"--release is for {', '.join(TAKING)}, none of which is among the regimes named. Name one.")
    lab = Lab(opened, seed=seed, questions=asked, kept=Kept(again), plugins=plugged)
    if test_text is not None or public_text is not None:
        texts = [None if path is None else read_test_text(path, lab.tokenizer) for path in (test_text, public_text)]
        lab = Lab(
            lab.workspace,
            seed=seed,
            test_text=texts[0],
            public_text=texts[1],
            questions=asked,
            kept=lab.kept,
            plugins=plugged,
        )
    if other_text is not None:
        lab.other_text = [record.text for record in read_corpus(other_text).records]
    is_asked = not set(ASKING).isdisjoint(regimes)
    if is_asked:
        lab.need_questions()  # before another regime runs for long
    elif questions is not None and "all" not in regimes:
        raise InvalidInput(
            f"--questions is for {', '.join(ASKING)}, which is not among the regimes named. Name it too."
        )
    left_out: tuple[str, ...] = ON_REQUEST
    if "all" in regimes and not is_asked and lab.questions is None:
        left_out += ASKING
        typer.echo(f"all leaves out {', '.join(ASKING)}: no questions. Give a file with --questions.", err=True)
    chosen = regimes_named(regimes, left_out=left_out)
    finished: dict[str, float] = {}
    failed: dict[str, str] = {}
    with workers_of(opened, workers, None, is_insecure=False) as group, progress(quiet=as_json) as bar:
        lab.start_task, lab.workers = task_starter(bar), group

        def write(line: str) -> None:
            bar.console.print(line, highlight=False, markup=False)

        def show(regime: Regime, result: Result) -> None:
            finished[regime.name] = result.seconds
            if as_json:
                return
            scale = f" ({scale_in_words(result.scale)})" if result.scale else ""
            write(f"{regime.name}: {len(result.rows)} rows in {result.seconds:.0f} s{scale}")
            if used := result.provenance["kept_from_before"]:
                write(f"  Files of an earlier run that were reused (votes, finished parts): {used}. To redo: --again")
            for plugin in result.provenance["plugins"]:
                origin = f"{plugin['package']} {plugin['version']}" if plugin["package"] else plugin["target"]
                write(f"  With the {plugin['group'][:-1]} {plugin['name']} of {origin}")
            for figure in regime.summary(result):
                write(f"  {figure}")

        def note(regime: Regime, error: PaclmError) -> None:
            failed[regime.name] = str(error)
            write(f"{regime.name}: not run. {error}")

        run_regimes(lab, chosen, preset, collections, show, note if len(chosen) > 1 else None)
    if as_json:
        print_json({"results": str(lab.folder / "results"), "seconds": finished, "failed": failed})
    elif finished:
        typer.echo(f"Results are in {lab.folder / 'results'}. Next: paclm study report {in_shell(workspace)}")
    if failed:
        raise InvalidInput(f"Regimes that failed, with their errors above: {', '.join(failed)}.")


@study.command()
def report(
    workspace: WorkspaceArgument,
    in_browser: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """
    Write tables, figures and report.html from the results

    Tables as Markdown, CSV and LaTeX, figures as SVG and PDF, and one HTML file that opens offline.

    Example usage:

    \b
        paclm study report clinic
        paclm study report clinic --open
    """
    require_packages("matplotlib", "jinja2")
    from paclm.worlds.workspace import Workspace

    folder = Workspace.open(workspace).study_path
    if not any((folder / "results").glob("*.json")):
        raise InvalidInput(f"{workspace} has no results yet. Run: paclm study run {in_shell(workspace)} all")
    from paclm.study.report import write_report

    written = write_report(folder)
    for sentence in written.left_out:
        typer.echo(f"Warning: {sentence}", err=True)
    is_open = in_browser and _open_in_browser(written.page)
    if as_json:
        print_json({"report": str(written.page), "tables": len(written.tables), "figures": len(written.figures)})
        return
    remedy = f"Opened {written.page}" if is_open else f"Open {written.page}"
    if in_browser and not is_open:
        remedy = f"There is no display here: copy {written.page} to a machine with a browser, and open it there."
    typer.echo(f"Tables: {len(written.tables)}, figures: {len(written.figures)}. {remedy}")


@study.command()
def plugins(as_json: JsonFlag = False) -> None:
    """
    List installed plugins and import each once

    Releases, regimes, attacks, baselines and readers of other packages, with the package and whether it can be used;
    exit status 1 if one cannot. generate and serve import none of them.

    Example usage:

    \b
        paclm study plugins
        paclm study plugins --json | jq '.plugins[] | select(.problem)'
    """
    from paclm.study.extensions import survey

    found = survey()
    if as_json:
        print_json({"plugins": [{**plugin._asdict(), "problem": error and str(error)} for plugin, error in found]})
    else:
        for plugin, error in found:
            typer.echo(f"{plugin.group[:-1]:9s} {plugin.name:20s} {plugin.origin:30s} {plugin.target}")
            if error is not None:
                typer.echo(f"  Error: {error}")
        if not found:
            typer.echo("There are no plugins.")
    if any(error is not None for _, error in found):
        raise typer.Exit(1)


def _open_in_browser(page: Path) -> bool:
    """Whether a browser was started; never over ssh, and never one that takes over the terminal."""
    has_display = sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    return bool(has_display) and "SSH_CONNECTION" not in os.environ and webbrowser.open(page.absolute().as_uri())
