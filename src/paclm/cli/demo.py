"""`paclm demo`: the whole product on the embedded corpus, offline with the embedded base model, in a few minutes.

Every number it prints is measured in that run. Finished steps are kept in the workspace, so a second run resumes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from paclm.cli.console import STOP_MESSAGE, JsonFlag, format_guarantee, format_size, print_json, require_packages
from paclm.cli.models import fetch_smollm2_once
from paclm.cli.train import run_job, warn_of_load
from paclm.cli.training_advice import SMALL_CORPUS
from paclm.config import format_duration, in_shell, parse_budget
from paclm.errors import WorkspaceError

if TYPE_CHECKING:
    from paclm.cli.side_by_side import Screen
    from paclm.engine.training_job import TrainingJob
    from paclm.study.lab import Lab
    from paclm.study.recorded_votes import RecordedVotes
    from paclm.study.results import Result
    from paclm.worlds.workspace import Workspace

EMBEDDED = "tiny"
NOTES = 230
WORLDS = 16
HELD_OUT_TOKENS = 2000
DRAWS = 2  # of coins, where votes are sampled
PROMPTS = {
    "[synthetic note]\nClinic note: multiple sclerosis\n": 220,
    "[synthetic note]\nDischarge letter: transient ischaemic attack\n": 180,
}
"""With how many tokens each is continued; two conditions that are common in this hospital."""
TEMPERATURE = 0.3  # low: at τ = 1 a model this small writes poor text; 0 is greedy
PER_TOKEN, TOTAL = "2^-16", "2^-6"
TRAINING: dict[str, float] = {**SMALL_CORPUS, "epochs": 1}
"""Larger steps than the paper's: the corpus is small, and training should take a minute."""
QUESTIONS, ANSWERED_SESSIONS = 100, 16
ATTACKED_SESSIONS, ATTACKED_TOKENS = 40, 600
REPORTED_SESSIONS, REPORTED_TOKENS = 12, 512
LARGER = "smollm2"
"""Proposed at the end."""
QUESTION_TOKENS = 120  # about, with its answer
READ_SHARE = {"cpu": 1.0, "cuda": 0.4}  # time to read a position, in those to train one; a CPU reads in float32

Figures = dict[str, Any]
T = TypeVar("T")


def demo(
    workspace: Annotated[
        Path | None,
        typer.Argument(help="Folder to make, or to continue.", show_default="paclm-demo, or paclm-demo-MODEL"),
    ] = None,
    base: Annotated[str, typer.Option(help="tiny, smollm2, a folder, a .gguf file or a Hugging Face name.")] = EMBEDDED,
    as_json: JsonFlag = False,
) -> None:
    """
    Run everything on the embedded corpus and base model

    Makes synthetic clinic notes, trains worlds on them, plans a budget, shows what the public and the private model
    write, compares accuracy and what they know, attacks with and without noise, and writes a report. Needs no network.
    A second run continues where the first one stopped.

    Another base takes longer: time and memory are printed before training starts. smollm2 is fetched if needed.

    Example usage:

    \b
        paclm demo
        paclm demo /tmp/paclm-demo
        paclm demo --base smollm2
        paclm demo --json | jq .accuracy
    """
    # The packages of all extras that the steps below use.
    require_packages("matplotlib", "jinja2", "torch", "transformers", "safetensors", "cryptography")
    STOP_MESSAGE.set("Run the same command to continue.")
    from paclm.cli.side_by_side import Screen, shortened

    path, screen = workspace or default_folder(base), Screen(err=as_json)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return work()
        finally:
            seconds[name] = round(time.perf_counter() - began, 1)

    screen.head(1, f"Make a corpus of {NOTES} synthetic clinic notes and {WORLDS} worlds")
    opened = timed("corpus", lambda: _prepare(path, base, screen))
    screen.head(2, "Train every world, and one adapter on all notes for comparison")
    opened, training = timed("training", lambda: _train(opened, screen))
    screen.head(3, "Plan a budget")
    budget = _plan(screen)
    from paclm.cli.demo_texts import compare_texts
    from paclm.study.lab import Lab

    lab = Lab(opened)
    decoder = f"at temperature {TEMPERATURE}" if TEMPERATURE else "greedy"
    screen.head(4, f"Continue the same prompts without and with the private notes ({decoder})")
    completions = timed("completions", lambda: compare_texts(lab, PROMPTS, TEMPERATURE, screen))
    screen.head(5, "Measure accuracy on held-out notes (next token, greedy)")
    recorded = timed("votes", lambda: _votes(lab))
    accuracy = _accuracy(recorded, screen)
    screen.head(6, "Ask what only this hospital's notes say: its wards, medicines, staff, protocols")
    knowledge = timed("knowledge", lambda: _knowledge(lab, screen))
    screen.head(7, "Attack: which records were in the realized world?")
    attack = timed("attack", lambda: _attack(opened, recorded, screen))
    screen.head(8, "Write a report: accuracy, knowledge, flatness and releases on these worlds")
    page = timed("report", lambda: _report(lab))
    screen.say(str(shortened(page)))
    _print_next_steps(path, base, screen)
    if as_json:
        print_json(
            {
                "workspace": str(opened.path),
                "base": opened.base.name,
                "records": dict(opened.manifest.summary),
                "training": training,
                "budget": budget,
                **completions,
                "accuracy": accuracy,
                "knowledge": knowledge,
                "attack": attack,
                "report": str(page),
                "seconds": seconds,
            }
        )


