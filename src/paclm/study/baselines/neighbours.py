"""AdaPMixED, SubMix and GNMax on the first queries of a text, in one walk with PMixED's digest.

Each method keeps its own accountant and says what its guarantee is. All of them answer from the same disjoint shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paclm.engine.decode_step import coupled_votes
from paclm.privacy.belief import BoolArray, FloatArray
from paclm.study.baselines import adapmixed, gnmax, submix
from paclm.study.baselines.adapmixed import AdaSettings
from paclm.study.baselines.distributions import Distributions
from paclm.study.baselines.submix import SubMixSettings

_NOISE_DRAWS = 16


@dataclass(frozen=True, slots=True)
class NeighbourResult:
    """One method on one text."""

    method: str
    guarantee: str
    epsilon: float
    """What its own accountant reports in the end."""
    truth: FloatArray  # (queries,) probability that the released token is the true one
    private_share: float
    """Answers that the shard models had a part in."""


@dataclass
class Neighbours:
    """Collects answers part by part until so many queries were asked, and then sums up."""

    queries: int
    epsilon: float
    delta: float
    num_shards: int
    rng: np.random.Generator
    ada: AdaSettings = field(init=False)
    sub: SubMixSettings = field(init=False)
    _kept: dict[str, list[FloatArray]] = field(default_factory=dict)
    _done: int = 0

    def __post_init__(self) -> None:
        self.ada = AdaSettings(delta=self.delta)
        self.sub = SubMixSettings(epsilon=self.epsilon, queries=self.queries)
        self._pairs = submix.random_pairs(self.num_shards, self.rng)

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
        self._keep("public", _at(public, truth))
        self._keep("ada", _at(ada.log_release, truth))
        self._keep("ada_losses", ada.losses)
        self._keep("ada_private", ada.is_private.astype(np.float64))
        self._keep("sub", _at(sub.log_release, truth))
        self._keep("sub_losses", sub.losses)
        self._keep("counts", counts.double().cpu().numpy())
        self._keep("is_truth", (support == truth.unsqueeze(-1)).double().cpu().numpy())

    def outcomes(self) -> list[NeighbourResult]:
        """What every method did: AdaPMixED stopped at ε and in full, SubMix, GNMax with noise for any votes."""
        kept = {name: np.concatenate(values) for name, values in self._kept.items()}
        public, losses = kept["public"], kept["ada_losses"]
        stop = adapmixed.within(losses, self.epsilon, self.ada)
        found = [
            self._ada("AdaPMixED, stopped at ε", kept, np.arange(len(public)) < stop),
            self._ada("AdaPMixED, all queries", kept, np.ones(len(public), dtype=np.bool_)),
        ]
        stop = submix.within(kept["sub_losses"], self.sub)
        is_private = np.arange(len(public)) < stop
        spent = float(kept["sub_losses"][:stop].sum(axis=0).max()) if stop else 0.0
        truth = np.where(is_private, kept["sub"], public)
        found.append(NeighbourResult("SubMix", submix.GUARANTEE, spent, truth, float(is_private.mean())))
        noise = gnmax.noise_for(self.epsilon, self.delta, self.queries)
        rows = np.arange(len(public))
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

    def _keep(self, name: str, values: FloatArray) -> None:
        self._kept.setdefault(name, []).append(values)


def _at(log_release: Tensor, truth: Tensor) -> FloatArray:
    picked: FloatArray = log_release.gather(-1, truth.unsqueeze(-1))[:, 0].exp().cpu().numpy()
    return picked
