"""Controls of the gain: what the same training gives on other text, and on records of the source that are not private.

Held-out records share source, style and form with the private ones, so a part of the gain is not about what any record
says. Ordinary LoRA adapters are trained with the settings and the start of the workspace's full-corpus adapter on

    other text           as many texts of another source as there are private records, each cut to the length of one
    other text, half     random halves of them, for the worlds, which see half of the private records
    spare records        records of the private source that the workspace does not hold
    as many private      random private records, as many as there are spare ones

and vote on the positions and coins of `accuracy`. The share is the gain over the public model divided by that of as
many private records, paired position by position, with errors over held-out records.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.leak import Estimate
from paclm.study.decoding import GREEDY, GUMBEL, Decoding
from paclm.study.lab import Lab
from paclm.study.parts import Array
from paclm.study.recorded_votes import TextVotes, collect_votes
from paclm.study.regime import Findings, Regime
from paclm.study.results import Result, Row
from paclm.study.statistics import clustered_mean, retained_gain
from paclm.study.text_training import train_on_texts
from paclm.worlds.layout import FULL_FILE, WORLDS_FILE

ALL, HALF, FEW = "private records", "private records, half", "private records, as many as spare"
BESIDE = {"other text": ALL, "other text, half": HALF, "spare records": FEW}
"""Controls, each with what was trained on as many private records."""
NAMES = (*BESIDE, FEW)
"""Of the groups of adapters that are trained here."""
SUPPORT = 200
NOTES = [
    "Private records, half: the mean over the worlds, without noise. An adapter is trained once: errors are over "
    "held-out records and do not contain how another training would differ.",
    "Each other text is cut to the length of a private record, and is as long or longer: the first in their file that "
    "are. A text with the same topic as a held-out record may be among them.",
    "A share says what the source and the form of text give; the rest is not what single records say either: it is "
    "what private records have in common with held-out ones.",
]


@dataclass(frozen=True, slots=True)
class ControlsScale:
    positions: int
    gumbel_draws: int
    halves: int  # of the other text, one adapter each; two of them complement each other
    subsets: int  # of the private records, as many as there are spare ones, at most


class ControlGroup(NamedTuple):
    """Adapters that are averaged: the same kind and number of texts, drawn again."""

    name: str
    members: BoolArray  # (texts, adapters)


def run(lab: Lab, scale: ControlsScale) -> Findings:
    """Both decoders."""
    if lab.other_text is None and not lab.spare_text:
        raise InvalidInput(
            "There is no text to train controls on. Give public text of another source with --other-text."
        )
    _refuse_records(lab)
    decodings = (GREEDY, GUMBEL.times(scale.gumbel_draws))
    private = lab.text_votes(scale.positions, decodings)
    parts = lab.parts("controls", asdict(scale))
    arrays = parts.arrays("votes", partial(_train_and_vote, lab, scale, decodings))
    rows: list[Row] = []
    for name, votes in private.items():
        controls = TextVotes.from_arrays(arrays, name)
        rows += [{"decoder": name, **row} for row in rows_of(lab, votes, controls, arrays)]
    return Findings(rows, NOTES)


def _refuse_records(lab: Lab) -> None:
    """A control that is trained on private or on scored records is none."""
    records = [*lab.workspace.records("train"), *lab.workspace.records("heldout")]
    held = {record.text for record in records}
    for option, texts in (("--other-text", lab.other_text), ("the rest of the corpus", lab.spare_text)):
        if shared := len(held.intersection(texts or ())):
            raise InvalidInput(
                f"{shared:,} of the texts of {option} are records of this workspace, and a control must hold none. "
                "Take others."
            )


def _train_and_vote(lab: Lab, scale: ControlsScale, decodings: Sequence[Decoding]) -> dict[str, Array]:
    """Votes of all controls, with the number of texts and tokens of each adapter, and the group it belongs to."""
    from paclm.engine.base_model import base_of, context_of
    from paclm.engine.loading import open_engine
    from paclm.worlds.blocks import block_length

    texts, groups = choose_texts(lab, scale)
    settings = lab.workspace.training
    membership = np.hstack([group.members for group in groups])
    trained = train_on_texts(
        lab,
        texts,
        membership,
        settings,
        int(lab.workspace.manifest.arguments["seed"]),  # the start of the workspace's own adapters
        "train controls",
        block_tokens=block_length(settings, context_of(base_of(lab.workspace))),
    )
    lab.release_engine()  # of what training held, too
    runtime = replace(lab.runtime, max_sequences=1, context=lab.window)
    engine = open_engine(lab.workspace, SUPPORT, runtime, trained.stack)
    passages = lab.passages(scale.positions)
    advance = lab.start_task("votes of controls", sum(passage.num_scored for passage in passages))
    seeds = [lab.seed_for("coins", decoding.name) for decoding in decodings]  # the coins of the private votes
    is_odd = membership.shape[1] % 2 == 1  # votes are of an even number of worlds: the last one has the place of `full`
    found = collect_votes(engine, passages, decodings, seeds, is_odd, advance)
    arrays: dict[str, Array] = {k: array for name, votes in found.items() for k, array in votes.arrays(name).items()}
    sizes = [group.members.shape[1] for group in groups]
    arrays["group"] = np.repeat([NAMES.index(group.name) for group in groups], sizes)
    return arrays | {"records": membership.sum(axis=0), "tokens": trained.num_tokens}


def choose_texts(lab: Lab, scale: ControlsScale) -> tuple[list[list[int]], list[ControlGroup]]:
    """Token ids of all texts that controls are trained on, and who is trained on which."""
    from paclm.worlds.blocks import encode_stream, encode_texts

    most = lab.workspace.training.max_record_tokens
    private = [ids[:most] for ids in encode_stream(lab.tokenizer, (r.text for r in lab.workspace.records("train")))]
    sets: list[tuple[list[list[int]], list[tuple[str, BoolArray]]]] = []
    if lab.other_text is not None:
        other = stand_ins([len(ids) for ids in private], encode_stream(lab.tokenizer, lab.other_text))
        halves = _halves(len(other), scale.halves, lab.rng("controls", "halves"))
        whole = np.ones((len(other), 1), dtype=np.bool_)
        sets.append((other, [("other text", whole), ("other text, half", halves)]))
    if lab.spare_text:
        spare = encode_texts(lab.tokenizer, lab.spare_text[: len(private)])
        sets.append((spare, [("spare records", np.ones((len(spare), 1), dtype=np.bool_))]))
        sets.append((private, [(FEW, _subsets(len(private), len(spare), scale.subsets, lab.rng("controls", "few")))]))
    texts = [text for own, _ in sets for text in own]
    groups, start = [], 0
    for own, columns in sets:
        for name, inside in columns:
            members = np.zeros((len(texts), inside.shape[1]), dtype=np.bool_)
            members[start : start + len(own)] = inside
            groups.append(ControlGroup(name, members))
        start += len(own)
    return texts, groups


def stand_ins(lengths: Sequence[int], texts: Iterable[Sequence[int]]) -> list[list[int]]:
    """For every length one of the texts, in their order, cut to it; raises if too few of them are as long."""
    wanted, found = sorted(lengths), []
    for text in texts:
        place = bisect.bisect_right(wanted, len(text)) - 1  # the longest that this text can stand in for
        if place >= 0:
            found.append(list(text[: wanted.pop(place)]))
        if not wanted:
            return found
    raise InvalidInput(
        f"--other-text has texts as long as {len(found):,} of the {len(lengths):,} private records, and "
        f"{len(wanted):,} more are needed, of up to {max(wanted):,} tokens. Give a file with more text."
    )


def _halves(size: int, count: int, rng: np.random.Generator) -> BoolArray:
    """(size, count) random halves; each second one is the complement of the one before."""
    members = np.zeros((size, count), dtype=np.bool_)
    for i in range(0, count, 2):
        order = rng.permutation(size)
        members[order[: size // 2], i] = True
        members[order[(size + 1) // 2 :], i + 1 : i + 2] = True  # nothing where the last one has no partner
    return members


def _subsets(size: int, each: int, most: int, rng: np.random.Generator) -> BoolArray:
    """(size, count) disjoint random subsets of `each`."""
    count = min(most, size // each)
    members = np.zeros((size, count), dtype=np.bool_)
    for i, chosen in enumerate(rng.permutation(size)[: count * each].reshape(count, each)):
        members[chosen, i] = True
    return members


def rows_of(lab: Lab, votes: TextVotes, controls: TextVotes, facts: Mapping[str, Array]) -> list[Row]:
    """One row per kind of text, of one decoder; `facts` has group, records and tokens of every control."""
    if not np.array_equal(votes.truth, controls.truth):
        raise InvalidInput("Controls and worlds were not scored on the same positions. Run again with --again.")
    hits: dict[str, FloatArray] = {
        ALL: _hits(votes.column("full")[:, None], votes.truth),
        HALF: _hits(votes.votes, votes.truth),
    }
    entries, membership = lab.workspace.manifest.adapters, lab.workspace.membership
    total, drawn = entries[WORLDS_FILE].get("tokens"), membership.shape[1]
    about: dict[str, Row] = {
        ALL: _about(1, len(membership), entries[FULL_FILE].get("tokens")),
        HALF: _about(votes.num_worlds, membership.sum(axis=0).mean(), None if total is None else total / drawn),
    }
    columns = [controls.votes, *([] if controls.full is None else [controls.full[:, None]])]
    chosen = np.concatenate(columns, axis=1)  # (n, controls)
    for number, name in enumerate(NAMES):
        own = np.flatnonzero(facts["group"] == number)
        if own.size:
            hits[name] = _hits(chosen[:, own], votes.truth)
            about[name] = _about(own.size, *(float(facts[column][own].mean()) for column in ("records", "tokens")))
    public = _hits(votes.public[:, None], votes.truth)
    differs = float((votes.public != controls.public).mean())
    return [
        {
            "trained_on": name,
            **about[name],
            **_scores(lab, votes.passage, public, hits, name),
            "public_differs": differs,
        }
        for name in hits
    ]


def _scores(lab: Lab, passage: IntArray, public: FloatArray, hits: Mapping[str, FloatArray], name: str) -> Row:
    own, beside = hits[name], BESIDE.get(name)
    row: Row = {"positions": len(own), "passages": len(np.unique(passage)), "beside": beside}

    def mean(values: FloatArray) -> Estimate:
        return clustered_mean(values, passage, lab.rng("hits", "bootstrap"))

    row["accuracy"], row["accuracy_stderr"] = mean(own)
    row["gain_points"], row["gain_stderr"] = mean(own - public)
    for column, other in (("of_full", ALL), ("share", beside)):
        share = other and retained_gain(own, public, hits[other], passage, lab.rng("hits", "bootstrap"))
        row[column], row[f"{column}_stderr"] = share or (None, None)
    row["left_points"], row["left_stderr"] = mean(hits[beside] - own) if beside else (None, None)
    return row


def _hits(chosen: IntArray, truth: IntArray) -> FloatArray:
    """(n,) the share of the adapters that chose the true token, of (n, adapters)."""
    found: FloatArray = (chosen == truth[:, None]).mean(axis=1)
    return found


def _about(adapters: int, records: float, tokens: float | None) -> Row:
    return {"adapters": int(adapters), "records": float(records), "tokens": tokens}


def in_short(result: Result) -> list[str]:
    """The share of the gain that each control has."""
    return [
        f"{row['trained_on']}, {row['decoder']}: {row['share']:.0%} ± {row['share_stderr']:.0%} of the gain of as many "
        f"private records; {100 * row['left_points']:+.2f} ± {100 * row['left_stderr']:.2f} points are left"
        for row in result.rows
        if row["share"] is not None
    ]


REGIME = Regime(
    name="controls",
    title="Controls of the gain",
    question="How much of the gain would other text give, trained on in the same way?",
    presets={"quick": ControlsScale(4096, 2, 1, 1), "paper": ControlsScale(65_408, 1, 2, 3)},
    run=run,
    in_short=in_short,
    for_each_collection=False,
)
