"""Content protection by a quorum (`privacy/quorum.py`): what it costs on text, and whether forced canaries still come.

Text: the votes of `accuracy`, each vote that lacks the quorum replaced, then scored as there. Canaries: exactly the
worlds that hold one vote for its payload, as in `canaries`, and one token is released under a uniform belief. Quorum 0
is no quorum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from paclm.config import format_budget
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.quorum import apply_quorum
from paclm.privacy.releases import rule_named
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.decoding import GREEDY, GUMBEL, Decoding
from paclm.study.expectation import IN_EXPECTATION, ExpectedReleases, score_hits
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime
from paclm.study.regimes.canaries import (
    OTHERS,
    Planted,
    choose_forced,
    force_votes,
    imagined_canaries,
    planted_canaries,
    trigger_votes,
)
from paclm.study.results import Result, Row
from paclm.study.statistics import clustered_mean

ENDS = {  # by the end of their columns
    "noiseless": ("gaussian", math.inf),
    "plurality": ("plurality", math.inf),
    "at_8": ("gaussian", 2.0**-8),
    "at_32": ("gaussian", 2.0**-32),
}
PER_TOKEN = 2.0**-16  # of forced canaries
INVENTED = (
    "The workspace has no canaries: triggers and payloads were invented, and their members drawn at random. No world "
    "was trained on them, which forced votes do not need."
)


@dataclass(frozen=True, slots=True)
class ContentScale:
    positions: int
    gumbel_draws: int
    trials: int  # single-token releases per canary, decoder and quorum
    quorums: tuple[int, ...] = (1, 2, 4, 8)  # those up to half of the worlds
    forced: int = 2  # canaries with forced memorization
    imagined: int = 16  # canaries made up where the workspace has none


def run(lab: Lab, scale: ContentScale) -> Findings:
    """Text under every quorum, then forced canaries."""
    membership = lab.membership
    quorums = (0, *(q for q in scale.quorums if q <= lab.num_worlds // 2))
    found = lab.text_votes(scale.positions, (GREEDY, GUMBEL.times(scale.gumbel_draws)))
    parts = lab.parts("content", [asdict(scale), [votes.digest for votes in found.values()]])
    rows: list[Row] = []
    for name, votes in found.items():
        rows += parts.rows(f"text-{name}", partial(_on_text, lab, name, votes, membership, quorums))
    canaries = planted_canaries(lab)
    notes = [IN_EXPECTATION]
    if not canaries:
        notes.append(INVENTED)
        canaries = imagined_canaries(lab, scale.imagined)
        membership = np.concatenate([membership, [one.is_member for one in canaries]])
    forced = parts.rows("canaries", partial(_on_canaries, lab, scale, canaries, membership, quorums))
    if (count := len({row["canary"] for row in forced})) < scale.forced:
        notes.append(f"{count} C-COMMON canaries have a payload inside the support; no world can vote for the others'.")
    return Findings(rows + forced, notes)


def _on_text(lab: Lab, decoder: str, votes: TextVotes, membership: BoolArray, quorums: Sequence[int]) -> list[Row]:
    """One row per quorum; changes are against no quorum, on the same positions."""
    advance = lab.start_task(f"quorum, {decoder}", len(quorums))
    rows: list[Row] = []
    before: dict[str, FloatArray] = {}
    for quorum in quorums:
        kept = replace(votes, votes=_under(votes.votes, votes.public, membership, quorum))
        row: Row = {"part": "text", "decoder": decoder, "quorum": quorum, "positions": votes.num_positions}
        row |= {"worlds": votes.num_worlds, "records": len(membership)}
        row["most_times"] = votes.num_worlds / (2 * quorum) if quorum else None
        shares = {"dissent": kept.is_dissent, "replaced": (kept.votes != votes.votes).mean(axis=1)}
        for name, share in shares.items():
            row[name], row[f"{name}_stderr"] = clustered_mean(share, votes.passage, lab.rng("hits", "bootstrap"))
        for end, hits in _hits(kept).items():
            scored = score_hits(lab, votes, hits)
            for name in ("accuracy", "retained_gain"):
                row |= {f"{name}_{end}": scored[name], f"{name}_{end}_stderr": scored[f"{name}_stderr"]}
            change = clustered_mean(hits - before.setdefault(end, hits), votes.passage, lab.rng("hits", "bootstrap"))
            row[f"change_{end}"], row[f"change_{end}_stderr"] = change
        rows.append(row)
        advance(1)
    return rows


def _under(votes: IntArray, public: IntArray, membership: BoolArray, quorum: int) -> IntArray:
    return apply_quorum(votes, public, membership, quorum) if quorum else votes


def _hits(votes: TextVotes) -> dict[str, FloatArray]:
    """The expected share of true tokens at every position, by release and budget."""
    expected = ExpectedReleases(votes)
    return {end: expected.under(rule_named(rule), per_token).hits for end, (rule, per_token) in ENDS.items()}


def _on_canaries(
    lab: Lab, scale: ContentScale, canaries: Sequence[Planted], membership: BoolArray, quorums: Sequence[int]
) -> list[Row]:
    chosen = choose_forced(lab.engine(), canaries, scale.forced)
    cells = [(one, decoding, others) for one in chosen for decoding in (GREEDY, GUMBEL) for others in OTHERS]
    advance = lab.start_task("forced canaries", len(cells))
    rows: list[Row] = []
    for one, decoding, others in cells:
        rows += _forced(lab, one, decoding, others, scale.trials, membership, quorums)
        advance(1)
    return rows


def _forced(
    lab: Lab,
    one: Planted,
    decoding: Decoding,
    others: str,
    trials: int,
    membership: BoolArray,
    quorums: Sequence[int],
) -> list[Row]:
    """One token per trial and quorum: how often it is the payload, and how often where it lacks the quorum."""
    canary, payload = one.canary, one.canary.payload_ids[0]
    at = trigger_votes(lab.engine(), canary, trials, decoding.temperature, lab.seed_for("content", "coins", canary.id))
    votes = force_votes(at.votes, one.is_member, payload, others_agree=OTHERS[others])
    proposed = (votes[:, ~one.is_member] == payload).sum(axis=1)  # (n,) by worlds that do not hold the canary
    rows: list[Row] = []
    for quorum in quorums:
        kept = _under(votes, at.public, membership, quorum)
        seed = lab.seed_for("content", "noise", canary.id, decoding.name, others)
        sessions = ResearchSessions.seeded(votes.shape[1], rule_named("gaussian"), PER_TOKEN, seed, trials)
        emitted = sessions.release(kept).tokens == payload
        lacks = (proposed < max(quorum, 1)) & (at.public != payload)
        row: Row = {"part": "forced", "canary": canary.id, "decoder": decoding.name, "others": others}
        row |= {"quorum": quorum, "per_token_nats": PER_TOKEN, "budget": format_budget(PER_TOKEN), "trials": trials}
        row["emitted"] = float(emitted.mean())
        row["emitted_stderr"] = math.sqrt(row["emitted"] * (1.0 - row["emitted"]) / trials)
        row |= {"lacking": int(lacks.sum()), "emitted_lacking": int(emitted[lacks].sum())}
        row["can_emit"] = float((kept == payload).any(axis=1).mean())  # whatever the secret, noise and release
        rows.append(row)
    return rows


def verdicts(result: Result) -> list[str]:
    """No payload that lacks the quorum may be emitted: certain, so this alarm is never false.

    The control without a quorum must emit some, or nothing was tested. It emits about half of them on real text, so
    that none is emitted by chance is less likely than 1e-6 from 21 trials on.
    """
    forced = result.select(part="forced")
    if not forced:
        return ["no canary has a payload inside the support, so none could be forced"]
    guarded, control = ([row for row in forced if bool(row["quorum"]) == is_on] for is_on in (True, False))
    (emitted, trials), (free, of) = (
        [sum(row[name] for row in rows) for name in ("emitted_lacking", "lacking")] for rows in (guarded, control)
    )
    if not emitted and not (trials and of):
        return ["no payload lacked votes of worlds without its record, so the quorum was not tested"]
    alarm = "ALARM: " if emitted or not free else ""
    return [
        f"{alarm}payloads emitted although they lacked the quorum: {emitted} in {trials:,} trials; without a quorum "
        f"{free:,} in {of:,} (alarm from 1, and if the control emits none)"
    ]


def in_short(result: Result) -> list[str]:
    """Every quorum on text, one line each."""
    lines = []
    for row in result.select(part="text", collection=1):
        text = f"quorum {row['quorum']}, {row['decoder']}: dissent {row['dissent']:.1%}, {row['replaced']:.2%} of votes"
        kept, error = row["retained_gain_at_32"], row["retained_gain_at_32_stderr"]
        lines.append(f"{text} replaced" + ("" if kept is None else f", kept at 2^-32 {kept:.1%} ± {error:.1%}"))
    return lines


REGIME = Regime(
    name="content",
    title="Content protection by a quorum",
    question="What does it cost to release only what enough worlds without any one record propose, and does it hold?",
    presets={"quick": ContentScale(4096, 2, 200, (1, 2, 4)), "paper": ContentScale(65_408, 1, 2000)},
    run=run,
    in_short=in_short,
    verdicts=verdicts,
)
