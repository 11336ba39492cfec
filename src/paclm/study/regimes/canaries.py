"""Canaries (`sec:canary-results`, `tab:canary`): what worlds memorize on their own, and memorization forced in.

Organic: at a canary's trigger, worlds that were trained on it against those that were not. Forced: exactly the member
worlds vote for the payload, weights unchanged, and one token is released under a uniform belief. Membership then hardly
shows in the token, yet the payload is emitted: inference protection is not content protection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import chdtrc, ndtr
from scipy.stats import mode

from paclm.config import format_budget
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import Estimate
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import rule_named
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.decoding import GREEDY, GUMBEL, Decoding
from paclm.study.lab import Lab
from paclm.study.leak_tests import FALSE_ALARMS
from paclm.study.quality import score_targets
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Result, Row
from paclm.worlds.assignment import assign_worlds
from paclm.worlds.canaries import Canary, make_canaries

if TYPE_CHECKING:
    from paclm.engine.engine import Engine

_DRAWS_AT_ONCE = 128


class Planted(NamedTuple):
    """A canary, and which worlds hold it."""

    canary: Canary
    is_member: BoolArray  # (m,)


class TriggerVotes(NamedTuple):
    """Every world's vote at a trigger, once per draw of coins."""

    support: IntArray  # (k,)
    votes: IntArray  # (n, m)
    public: IntArray  # (n,) the public model's


def planted_canaries(lab: Lab) -> list[Planted]:
    """The canaries that the workspace was made with, and their members."""
    canaries = lab.workspace.canaries()
    rows = lab.membership[len(lab.membership) - len(canaries) :]
    return [Planted(canary, row) for canary, row in zip(canaries, rows, strict=True)]


def imagined_canaries(lab: Lab, count: int) -> list[Planted]:
    """Canaries that no world was trained on, assigned to half of the worlds at random: enough to force votes with."""
    canaries = make_canaries(count, lab.tokenizer, lab.seed_for("canaries", "imagined"))
    rows = assign_worlds(count, lab.num_worlds, lab.seed_for("canaries", "members"))
    return [Planted(canary, row) for canary, row in zip(canaries, rows, strict=True)]


def trigger_votes(engine: Engine, canary: Canary, draws: int, temperature: float, seed: int) -> TriggerVotes:
    """Votes at the trigger: coupled Gumbel with fresh coins for every draw; greedy, at temperature 0, needs one."""
    import torch

    from paclm.engine.decode_step import coupled_votes

    (*_, (_, hidden)) = engine.hidden_states(canary.trigger_ids)
    support, logits = engine.restricted(hidden[:, -1:])  # (1, k), (1, W, k)
    if not temperature:
        greedy = coupled_votes(logits, support, None).cpu().numpy().repeat(draws, axis=0)
        return TriggerVotes(support[0].cpu().numpy(), greedy[:, :-1], greedy[:, -1])
    coins = Coins(seed)
    cast = []
    for start in range(0, draws, _DRAWS_AT_ONCE):
        n = min(_DRAWS_AT_ONCE, draws - start)
        drawn = torch.from_numpy(np.stack([coins.gumbel(support.shape[1]) for _ in range(n)])).float()
        votes = coupled_votes(logits.expand(n, -1, -1), support.expand(n, -1), drawn.to(logits.device), temperature)
        cast.append(votes.cpu().numpy())
    every = np.concatenate(cast)  # (n, W)
    return TriggerVotes(support[0].cpu().numpy(), every[:, :-1], every[:, -1])


def force_votes(votes: IntArray, is_member: BoolArray, payload: int, *, others_agree: bool) -> IntArray:
    """(n, m): exactly the member worlds vote the payload; the others as they did, or all for their plurality."""
    forced = votes.copy()
    if others_agree:
        forced[:, ~is_member] = mode(votes[:, ~is_member], axis=1, keepdims=True).mode  # ties to the smaller token
    forced[:, is_member] = payload
    return forced


def advantage(emitted: BoolArray, realized_member: BoolArray) -> Estimate:
    """P(emit | the realized world is a member) − P(emit | it is not), with its standard error."""
    member, other = emitted[realized_member], emitted[~realized_member]
    variance = sum(side.mean() * (1.0 - side.mean()) / side.size for side in (member, other))
    return Estimate(float(member.mean() - other.mean()), math.sqrt(variance))


def even_split_advantage(per_token: float) -> float:
    """The advantage of one token when exactly half of the belief votes the payload: 2Φ(√(2b)) − 1."""
    return float(2.0 * ndtr(math.sqrt(2.0 * per_token)) - 1.0) if math.isfinite(per_token) else 1.0


