"""How well PMixED does at fixed operating points along a text of any length, block by block.

`expected_truth` is exact at every position: given |R| = n the sample of shard models is uniform. What is not linear in
the sample (a cut to the public support, perplexity) is played, with a fresh sample of shard models at every position.
Nothing depends on where a block ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paclm.privacy.belief import FloatArray, IntArray
from paclm.study.baselines.pmixed import PMixedSettings
from paclm.study.baselines.search import Digest, likely_sizes

BLOCK = 1024
"""Positions of a block: with 128 shard models 51 MB for every order that is played, as float32."""


class PMixedPass(NamedTuple):
    """One pass over the text with fresh samples of shard models."""

    truth: FloatArray  # (n,) probability that the released token is the true one
    inside: FloatArray  # (n,) the same when the release is restricted to the public support
    members: FloatArray  # (n,) shard models that took part
    weight: FloatArray  # (n,) λ of those together

    @property
    def empty(self) -> float:
        """Share of positions without any shard model."""
        return float((self.members == 0).mean())

    @property
    def mean_weight(self) -> float:
        """λ over the shard models that took part; NaN if none did."""
        taken = self.members.sum()
        return float(self.weight.sum() / taken) if taken else float("nan")


@torch.inference_mode()
def expected_truth(digest: Digest, settings: PMixedSettings) -> FloatArray:
    """(n,) probability that the released token is the true one, averaged exactly over samples of shard models."""
    sizes, chance = likely_sizes(digest.num_shards, settings.rate)
    if settings.ball == "strict":  # one radius for all sizes
        weights = digest.strict_weights(float(settings.radii[-1]))
        gain = chance.sum() * (weights * digest.excess).mean(1)
    else:
        gains = digest.table(settings.order).gains(settings.radii[sizes], digest.excess)
        gain = gains @ torch.from_numpy(chance).to(gains.device)
    return _on_host(digest.truth_public + gain)


@torch.inference_mode()
def play(digest: Digest, settings: PMixedSettings, rng: np.random.Generator) -> PMixedPass:
    """One pass: every position has its own sample of shard models."""
    shape = (digest.num_positions, digest.num_shards)
    drawn = np.ones(shape, dtype=np.bool_) if settings.rate == 1.0 else rng.random(shape) < settings.rate
    chosen = torch.from_numpy(drawn).to(digest.truth_shards.device)  # (n, N)
    members = chosen.sum(1)
    weights = torch.zeros(shape, dtype=torch.float64, device=chosen.device)
    if settings.ball == "strict":
        weights = torch.where(chosen, digest.strict_weights(float(settings.radii[-1])), weights)
    else:
        at = torch.nonzero(chosen, as_tuple=True)
        radii = torch.tensor(settings.radii, device=chosen.device)[members[at[0]]]
        weights[at] = digest.table(settings.order).weight(radii, at)

    def release(public: Tensor, shards: Tensor) -> Tensor:
        return public + (weights * (shards - public.unsqueeze(1))).sum(1) / members.clamp_min(1)

    truth = release(digest.truth_public, digest.truth_shards)
    inside = digest.inside(truth, release(digest.mass_public, digest.mass_shards))
    return PMixedPass(*map(_on_host, (truth, inside, members.double(), weights.sum(1))))


class TextFigures(NamedTuple):
    """The true token without PMixED."""

    public: FloatArray  # (n,)
    public_inside: FloatArray  # (n,) in the public support
    ceiling: FloatArray  # (n,) under the average of the shard models
    ceiling_inside: FloatArray  # (n,)
    passage: IntArray  # (n,)


@dataclass(frozen=True, slots=True)
class PMixedFigures:
    """One operating point on a text."""

    settings: PMixedSettings
    expected: FloatArray  # (n,)
    passes: list[PMixedPass]


class PMixedPlayer:
    """Plays fixed operating points along a text; every generator is one pass of its point."""

    def __init__(self, points: Sequence[tuple[PMixedSettings, Sequence[np.random.Generator]]]) -> None:
        self._points = list(points)
        self._text: list[TextFigures] = []
        self._expected: list[list[FloatArray]] = [[] for _ in self._points]
        self._passes: list[list[list[PMixedPass]]] = [[[] for _ in rngs] for _, rngs in self._points]

    @property
    def orders(self) -> list[int]:
        """Those that a digest needs a table of."""
        return sorted({settings.order for settings, _ in self._points if settings.ball != "strict"})

    def see(self, block: Digest) -> None:
        """Play the positions of a block."""
        columns = block.truth_public, block.public_inside(), block.ceiling(), block.ceiling_inside()
        public, public_inside, ceiling, ceiling_inside = map(_on_host, columns)
        self._text.append(TextFigures(public, public_inside, ceiling, ceiling_inside, block.passage))
        for i, (settings, rngs) in enumerate(self._points):
            self._expected[i].append(expected_truth(block, settings))
            for rng, passes in zip(rngs, self._passes[i], strict=True):
                passes.append(play(block, settings, rng))

    def text(self) -> TextFigures:
        """The whole text without PMixED."""
        return TextFigures(*map(np.concatenate, zip(*self._text, strict=True)))

    def figures(self) -> list[PMixedFigures]:
        """One for every operating point, in their order."""
        return [
            PMixedFigures(settings, np.concatenate(expected), [_join(parts) for parts in passes])
            for (settings, _), expected, passes in zip(self._points, self._expected, self._passes, strict=True)
        ]


def _join(parts: Sequence[PMixedPass]) -> PMixedPass:
    return PMixedPass(*map(np.concatenate, zip(*parts, strict=True)))


def _on_host(values: Tensor) -> FloatArray:
    found: FloatArray = values.cpu().numpy()
    return found
