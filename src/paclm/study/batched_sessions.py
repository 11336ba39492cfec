"""Many research sessions at a time, with a vectorised Gaussian release where only two distinct votes were cast.

Speed only: every session equals a `ResearchSession` with its noise bit for bit (the same calibration, the same draws,
the same sums in the same order), and a test compares the two. Three dissenting tokens in four have two distinct votes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paclm.curator.research import STAMP
from paclm.errors import InvalidInput
from paclm.privacy import gaussian
from paclm.privacy.accounting import check_per_token
from paclm.privacy.belief import (
    IN_ONE_SUM,
    SAFE_MASS,
    BoolArray,
    FloatArray,
    IntArray,
    check_num_worlds,
    normalise,
    uniform_belief,
)
from paclm.privacy.calibration import helmert, pair_variance
from paclm.privacy.randomness import NoiseSource, ResearchNoise, WordArray, normals_of
from paclm.privacy.releases import Rule, unreadable_secret

_AHEAD = 64  # random words fetched at a time per session


class BatchRelease(NamedTuple):
    """One release in each of n sessions."""

    tokens: IntArray  # (n,)
    is_dissent: BoolArray  # (n,)
    information: FloatArray  # (n,) the most nats each token can leak
    noise_scales: FloatArray  # (n,) σ, 0 where no noise was drawn


class ResearchSessions:
    """Independent sessions with one secret, one belief and one source of noise each."""

    stamp = STAMP

    def __init__(self, num_worlds: int, rule: Rule, per_token: float, noises: Sequence[ResearchNoise]) -> None:
        if not noises:
            raise InvalidInput("A batch of sessions needs at least one source of research noise.")
        self._rule = rule
        self._per_token = check_per_token(per_token)
        self._noise = _NoiseBank(noises)
        # Beyond IN_ONE_SUM worlds the plain release adds masses up in another order.
        self._can_vectorise = rule.release is gaussian.release and per_token < math.inf and num_worlds <= IN_ONE_SUM
        draws = [_Share(self._noise, row) for row in range(len(noises))]
        self.secrets: IntArray = np.array([draw.below(check_num_worlds(num_worlds)) for draw in draws])
        self.beliefs: FloatArray = np.tile(uniform_belief(num_worlds), (len(noises), 1))
        """(n, m) log probabilities"""

    @classmethod
    def seeded(cls, num_worlds: int, rule: Rule, per_token: float, seed: int, num_sessions: int) -> ResearchSessions:
        """Sessions with independent secrets and noise, all from one seed."""
        children = np.random.SeedSequence(seed).spawn(num_sessions)
        return cls(num_worlds, rule, per_token, [ResearchNoise(child) for child in children])

    def __len__(self) -> int:
        return len(self.secrets)

    def release(self, votes: IntArray, sessions: IntArray | None = None) -> BatchRelease:
        """Release one token in each of the given sessions (default all) on its row of votes (n, m)."""
        sessions = np.arange(len(self)) if sessions is None else sessions
        expected = (sessions.size, self.beliefs.shape[1])
        if votes.shape != expected or not np.issubdtype(votes.dtype, np.integer):
            raise InvalidInput(f"Votes must be integers {expected}, not {votes.dtype} {votes.shape}.")
        low, high = votes.min(axis=1), votes.max(axis=1)  # (n,)
        done = BatchRelease(low.astype(np.int64), low != high, np.zeros(low.size), np.zeros(low.size))
        one_by_one = done.is_dissent
        if self._can_vectorise:
            is_pair = one_by_one & ((votes == low[:, None]) | (votes == high[:, None])).all(axis=1)
            rows = np.flatnonzero(is_pair)
            at = sessions[rows]
            normals = normals_of(self._noise.take_one(at))
            done.tokens[rows], self.beliefs[at], done.noise_scales[rows] = release_pairs(
                votes[rows], self.beliefs[at], self.secrets[at], self._per_token, normals
            )
            done.information[rows] = self._per_token
            one_by_one = one_by_one & ~is_pair
        for row in np.flatnonzero(one_by_one).tolist():
            session = int(sessions[row])
            secret = int(self.secrets[session]) if self._rule.reads_secret else unreadable_secret(self._rule.name)
            noise = _Share(self._noise, session)
            released = self._rule.release(votes[row], self.beliefs[session], secret, self._per_token, noise)
            done.tokens[row], self.beliefs[session] = released.token, released.belief
            done.information[row], done.noise_scales[row] = released.information, released.noise_scale
        return done


def release_pairs(
    votes: IntArray, beliefs: FloatArray, secrets: IntArray, per_token: float, normals: FloatArray
) -> tuple[IntArray, FloatArray, FloatArray]:
    """`gaussian.release` in n sessions whose votes have exactly two values: tokens, beliefs and noise scales.

    Votes and beliefs are (n, m), secrets and N(0, 1) draws (n,).
    """
    n = len(votes)
    rows = np.arange(n)
    low, high = votes.min(axis=1), votes.max(axis=1)  # (n,)
    choice = (votes == high[:, None]).astype(np.int64)  # (n, m)
    bins = (choice + 2 * rows[:, None]).ravel()
    mass: FloatArray = np.bincount(bins, np.exp(beliefs).ravel(), 2 * n).astype(np.float64, copy=False).reshape(n, 2)
    variance = pair_variance(mass[:, 0], mass[:, 1], per_token)  # (n,)
    axis = helmert(2)[:, 0]  # (2,)
    R = axis[choice[rows, secrets]] + np.sqrt(variance) * normals  # (n,)
    tokens = np.where(R >= 0.0, low, high)  # argmax of (R, −R)/√2, ties to the smaller token
    log_likelihood = (R[:, None] - axis) ** 2 * (-0.5 / variance)[:, None]  # (n, 2)
    top = log_likelihood.max(axis=1, keepdims=True)
    # Python's exp and log, as in `update_belief`: numpy's differ in the last bit.
    weights = np.array([math.exp(x) for x in (log_likelihood - top).ravel().tolist()]).reshape(n, 2)
    evidence = (mass * weights).sum(axis=1)  # (n,)
    is_safe = evidence > SAFE_MASS
    log_evidence = np.array([math.log(x) for x in np.where(is_safe, evidence, 1.0).tolist()])
    after = beliefs + np.take_along_axis(log_likelihood - (top + log_evidence[:, None]), choice, axis=1)
    for row in np.flatnonzero(~is_safe):
        after[row] = normalise(beliefs[row] + log_likelihood[row][choice[row]])
    return tokens, after, np.sqrt(variance)


class _NoiseBank:
    """Random words of many sources, fetched ahead and handed out in each source's own order."""

    def __init__(self, noises: Sequence[ResearchNoise]) -> None:
        self._noises = noises
        self._words: WordArray = np.stack([noise.words(_AHEAD) for noise in noises])  # (n, ahead)
        self._next = np.zeros(len(noises), dtype=np.int64)

    def take_one(self, sources: IntArray) -> WordArray:
        """One word from each of the given sources."""
        for source in sources[self._next[sources] == _AHEAD].tolist():
            self._refill(source)
        words: WordArray = self._words[sources, self._next[sources]]
        self._next[sources] += 1
        return words

    def take(self, source: int, size: int) -> WordArray:
        """Several words from one source."""
        parts: list[WordArray] = []
        while size:
            if self._next[source] == _AHEAD:
                self._refill(source)
            start = int(self._next[source])
            part = self._words[source, start : start + size].copy()
            self._next[source] += part.size
            size -= part.size
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _refill(self, source: int) -> None:
        self._words[source] = self._noises[source].words(_AHEAD)
        self._next[source] = 0


class _Share(NoiseSource):
    """One session's part of the bank."""

    __slots__ = ("_bank", "_source")

    def __init__(self, bank: _NoiseBank, source: int) -> None:
        self._bank, self._source = bank, source

    def words(self, size: int) -> WordArray:
        """Uniform 64-bit integers from this session's source."""
        return self._bank.take(self._source, size)
