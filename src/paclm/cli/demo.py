"""`paclm demo`: the whole product on the embedded corpus and base model, offline, in a few minutes.

Every number it prints is measured in that run. Finished steps are kept in the workspace, so a second run resumes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.cli.console import STOP_MESSAGE, format_guarantee, print_wrapped, require_packages
from paclm.cli.train import run_job, warn_of_load
from paclm.cli.training_advice import SMALL_CORPUS
from paclm.config import in_shell, parse_budget

if TYPE_CHECKING:
    from paclm.study.lab import Lab
    from paclm.study.recorded_votes import RecordedVotes
    from paclm.worlds.workspace import Workspace

NOTES = 90
WORLDS = 32
HELD_OUT_TOKENS = 2000
DRAWS = 2  # of coins, where votes are sampled
NEW_TOKENS = 60
TEMPERATURE = 0.3  # low: at τ = 1 a model this small writes poor text
COLOURS = {"agreed": "", "disputed": "\x1b[33m", "public": "\x1b[34m"}
BRACKETS = {"agreed": "", "disputed": "⟨", "public": "⟨public: "}  # marks of tokens where there are no colours
PER_TOKEN, TOTAL = "2^-16", "2^-6"
PROMPT = "[synthetic note]\nThe patient"
TRAINING = {**SMALL_CORPUS, "epochs": 1}
"""Larger steps than the paper's: corpus and model are small, and training should take two minutes."""


def demo(
    workspace: Annotated[Path, typer.Argument(help="Folder to make, or to continue.")] = Path("paclm-demo"),
) -> None:
    """
    Run everything on the embedded corpus and base model

    Makes synthetic clinic notes, trains worlds on them, plans a budget, generates a private completion, compares its
    accuracy with the public and the non-private model, attacks it with and without noise, and writes a report. Needs
    no network. A second run continues where the first one stopped.

    Example usage:

    \b
        paclm demo
        paclm demo /tmp/paclm-demo
    """
    # The packages of all extras that the steps below use.
    require_packages("matplotlib", "jinja2", "torch", "transformers", "safetensors", "cryptography")
    STOP_MESSAGE.set("Run the same command to continue.")
    _head(1, f"Make a corpus of {NOTES} synthetic clinic notes and {WORLDS} worlds")
    opened = _prepare(workspace)
    _head(2, "Train every world, and one adapter on all notes for comparison")
    opened = _train(opened, "worlds")
    opened = _train(opened, "full")
    _head(3, "Plan a budget")
    _plan()
    dissent = "\x1b[33mdissent\x1b[0m" if sys.stdout.isatty() else "⟨dissent⟩"
    _head(4, f"Generate a private completion at temperature {TEMPERATURE} ({dissent}: tokens on which worlds differ)")
    _generate(opened)
    _head(5, "Measure accuracy on held-out notes (next token, greedy)")
    recorded = _votes(opened)
    _accuracy(recorded)
    _head(6, "Attack: which records were in the realized world?")
    _attack(opened, recorded)
    _head(7, "Write a report: the paper's accuracy, flatness and releases on these worlds")
    _print_next_steps(workspace, _report(opened))


def _head(number: int, title: str) -> None:
    typer.echo()
    print_wrapped(f"{number}. {title}", column=3)


def _print(text: str) -> None:
    print_wrapped(f"   {text}", column=3)


