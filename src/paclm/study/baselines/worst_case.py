"""A small ensemble on which PMixED's loss can be computed exactly: two tokens, and one shard model that is not public.

All other shard models are the public model, so leaving out the one leaves the public model itself, and T queries are
a binomial count under either. What an accountant claims must hold here too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

from paclm.privacy.belief import FloatArray
from paclm.study.baselines.accountants import mix, symmetric_divergence
from paclm.study.baselines.pmixed import PMixedSettings


class ExactLoss(NamedTuple):
    """The exact loss of T queries on the example."""

    public_mass: float  # p0 of the token that the shard model prefers
    shard_mass: float
    delta: float  # the smallest δ for which (ε, δ) holds at the settings' ε, in the worse direction
    rdp: float  # Rényi loss of one query at the settings' order
    claimed_rdp: float  # what the accountant charges for one query


def exact_losses(
    settings: PMixedSettings, public_masses: Sequence[float], shard_masses: Sequence[float]
) -> list[ExactLoss]:
    """Examples with p0 = (1−w, w) and one shard model (1−c, c), each against the public model alone."""
    w, c = np.asarray(public_masses, dtype=np.float64), np.asarray(shard_masses, dtype=np.float64)
    public, shard = np.log(np.stack([1.0 - w, w], -1)), np.log(np.stack([1.0 - c, c], -1))  # (examples, 2)
    others = np.arange(settings.num_shards)
    chance = binom.pmf(others, settings.num_shards - 1, settings.rate)
    others = others[chance > 1e-9]  # the rest could only add to the loss
    weights = settings.weights(shard[:, None], public[:, None], np.tile(others + 1, (len(w), 1)))  # (examples, sizes)
    moved = np.exp(mix(shard[:, None], public[:, None], weights)) - np.exp(public[:, None])  # (examples, sizes, 2)
    share = settings.rate * chance[others] / (others + 1)
    with_it = np.log(np.exp(public) + (share[:, None] * moved).sum(axis=1))  # (examples, 2)
    losses = symmetric_divergence(with_it, public, settings.order)
    found = []
    for i in range(len(w)):
        p, q = float(np.exp(with_it[i, 1])), float(w[i])
        delta = max(_delta(settings.queries, *pair, settings.epsilon) for pair in ((p, q), (q, p)))
        found.append(ExactLoss(q, float(c[i]), delta, float(losses[i]), settings.rdp / settings.queries))
    return found


def pair_below_the_order(order: int, radius: float) -> tuple[float, float]:
    """Public and shard masses of two tokens on the edge of the ball, D↔_a = aβ, with D_2(p‖p0) above 2β if a ≥ 3.

    p0 = ((1+x)/2, (1−x)/2) and p = (1/2, 1/2): the pair of the proposition in docs/research/baselines.md. The larger
    direction is D_a(p‖p0), for which x is found, from inside.
    """
    goal = order * radius * (1.0 - 1e-9)

    def excess(logit: float) -> float:  # ln((1+x)/(1−x)) keeps the digits of x near 1
        two = np.array([0.0, -logit]) - np.logaddexp(0.0, -logit)
        return float(symmetric_divergence(np.log([0.5, 0.5]), two, order)) - goal

    logit = float(brentq(excess, 1e-12, 600.0, xtol=1e-14))
    return float(np.exp(-np.logaddexp(0.0, logit))), 0.5


def worst_loss(settings: PMixedSettings) -> ExactLoss:
    """The example of this kind with the largest δ, by a coarse search: a lower bound on the worst case."""
    pairs = itertools.product(np.geomspace(1e-5, 0.45, 24), (0.5, 0.7, 0.9, 0.97, 0.99, 0.999))
    public, shard = zip(*pairs, strict=True)
    return max(exact_losses(settings, public, shard), key=lambda example: example.delta)


def _delta(queries: int, p: float, q: float, epsilon: float) -> float:
    """Σ_k max(0, P(k) − e^ε Q(k)) for two binomial counts, over the counts that either can reach."""
    middle, spread = queries * np.array([p, q]), 12.0 * np.sqrt(queries * np.array([p * (1 - p), q * (1 - q)])) + 50.0
    low, high = max(0.0, (middle - spread).min()), min(float(queries), (middle + spread).max())
    count: FloatArray = np.arange(math.floor(low), math.ceil(high) + 1, dtype=np.float64)
    log_p, log_q = binom.logpmf(count, queries, p), binom.logpmf(count, queries, q)
    over = log_p - log_q - epsilon
    is_over = over > 0.0
    return math.fsum(np.exp(log_p[is_over]) * -np.expm1(-over[is_over]))
