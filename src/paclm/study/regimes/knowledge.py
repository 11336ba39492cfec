"""Recall of house knowledge: questions whose answers stand in the private records, and who completes them right.

An answer is matched if a greedy completion of the prompt begins with its tokens. No text has to be generated to find
out: a completion is still right at token t only if all tokens before it were the answer's, so its context there is the
prompt and the answer so far, and teacher-forced votes on prompt + answer are those of free decoding wherever they
matter. A release is replayed on them as one session a question, with a fresh secret and a uniform belief, which ends
at the first wrong token. The chance of an exact match is the share of sessions that reach the end of the answer. A
deployment keeps one secret and its belief; at small budgets the belief hardly moves.

A completion that spells the answer with other tokens, or continues its last word, counts as wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from paclm.config import format_budget
from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import RULES, Rule
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.decoding import GREEDY
from paclm.study.lab import Advance, Lab
from paclm.study.questions import (
    ALL,
    AskedQuestion,
    Question,
    count_units,
    encode_questions,
    is_embedded,
    share_texts,
    supported,
)
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.serving import EngineStreams, begin, continue_by, draw_secrets, engine_for, play
from paclm.study.statistics import clustered_mean, retained_gain

if TYPE_CHECKING:
    from paclm.engine.engine import Engine

EXAMPLE_BUDGET = 2.0**-16
OTHERS = {"public": "public model", "noiseless": "realized world, no noise", "full": "full corpus (not private)"}
"""Who answers besides the releases, with their names in table and figure."""
_TAIL = 90  # characters of a prompt that an example shows
_MORE = 4  # tokens that an example shows after as many as the answer has


@dataclass(frozen=True, slots=True)
class KnowledgeScale:
    questions: int  # at most; more are drawn from
    sessions: int  # of each release, a question
    least_units: int = 3  # in whose records an answer has to stand
    budgets: tuple[float, ...] = (2.0**-4, 2.0**-8, 2.0**-16, 2.0**-32)
    examples: int = 5

    def __post_init__(self) -> None:
        if self.least_units < 2:
            raise InvalidInput(
                f"least_units must be at least 2, not {self.least_units}: no question is about one unit."
            )


def run(lab: Lab, scale: KnowledgeScale) -> Findings:
    """Rows of every kind of question and of all of them, then examples."""
    given = lab.need_questions()
    units = count_units(given, lab.workspace.records("train"))
    found = supported(given, units, scale.least_units)
    asked = _draw(lab, encode_questions(found, lab.tokenizer, lab.window), scale.questions)
    engine, together = engine_for(lab, lab.worlds_name, "full", sequences=max(1, scale.examples), context=lab.window)
    parts = lab.parts("knowledge", [asdict(scale), [(one.prompt, one.answer) for one in asked]])
    advance = lab.start_task("questions", len(asked))
    kept = parts.arrays("knowledge-votes", lambda: answer_votes(engine, asked, advance).arrays(GREEDY.name))
    rows = _scores(lab, scale, asked, TextVotes.from_arrays(kept, GREEDY.name), units)
    notes = [
        f"{len(asked):,} of {len(given):,} questions were asked; left out are {len(given) - len(found):,} "
        f"whose answers, with what they are about, stand in the training records of fewer than {scale.least_units} "
        f"{'groups' if lab.workspace.manifest.arguments.get('group_by') else 'records'}.",
    ]
    if is_embedded(lab.workspace):
        rows += _examples(lab, engine, asked, min(scale.examples, together))
    else:
        notes.append("No example is shown: a report holds no text of your records.")
    return Findings(rows, notes)


def _draw(lab: Lab, asked: list[AskedQuestion], most: int) -> list[AskedQuestion]:
    """At most so many questions, all of a text before the next: a text is read once for all of them."""
    texts = [questions for _, questions in share_texts(asked)]
    order = lab.rng("knowledge", "questions").permutation(len(texts))
    return [asked[i] for i in sorted([i for text in order for i in texts[text]][:most])]


def answer_votes(engine: Engine, asked: Sequence[AskedQuestion], advance: Advance = lambda _: None) -> TextVotes:
    """Greedy votes on every token of every answer; the engine's last world is the full-corpus adapter.

    `passage` is the number of the question.
    """
    import torch

    from paclm.engine.decode_step import coupled_votes

    texts = share_texts(asked)
    found: dict[int, IntArray] = {}  # by question: (answer's tokens, m + full + public)
    for some, hidden in engine.read_texts([text[:-1] for text, _ in texts]):
        rows: list[int] = []
        start, served = 0, list[int]()
        for text, questions in texts[some.start : some.stop]:
            for i in questions:
                first = start + len(asked[i].prompt) - 1
                rows += range(first, first + len(asked[i].answer))
            served += questions
            start += len(text) - 1
        support, logits = engine.restricted(hidden[:, torch.tensor(rows, device=hidden.device)])
        cast = coupled_votes(logits, support, None).cpu().numpy().astype(np.int32)
        ends = np.cumsum([len(asked[i].answer) for i in served])[:-1]
        found |= zip(served, np.split(cast, ends), strict=True)
        advance(len(served))
    votes = np.concatenate([found[i] for i in range(len(asked))])
    return TextVotes(
        votes=votes[:, :-2],
        full=votes[:, -2],
        public=votes[:, -1],
        truth=np.concatenate([np.array(one.answer, np.int32) for one in asked]),
        passage=np.repeat(np.arange(len(asked), dtype=np.int32), [len(one.answer) for one in asked]),
        position=np.arange(len(votes), dtype=np.int32),
    )


def all_right(votes: IntArray, answers: TextVotes) -> BoolArray:
    """Whether all tokens of each answer are voted for: votes (n,) or (n, m) → (questions,) or (questions, m)."""
    firsts = np.flatnonzero(np.diff(answers.passage, prepend=-1))
    truth = answers.truth.reshape(-1, *[1] * (votes.ndim - 1))
    right: BoolArray = np.logical_and.reduceat(votes == truth, firsts, axis=0)
    return right


def release_matches(answers: TextVotes, rule: Rule, per_token: float, sessions: int, seed: int) -> FloatArray:
    """The share of sessions in which a release gives every token of the answer, (questions,)."""
    lengths = np.repeat(np.bincount(answers.passage), sessions)  # (questions · sessions,)
    firsts = np.repeat(np.flatnonzero(np.diff(answers.passage, prepend=-1)), sessions)
    played = ResearchSessions.seeded(answers.num_worlds, rule, per_token, seed, len(lengths))
    is_right = np.ones(len(lengths), dtype=np.bool_)
    for step in range(int(lengths.max())):
        going = np.flatnonzero(is_right & (lengths > step))
        at = firsts[going] + step
        is_right[going] = played.release(answers.votes[at], going).tokens == answers.truth[at]
    share: FloatArray = is_right.reshape(-1, sessions).mean(axis=1)
    return share


def _scores(
    lab: Lab, scale: KnowledgeScale, asked: Sequence[AskedQuestion], answers: TextVotes, units: Mapping[Question, int]
) -> list[Row]:
    """Who answers how much, by kind. Questions with the same answer are one sample: errors are over answers."""
    cells: list[tuple[str, float | None]] = []
    for rule in RULES.values():
        cells += [(rule.name, budget) for budget in (scale.budgets if rule.reads_secret else (None,))]
    full, public = (all_right(votes, answers).astype(np.float64) for votes in (answers.column("full"), answers.public))
    matches: dict[tuple[str, float | None], FloatArray] = {("public", None): public}
    for name, budget in cells:
        seed = lab.seed_for("knowledge", name, budget)
        matches[name, budget] = release_matches(answers, RULES[name], budget or scale.budgets[0], scale.sessions, seed)
    matches["noiseless", None] = all_right(answers.votes, answers).mean(axis=1)
    matches["full", None] = full
    texts = [one.question.answer for one in asked]
    support = np.array([units[one.question] for one in asked])
    clusters = np.unique(texts, return_inverse=True)[1]
    kinds = [one.question.kind for one in asked]
    rows: list[Row] = []
    for kind in (ALL, *dict.fromkeys(filter(None, kinds))):
        own = np.flatnonzero([kind in (ALL, other) for other in kinds])
        for (name, budget), share in matches.items():
            rng = lab.rng("knowledge", "bootstrap", kind)
            row: Row = {"part": "score", "kind": kind, "release": name, "per_token_nats": budget}
            row["budget"] = None if budget is None else format_budget(budget)
            row |= {"questions": own.size, "answers": np.unique(clusters[own]).size, "sessions": scale.sessions}
            row |= {"units_least": support[own].min(), "units_median": np.median(support[own])}
            row["exact_match"], row["exact_match_stderr"] = clustered_mean(share[own], clusters[own], rng)
            kept = retained_gain(share[own], public[own], full[own], clusters[own], rng)
            row["retained_gain"], row["retained_gain_stderr"] = kept or (None, None)
            rows.append(row)
    return rows


def _examples(lab: Lab, engine: Engine, asked: Sequence[AskedQuestion], count: int) -> list[Row]:
    """Questions drawn at random, of as many kinds as possible, and what is written after them."""
    order = lab.rng("knowledge", "examples").permutation(len(asked)).tolist()
    seen: Counter[str | None] = Counter()
    turns: dict[int, int] = {}
    for i in order:
        turns[i] = seen[asked[i].question.kind]
        seen[asked[i].question.kind] += 1
    shown = [asked[i] for i in sorted(order, key=turns.__getitem__)[:count]]
    if not shown:
        return []
    length = max(len(one.answer) for one in shown) + _MORE
    prompts = [one.prompt[-(lab.window - length) :] for one in shown]
    streams = EngineStreams(engine, GREEDY, [Coins(0)] * len(shown), with_full=True)  # greedy votes use no coins
    seed = lab.seed_for("knowledge", "examples")
    secrets = draw_secrets(lab.num_worlds, seed, len(shown))
    sessions = begin(lab.num_worlds, RULES["gaussian"], EXAMPLE_BUDGET, seed, 0, secrets)
    said = {
        "gaussian": play(streams, prompts, sessions, length).tokens,
        "public": continue_by(streams, prompts, length, lambda panel: panel.public),
    }
    rows: list[Row] = []
    for number, one in enumerate(shown):
        tokens = {name: written[number, : len(one.answer) + _MORE].tolist() for name, written in said.items()}
        rows.append(
            {
                "part": "example",
                "kind": one.question.kind,
                "budget": format_budget(EXAMPLE_BUDGET),
                "prompt": _in_line(one.question.prompt)[-_TAIL:],
                "answer": _in_line(one.question.answer),
                **{f"said_{name}": _in_line(lab.tokenizer.decode(ids)) for name, ids in tokens.items()},
            }
        )
    return rows


def _in_line(text: str) -> str:
    """A text in one line, its lines separated by strokes."""
    return " / ".join(filter(None, (" ".join(line.split()) for line in text.splitlines())))


REGIME = Regime(
    name="knowledge",
    title="Recall of house knowledge",
    question="How many questions about what the records say does each release answer?",
    presets={"quick": KnowledgeScale(200, 16), "paper": KnowledgeScale(2000, 32)},
    run=run,
    headlines=(
        headline("exact match, public model", "exact_match ±", ".1%", kind=ALL, release="public"),
        headline("exact match, gaussian at {budget}", "exact_match ±", ".1%", kind=ALL, release="gaussian"),
        headline("exact match, plurality", "exact_match ±", ".1%", kind=ALL, release="plurality"),
        headline("exact match, full corpus (not private)", "exact_match ±", ".1%", kind=ALL, release="full"),
    ),
)
