"""Research mode: seeded sessions in memory, for studies. NOT PRIVATE: the secret follows from the seed.

A rule that says it never reads the secret is given one that cannot be read, at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.accounting import check_per_token
from paclm.privacy.belief import IN_ONE_SUM, BoolArray, FloatArray, IntArray, Release, check_num_worlds, uniform_belief
from paclm.privacy.pairs import has_two_votes, release_pairs
from paclm.privacy.randomness import NoiseSource, ResearchNoise, WordArray, normals_of
from paclm.privacy.releases import Rule, unreadable_secret

STAMP = "NOT PRIVATE: research mode, secret and noise follow from a seed"

_AHEAD = 64
"""Random words fetched at once per session."""


class ResearchSession:
    """One stream of releases against one secret drawn at the start, from a uniform belief."""

    __slots__ = ("_instead", "_noise", "_per_token", "_release", "belief", "secret")

    stamp = STAMP

    def __init__(self, num_worlds: int, rule: Rule, per_token: float, noise: ResearchNoise) -> None:
        self._release = rule.release
        self._per_token = check_per_token(per_token)
        self._noise = noise
        self.secret = noise.below(check_num_worlds(num_worlds))
        self._instead = None if rule.reads_secret else unreadable_secret(rule.name)
        self.belief: FloatArray = uniform_belief(num_worlds)

    def release(self, votes: IntArray) -> Release:
        """Release one token on the votes of all worlds (m,), and carry the belief on."""
        shown = self.secret if self._instead is None else self._instead
        step = self._release(votes, self.belief, shown, self._per_token, self._noise)
        self.belief = step.belief
        return step


class Steps(NamedTuple):
    """One release in every session."""

    tokens: IntArray  # (n,)
    is_dissent: BoolArray  # (n,)
    information: FloatArray  # (n,) nats each step can have told
    noise_scales: FloatArray  # (n,) σ, 0 where no noise was drawn


class ResearchSessions:
    """Many independent sessions side by side, each the same bit for bit as a `ResearchSession` with its noise."""

    stamp = STAMP

    def __init__(self, num_worlds: int, rule: Rule, per_token: float, noises: Sequence[ResearchNoise]) -> None:
        if not noises:
            raise InvalidInput("Sessions side by side need at least one source of research noise.")
        self._rule = rule
        self._instead = None if rule.reads_secret else unreadable_secret(rule.name)
        self._per_token = check_per_token(per_token)
        self._noise = _NoiseBank(noises)
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

    def release(self, votes: IntArray) -> Steps:
        """Release one token in every session on its own row of votes (n, m), and carry the beliefs on."""
        if votes.shape != self.beliefs.shape or not np.issubdtype(votes.dtype, np.integer):
            raise InvalidInput(f"Votes must be integers {self.beliefs.shape}, not {votes.dtype} {votes.shape}.")
        tokens = votes[:, 0].astype(np.int64)  # right wherever the worlds agree
        is_dissent: BoolArray = (votes != votes[:, :1]).any(axis=1)
        information, scales = np.zeros(len(self)), np.zeros(len(self))
        steps = Steps(tokens, is_dissent, information, scales)
        disputed = np.flatnonzero(is_dissent)
        in_bulk = np.zeros(0, dtype=np.int64)
        can_bulk = votes.shape[1] <= IN_ONE_SUM  # beyond, masses are added up in another order
        if self._rule.name == "gaussian" and self._per_token < np.inf and disputed.size and can_bulk:
            is_pair = has_two_votes(votes[disputed])
            in_bulk, disputed = disputed[is_pair], disputed[~is_pair]
            self._release_pairs(votes, in_bulk, steps)
        for row in disputed.tolist():
            shown = int(self.secrets[row]) if self._instead is None else self._instead
            noise = _Share(self._noise, row)
            step = self._rule.release(votes[row], self.beliefs[row], shown, self._per_token, noise)
            tokens[row], self.beliefs[row] = step.token, step.belief
            information[row], scales[row] = step.information, step.noise_scale
        return steps

    def _release_pairs(self, votes: IntArray, rows: IntArray, steps: Steps) -> None:
        normals = normals_of(self._noise.take_one(rows))
        done = release_pairs(votes[rows], self.beliefs[rows], self.secrets[rows], self._per_token, normals)
        steps.tokens[rows], self.beliefs[rows] = done.tokens, done.beliefs
        steps.information[rows], steps.noise_scales[rows] = self._per_token, done.noise_scales


class _NoiseBank:
    """Random words of many sources, fetched ahead and handed out in each source's own order."""

    def __init__(self, noises: Sequence[ResearchNoise]) -> None:
        self._noises = noises
        self._words: WordArray = np.stack([noise.words(_AHEAD) for noise in noises])  # (n, ahead)
        self._next = np.zeros(len(noises), dtype=np.int64)

    def take_one(self, rows: IntArray) -> WordArray:
        """One word from each of the given sources."""
        for row in rows[self._next[rows] == _AHEAD].tolist():
            self._refill(row)
        words: WordArray = self._words[rows, self._next[rows]]
        self._next[rows] += 1
        return words

    def take(self, row: int, size: int) -> WordArray:
        """Several words from one source."""
        parts: list[WordArray] = []
        while size:
            if self._next[row] == _AHEAD:
                self._refill(row)
            start = int(self._next[row])
            part = self._words[row, start : start + size].copy()
            self._next[row] += part.size
            size -= part.size
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _refill(self, row: int) -> None:
        self._words[row] = self._noises[row].words(_AHEAD)
        self._next[row] = 0


class _Share(NoiseSource):
    """One session's part of the bank."""

    __slots__ = ("_bank", "_row")

    def __init__(self, bank: _NoiseBank, row: int) -> None:
        self._bank, self._row = bank, row

    def words(self, size: int) -> WordArray:
        """Uniform 64-bit integers from this session's source."""
        return self._bank.take(self._row, size)
