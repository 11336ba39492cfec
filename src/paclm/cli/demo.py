"""`paclm demo`: the whole product on the embedded corpus and base model, offline, in a few minutes.

Every number it prints is measured in that run. Done steps are kept in the workspace, so a second run resumes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.cli.console import WHEN_STOPPED, need, progress, tasks
from paclm.cli.training_advice import SMALL_CORPUS
from paclm.cli.wrap import say
from paclm.config import in_shell, parse_budget

if TYPE_CHECKING:
    from paclm.study.lab import Lab
    from paclm.study.recorded_votes import RecordedVotes
    from paclm.worlds.workspace import Workspace

NOTES = 90
WORLDS = 32
HELD_OUT_TOKENS = 2000
DRAWS = 2
"""Of coins, where votes are sampled."""
NEW_TOKENS = 60
TEMPERATURE = 0.3
"""A small model reads better when it is not adventurous."""
COLOURS = {"agreed": "", "disputed": "\x1b[33m", "public": "\x1b[34m"}
BRACKETS = {"agreed": "", "disputed": "⟨", "public": "⟨public: "}
"""Marks of tokens where there are no colours."""
PER_TOKEN, TOTAL = "2^-16", "2^-6"
PROMPT = "[synthetic note]\nThe patient"
TRAINING = {**SMALL_CORPUS, "epochs": 1}
"""Small corpus, small model: larger steps than the paper's, so that two minutes of training show something."""


def demo(
    workspace: Annotated[Path, typer.Argument(help="Folder to make or to go on with.")] = Path("paclm-demo"),
) -> None:
    """
    Run everything on the embedded corpus and base model

    Synthetic clinic notes, worlds trained on them, a budget, a private completion, its accuracy beside the public and
    the non-private model, an attack that fails against the private stream and succeeds without noise, and a report.
    No network. A second run goes on where the first one was.

    Example usage:

    \b
        paclm demo
        paclm demo /tmp/paclm-demo
    """
    need("matplotlib", "jinja2", "torch", "transformers", "safetensors", "cryptography")  # report brings all of them
    WHEN_STOPPED.set("The same command goes on where it was.")
    _head(1, f"A corpus of {NOTES} synthetic clinic notes and {WORLDS} worlds")
    opened = _prepare(workspace)
    _head(2, "Train every world, and one adapter on everything for comparison")
    opened = _train(opened, "worlds")
    opened = _train(opened, "full")
    _head(3, "Plan a budget")
    _plan()
    disputed = "\x1b[33mdisputed\x1b[0m" if sys.stdout.isatty() else "⟨disputed⟩"
    _head(4, f"A private completion, temperature {TEMPERATURE} ({disputed}: tokens on which the worlds differ)")
    _generate(opened)
    _head(5, "Accuracy on held-out notes, next token, greedy")
    recorded = _votes(opened)
    _accuracy(recorded)
    _head(6, "Attack: who was in the realized world?")
    _attack(opened, recorded)
    _head(7, "Report: the paper's accuracy, flatness and releases on these worlds")
    _say_what_next(workspace, _report(opened))


def _head(number: int, title: str) -> None:
    typer.echo()
    say(f"{number}. {title}", column=3)


def _prepare(path: Path) -> Workspace:
    from paclm.engine.base import load_tokenizer, resolve_base
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
    if settings.config is None:  # new, or stopped just here; what its owner wrote since stays
        write_settings(settings.path, "training", TRAINING)
        write_settings(settings.path, "mechanism", {"per_token": PER_TOKEN, "total": TOTAL})
    counts = created.workspace.manifest.summary
    patients = len({record.group for record in created.workspace.records("train")})
    say(
        f"   {counts['train']} notes of {patients} patients for the worlds, {counts['held_out']} held out; "
        f"all notes of a patient go together. {'Made' if created.is_new else 'Found'} {created.workspace.path}.",
        column=3,
    )
    return Workspace.open(path)


def _train(workspace: Workspace, what: str) -> Workspace:
    from paclm.cli.train import say_threads
    from paclm.engine.training import Progress
    from paclm.engine.training_job import prepare_training
    from paclm.worlds.layout import adapters_file

    if adapters_file(what) in workspace.manifest.adapters:
        typer.echo(f"   {what}: trained already.")
        return workspace
    job = prepare_training(workspace, what)
    say_threads(job)
    with progress() as bar:
        task = bar.add_task(f"   {what}", total=None)

        def show(now: Progress) -> None:
            bar.update(task, completed=now.step, total=now.num_steps, description=f"   {what}, loss {now.loss:.3f}")

        workspace, trained = job.run(resume=job.is_unfinished, on_progress=show)
    gain = trained.improvement
    say(
        f"   {what}: loss on own records {gain.public.mean():.3f} → {gain.trained.mean():.3f} nats per token, "
        f"{trained.seconds:.0f} s.",
        column=3,
    )
    return workspace


