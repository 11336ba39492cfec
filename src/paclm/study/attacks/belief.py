"""Bayes-optimal attacks that read the curator's own belief: more than any user sees, so an upper envelope."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paclm.privacy.belief import BoolArray, FloatArray, IntArray, membership_probabilities
from paclm.privacy.leak import Estimate, mean_and_stderr
from paclm.privacy.releases import rule_named
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.streams import play_sessions


class AttackResult(NamedTuple):
    """How often each attack was right; errors are over sessions, which are independent."""

    membership: Estimate  # mean over all records of: declared a member when the belief in its worlds exceeds one half
    world: Estimate  # the most likely world is the realized one


def guesses_right(beliefs: FloatArray, secrets: IntArray, membership: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Per session: the share of records guessed right, and whether the world was; a tie counts as a fair guess.

    Beliefs (sessions, m), secrets (sessions,), membership (records, m) → two arrays (sessions,).
    """
    record_hits = np.empty(len(secrets))
    for i, (belief, secret) in enumerate(zip(beliefs, secrets.tolist(), strict=True)):
        probability = membership_probabilities(belief, membership)  # (records,)
        is_tie = np.abs(probability - 0.5) < 1e-12  # a coin flip
        record_hits[i] = np.where(is_tie, 0.5, (probability > 0.5) == membership[:, secret]).mean()
    return record_hits, chance_to_name(beliefs, secrets)


def chance_to_name(scores: FloatArray, secrets: IntArray) -> FloatArray:
    """Whether the world with the best score, (n, m), is the realized one; a tie counts as a guess among the tied."""
    is_top = scores == scores.max(axis=1, keepdims=True)  # (n, m)
    chance: FloatArray = is_top[np.arange(len(secrets)), secrets] / is_top.sum(axis=1)
    return chance


def attack_beliefs(beliefs: FloatArray, secrets: IntArray, membership: BoolArray) -> AttackResult:
    """Guess every record's membership and the world from the final beliefs of independent sessions."""
    records, worlds = guesses_right(beliefs, secrets, membership)
    return AttackResult(mean_and_stderr(records), mean_and_stderr(worlds))


def attack_sessions(
    votes: RecordedVotes,
    membership: BoolArray,
    *,
    release: str,
    per_token: float,
    sessions: int,
    tokens: int,
    seed: int,
) -> AttackResult:
    """Play sessions on recorded votes and attack their final beliefs."""
    streams = list(play_sessions(votes, rule_named(release), per_token, sessions, tokens, seed))
    beliefs = np.concatenate([stream.beliefs for stream in streams])
    return attack_beliefs(beliefs, np.concatenate([stream.secrets for stream in streams]), membership)
