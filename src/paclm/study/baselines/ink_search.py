"""Which τ, score and support InvisibleInk should take at an operating point, and how well it then does.

The budget fixes C/τ for every number of shards, so what is searched is τ (with C in proportion), what is clipped, and
k. The search reads *public* text only: the expected gain is tabulated there over C and τ, and interpolated in C. It
does ask the shard models, whose training saw the records: like PMixED's search, it is outside of the account, and only
settings found with models of public records would be inside. Without public text nothing is searched.

Accuracy is exact up to float32: the probability of the true token, not draws. Lower temperatures raise it for any
model, the public one too. A setting is therefore judged by its gain over the public model at its own temperature and
support, and is compared with the same setting without privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray
from paclm.study.baselines.distributions import Distributions
from paclm.study.baselines.invisible_ink import (
    ADJACENCIES,
    SCORES,
    Adjacency,
    InkSettings,
    Score,
    clip_ratio_for,
    differences,
    guarantee,
    kth_largest,
    log_release,
    moved_scores,
    support,
)

CLIPS: FloatArray = np.geomspace(1e-4, 20.0, 40)
TEMPERATURES = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5)
TOP_KS: tuple[int | None, ...] = (None, 200)


class InkTarget(NamedTuple):
    """The guarantee to reach: T queries within (ε, δ), for one kind of neighbours."""

    queries: int
    epsilon: float
    delta: float
    adjacency: Adjacency

    def settings(self, num_shards: int, temperature: float, score: Score, top_k: int | None) -> InkSettings:
        """The operating point at this temperature that spends all of it."""
        ratio = clip_ratio_for(self.epsilon, self.delta, self.queries, num_shards, self.adjacency)
        return InkSettings(
            num_shards=num_shards,
            clip=ratio * temperature,
            temperature=temperature,
            adjacency=self.adjacency,
            score=score,
            top_k=top_k,
        )

    @property
    def guarantee(self) -> str:
        """What is promised, in words."""
        return guarantee(self.adjacency, self.epsilon, self.delta, self.queries)


def targets_of(epsilons: Iterable[float], horizons: Sequence[int], delta: float) -> list[InkTarget]:
    """Every combination, under both kinds of neighbours."""
    return [InkTarget(t, e, delta, adjacency) for e in epsilons for t in horizons for adjacency in ADJACENCIES]


class InkChoice(NamedTuple):
    """An operating point of one ensemble for one target."""

    target: InkTarget
    settings: InkSettings
    gain: float | None  # expected on the public text, over the public model alike; None: nothing was searched


def unsearched(targets: Sequence[InkTarget], num_shards: int) -> list[InkChoice]:
    """τ = 1 over the whole vocabulary, with log probabilities clipped: fixed before any text is read."""
    settings = (target.settings(num_shards, 1.0, "log probabilities", None) for target in targets)
    return [InkChoice(target, own, None) for target, own in zip(targets, settings, strict=True)]


class InkTable:
    """The mean gain on a text for every score, k, temperature and clip of a grid."""

    def __init__(
        self,
        num_shards: int,
        temperatures: Sequence[float] = TEMPERATURES,
        top_ks: Sequence[int | None] = TOP_KS,
        clips: FloatArray = CLIPS,
    ) -> None:
        self.num_shards = num_shards
        self.temperatures, self.top_ks, self.clips = tuple(temperatures), tuple(top_ks), clips
        self.num_positions = 0
        self._total = np.zeros((len(SCORES), len(self.top_ks), len(self.temperatures), len(clips)))

    @torch.inference_mode()
    def see(self, part: Distributions) -> None:
        """Add the positions of a part."""
        self.num_positions += part.num_positions
        total = torch.zeros(self._total.shape, dtype=torch.float64, device=part.log_public.device)
        play = _Public(part)
        for s, score in enumerate(SCORES):
            moves = differences(part, score, torch.float32)
            for c, clip in enumerate(self.clips.tolist()):
                moved = moved_scores(part.log_public, moves, clip)
                for k, top_k in enumerate(self.top_ks):
                    one = InkSettings(num_shards=self.num_shards, clip=clip, top_k=top_k)
                    for t, temperature in enumerate(self.temperatures):
                        at = replace(one, temperature=temperature)
                        total[s, k, t, c] = (play.truth(moved, at) - play.public(at)).sum()
        self._total += total.cpu().numpy()

    def choose(self, targets: Sequence[InkTarget]) -> list[InkChoice]:
        """The setting of largest expected gain for each target, in their order."""
        if self.num_positions == 0:
            raise InvalidInput("There is no position to search on: the public text is empty.")
        gains = self._total / self.num_positions
        return [self._best(target, gains) for target in targets]

    def _best(self, target: InkTarget, gains: FloatArray) -> InkChoice:
        found = [
            InkChoice(target, own, _gain_at(own.clip, self.clips, gains[s, k, t]))
            for s, score in enumerate(SCORES)
            for k, top_k in enumerate(self.top_ks)
            for t, temperature in enumerate(self.temperatures)
            for own in [target.settings(self.num_shards, temperature, score, top_k)]
        ]
        return max(found, key=lambda choice: choice.gain if choice.gain is not None else -math.inf)


def _gain_at(clip: float, clips: FloatArray, gains: FloatArray) -> float:
    """Interpolated in ln C; below the grid in proportion to C, above it constant."""
    if clip < clips[0]:
        return float(gains[0] * clip / clips[0])
    return float(np.interp(math.log(clip), np.log(clips), gains))


class InkFigures(NamedTuple):
    """The true token under one setting, exactly."""

    truth: FloatArray  # (n,) its probability
    public: FloatArray  # (n,) under the public model at the same temperature and support
    ceiling: FloatArray  # (n,) under the average of the shard models' logits without clipping, alike
    passage: IntArray  # (n,)

    def first(self, count: int) -> InkFigures:
        """Those of the first positions."""
        return InkFigures(self.truth[:count], self.public[:count], self.ceiling[:count], self.passage[:count])


def clips_for(targets: Iterable[InkTarget], num_shards: int, temperatures: Sequence[float]) -> FloatArray:
    """The part of the grid of clips between whose ends these targets lie."""
    needed = [
        target.settings(num_shards, temperature, SCORES[0], None).clip
        for target in targets
        for temperature in temperatures
    ]
    first, last = np.searchsorted(CLIPS, [min(needed), max(needed)])
    return CLIPS[max(0, first - 1) : last + 1]


class InkPlayer:
    """Plays fixed settings of one ensemble along a text, part by part."""

    def __init__(self, settings: Sequence[InkSettings]) -> None:
        self.settings = tuple(settings)
        self._kept: list[FloatArray] = []  # (settings, 3, c) each
        self._passages: list[IntArray] = []

    @property
    def num_positions(self) -> int:
        """How many it has seen."""
        return sum(map(len, self._passages))

    @torch.inference_mode()
    def see(self, part: Distributions) -> None:
        """Play the positions of a part."""
        found = torch.zeros((len(self.settings), 3, part.num_positions), dtype=torch.float64, device=part.truth.device)
        play = _Public(part)
        for score in SCORES:
            own = [(i, one) for i, one in enumerate(self.settings) if one.score == score]
            if not own:
                continue
            moves = differences(part, score, torch.float32)
            whole = part.log_public + moves.mean(1)
            for i, one in own:
                found[i, 0] = play.truth(moved_scores(part.log_public, moves, one.clip), one)
                found[i, 1], found[i, 2] = play.public(one), play.truth(whole, one)
        self._kept.append(found.cpu().numpy())
        self._passages.append(part.passage)

    def figures(self) -> list[InkFigures]:
        """One for every setting, in their order."""
        passage = np.concatenate(self._passages)
        return [InkFigures(own[0], own[1], own[2], passage) for own in np.concatenate(self._kept, axis=-1)]


class _Public:
    """What settings share at the positions of a part: the support, and the public model in it."""

    def __init__(self, part: Distributions) -> None:
        self._part = part
        self._kth: dict[int | None, Tensor | None] = {}  # by k
        self._allowed: dict[tuple[int | None, float], Tensor | None] = {}  # the last one, by k and margin
        self._public: dict[tuple[float, int | None, float], Tensor] = {}  # (c,) by τ, k and margin

    def truth(self, scores: Tensor, one: InkSettings) -> Tensor:
        """(c,)"""
        return truth_of(scores, self._support(one), one.temperature, self._part.truth)

    def public(self, one: InkSettings) -> Tensor:
        """(c,)"""
        key = (one.temperature, *self._key(one))
        if key not in self._public:
            self._public[key] = self.truth(self._part.log_public, one)
        return self._public[key]

    def _key(self, one: InkSettings) -> tuple[int | None, float]:
        return one.top_k, 0.0 if one.top_k is None else one.support_margin

    def _support(self, one: InkSettings) -> Tensor | None:
        key = self._key(one)
        if key not in self._allowed:
            if one.top_k not in self._kth:
                self._kth[one.top_k] = kth_largest(self._part.log_public, one.top_k)
            kth = self._kth[one.top_k]
            self._allowed = {key: None if kth is None else support(self._part.log_public, one, kth)}
        return self._allowed[key]


def truth_of(scores: Tensor, allowed: Tensor | None, temperature: float, truth: Tensor) -> Tensor:
    """The probability of the true token (c,) under softmax(φ/τ) on the allowed tokens."""
    return log_release(scores, allowed, temperature).gather(-1, truth.unsqueeze(-1))[:, 0].exp()
