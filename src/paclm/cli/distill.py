"""`paclm distill`: a student to publish, trained on privately released text only."""

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from paclm.config import PromiseName, ReleaseName, TrainingConfig, format_budget, format_duration, in_shell
from paclm.errors import InvalidInput, LedgerBusy

if TYPE_CHECKING:
    from paclm.curator.beginnings import Beginnings
    from paclm.curator.curator import Curator
    from paclm.curator.distill import DistilledText, TextPlan
    from paclm.curator.dp_decoder import DpDecoder
    from paclm.curator.student_card import StudentFacts
    from paclm.engine.workers import WorkerGroup
    from paclm.worlds.workspace import Workspace


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
    epochs: Annotated[int | None, typer.Option(help="How often it sees each text.", min=1, show_default="2")] = None,
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
    if promise == "corpus" and (release or mix_promises):
        raise InvalidInput(
            "Under the promise corpus tokens are drawn from the DP adapter, and a corpus with mixed promises has no "
            "bound. Leave --release and --mix-promises out."
        )
    opened = open_for(promise, workspace)  # quick checks come before the slow imports, and before anything is spent
    from paclm.curator.distill import check_promised
    from paclm.curator.student_card import check_new

    check_new(out, opened.path)
    if promise == "corpus":
        check_promised(opened)
    typer.echo(f"Opening {workspace} ...", err=True)
    beginnings = _beginnings(opened, prompts)
    with (
        workers_of(opened, workers, rendezvous, is_insecure=insecure_network) as group,
        _open(opened, promise, witness, mix_promises, group, release) as decoder,
    ):
        began = time.monotonic()
        text, num_new = _generate(opened, decoder, beginnings, length, num_tokens)
        generated = time.monotonic() - began
    del decoder, group  # their memory is for training now
    began = time.monotonic()
    facts = _train(opened, out, text, beginnings, rank, epochs)
    _show(facts, out, num_new, generated, time.monotonic() - began, as_json)


def _beginnings(workspace: Workspace, prompts: str) -> Beginnings:
    from paclm.curator.beginnings import find_beginnings
    from paclm.engine.base_model import base_of

    if prompts not in ("none", "public"):
        print_wrapped("Note: the prompts must carry no private information: a student continues them.", err=True)
    support_size = workspace.settings.voting.support_size
    return find_beginnings(base_of(workspace), workspace.runtime, prompts, support_size)


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

    decoder: Curator | DpDecoder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # printed below instead
        try:
            if promise == "corpus":
                decoder = DpDecoder.open(workspace)
            else:
                decoder = Curator.open(
                    workspace, witness=witness, mix_promises=mix_promises, workers=group, release=release
                )
        except LedgerBusy as busy:
            raise type(busy)(
                f"{busy} A ledger has one writer, and text for a student is charged there: stop the server, distill, "
                "and start it again."
            ) from None
    for caution in decoder.cautions:
        print_wrapped(f"Warning: {caution}", err=True)
    return decoder


def _generate(
    workspace: Workspace, decoder: Curator | DpDecoder, beginnings: Beginnings, length: int | None, num_tokens: int
) -> tuple[DistilledText, int]:
    """Generate what is missing; the text, and how many of its tokens are new."""
    from paclm.cli.progress import progress
    from paclm.curator.distill import open_distiller, text_settings

    settings = text_settings(decoder, workspace, beginnings, length)
    with open_distiller(workspace, decoder, settings) as distiller:
        plan = distiller.plan(num_tokens)
        _show_plan(plan, decoder)
        STOP_MESSAGE.set("Charged text is kept: repeat the command to go on from there.")
        with progress() as bar:
            task = bar.add_task("Generating", total=num_tokens, completed=plan.kept)
            distiller.generate(num_tokens, lambda count: bar.advance(task, count))
        return distiller.text(num_tokens), plan.tokens - plan.kept