def _plan() -> None:
    from paclm.privacy.bounds import format_bound, success_bound

    per_token, total = parse_budget(PER_TOKEN), parse_budget(TOTAL)
    record, world = (format_bound(success_bound(total, guess)) for guess in (1 / 2, 1 / WORLDS))
    typer.echo(f"   {PER_TOKEN} nats a token, {TOTAL} in total: {math.floor(total / per_token):,} tokens.")
    say(
        "   Until they are gone no attack on whether a patient was in the secretly drawn half succeeds more than\n"
        f"   {record} of the time (a guess: 50%), and none names the realized world more than {world} "
        f"(a guess: {1 / WORLDS:.1%}).",
        column=3,
    )


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
    disputed = done.marks.count("disputed")
    typer.echo()
    if done.public_tokens:
        say(
            f"   The budget of this workspace is gone: {done.public_tokens} of these tokens are the public model's. "
            f"To start over, delete {workspace.path}.",
            column=3,
        )
    say(
        f"   {len(done.tokens)} tokens, {disputed} disputed; charged {done.charged_nats:.3g} nats, spent so far "
        f"{done.spent_nats:.3g} of {done.total_nats:.3g}, {done.remaining_tokens:,} tokens left.",
        column=3,
    )


@contextmanager
def _lab(workspace: Workspace) -> Iterator[Lab]:
    """A lab with a progress bar that is gone when the work is done."""
    from paclm.study.lab import Lab

    with progress(transient=True) as bar:
        yield Lab(workspace, start_task=tasks(bar, indent=3))


def _votes(workspace: Workspace) -> RecordedVotes:
    """Greedy votes along held-out notes; the report's regimes ask for the same and find them."""
    from paclm.study.decoding import GREEDY, GUMBEL

    with _lab(workspace) as lab:
        found = lab.text_votes(HELD_OUT_TOKENS, (GREEDY, GUMBEL.times(DRAWS)))
    return found[GREEDY.name]


def _accuracy(recorded: RecordedVotes) -> None:
    from paclm.study.replay import ReplaySettings, replay

    def run(release: str, per_token: float) -> dict[str, float]:
        settings = ReplaySettings(release=release, per_token=per_token, protocol="fresh", sessions=8)
        return replay(recorded, settings)

    private, plurality = run("gaussian", parse_budget(PER_TOKEN)), run("plurality", parse_budget(PER_TOKEN))
    rows = {
        "public model": private["accuracy_public"],
        f"private, gaussian at {PER_TOKEN}": private["accuracy"],
        "plurality (tells nothing about which half)": plurality["accuracy"],
        "realized world, no noise": private["accuracy_noiseless"],
        "adapter on the whole corpus": private["accuracy_full"],
    }
    for name, value in rows.items():
        typer.echo(f"   {name:<42} {value:6.1%}")
    share = private["retained_gain"]
    kept = (
        "the whole corpus gains nothing over the public model here."
        if share is None
        else f"of the gain over the public model {share:.0%} is kept (other decoders and samples keep other shares)."
    )
    say(
        f"   Greedy, {recorded.num_positions:,} positions; the worlds agree on {private['unanimity']:.1%}; {kept}",
        column=3,
    )


def _report(workspace: Workspace) -> Path:
    """Three regimes at the demo's scale; what an earlier run found is kept."""
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


def _say_what_next(workspace: Path, page: Path) -> None:
    quoted = in_shell(workspace)
    ways = {
        f"paclm serve {quoted}": "an OpenAI-compatible endpoint, and a dashboard at its address",
        f'paclm generate {quoted} --prompt "The patient" --max-tokens 40': "another completion, and what it cost",
        f"paclm ledger show {quoted}": "spent so far, what is left, and the bounds",
        f"paclm study run {quoted} all": "every table and figure of the paper, in a quarter of an hour",
    }
    typer.echo(f"   {page}\n\nOpen that page in a browser. Then, with the same workspace:")
    for command, what in ways.items():
        typer.echo(f"  {command}\n      {what}")
    say(
        "First `source .venv/bin/activate` if paclm is not on your path. `tiny` is a toy: better text needs a better "
        "base."
    )


def _attack(workspace: Workspace, recorded: RecordedVotes) -> None:
    from paclm.privacy.bounds import format_bound, success_bound
    from paclm.study.attacks.belief import attack_sessions

    for name, per_token in ((f"at {PER_TOKEN} nats a token", parse_budget(PER_TOKEN)), ("without noise", math.inf)):
        found = attack_sessions(
            recorded, workspace.membership, release="gaussian", per_token=per_token, sessions=40, tokens=600, seed=1
        )
        typer.echo(
            f"   {name:<24} records: right {found.membership.mean:.1%} ± {found.membership.stderr:.1%}, "
            f"world: named in {found.world.mean:.1%}"
        )
    bound = format_bound(success_bound(600 * parse_budget(PER_TOKEN), 0.5))
    say(
        f"   A guess is right 50% of the time; at {PER_TOKEN} the proof allows {bound} after these 600 tokens. "
        "Mean ± standard\n"
        "   error over 40 secrets; the attack reads the curator's own belief, which no user ever sees.",
        column=3,
    )
