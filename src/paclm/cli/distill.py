"""`paclm distill`: a student to publish, trained on privately released text only."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paclm.cli.console import (
    STOP_MESSAGE,
    JsonFlag,
    MixPromisesFlag,
    PromiseOption,
    ServedArgument,
    WitnessOption,
    format_corpus_guarantee,
    format_guarantee,
    open_for,
    print_fields,
    print_json,
    print_wrapped,
    whole_number,
)
from paclm.cli.worker_options import (
    InsecureNetworkFlag,
    RendezvousOption,
    WorkersOption,
    refuse_workers,
    workers_of,
)
from paclm.config import PromiseName, ReleaseName, TrainingConfig, format_budget, format_duration
from paclm.errors import InvalidInput, LedgerBusy, PromiseConflict

if TYPE_CHECKING:
    from paclm.curator.curator import Curator
    from paclm.curator.distill import TextPlan, TextSettings
    from paclm.curator.dp_decoder import DpDecoder
    from paclm.curator.transcript import ReleasedText
    from paclm.engine.student import HeldOut, Recipe
    from paclm.engine.workers import WorkerGroup
    from paclm.worlds.workspace import Workspace

_BEGINNINGS = 256
_BEGINNING_TOKENS = 8


def distill(
    workspace: ServedArgument,
    tokens: Annotated[str, typer.Option(help="How many released tokens to train on: 100k, 1M.")],
    out: Annotated[Path, typer.Option(help="New folder for the student.")],
    release: Annotated[
        ReleaseName | None,
        typer.Option(help="Release of the tokens; plurality costs nothing.", show_default="as in [mechanism]"),
    ] = None,
    promise: PromiseOption = "half",
    mix_promises: MixPromisesFlag = False,
    prompts: Annotated[
        str,
        typer.Option(
            metavar="none|public|FILE",
            help="Where texts begin: at the start token, with words of the public model, or at public prompts, one a "
            "line. They must carry no private information.",
        ),
    ] = "none",
    length: Annotated[
        int | None, typer.Option(help="Most tokens of one text.", min=1, show_default="256, or a training block")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="r of the student.", min=1, show_default="as in [training]")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="How often it sees each text.", min=1, show_default="as found best")
    ] = None,
    witness: WitnessOption = None,
    workers: WorkersOption = 1,
    rendezvous: RendezvousOption = None,
    insecure_network: InsecureNetworkFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """
    Train a student to publish on privately released text

    Generates text in many streams, charged like any other, and trains an adapter on it alone: the student may be given
    away under the bound at the committed total. Text is kept sealed as it is charged: the same command goes on where it
    was stopped, a larger --tokens is charged for the difference, and another --rank or --epochs costs nothing.

    Example usage:

    \b
        paclm distill clinic --tokens 1M --out clinic-student
        paclm distill clinic --tokens 1M --out clinic-student --release plurality
        paclm distill clinic --tokens 1M --out clinic-student --promise corpus
        paclm serve clinic-student
    """
    num_tokens = whole_number("--tokens", tokens)
    refuse_workers(promise, workers)
    if promise == "corpus" and release is not None:
        raise InvalidInput("Under the promise corpus tokens are drawn from the DP adapter. Leave --release out.")
    opened = open_for(promise, workspace)  # quick checks come before the slow imports, and before anything is spent
    from paclm.curator.student_card import check_new

    check_new(out)
    typer.echo(f"Opening {workspace} ...", err=True)
    texts, facts = _generate(
        opened,
        promise,
        num_tokens,
        prompts,
        length,
        lambda group: _open(opened, promise, witness, mix_promises, group, release),
        workers_of(opened, workers, rendezvous, is_insecure=insecure_network),
    )
    _finish(opened, out, texts, facts, rank, epochs, as_json)


def _open(
    workspace: Workspace,
    promise: PromiseName,
    witness: str | None,
    mix_promises: bool,
    group: WorkerGroup | None,
    release: ReleaseName | None,
) -> Curator | DpDecoder:
    from paclm.curator.curator import Curator
    from paclm.curator.dp_decoder import DpDecoder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # printed below instead
        try:
            decoder: Curator | DpDecoder = (
                DpDecoder.open(workspace, mix_promises=mix_promises)
                if promise == "corpus"
                else Curator.open(workspace, witness=witness, mix_promises=mix_promises, workers=group, release=release)
            )
        except LedgerBusy as busy:
            raise LedgerBusy(
                f"{busy} Text for a student needs the same ledger and its one writer: stop the server, distill, and "
                "start it again."
            ) from None
    for caution in decoder.cautions:
        print_wrapped(f"Warning: {caution}", err=True)
    return decoder


@dataclasses.dataclass(frozen=True, slots=True)
class _Text:
    """What is known of the text once it is complete."""

    settings: TextSettings
    prompts: str  # in words
    new_tokens: int
    seconds: float
    charged_nats: float
    most_nats: float
    figures: dict[str, Any]
    committed_nats: float | None


def _generate(
    workspace: Workspace,
    promise: PromiseName,
    num_tokens: int,
    prompts: str,
    length: int | None,
    open_decoder: Callable[[WorkerGroup | None], Curator | DpDecoder],
    workers: Any,
) -> tuple[list[ReleasedText], _Text]:
    """Generate what is missing, and return the text with what it cost."""
    from paclm.cli.progress import progress
    from paclm.curator.curator import Curator
    from paclm.curator.distill import Distiller, first_tokens, open_transcript, text_settings
    from paclm.privacy.accounting import nats_up

    with workers as group, open_decoder(group) as decoder:
        begin, where = _prompts(workspace, decoder, prompts)
        settings = text_settings(decoder, workspace, begin, length)
        with open_transcript(workspace, settings) as transcript:
            distiller = Distiller(decoder, transcript, settings)
            plan = distiller.plan(num_tokens)
            _show_plan(plan, settings)
            STOP_MESSAGE.set("Charged text is kept: repeat the command to go on from there.")
            began = time.monotonic()
            with progress() as bar:
                task = bar.add_task("Generating", total=num_tokens, completed=plan.kept)
                distiller.generate(num_tokens, lambda count: bar.advance(task, count))
            is_half = isinstance(decoder, Curator)
            figures = decoder.figures() if isinstance(decoder, Curator) else decoder.promise_figures()
            if not is_half and not figures.get("is_promised"):
                raise PromiseConflict(
                    "Nothing is promised about this corpus: it is served under both promises. A student of it would "
                    "have no bound, so none was made."
                )
            text = _Text(
                settings=settings,
                prompts=where,
                new_tokens=plan.tokens - plan.kept,
                seconds=time.monotonic() - began,
                charged_nats=nats_up(transcript.charged_units),
                most_nats=nats_up(transcript.most_units),
                figures=dict(figures),
                committed_nats=decoder.committed_nats if isinstance(decoder, Curator) else None,
            )
            return first_tokens(transcript.texts(), num_tokens), text


def _prompts(workspace: Workspace, decoder: Curator | DpDecoder, prompts: str) -> tuple[Sequence[Sequence[int]], str]:
    """Token ids of the prompts, and what they are in words."""
    from paclm.curator.distill import public_beginnings, read_prompts
    from paclm.curator.streams import encode_prompt

    start = encode_prompt(decoder.tokenizer, "")
    if prompts == "none":
        return [start], "the start token"
    if prompts == "public":
        begin = public_beginnings(
            workspace, start, _BEGINNINGS, _BEGINNING_TOKENS, workspace.settings.voting.support_size
        )
        return begin, f"{_BEGINNINGS} beginnings of {_BEGINNING_TOKENS} tokens that the public model wrote"
    begin = [tuple(encode_prompt(decoder.tokenizer, line)) for line in read_prompts(Path(prompts).expanduser())]
    print_wrapped("Note: the prompts must carry no private information: the student learns to continue them.", err=True)
    return begin, f"{len(begin):,} public prompts"


def _show_plan(plan: TextPlan, settings: TextSettings) -> None:
    left = plan.tokens - plan.kept
    fields = {
        "text": f"{plan.tokens:,} tokens by {settings.release}"
        + (f"; {plan.kept:,} are kept from earlier, {left:,} are missing" if plan.kept else ""),
        "charge": "nothing",
        "time": f"about {format_duration(plan.hours * 3600)} in {plan.streams} streams, then training"
        if left
        else "training only",
    }
    if plan.total_nats is not None and plan.spent_nats is not None:
        fields["charge"] = (
            f"at most {format_budget(plan.most_nats)} nats; {format_budget(plan.spent_nats)} of "
            f"{format_budget(plan.total_nats)} are spent"
        )
    print_fields(fields, err=True)


def _finish(
    workspace: Workspace,
    out: Path,
    texts: list[ReleasedText],
    text: _Text,
    rank: int | None,
    epochs: int | None,
    as_json: bool,
) -> None:
    """Train, score, write the folder, and show what came of it."""
    from paclm.cli.progress import progress
    from paclm.curator.distill import score, train
    from paclm.curator.student_card import StudentFacts, write_student
    from paclm.engine.base_model import base_of
    from paclm.engine.student import Recipe

    base, training = base_of(workspace), _training(workspace.training, rank)
    recipe = Recipe() if epochs is None else Recipe(epochs=epochs)
    num_tokens = sum(len(one.tokens) for one in texts)
    began = time.monotonic()
    with progress() as bar:
        task = bar.add_task("Training", total=recipe.epochs * num_tokens)
        model, student = train(
            base,
            texts,
            training,
            recipe,
            workspace.runtime,
            text.settings.support_size,
            lambda count: bar.advance(task, count),
        )
    trained = time.monotonic() - began
    heldout = score(workspace, base, model, student)
    facts = StudentFacts(
        base=base,
        text=text.settings,
        training=training,
        recipe=recipe,
        prompts=text.prompts,
        tokens=num_tokens,
        most_nats=text.most_nats,
        figures=text.figures,
        committed_nats=text.committed_nats,
        num_worlds=int(workspace.manifest.arguments["worlds"]),
        unit=workspace.manifest.unit,
        unit_name=workspace.manifest.unit_name,
        heldout=heldout,
        num_heldout=len(workspace.records("heldout")),
    )
    write_student(out, student, facts)
    _show(workspace, out, text, num_tokens, recipe, heldout, trained, as_json)


def _training(settings: TrainingConfig, rank: int | None) -> TrainingConfig:
    """The shape of the worlds' adapters; with another rank, the same scale."""
    if rank is None:
        return settings
    return dataclasses.replace(settings, rank=rank, alpha=settings.alpha * rank / settings.rank)


