"""Students to publish (`paclm distill`): what they keep of the gain, and what they say about who was in.

Private text is written in research mode, many streams against one secret and one belief, and a student is trained on it
alone. Three questions, one part of the rows each:

    gain      accuracy and loss on held-out text by release and number of tokens, beside `full` and `dp`
    half      was a record in the realized world? Bounded by the tokens' nats: an attack above its bound is an alarm
    corpus    is a record in the corpus at all? Not promised under `half`; beside the full-corpus and the DP adapter

Controls for `half`: a student of the realized world's own text (no noise) and that world's adapter, which must give
themselves away, and a student of the public model's text, which cannot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paclm.config import format_budget
from paclm.errors import InvalidInput
from paclm.privacy.releases import rule_named
from paclm.study.adapter_scores import ScoredAdapters, score_adapters
from paclm.study.distilled_text import TextSource, TextWriter
from paclm.study.lab import Lab
from paclm.study.leak_tests import FALSE_ALARMS, is_violation
from paclm.study.regime import Findings, Regime, headline
from paclm.study.regimes.universe import choose_candidates
from paclm.study.results import Result, Row
from paclm.study.student_audit import WORLD, bounds_at, corpus_rows, half_rows, score_all
from paclm.study.students import Group, Name, default_recipe, train_students

if TYPE_CHECKING:
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.student_training import RecipeName

NO_NOISE, PUBLIC = "no noise", "public model"
RECIPES: tuple[RecipeName, ...] = ("coupled", "difference", "text")
_FEWEST = 16  # tokens of a record that is attacked


@dataclass(frozen=True, slots=True)
class StudentScale:
    positions: int
    gumbel_draws: int
    tokens: tuple[int, ...]  # distilled, of the first deployment
    releases: tuple[str, ...]
    per_token: float
    deployments: int  # that are attacked, with a secret each
    attacked: int  # tokens of each of them
    records: int  # at most, of members and of others
    record_tokens: int  # of each record that are scored
    streams: int  # side by side
    length: int = 256  # most tokens of a stream
    recipes: int = 0  # tokens at which all recipes are compared; 0: none

    def __post_init__(self) -> None:
        if not self.tokens or not self.releases or min(*self.tokens, self.attacked, self.deployments) < 1:
            raise InvalidInput("Students need releases, numbers of tokens and deployments of at least 1.")


def run(lab: Lab, scale: StudentScale) -> Findings:
    """Write the texts, train the students, score them, attack them."""
    lab.need_all_worlds()
    lab.ensure("full")
    writer = TextWriter(lab, scale.streams, scale.length)
    groups = _distill(lab, scale, writer)
    dp, notes = _dp_adapters(lab)
    rows = _gain(lab, scale, groups, dp)
    candidates = choose_candidates(lab, scale.records, scale.record_tokens, _FEWEST)
    attacked = [group for group in groups if group.is_default]
    beside = {"full corpus": lab.stack("full"), **{name: stack for name, (_, stack) in dp.items()}}
    worlds, others = score_all(lab, attacked, beside, candidates)
    rows += half_rows(lab, attacked, np.array(writer.secrets(scale.deployments)), candidates, worlds, others)
    rows += corpus_rows(lab, attacked, beside, candidates, others)
    return Findings(rows, [*notes, *_notes(scale, rows)])


# --- texts and students -----------------------------------------------------------------------------------------------


def _sources(scale: StudentScale) -> list[TextSource]:
    released = [TextSource(name, rule_named(name), scale.per_token) for name in scale.releases]
    return [*released, TextSource(NO_NOISE, rule_named("gaussian"), math.inf), TextSource(PUBLIC, None, 0.0)]


def _wanted(scale: StudentScale) -> Iterator[tuple[TextSource, int, RecipeName, int]]:
    """Source, tokens, recipe and deployments of every group."""
    kind = default_recipe()
    for source in _sources(scale):
        is_control = source.name in (NO_NOISE, PUBLIC)
        for tokens in sorted({scale.attacked} if is_control else {*scale.tokens, scale.attacked}):
            yield source, tokens, kind, scale.deployments if tokens == scale.attacked else 1
    if scale.recipes:
        first = _sources(scale)[0]
        for recipe in RECIPES:
            if recipe != kind or scale.recipes not in (*scale.tokens, scale.attacked):
                yield first, scale.recipes, recipe, 1


def _distill(lab: Lab, scale: StudentScale, writer: TextWriter) -> list[Group]:
    wanted = list(_wanted(scale))
    most: dict[tuple[TextSource, int], int] = {}
    for source, tokens, _, deployments in wanted:
        for deployment in range(deployments):
            most[source, deployment] = max(tokens, most.get((source, deployment), 0))
    advance = lab.start_task("distilled text, tokens", sum(most.values()))
    for (source, deployment), tokens in most.items():
        writer.write(source, deployment, tokens, advance)
    written = {
        Name(source.name, deployment, tokens, recipe): writer.first(source, deployment, tokens)
        for source, tokens, recipe, deployments in wanted
        for deployment in range(deployments)
    }
    students = train_students(
        lab, {name: one.texts for name, one in written.items()}, lab.parts("student", ["trained"])
    )
    groups = []
    for source, tokens, recipe, deployments in wanted:
        names = [Name(source.name, deployment, tokens, recipe) for deployment in range(deployments)]
        groups.append(Group(source, tokens, recipe, [students[n] for n in names], [written[n] for n in names]))
    return groups


def _dp_adapters(lab: Lab) -> tuple[dict[str, tuple[Row, AdapterStack]], list[str]]:
    """DP adapters of the workspace that fit beside its worlds: facts and adapter by name; and which do not fit."""
    from paclm.engine.adapters import AdapterStack

    full = lab.stack("full")
    found: dict[str, tuple[Row, AdapterStack]] = {}
    left_out = []
    for file, entry in sorted(lab.workspace.manifest.adapters.items()):
        if "dp" not in entry:
            continue
        stack = AdapterStack.load(lab.workspace.adapters_path / file)
        if (stack.layers, stack.spec.rank, stack.spec.scale) != (full.layers, full.spec.rank, full.spec.scale):
            left_out.append(file)
        else:
            epsilon, delta = entry["dp"]["epsilon"], entry["dp"]["delta"]
            name = f"dp:{epsilon:g}" if f"dp:{epsilon:g}" not in found else file.removesuffix(".safetensors")
            found[name] = {"epsilon": epsilon, "delta": delta}, stack
    return found, [f"Left out, because their shape is not that of the worlds: {', '.join(left_out)}."] * bool(left_out)


# --- gain -------------------------------------------------------------------------------------------------------------


def _gain(
    lab: Lab, scale: StudentScale, groups: Sequence[Group], dp: Mapping[str, tuple[Row, AdapterStack]]
) -> list[Row]:
    """A row for every group and decoder, then one for every DP adapter and decoder."""
    trained = [ScoredAdapters(_facts(lab, group), [student.stack for student in group.students]) for group in groups]
    nothing: Row = dict.fromkeys(("tokens", "recipe", "budget", "charged_nats", "generation_seconds"))
    trained += [
        ScoredAdapters({**nothing, "source": name, "is_student": False, **facts}, [stack])
        for name, (facts, stack) in dp.items()
    ]
    scored = score_adapters(lab, scale.positions, scale.gumbel_draws, trained)
    return [{"part": "gain", **row} for row in scored]


def _facts(lab: Lab, group: Group) -> Row:
    source, nats = group.source, group.source.nats_per_token * group.tokens
    row: Row = {"source": source.name, "is_student": True, "tokens": group.tokens, "recipe": group.recipe}
    row |= {"is_default": group.is_default, "is_control": source.name in (NO_NOISE, PUBLIC)}
    row |= {"budget": format_budget(source.per_token) if source.nats_per_token else None, "charged_nats": nats}
    row |= {"dissent": float(np.mean([one.dissent for one in group.written]))}
    row["generation_seconds"] = float(np.mean([one.seconds for one in group.written]))
    row["training_seconds"] = float(np.mean([one.seconds for one in group.students]))
    return row | bounds_at(lab, nats)


# --- notes and verdicts -----------------------------------------------------------------------------------------------


def _notes(scale: StudentScale, rows: Sequence[Row]) -> list[str]:
    others = next(row["others"] for row in rows if row["part"] == "corpus")
    notes = [
        "All streams of a deployment share one secret and one belief, and begin at the start token. Of each source "
        f"there are {scale.deployments} students of {scale.attacked:,} tokens, and one of any other number.",
        "half: the promise is about this question. The attacker holds the adapters of all worlds and knows who is in "
        "which, as the guarantee assumes. p: how likely so much evidence for the realized worlds is if students share "
        "at most the charged nats with their secrets; exact, whatever the attack. Over d deployments it is m^-d at "
        "least for m worlds, so that one student alone raises no alarm.",
        "corpus: not promised under `half`, where whatever is computed from all worlds alike is free.",
    ]
    if others < 1000:
        notes.append(
            f"With {others} records held out, a false-positive rate of 0.1 % means none: true positives are then the "
            "members above every held-out record."
        )
    return notes


def verdicts(result: Result) -> list[str]:
    """Whether any attack found more than its student may say, and whether the attacks would have found a leak."""
    rows = result.select(part="half")
    tests = [row for row in rows if row["is_bounded"]]
    broken = [row for row in tests if is_violation(row["p"], len(tests))]
    worst = min(broken or tests, key=lambda row: float(row["p"]))
    share = f"alarm below {FALSE_ALARMS:g} ÷ {len(tests)}: any false alarm {FALSE_ALARMS:.0%} at most"
    lines = [
        f"{'ALARM: ' if broken else ''}which half was used: {len(broken)} of {len(tests)} attacks find more than was "
        f"charged; the most surprising is {worst['attack']} on {worst['source']} at {worst['tokens']:,} tokens, "
        f"p = {worst['p']:.2g} ({share})"
    ]
    for source in (NO_NOISE, WORLD):
        control = [row for row in rows if row["source"] == source]
        best = min(control, key=lambda row: float(row["chance_p"]))
        is_found = is_violation(best["chance_p"], len(control))
        lines.append(
            f"power, {source}: {'found' if is_found else 'NOT found, so the audit proves little'}; {best['attack']}: "
            f"AUC {best['auc']:.3f}, p = {best['chance_p']:.2g} in {best['deployments']} deployments"
        )
    return lines


REGIME = Regime(
    name="student",
    title="A student to publish",
    question="How much of the gain does a student of private text keep, and does it say which records were used?",
    presets={
        "quick": StudentScale(
            positions=4096,
            gumbel_draws=2,
            tokens=(1_000, 3_000),
            releases=("gaussian", "plurality"),
            per_token=2.0**-32,
            deployments=3,
            attacked=1_000,
            records=64,
            record_tokens=48,
            streams=16,
            length=64,
            recipes=1_000,
        ),
        "paper": StudentScale(
            positions=8176,
            gumbel_draws=2,
            tokens=(10_000, 100_000, 1_000_000, 3_000_000),
            releases=("gaussian", "channel", "plurality", "mixture"),
            per_token=2.0**-32,
            deployments=4,
            attacked=100_000,
            records=1024,
            record_tokens=256,
            streams=512,
            recipes=1_000_000,
        ),
    },
    run=run,
    headlines=(
        headline(
            "kept by a student of {tokens:,} tokens, {source}, {decoder}",
            "retained_gain ±",
            ".0%",
            part="gain",
            is_default=True,
            is_control=False,
        ),
        headline(
            "which half: AUC of {attack}, {source}, {tokens:,} tokens",
            "auc ±",
            ".3f",
            part="half",
            attack="lira",
            is_bounded=True,
        ),
    ),
    verdicts=verdicts,
    for_each_collection=False,
)
