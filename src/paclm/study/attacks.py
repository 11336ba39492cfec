"""Bayes-optimal attacks that read the curator's own belief: more than any user sees, so an upper envelope."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paclm.privacy.arrays import BoolArray
from paclm.privacy.belief import membership_probabilities
from paclm.privacy.leak import Estimate, mean_and_stderr
from paclm.privacy.releases import rule_named
from paclm.study.streams import play_sessions
from paclm.study.votes import RecordedVotes


class AttackResult(NamedTuple):
    """How often each attack was right; the errors are over sessions, which share nothing."""

    membership: Estimate
    """Mean over all records of: declared a member when the belief in its worlds exceeds one half."""
    world: Estimate
    """The most likely world is the realized one."""


def attack_sessions(
    recorded: RecordedVotes,
    membership: BoolArray,
    *,
    release: str,
    per_token: float,
    sessions: int,
    tokens: int,
    seed: int,
) -> AttackResult:
    """Play sessions on recorded votes, then guess every record's membership and the world from the final belief."""
    record_hits, world_hits = [], []
    for stream in play_sessions(recorded, rule_named(release), per_token, sessions, tokens, seed):
        belief, secret = stream.beliefs[0], int(stream.secrets[0])
        probability = membership_probabilities(belief, membership)  # (records,)
        is_member = membership[:, secret]
        is_tie = np.abs(probability - 0.5) < 1e-12  # a coin flip
        right = np.where(is_tie, 0.5, (probability > 0.5) == is_member)
        record_hits.append(float(right.mean()))
        is_top = belief == belief.max()
        world_hits.append(float(is_top[secret] / is_top.sum()))
    return AttackResult(mean_and_stderr(record_hits), mean_and_stderr(world_hits))