def _show(
    workspace: Workspace,
    out: Path,
    text: _Text,
    num_tokens: int,
    recipe: Recipe,
    heldout: HeldOut | None,
    trained: float,
    as_json: bool,
) -> None:
    figures, is_half = text.figures, text.settings.promise == "half"
    scores = {} if heldout is None else {f"heldout_{name}": value for name, value in heldout._asdict().items()}
    if as_json:
        shown = {name: value for name, value in figures.items() if name in ("epsilon", "delta", "unit")}
        print_json(
            {
                "tokens": num_tokens,
                "new_tokens": text.new_tokens,
                "charged_nats": text.charged_nats,
                "mia_bound": figures["mia_bound"],
                "world_id_bound": figures.get("world_id_bound"),
                **shown,
                "release": text.settings.release,
                "epochs": recipe.epochs,
                "generation_seconds": text.seconds,
                "training_seconds": trained,
                **scores,
                "student": str(out),
            }
        )
        return
    unit = workspace.manifest.unit
    if is_half:
        bounds = figures["mia_bound"], figures["world_id_bound"]
        worlds = int(workspace.manifest.arguments["worlds"])
        guarantee = "at the committed total, " + format_guarantee(*bounds, worlds, unit)
    else:
        guarantee = format_corpus_guarantee(figures, unit)  # type: ignore[arg-type]
    fields = {
        "student": f"{out} (PEFT, with a model card)",
        "text": f"{num_tokens:,} tokens, {text.new_tokens:,} of them new, in {format_duration(text.seconds)}",
        "charged": f"{format_budget(text.charged_nats)} nats for this text" if is_half else "nothing",
        "training": f"{recipe.epochs} epochs in {format_duration(trained)}",
    }
    if heldout is not None:
        fields["held-out"] = (
            f"loss {heldout.loss_student:.4f} nats per token, public model {heldout.loss_public:.4f}; right "
            f"{heldout.accuracy_student:.1%} of the time, public model {heldout.accuracy_public:.1%}"
        )
    print_fields({**fields, "guarantee": guarantee})
    typer.echo(f"Next: paclm serve {out}")