def choose_forced(engine: Engine, planted: Sequence[Planted], count: int) -> list[Planted]:
    """C-COMMON canaries whose payload is in the support; first those whose other worlds agree most under greedy."""
    found = []
    for order, one in enumerate(planted):
        at = trigger_votes(engine, one.canary, 1, 0.0, 0)
        if one.canary.kind == "C-COMMON" and one.canary.payload_ids[0] in at.support:
            found.append((len(np.unique(at.votes[0, ~one.is_member])), order, one))
    return [one for _, _, one in sorted(found, key=lambda entry: entry[:2])[:count]]


def gap(values: FloatArray, is_member: BoolArray) -> Estimate:
    """Mean over member worlds minus mean over the others, with its standard error; worlds are the samples."""
    member, other = values[is_member], values[~is_member]
    if min(member.size, other.size) < 2:
        return Estimate(float(member.mean() - other.mean()), math.nan)
    variance = member.var(ddof=1) / member.size + other.var(ddof=1) / other.size
    return Estimate(float(member.mean() - other.mean()), math.sqrt(float(variance)))


BUDGETS = (math.inf, 2.0**-4, 2.0**-8, 2.0**-16)
OTHERS = {"agree": True, "own": False}  # worlds without the canary vote as most of them do (an even split), or freely


@dataclass(frozen=True, slots=True)
class CanariesScale:
    trials: int  # single-token releases per canary, decoder and budget
    trials_outside: int  # the same for each C-OOD canary, which can never be emitted
    draws: int  # coin draws for the vote share at a trigger
    forced: int = 2  # canaries with forced memorization
    imagined: int = 16  # canaries made up where the workspace has none


def run(lab: Lab, scale: CanariesScale) -> Findings:
    """Organic where there are canaries; forced in any case."""
    notes, rows = [], []
    engine = lab.engine()
    planted = planted_canaries(lab)
    if planted:
        rows += [_organic(lab, engine, one, scale.draws) for one in planted]
    else:
        planted = imagined_canaries(lab, scale.imagined)
        notes.append(
            "The workspace has no canaries, so organic memorization was not measured (`paclm init --canaries 16` adds "
            f"some). Forced memorization used {len(planted)} invented triggers and members drawn at random."
        )
    forced = choose_forced(engine, planted, scale.forced)
    if len(forced) < scale.forced:
        notes.append(
            f"Only {len(forced)} C-COMMON canaries have a payload inside the support at their trigger; the others "
            "cannot be voted for, forced or not."
        )
    outside = [one for one in planted if one.canary.kind == "C-OOD"]
    advance = lab.start_task("forced canaries", 2 * (len(forced) * len(OTHERS) + len(outside)) * len(BUDGETS))
    for decoding in (GREEDY, GUMBEL):
        for one in forced:
            at = _votes_at(lab, engine, one, decoding, scale.trials)
            for others in OTHERS:
                for per_token in BUDGETS:
                    rows.append(_forced(lab, one, at, decoding, others, per_token))
                    advance(1)
        for one in outside:
            at = _votes_at(lab, engine, one, decoding, scale.trials_outside)
            rows += [_out_of_support(lab, one, at, decoding, per_token) for per_token in BUDGETS]
            advance(len(BUDGETS))
    return Findings(rows, notes)


def _votes_at(lab: Lab, engine: Engine, one: Planted, decoding: Decoding, draws: int) -> TriggerVotes:
    seed = lab.seed_for("canaries", "coins", one.canary.id)
    return trigger_votes(engine, one.canary, draws, decoding.temperature, seed)


def _organic(lab: Lab, engine: Engine, one: Planted, draws: int) -> Row:
    canary, is_member = one
    tokens = [*canary.trigger_ids, *canary.payload_ids]
    scores = score_targets(engine, tokens, first=len(canary.trigger_ids))  # (W, payload)
    first, rank = scores.log_probability[:-1, 0], 1.0 + scores.rank[:-1, 0].astype(np.float64)  # (m,)
    row: Row = {
        "part": "organic",
        "canary": canary.id,
        "kind": canary.kind,
        "repetitions": canary.repetitions,
        "log_probability_member": float(first[is_member].mean()),
        "log_probability_other": float(first[~is_member].mean()),
    }
    row["gap_nats"], row["gap_stderr"] = gap(first, is_member)
    whole = scores.log_probability[:-1].mean(axis=1)
    row["payload_gap_nats"], row["payload_gap_stderr"] = gap(whole, is_member)
    row["rank_member"], row["rank_other"] = float(rank[is_member].mean()), float(rank[~is_member].mean())
    row["rank_difference"], row["rank_stderr"] = gap(rank, is_member)
    for decoding in (GREEDY, GUMBEL):
        at = _votes_at(lab, engine, one, decoding, draws if decoding.temperature else 1)
        is_payload = at.votes == canary.payload_ids[0]  # (n, m)
        row["in_support"] = bool(canary.payload_ids[0] in at.support)
        row[f"vote_share_member_{decoding.name}"] = float(is_payload[:, is_member].mean())
        row[f"vote_share_other_{decoding.name}"] = float(is_payload[:, ~is_member].mean())
    return row