def _prepare(path: Path) -> Workspace:
    from paclm.engine.base_model import load_tokenizer, resolve_base
    from paclm.worlds.creation import create_workspace
    from paclm.worlds.readers import read_corpus
    from paclm.worlds.records import ReadOptions
    from paclm.worlds.settings import write_settings
    from paclm.worlds.workspace import Workspace

    base = resolve_base("tiny")
    corpus = read_corpus(f"clinic:{NOTES}", ReadOptions(group_by="patient"))
    created = create_workspace(
        path, corpus=corpus, base=base, tokenizer=load_tokenizer(base), num_worlds=WORLDS, group_by="patient"
    )
    settings = created.workspace.settings
    if settings.config is None:  # new, or stopped just here; later changes by its owner stay
        write_settings(settings.path, "training", TRAINING)
        write_settings(settings.path, "mechanism", {"per_token": PER_TOKEN, "total": TOTAL})
    counts = created.workspace.manifest.summary
    patients = len({record.group for record in created.workspace.records("train")})
    _print(
        f"{counts['train']} notes of {patients} patients for the worlds, {counts['held_out']} held out; all notes of a "
        f"patient go together. {'Made' if created.is_new else 'Found'} {created.workspace.path}."
    )
    return Workspace.open(path)


def _train(workspace: Workspace, what: str) -> Workspace:
    from paclm.engine.training_job import prepare_training
    from paclm.worlds.layout import adapters_file

    if adapters_file(what) in workspace.manifest.adapters:
        typer.echo(f"   {what}: trained already.")
        return workspace
    job = prepare_training(workspace, what)
    warn_of_load(job)
    workspace, trained = run_job(job, f"   {what}", resume=job.is_unfinished)
    loss = trained.improvement
    _print(
        f"{what}: loss on own records {loss.public.mean():.3f} → {loss.trained.mean():.3f} nats per token, "
        f"{trained.seconds:.0f} s."
    )
    return workspace


def _plan() -> None:
    from paclm.privacy.bounds import success_bound

    per_token, total = parse_budget(PER_TOKEN), parse_budget(TOTAL)
    bounds = success_bound(total, 1 / 2), success_bound(total, 1 / WORLDS)
    typer.echo(f"   {PER_TOKEN} nats per token, {TOTAL} in total: {math.floor(total / per_token):,} tokens.")
    _print(f"Until they are spent, {format_guarantee(*bounds, WORLDS, 'a patient was')}.")


def _generate(workspace: Workspace) -> None:
    from paclm.curator.curator import Curator

    begins, end = (COLOURS, "\x1b[0m") if sys.stdout.isatty() else (BRACKETS, "⟩")
    with Curator.open(workspace) as curator:
        stream = curator.submit(curator.request(PROMPT, NEW_TOKENS, temperature=TEMPERATURE, tag="command line"))
        typer.echo("   " + PROMPT.replace("\n", "\n   "), nl=False)
        while not stream.finish_reason:
            curator.step()
            for piece in stream.take():
                shown, begin = piece.text.replace("\n", "\n   "), begins[piece.mark]
                typer.echo(f"{begin}{shown}{end}" if begin and shown else shown, nl=False)
        done = curator.result(stream)
    typer.echo()
    if done.public_tokens:
        _print(
            f"The budget of this workspace is exhausted: {done.public_tokens} of these tokens come from the public "
            f"model. To start over, delete {workspace.path}."
        )
    _print(
        f"{len(done.tokens)} tokens, dissent on {done.marks.count('disputed')}; charged {done.charged_nats:.3g} nats, "
        f"spent so far {done.spent_nats:.3g} of {done.total_nats:.3g}, {done.remaining_tokens:,} tokens left."
    )


@contextmanager
def _lab(workspace: Workspace) -> Iterator[Lab]:
    """A lab with a progress bar that is removed at the end."""
    from paclm.cli.progress import progress, task_starter
    from paclm.study.lab import Lab

    with progress(transient=True) as bar:
        yield Lab(workspace, start_task=task_starter(bar, indent=3))


def _votes(workspace: Workspace) -> RecordedVotes:
    """Greedy votes along held-out notes; the report's regimes reuse them."""
    from paclm.study.decoding import GREEDY, GUMBEL

    with _lab(workspace) as lab:
        return lab.text_votes(HELD_OUT_TOKENS, (GREEDY, GUMBEL.times(DRAWS)))[GREEDY.name]


