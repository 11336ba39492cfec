"""Canaries under study: the planted ones, votes at their triggers, and votes with memorization forced in.

Weights are never touched: forcing replaces votes, after all worlds have cast theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import ndtr
from scipy.stats import mode

from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.leak import Estimate
from paclm.privacy.randomness import Coins
from paclm.study.lab import Lab
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
        votes = coupled_votes(logits, support, None)
        return TriggerVotes(support[0].cpu().numpy(), votes[:, :-1].cpu().numpy().repeat(draws, axis=0))
    coins = Coins(seed)
    cast = []
    for start in range(0, draws, _DRAWS_AT_ONCE):
        n = min(_DRAWS_AT_ONCE, draws - start)
        drawn = torch.from_numpy(np.stack([coins.gumbel(support.shape[1]) for _ in range(n)])).float()
        votes = coupled_votes(logits.expand(n, -1, -1), support.expand(n, -1), drawn.to(logits.device), temperature)
        cast.append(votes[:, :-1].cpu().numpy())
    return TriggerVotes(support[0].cpu().numpy(), np.concatenate(cast))


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
