"""AdaPMixED, SubMix and GNMax on the first queries of a text.

Each method keeps its own accountant and states its own guarantee. All of them answer from the same disjoint shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paclm.engine.decode_step import coupled_votes
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.study.baselines import adapmixed, gnmax, submix
from paclm.study.baselines.adapmixed import AdaSettings
from paclm.study.baselines.distributions import Distributions
from paclm.study.baselines.submix import SubMixSettings

_NOISE_DRAWS = 16


class NeighbourResult(NamedTuple):
    """One method on one text."""

    method: str
    guarantee: str
    epsilon: float  # what its own accountant reports at the end
    truth: FloatArray  # (queries,) probability that the released token is the true one
    private_share: float  # share of answers that used the shard models


class Neighbours:
    """Collects answers part by part until all queries are used, then summarises them."""

    def __init__(self, queries: int, epsilon: float, delta: float, num_shards: int, rng: np.random.Generator) -> None:
        self.queries, self.epsilon, self.delta, self.rng = queries, epsilon, delta, rng
        self.ada = AdaSettings(delta=delta)
        self.sub = SubMixSettings(epsilon=epsilon, queries=queries)
        self._pairs = submix.random_pairs(num_shards, rng)
        self._kept: dict[str, list[np.ndarray]] = {}
        self._done = 0

    def see_all(self, parts: Iterable[Distributions]) -> None:
        """Answer along a text until all queries are used."""
        for part in parts:
            self.see(part)
            if self._done >= self.queries:
                return

    def see(self, part: Distributions) -> None:
        """Answer at the positions of a part, as long as queries are left."""
        count = min(part.num_positions, self.queries - self._done)
        if count <= 0:
            return
        self._done += count
        shards, public, support, truth = (
            values[:count] for values in (part.log_shards, part.log_public, part.support, part.truth)
        )
        ada = adapmixed.answer(shards, public, support, self.ada, self.rng)
        sub = submix.answer(shards, public, self._pairs, self.sub)
        votes = self._votes(shards, support)  # (c, N)
        counts = (votes.unsqueeze(-1) == support.unsqueeze(1)).sum(1)  # (c, k)
        at_truth = truth.reshape(-1, 1, 1).expand(-1, shards.shape[1], 1)
        columns = {
            "public": _at(public, truth),
            "ceiling": shards.gather(-1, at_truth)[..., 0].exp().mean(1).cpu().numpy(),
            "passage": part.passage[:count],
            "ada": _at(ada.log_release, truth),
            "ada_losses": ada.losses,
            "ada_private": ada.is_private.astype(np.float64),
            "sub": _at(sub.log_release, truth),
            "sub_losses": sub.losses,
            "counts": counts.double().cpu().numpy(),
            "is_truth": (support == truth.unsqueeze(-1)).double().cpu().numpy(),
        }
        for name, values in columns.items():
            self._kept.setdefault(name, []).append(values)

    def text(self) -> tuple[FloatArray, FloatArray, IntArray]:
        """(queries,) The true token under the public model and the average of the shard models, and its passage."""
        public, ceiling, passage = (np.concatenate(self._kept[name]) for name in ("public", "ceiling", "passage"))
        return public, ceiling, passage

    def results(self) -> list[NeighbourResult]:
        """AdaPMixED stopped at ε and in full, SubMix, and GNMax with noise for any votes, charged in both ways."""
        kept = {name: np.concatenate(values) for name, values in self._kept.items()}
        public = kept["public"]
        rows = np.arange(len(public))
        stop = adapmixed.within(kept["ada_losses"], self.epsilon, self.ada)
        found = [
            self._ada("AdaPMixED, stopped at ε", kept, rows < stop),
            self._ada("AdaPMixED, all queries", kept, np.ones(len(public), dtype=np.bool_)),
        ]
        stop = submix.within(kept["sub_losses"], self.sub)
        is_private = rows < stop
        spent = float(kept["sub_losses"][:stop].sum(axis=0).max()) if stop else 0.0
        truth = np.where(is_private, kept["sub"], public)
        found.append(NeighbourResult("SubMix", submix.GUARANTEE, spent, truth, float(is_private.mean())))
        noise = gnmax.noise_for(self.epsilon, self.delta, self.queries)
        hits = [kept["is_truth"][rows, gnmax.release(kept["counts"], noise, self.rng)] for _ in range(_NOISE_DRAWS)]
        rate = np.mean(hits, axis=0)
        found.append(NeighbourResult("GNMax", gnmax.GUARANTEE, self.epsilon, rate, 1.0))
        dependent = gnmax.dependent_epsilon(kept["counts"], noise, self.delta)
        found.append(NeighbourResult("GNMax, counted by its votes", gnmax.GUARANTEE_DEPENDENT, dependent, rate, 1.0))
        return found

    def _ada(self, name: str, kept: dict[str, FloatArray], is_on: BoolArray) -> NeighbourResult:
        truth = np.where(is_on, kept["ada"], kept["public"])
        spent = adapmixed.spent_epsilon(kept["ada_losses"][is_on], self.ada)
        return NeighbourResult(name, adapmixed.GUARANTEE, spent, truth, float((kept["ada_private"] * is_on).mean()))

    def _votes(self, log_shards: Tensor, support: Tensor) -> Tensor:
        """Coupled Gumbel votes inside the public support, as worlds vote."""
        wide = support.unsqueeze(1).expand(-1, log_shards.shape[1], -1)
        coins = torch.from_numpy(self.rng.gumbel(size=tuple(support.shape))).to(log_shards.device)
        return coupled_votes(log_shards.gather(-1, wide), support, coins, 1.0)


def _at(log_release: Tensor, truth: Tensor) -> FloatArray:
    return log_release.gather(-1, truth.unsqueeze(-1))[:, 0].exp().cpu().numpy()