def default_folder(base: str) -> Path:
    """`paclm-demo`, and another one for every other base."""
    name = Path(base).expanduser().absolute().name.removesuffix(".gguf")
    return Path("paclm-demo" if base == EMBEDDED else f"paclm-demo-{name}")


def _prepare(path: Path, base_name: str, screen: Screen) -> Workspace:
    from paclm.cli.side_by_side import shortened
    from paclm.engine.base_model import check_base, load_tokenizer, resolve_base
    from paclm.worlds.creation import check_place, create_workspace
    from paclm.worlds.readers import read_corpus
    from paclm.worlds.records import ReadOptions
    from paclm.worlds.settings import write_settings
    from paclm.worlds.workspace import Workspace

    _refuse_other_base(check_place(path), path, base_name)
    if base_name == "smollm2":
        fetch_smollm2_once()
    base = resolve_base(base_name)
    check_base(base)
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
    screen.say(
        f"{counts['train']} notes of {patients} patients for the worlds, {counts['held_out']} held out; all notes of a "
        f"patient go together. {'Made' if created.is_new else 'Found'} {shortened(created.workspace.path)}."
    )
    return Workspace.open(path)


def _refuse_other_base(place: Path, named: Path, base: str) -> None:
    """Refuse a workspace of another base before anything is fetched."""
    from paclm.worlds.layout import MANIFEST_FILE
    from paclm.worlds.manifest import load_manifest

    if not (place / MANIFEST_FILE).exists():
        return
    made_with = load_manifest(place).base["name"]
    if made_with != base:
        quoted = in_shell(named)
        raise WorkspaceError(
            f"{named} was made with the base {made_with}. To continue it: paclm demo {quoted} --base "
            f"{in_shell(made_with)}; for {base} name another folder: paclm demo {quoted}-2 --base {in_shell(base)}"
        )


def _train(workspace: Workspace, screen: Screen) -> tuple[Workspace, Figures]:
    from paclm.worlds.layout import adapters_file

    figures: Figures = {}
    for what in ("worlds", "full"):
        file = adapters_file(what)
        if file in workspace.manifest.adapters:
            screen.say(f"{what}: trained already.")
        else:
            workspace = _train_adapters(workspace, what, screen)
        entry = workspace.manifest.adapters[file]  # of imported worlds, without losses
        figures[what] = {name: entry.get(name) for name in ("loss_public", "loss_trained")}
    return workspace, figures


def _train_adapters(workspace: Workspace, what: str, screen: Screen) -> Workspace:
    """The job, and with it the base model, is gone before the next one is loaded."""
    from paclm.engine.training_job import prepare_training

    job = prepare_training(workspace, what)
    warn_of_load(job)
    if what == "worlds" and workspace.base.name != EMBEDDED:
        _announce(job, screen)
    workspace, trained = run_job(job, f"   {what}", resume=job.is_unfinished)
    loss = trained.improvement
    screen.say(
        f"{what}: loss on own records {loss.public.mean():.3f} → {loss.trained.mean():.3f} nats per token, "
        f"{trained.seconds:.0f} s."
    )
    return workspace