def _show_plan(plan: TextPlan, decoder: Curator | DpDecoder) -> None:
    from paclm.curator.curator import Curator

    left, charge, release = plan.tokens - plan.kept, "nothing", "the DP adapter"
    if isinstance(decoder, Curator):
        account, release = decoder.account, decoder.config.release
        charge = (
            f"at most {format_budget(plan.most_nats)} nats; {format_budget(account.spent_nats)} of "
            f"{format_budget(account.total_nats)} are spent"
        )
    kept = f"; {plan.kept:,} are kept from earlier, {left:,} are missing" if plan.kept else ""
    fields = {
        "text": f"{plan.tokens:,} tokens by {release}{kept}",
        "charge": charge,
        "time": f"about {format_duration(plan.seconds)} in {plan.streams} streams, then training"
        if left
        else "training only",
    }
    print_fields(fields, err=True)


def _train(
    workspace: Workspace, out: Path, text: DistilledText, beginnings: Beginnings, rank: int | None, epochs: int | None
) -> StudentFacts:
    """Train on the text alone, then score on held-out records, then write the folder."""
    from paclm.cli.progress import progress
    from paclm.curator.distill import default_recipe, score, train
    from paclm.curator.student_card import StudentFacts, write_student
    from paclm.engine.base_model import base_of

    base, training = base_of(workspace), _training(workspace.training, rank)
    recipe = default_recipe(text.settings.promise, epochs)
    with progress() as bar:
        task = bar.add_task("Training", total=recipe.epochs * text.num_tokens)
        model, student = train(
            base,
            text.texts,
            training,
            recipe,
            workspace.runtime,
            text.settings.support_size,
            lambda count: bar.advance(task, count),
        )
    facts = StudentFacts(
        base=base,
        text=text,
        beginnings=beginnings.words,
        training=training,
        recipe=recipe,
        manifest=workspace.manifest,
        heldout=score(workspace, base, model, student),
        num_heldout=len(workspace.records("heldout")),
    )
    write_student(out, student, facts)
    return facts


def _training(settings: TrainingConfig, rank: int | None) -> TrainingConfig:
    """The shape of the worlds' adapters; with another rank, the same scale."""
    if rank is None:
        return settings
    return dataclasses.replace(settings, rank=rank, alpha=settings.alpha * rank / settings.rank)


def _show(facts: StudentFacts, out: Path, num_new: int, generated: float, trained: float, as_json: bool) -> None:
    text, figures, heldout, manifest = facts.text, facts.text.figures, facts.heldout, facts.manifest
    if as_json:
        named = {name: figures[name] for name in ("epsilon", "delta", "unit") if name in figures}
        scores = {} if heldout is None else {f"heldout_{name}": value for name, value in heldout._asdict().items()}
        print_json(
            {
                "tokens": text.num_tokens,
                "new_tokens": num_new,
                "charged_nats": text.charged_nats,
                "mia_bound": figures["mia_bound"],
                "world_id_bound": figures.get("world_id_bound"),
                **named,
                "promise": text.settings.promise,
                "release": text.settings.release,
                "generation_seconds": generated,
                "training_seconds": trained,
                **scores,
                "student": str(out),
            }
        )
        return
    is_half = text.settings.promise == "half"
    fields = {
        "student": f"{out} (PEFT, with a model card)",
        "text": f"{text.num_tokens:,} tokens, {num_new:,} of them new, in {format_duration(generated)}",
        "charged": f"{format_budget(text.charged_nats)} nats for all text that is kept" if is_half else "nothing",
        "training": f"{format_duration(trained)} with scoring; epochs: {facts.recipe.epochs}",
    }
    if heldout is not None:
        fields["held-out"] = (
            f"loss {heldout.loss_student:.4f} nats per token, public model {heldout.loss_public:.4f}; right "
            f"{heldout.accuracy_student:.1%} of the time, public model {heldout.accuracy_public:.1%}"
        )
    if is_half:
        bounds = figures["mia_bound"], figures["world_id_bound"]
        fields["guarantee"] = "at the committed total, " + format_guarantee(
            *bounds, manifest.arguments["worlds"], manifest.unit
        )
    else:
        fields["guarantee"] = format_corpus_guarantee(figures, manifest.unit)  # type: ignore[arg-type]
    print_fields(fields)
    typer.echo(f"Next: paclm serve {in_shell(out)}")
