"""What is kept of every position once its distributions are dropped: enough to evaluate any operating point of PMixED.

probability of the true token, mass inside the public support       for accuracy and perplexity
largest and smallest log ratio, one table per order                 for λ
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.study.baselines.distributions import Distributions
from paclm.study.baselines.divergence_table import DivergenceTable, compress, tabulate
from paclm.study.baselines.pmixed import PMixedSettings, strict_weight_within


@dataclass(frozen=True, slots=True)
class Digest:
    """A text under N shard models and the public model."""

    truth_shards: FloatArray  # (n, N) probability of the true token
    truth_public: FloatArray  # (n,)
    mass_shards: FloatArray  # (n, N) probability of the public support
    mass_public: FloatArray  # (n,)
    is_inside: BoolArray  # (n,) the true token is in the support
    largest: FloatArray  # (n, N) ln p/p0
    smallest: FloatArray  # (n, N)
    tables: dict[int, DivergenceTable]  # by order; rows (n, N)
    passage: IntArray  # (n,)

    @property
    def num_shards(self) -> int:
        """N"""
        return int(self.truth_shards.shape[1])

    @property
    def num_positions(self) -> int:
        """n"""
        return int(self.truth_shards.shape[0])

    def ceiling(self) -> FloatArray:
        """(n,) the true token under the plain average of all shard models: the ensemble without any privacy."""
        mean: FloatArray = self.truth_shards.mean(axis=1)
        return mean

    def ceiling_inside(self) -> FloatArray:
        """(n,) the same inside the public support, renormalised."""
        return self.inside(self.ceiling(), self.mass_shards.mean(axis=1))

    def public_inside(self) -> FloatArray:
        """(n,) the true token under the public model inside its support, renormalised."""
        return self.inside(self.truth_public, self.mass_public)

    def inside(self, truth: FloatArray, mass: FloatArray) -> FloatArray:
        """A release restricted to the public support afterwards: 0 for a true token outside, more for one inside."""
        return np.where(self.is_inside, truth / mass, 0.0)

    def weights(self, settings: PMixedSettings, members: int, where: tuple[IntArray, IntArray]) -> FloatArray:
        """λ (c,) of shard models at positions, `where` (c,) and (c,), when this many take part."""
        radius = float(settings.radii[members])
        if settings.ball == "strict":
            return strict_weight_within(self.largest[where], self.smallest[where], radius)
        if settings.order not in self.tables:
            raise InvalidInput(f"No table was made for order {settings.order}; there are {sorted(self.tables)}.")
        return self.tables[settings.order].weight(radius, where)


@torch.inference_mode()
def make_digest(
    parts: Iterable[Distributions], orders: Sequence[int], on_part: Callable[[Distributions], None] = lambda _: None
) -> Digest:
    """Digest a stream of parts; `on_part` is called with every part before it is dropped."""
    kept: dict[str, list[np.ndarray]] = {}
    tables: dict[int, list[np.ndarray]] = {order: [] for order in orders}
    for part in parts:
        for name, values in _columns(part).items():
            kept.setdefault(name, []).append(values)
        for table in tabulate(compress(part.log_shards, part.log_public), orders):
            tables[table.order].append(table.values)
        on_part(part)
    if not kept:
        raise InvalidInput("There is no position to digest: the text is empty.")
    joined = {order: DivergenceTable(order, np.concatenate(values)) for order, values in tables.items()}
    return Digest(tables=joined, **{name: np.concatenate(values) for name, values in kept.items()})


def _columns(part: Distributions) -> dict[str, np.ndarray]:
    shards, support = part.log_shards, part.support
    where = part.truth.reshape(-1, 1)
    wide = (-1, shards.shape[1], -1)
    ratio = shards - part.log_public.unsqueeze(1)
    found = {
        "truth_shards": shards.gather(-1, where.unsqueeze(1).expand(*wide))[..., 0].exp(),
        "truth_public": part.log_public.gather(-1, where)[:, 0].exp(),
        "mass_shards": shards.gather(-1, support.unsqueeze(1).expand(*wide)).exp().sum(-1),
        "mass_public": part.log_public.gather(-1, support).exp().sum(-1),
        "is_inside": (support == where).any(-1),
        "largest": ratio.amax(-1),
        "smallest": ratio.amin(-1),
    }
    return {name: values.cpu().numpy() for name, values in found.items()} | {"passage": part.passage}