def _announce(job: TrainingJob, screen: Screen) -> None:
    """Time and memory of all that follows, from training steps that the plan has just taken."""
    from paclm.engine.memory import peak_memory

    plan = job.plan(estimate_time=True)
    read = HELD_OUT_TOKENS + QUESTIONS * QUESTION_TOKENS + 2 * sum(PROMPTS.values())
    share = READ_SHARE[job.model.device.type] * read * (plan.num_worlds + 2) / plan.num_positions
    seconds = (plan.seconds or 0.0) * (1 + 2 / plan.num_worlds + share)
    # The plan's steps trained two worlds, or more on a GPU. On a CPU torch keeps most of what they used, and training
    # needs as much again: 3.2 GiB became 6.4 with smollm2.
    is_gpu = job.model.device.type == "cuda"
    memory = peak_memory(job.model.device) * (1 if is_gpu else 2)
    where = "GPU memory (to train; answers may use what is free)" if is_gpu else "memory"
    screen.say(
        f"On this machine all of this will take about {format_duration(seconds)} and up to {format_size(memory)} of "
        f"{where}. Ctrl-C stops it, and the same command continues."
    )


def _plan(screen: Screen) -> Figures:
    from paclm.privacy.bounds import success_bound

    per_token, total = parse_budget(PER_TOKEN), parse_budget(TOTAL)
    tokens = math.floor(total / per_token)
    mia, world_id = success_bound(total, 1 / 2), success_bound(total, 1 / WORLDS)
    screen.say(f"{PER_TOKEN} nats per token, {TOTAL} in total: {tokens:,} tokens.")
    screen.say(f"Until they are spent, {format_guarantee(mia, world_id, WORLDS, 'a patient was')}.")
    bounds = {"mia_bound": mia, "world_id_bound": world_id}
    return {"per_token_nats": per_token, "total_nats": total, "tokens": tokens, **bounds}


@contextmanager
def _showing_progress(lab: Lab) -> Iterator[None]:
    """A progress bar that is removed at the end."""
    from paclm.cli.progress import progress, task_starter

    with progress(transient=True) as bar:
        lab.start_task = task_starter(bar, indent=3)
        yield


def _votes(lab: Lab) -> RecordedVotes:
    """Greedy votes along held-out notes; the report's regimes reuse them."""
    from paclm.study.decoding import GREEDY, GUMBEL

    with _showing_progress(lab):
        return lab.text_votes(HELD_OUT_TOKENS, (GREEDY, GUMBEL.times(DRAWS)))[GREEDY.name]


def _accuracy(recorded: RecordedVotes, screen: Screen) -> Figures:
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
    screen.fields({name: f"{value:6.1%}" for name, value in rows.items()})
    share = private["retained_gain"]
    kept = (
        "the whole corpus gains nothing over the public model here."
        if share is None
        else f"{share:.0%} of the gain over the public model is retained (other decoders and samples differ)."
    )
    screen.say(f"{recorded.num_positions:,} positions; the worlds agree on {private['unanimity']:.1%}; {kept}")
    names = ("public", "gaussian", "plurality", "noiseless", "full")
    figures: Figures = dict(zip(names, rows.values(), strict=True))
    return {**figures, "positions": recorded.num_positions, "unanimity": private["unanimity"], "retained_gain": share}


def _attack(workspace: Workspace, recorded: RecordedVotes, screen: Screen) -> Figures:
    from paclm.privacy.bounds import format_bound, success_bound
    from paclm.study.attacks.belief import attack_sessions

    figures: Figures = {}
    price = parse_budget(PER_TOKEN)
    for key, name, per_token in (
        ("private", f"at {PER_TOKEN} nats per token", price),
        ("without_noise", "without noise", math.inf),
    ):
        found = attack_sessions(
            recorded,
            workspace.membership,
            release="gaussian",
            per_token=per_token,
            sessions=ATTACKED_SESSIONS,
            tokens=ATTACKED_TOKENS,
            seed=1,
        )
        screen.line(
            f"   {name:<24} records: right {found.membership.mean:.1%} ± {found.membership.stderr:.1%}, "
            f"world: named in {found.world.mean:.1%}"
        )
        figures[key] = {
            "records": found.membership.mean,
            "records_stderr": found.membership.stderr,
            "world": found.world.mean,
        }
    bound = success_bound(ATTACKED_TOKENS * price, 0.5)
    screen.say(
        f"A guess is right 50% of the time; at {PER_TOKEN} the bound after these {ATTACKED_TOKENS} tokens is "
        f"{format_bound(bound)}. Mean ± standard error over {ATTACKED_SESSIONS} secrets; the attack reads the "
        "curator's belief, which no user ever sees."
    )
    return {**figures, "mia_bound": bound}


