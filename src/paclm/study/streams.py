"""Streams of releases on recorded votes, for `paclm replay` and every study that needs no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paclm.curator.research import ResearchSession
from paclm.privacy import gaussian
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import Rule
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.recorded_votes import RecordedVotes

_BATCH = 128  # Sessions in one batch. Their noise is independent, so batches of any size give the same figures.


class RecordedStream(NamedTuple):
    """One run of tokens: the positions read, the tokens released, the votes of the realized world."""

    positions: IntArray  # (t,)
    released: IntArray  # (t,)
    realized: IntArray  # (t,)
    scales: FloatArray  # (dissenting tokens,) σ of the noise
    information: FloatArray  # (secrets,) Σ of the conditional information of each secret's tokens
    secrets: IntArray  # (secrets,)
    beliefs: FloatArray  # (moved, m) final beliefs, of the secrets whose votes dissented
    moved: IntArray  # (moved,) the indices of those secrets; every other belief is still uniform


def play_sessions(
    recorded: RecordedVotes, rule: Rule, per_token: float, sessions: int, tokens: int, seed: int
) -> Iterator[RecordedStream]:
    """Consecutive positions from a random start, wrapping round, against one secret each."""
    children = np.random.SeedSequence(seed).spawn(sessions)
    size = _BATCH if rule.release is gaussian.release else 1  # nothing else is vectorised
    for first in range(0, sessions, size):
        noises = [ResearchNoise(child) for child in children[first : first + size]]
        starts = np.array([noise.below(recorded.num_positions) for noise in noises])
        positions = (starts[:, None] + np.arange(tokens)) % recorded.num_positions  # (n, t)
        yield from _play_batch(recorded, ResearchSessions(recorded.num_worlds, rule, per_token, noises), positions)


def _play_batch(recorded: RecordedVotes, sessions: ResearchSessions, positions: IntArray) -> Iterator[RecordedStream]:
    """Step j releases the j-th dissenting token of every session that has one."""
    dissenting = [np.flatnonzero(row) for row in recorded.is_dissent[positions]]
    released = recorded.votes[positions, 0]  # (n, t), correct where the worlds agree
    scales = [np.zeros(at.size) for at in dissenting]
    information = np.zeros(len(sessions))
    for step in range(max(at.size for at in dissenting)):
        rows = np.array([row for row, at in enumerate(dissenting) if at.size > step])
        columns = np.array([dissenting[row][step] for row in rows])
        done = sessions.release(recorded.votes[positions[rows, columns]], rows)
        released[rows, columns] = done.tokens
        information[rows] += done.information
        for row, scale in zip(rows, done.noise_scales, strict=True):
            scales[row][step] = scale
    for row, secret in enumerate(sessions.secrets):
        yield RecordedStream(
            positions[row],
            released[row],
            recorded.votes[positions[row], secret],
            scales[row],
            information[row : row + 1],
            sessions.secrets[row : row + 1],
            sessions.beliefs[row : row + 1],
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
        secrets = np.zeros(length, dtype=np.int64)  # where worlds agree, any secret gives the same figures
        scales, information = [], np.zeros(length)
        for row, t in enumerate(dissenting):
            session = ResearchSession(recorded.num_worlds, rule, per_token, noise)
            step = session.release(recorded.votes[t])
            released[t], beliefs[row], secrets[t] = step.token, step.belief, session.secret
            realized[t] = recorded.votes[t, session.secret]
            scales.append(step.noise_scale)
            information[t] = step.information
        yield RecordedStream(positions, released, realized, np.array(scales), information, secrets, beliefs, dissenting)
