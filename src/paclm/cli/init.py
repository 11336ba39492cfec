"""`paclm init`: a workspace, ready for training, from private text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.cli.console import STOP_MESSAGE, JsonFlag, print_fields, print_json
from paclm.config import TrainingConfig, in_shell

if TYPE_CHECKING:
    from paclm.worlds.creation import Created


def init(
    workspace: Annotated[Path, typer.Argument(help="Folder to make.")],
    corpus: Annotated[
        str,
        typer.Option(
            help="A .jsonl, .csv, .tsv or .parquet file (also .gz, .xz, .bz2), a folder of .txt and .md files, "
            "a Hugging Face data set, or clinic:N for synthetic notes."
        ),
    ],
    base: Annotated[str, typer.Option(help="tiny, smollm2, a folder, a .gguf file or a Hugging Face name.")],
    worlds: Annotated[int, typer.Option(help="Number of worlds; even.")] = 128,
    seed: Annotated[
        int, typer.Option(help="Decides which records are in which world, held out, and planted as canaries.")
    ] = 101,
    holdout: Annotated[
        int | None,
        typer.Option(
            help="About how many records no world sees; each is held out by a hash of its text or group, 0: none.",
            show_default="min(512, 20 %)",
        ),
    ] = None,
    canaries: Annotated[int, typer.Option(help="Planted records, to measure memorization; the paper has 16.")] = 0,
    group_by: Annotated[
        str | None, typer.Option(help="Field with the owner of a record: all records of one owner go together.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field or column with the text.")] = "text",
    id_field: Annotated[
        str | None, typer.Option(help="Field or column with the id.", show_default="id, else made from the text")
    ] = None,
    max_record_tokens: Annotated[int, typer.Option(help="Tokens beyond this many are not trained on.")] = 2048,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out records that cannot be read.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """
    Make a workspace from private records and a base model

    Safe to repeat: an existing workspace made from the same inputs is left unchanged.

    Example usage:

    \b
        paclm init clinic --corpus notes.jsonl --base tiny --group-by patient
        paclm init demo --corpus clinic:2000 --base tiny --worlds 32
    """
    from paclm.cli.progress import progress, task_starter
    from paclm.curator.custody import keep_address
    from paclm.engine.base_model import check_base, load_tokenizer, resolve_base
    from paclm.worlds.assignment import check_num_worlds, check_seed, check_whole
    from paclm.worlds.creation import check_place, create_workspace
    from paclm.worlds.readers import read_corpus
    from paclm.worlds.records import ReadOptions

    place = check_place(workspace)
    check_num_worlds(worlds)
    check_seed(seed)
    check_whole("--holdout", holdout or 0, at_least=0)
    check_whole("--canaries", canaries, at_least=0)
    check_whole("--max-record-tokens", max_record_tokens, at_least=2)
    STOP_MESSAGE.set("Nothing was made yet. Repeat the command to continue.")
    options = ReadOptions(text_field=text_field, id_field=id_field, group_by=group_by, skip_bad=skip_bad)
    beside = next(folder for folder in place.parents if folder.is_dir())
    with progress(transient=True) as bar:
        start_task = task_starter(bar)
        read = read_corpus(corpus, options, folder=beside, start_task=start_task)
        model = resolve_base(base)
        check_base(model)
        created = create_workspace(
            workspace,
            corpus=read,
            base=model,
            tokenizer=load_tokenizer(model),
            num_worlds=worlds,
            seed=seed,
            holdout=holdout,
            num_canaries=canaries,
            group_by=group_by,
            max_record_tokens=max_record_tokens,
            start_task=start_task,
        )
    keep_address(created.workspace.path)
    notes = [*read.report.sentences(), *created.cautions, *_advice(created, workspace)]
    if as_json:
        manifest = created.workspace.manifest
        figures = {"workspace": str(created.workspace.path), "is_new": created.is_new, **manifest.summary}
        public = {"base": manifest.base["name"], "base_fingerprint": manifest.base["fingerprint"]}
        print_json({**figures, "seed": manifest.arguments["seed"], **public, "notes": notes})
        return
    for note in notes:
        typer.echo(f"Note: {note}", err=True)
    _print_summary(created, workspace)


def _advice(created: Created, named: Path) -> list[str]:
    """A warning before training if the worlds will learn little."""
    from paclm.cli.training_advice import FEW_STEPS, before_training
    from paclm.engine.base_model import base_of, context_of
    from paclm.engine.training_order import expected_steps

    opened, counts = created.workspace, created.workspace.manifest.summary
    tokens_per_record = counts["num_tokens"] / counts["train"]
    steps = expected_steps(opened.training, counts["records_per_world"], tokens_per_record, context_of(base_of(opened)))
    is_default = opened.training.learning_rate == TrainingConfig().learning_rate
    return [before_training(steps, named)] if steps < FEW_STEPS and is_default and not opened.manifest.adapters else []


def _print_summary(created: Created, named: Path) -> None:
    """Print the counts, the unit of privacy, what was cut, and the next command."""
    workspace = created.workspace
    counts, arguments = workspace.manifest.summary, workspace.manifest.arguments
    unit = "each record by itself"
    if arguments["group_by"]:
        drawn = f", {counts['groups_in_worlds']:,} of them for the worlds" if "groups_in_worlds" in counts else ""
        unit = f"all records with the same {arguments['group_by']} ({counts['groups']:,} groups{drawn})"
    cut = "none cut"
    if counts["num_records_cut"]:
        held_out = f" ({counts['held_out_cut']:,} of them held out)" if counts.get("held_out_cut") else ""
        cut = f"{counts['num_records_cut']:,} cut{held_out}, {counts['num_tokens_dropped']:,} tokens not used"
    expected = f" ({arguments['holdout']:,} expected)" if counts["held_out"] != arguments["holdout"] else ""
    planted = f", {counts['canaries']} canaries planted" if counts["canaries"] else ""
    head = "Made the workspace" if created.is_new else "Unchanged, already made from the same inputs:"
    typer.echo(f"{head} {workspace.path}")
    print_fields(
        {
            "records": f"{counts['train']:,} for the worlds, {counts['held_out']:,} held out{expected}{planted}",
            "unit": unit,
            "tokens": f"{counts['num_tokens']:,}; median {counts['median_per_record']:,.0f} per record, {cut}",
            "worlds": f"{counts['worlds']}, each record in {counts['worlds'] // 2}, about "
            f"{counts['records_per_world']:,.0f} records per world (seed {arguments['seed']})",
            "base": f"{workspace.base.name} ({workspace.base.fingerprint[:12]})",
        }
    )
    if workspace.manifest.adapters:
        typer.echo("Its worlds are trained.")
        return
    typer.echo(f"Next: paclm train {in_shell(named)}")
    typer.echo(
        "To hide whether a record is in the corpus at all (before anything is served under the promise half): "
        f"paclm train {in_shell(named)} --what dp:8"
    )