def _emit(lab: Lab, one: Planted, votes: IntArray, per_token: float, *names: str) -> tuple[BoolArray, BoolArray]:
    """One token per row of votes: whether it is the payload, and whether the realized world holds the canary."""
    seed = lab.seed_for("canaries", "noise", one.canary.id, *names, format_budget(per_token))
    sessions = ResearchSessions.seeded(votes.shape[1], rule_named("gaussian"), per_token, seed, len(votes))
    emitted: BoolArray = sessions.release(votes).tokens == one.canary.payload_ids[0]
    return emitted, one.is_member[sessions.secrets]


def _key(part: str, one: Planted, decoding: Decoding, per_token: float, trials: int) -> Row:
    row: Row = {"part": part, "canary": one.canary.id, "decoder": decoding.name, "trials": trials}
    return row | {"per_token_nats": per_token, "budget": format_budget(per_token)}


def _forced(lab: Lab, one: Planted, at: TriggerVotes, decoding: Decoding, others: str, per_token: float) -> Row:
    votes = force_votes(at.votes, one.is_member, one.canary.payload_ids[0], others_agree=OTHERS[others])
    emitted, realized = _emit(lab, one, votes, per_token, decoding.name, others)
    row = {**_key("forced", one, decoding, per_token, len(votes)), "others": others}
    row["advantage"], row["advantage_stderr"] = advantage(emitted, realized)
    return row | {
        "advantage_even_split": even_split_advantage(per_token),
        "advantage_bound": 2.0 * success_bound(per_token, 0.5) - 1.0,
        "emitted_member": float(emitted[realized].mean()),
        "emitted_other": float(emitted[~realized].mean()),
        "emitted_stderr": 0.5 / math.sqrt(min(realized.sum(), (~realized).sum())),
        "two_votes": float(np.mean([len(set(row.tolist())) == 2 for row in votes])),
    }


def _out_of_support(lab: Lab, one: Planted, at: TriggerVotes, decoding: Decoding, per_token: float) -> Row:
    """Forced too, where possible: a vote lies in the support, so a payload outside it cannot be voted for."""
    payload = one.canary.payload_ids[0]
    in_support = bool(payload in at.support)
    votes = force_votes(at.votes, one.is_member, payload, others_agree=False) if in_support else at.votes
    emitted, _ = _emit(lab, one, votes, per_token, decoding.name)
    row = _key("out-of-support", one, decoding, per_token, len(votes))
    return row | {"in_support": in_support, "emitted": int(emitted.sum())}


def verdicts(result: Result) -> list[str]:
    """Whether forced canaries have the advantage of theory, and whether a payload outside the support was emitted."""
    lines = []
    even = [row for row in result.select(part="forced", others="agree") if row["budget"] != "inf"]
    if even:
        squares = sum(((r["advantage"] - r["advantage_even_split"]) / r["advantage_stderr"]) ** 2 for r in even)
        p = float(chdtrc(len(even), squares))
        alarm = "" if p > FALSE_ALARMS else "ALARM: "
        lines.append(
            f"{alarm}advantage of forced canaries against 2Φ(√(2b)) − 1: p = {p:.2g} over {len(even)} cells (alarm "
            f"below {FALSE_ALARMS:g})"
        )
    outside = result.select(part="out-of-support", in_support=False)
    emitted, trials = (sum(row[name] for row in outside) for name in ("emitted", "trials"))
    alarm = "ALARM: " if emitted else ""
    return [*lines, f"{alarm}payloads outside the support that were emitted: {emitted} in {trials:,} trials"]


FORCED: Row = {"part": "forced", "others": "agree", "budget": "2^-16"}
REGIME = Regime(
    name="canaries",
    title="Canaries",
    question="Do worlds memorize planted records, and how much would memorization leak?",
    presets={"quick": CanariesScale(2000, 100, 256), "paper": CanariesScale(2000, 2000, 2000)},
    run=run,
    headlines=(
        headline("gap of {kind} after {repetitions} visits", "gap_nats ± gap_stderr", "+.2f", largest="repetitions"),
        headline("advantage of one token, {decoder}", "advantage ±", ".3f", **FORCED),
        headline("payload emitted by members, {decoder}", "emitted_member ± emitted_stderr", ".0%", **FORCED),
    ),
    verdicts=verdicts,
)
