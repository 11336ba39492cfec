"""Streams of releases on recorded votes: the one place where studies without a model play sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paclm.curator.research import ResearchSession
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import Rule
from paclm.study.recorded_votes import RecordedVotes


class RecordedStream(NamedTuple):
    """One run of tokens: where it read, what it released, what the realized world wanted."""

    positions: IntArray  # (t,)
    released: IntArray  # (t,)
    realized: IntArray  # (t,) the realized world's vote
    scales: FloatArray  # (dissenting tokens,) σ of the noise
    information: float  # Σ_t of each step's conditional information
    secrets: IntArray  # (secrets,)
    beliefs: FloatArray  # (moved, m) the belief at the end of a secret's stream, where it can have moved
    moved: IntArray  # (moved,) which of the secrets those are about; every other belief is uniform still


def play_sessions(
    recorded: RecordedVotes, rule: Rule, per_token: float, sessions: int, tokens: int, seed: int
) -> Iterator[RecordedStream]:
    """Consecutive positions from a random start, wrapping round, against one secret each."""
    is_dissent = recorded.is_dissent
    for child in np.random.SeedSequence(seed).spawn(sessions):
        noise = ResearchNoise(child)
        positions = (noise.below(recorded.num_positions) + np.arange(tokens)) % recorded.num_positions
        session = ResearchSession(recorded.num_worlds, rule, per_token, noise)
        released = recorded.votes[positions, 0].copy()  # right wherever the worlds agree
        scales, information = [], 0.0
        for t in np.flatnonzero(is_dissent[positions]):
            step = session.release(recorded.votes[positions[t]])
            released[t] = step.token
            scales.append(step.noise_scale)
            information += step.information
        yield RecordedStream(
            positions,
            released,
            recorded.votes[positions, session.secret],
            np.array(scales),
            information,
            np.array([session.secret]),
            session.belief[None],
            np.zeros(1, dtype=np.int64),
        )


def play_fresh(
    recorded: RecordedVotes, rule: Rule, per_token: float, passes: int, length: int, seed: int
) -> Iterator[RecordedStream]:
    """A fresh secret and a uniform belief at every position: the paper's teacher-forced protocol."""
    positions = np.arange(length)
    dissenting = np.flatnonzero(recorded.is_dissent[:length])
    for child in np.random.SeedSequence(seed).spawn(passes):
        noise = ResearchNoise(child)
        released = recorded.votes[:length, 0].copy()
        realized = released.copy()
        beliefs = np.empty((dissenting.size, recorded.num_worlds))
        secrets = np.zeros(length, dtype=np.int64)  # where worlds agree any secret gives the same figures
        scales, information = [], 0.0
        for row, t in enumerate(dissenting):
            session = ResearchSession(recorded.num_worlds, rule, per_token, noise)
            step = session.release(recorded.votes[t])
            released[t], beliefs[row], secrets[t] = step.token, step.belief, session.secret
            realized[t] = recorded.votes[t, session.secret]
            scales.append(step.noise_scale)
            information += step.information
        yield RecordedStream(positions, released, realized, np.array(scales), information, secrets, beliefs, dissenting)