def _accuracy(recorded: RecordedVotes) -> None:
    from paclm.study.replay import ReplaySettings, replay

    def run(release: str) -> dict[str, float]:
        price = parse_budget(PER_TOKEN)
        return replay(recorded, ReplaySettings(release=release, per_token=price, protocol="fresh", sessions=8))

    private, plurality = run("gaussian"), run("plurality")
    rows = {
        "public model": private["accuracy_public"],
        f"private, gaussian at {PER_TOKEN}": private["accuracy"],
        "plurality (leaks nothing about the half)": plurality["accuracy"],
        "realized world, no noise": private["accuracy_noiseless"],
        "adapter on the whole corpus": private["accuracy_full"],
    }
    for name, value in rows.items():
        typer.echo(f"   {name:<42} {value:6.1%}")
    share = private["retained_gain"]
    kept = (
        "the whole corpus gains nothing over the public model here."
        if share is None
        else f"{share:.0%} of the gain over the public model is retained (other decoders and samples differ)."
    )
    _print(f"{recorded.num_positions:,} positions; the worlds agree on {private['unanimity']:.1%}; {kept}")


def _report(workspace: Workspace) -> Path:
    """Run three regimes at the demo's scale, or reuse their results, and write the report."""
    from paclm.study.regimes import regime_named
    from paclm.study.regimes.accuracy import AccuracyScale
    from paclm.study.regimes.flatness import FlatnessScale
    from paclm.study.regimes.releases import ReleasesScale
    from paclm.study.report import write_report
    from paclm.study.run import results_folder, run_regime

    scales = {
        "accuracy": AccuracyScale(HELD_OUT_TOKENS, DRAWS),
        "flatness": FlatnessScale(HELD_OUT_TOKENS // 2, DRAWS),
        "releases": ReleasesScale(HELD_OUT_TOKENS, DRAWS, sessions=12, tokens=512),
    }
    with _lab(workspace) as lab:
        for name, scale in scales.items():
            if not (results_folder(lab) / f"{name}.json").is_file():
                run_regime(lab, regime_named(name), "quick", scale=scale)
    return write_report(workspace.study_path).page


def _print_next_steps(workspace: Path, page: Path) -> None:
    quoted = in_shell(workspace)
    commands = {
        f"paclm serve {quoted}": "an OpenAI-compatible endpoint, and a dashboard at its address",
        f'paclm generate {quoted} --prompt "The patient" --max-tokens 40': "another completion and its cost",
        f"paclm ledger show {quoted}": "spent so far, what is left, and the bounds",
        f"paclm study run {quoted} all": "every table and figure of the paper, in about 15 minutes",
    }
    typer.echo(f"   {page}\n\nOpen that page in a browser. Then, with the same workspace:")
    for command, what in commands.items():
        typer.echo(f"  {command}\n      {what}")
    print_wrapped(
        "If paclm is not on your path, first run `source .venv/bin/activate`. `tiny` is a toy model: use a larger base "
        "for better text."
    )


def _attack(workspace: Workspace, recorded: RecordedVotes) -> None:
    from paclm.privacy.bounds import format_bound, success_bound
    from paclm.study.attacks.belief import attack_sessions

    for name, per_token in ((f"at {PER_TOKEN} nats per token", parse_budget(PER_TOKEN)), ("without noise", math.inf)):
        found = attack_sessions(
            recorded, workspace.membership, release="gaussian", per_token=per_token, sessions=40, tokens=600, seed=1
        )
        typer.echo(
            f"   {name:<24} records: right {found.membership.mean:.1%} ± {found.membership.stderr:.1%}, "
            f"world: named in {found.world.mean:.1%}"
        )
    bound = format_bound(success_bound(600 * parse_budget(PER_TOKEN), 0.5))
    _print(
        f"A guess is right 50% of the time; at {PER_TOKEN} the bound after these 600 tokens is {bound}. Mean ± "
        "standard error over 40 secrets; the attack reads the curator's belief, which no user ever sees."
    )