def _knowledge(lab: Lab, screen: Screen) -> Figures:
    from paclm.study.questions import ALL
    from paclm.study.regimes.knowledge import KnowledgeScale

    price = parse_budget(PER_TOKEN)
    with _showing_progress(lab):
        result = _run_once(lab, "knowledge", KnowledgeScale(QUESTIONS, ANSWERED_SESSIONS, budgets=(price,), examples=3))
    wanted = {
        "public": ("public model", None),
        "gaussian": (f"private, gaussian at {PER_TOKEN}", price),
        "plurality": ("plurality (leaks nothing about the half)", None),
        "full": ("adapter on the whole corpus", None),
    }
    rows = {
        release: result.one(part="score", kind=ALL, collection=1, release=release, per_token_nats=budget)
        for release, (_, budget) in wanted.items()
    }
    screen.fields({wanted[name][0]: f"{row['exact_match']:6.1%}" for name, row in rows.items()})
    screen.say(
        f"Exact match on {rows['public']['questions']:,} questions about the house; notes of at least three patients "
        "tell each answer."
    )
    return {"questions": rows["public"]["questions"], **{name: row["exact_match"] for name, row in rows.items()}}


def _report(lab: Lab) -> Path:
    """Run three more regimes at the demo's scale, or reuse their results, and write the report."""
    from paclm.study.regimes.accuracy import AccuracyScale
    from paclm.study.regimes.flatness import FlatnessScale
    from paclm.study.regimes.releases import ReleasesScale
    from paclm.study.report import write_report

    with _showing_progress(lab):
        _run_once(lab, "accuracy", AccuracyScale(HELD_OUT_TOKENS, DRAWS))
        _run_once(lab, "flatness", FlatnessScale(HELD_OUT_TOKENS // 2, DRAWS))
        _run_once(
            lab,
            "releases",
            ReleasesScale(HELD_OUT_TOKENS, DRAWS, sessions=REPORTED_SESSIONS, tokens=REPORTED_TOKENS),
        )
    return write_report(lab.workspace.study_path).page


def _run_once(lab: Lab, name: str, scale: Any) -> Result:
    """The result of a regime at this scale, or the one that an earlier run has left."""
    from paclm.study.regimes import regime_named
    from paclm.study.results import Result
    from paclm.study.run import results_folder, run_regime

    path = results_folder(lab) / f"{name}.json"
    if path.is_file() and (found := Result.load(path)).scale == json.loads(json.dumps(asdict(scale))):
        return found
    return run_regime(lab, regime_named(name), "quick", scale=scale)


def _print_next_steps(workspace: Path, base: str, screen: Screen) -> None:
    import torch

    quoted = in_shell(workspace)
    commands = {
        f"paclm study report {quoted} --open": "opens this report in a browser",
        f"paclm serve {quoted}": "an OpenAI-compatible endpoint, and a dashboard at its address",
        f'paclm generate {quoted} --prompt "[synthetic note]" --max-tokens 220 --temperature 0.3': "another note",
        f"paclm ledger show {quoted}": "spent so far, what is left, and the bounds",
        f"paclm study run {quoted} all": "every table and figure of the paper, in about 20 minutes",
    }
    screen.line("\nNext, with the same workspace:")
    for command, what in commands.items():
        screen.line(f"  {command}\n      {what}")
    if base == EMBEDDED:
        where = "on the GPU of this machine" if torch.cuda.is_available() else "much slower without a GPU"
        screen.line(
            f"On a larger base model:\n  paclm demo --base {LARGER}\n"
            f"      the same notes, {where}; time and memory are said before it starts"
        )
    screen.say("If paclm is not on your path, first run `source .venv/bin/activate`.", column=0)
