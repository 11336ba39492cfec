"""The rate–distortion release: of all channels that leak at most b nats, the one that repeats the vote most often.

For masses π it is P(y|v) ∝ q(y)·(1 + g·[y = v]), where q lives on the heaviest votes and the gain g ≥ 0 sets the leak:
g → 0 is plurality, g → ∞ the realized vote. The released tokens are the whole history, so belief and charge are exact
for what leaves. Most of the leak comes from rare events: a minority vote released.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from paclm.errors import UnsoundState
from paclm.privacy.belief import FloatArray, IntArray, Release, tally, update_belief
from paclm.privacy.randomness import NoiseSource

MARGIN = 2.0**-20
"""The search aims at b·(1 − MARGIN) and stops within as much again below it: rounding never reaches b."""
_ROUNDING = 1e-12
"""Far more than float64 loses in an entropy, far less than the margin."""
_LARGEST_LOG_GAIN = 700.0
"""Beyond e^700 a gain overflows. Votes light enough to need more carry no information that matters."""


class Channel(NamedTuple):
    """P(y|v) ∝ weights[y]·(1 + gain·[y = v]); gain inf is the identity."""

    weights: FloatArray  # (a,) q, the marginal of the released token
    gain: float
    information: float
    """I(vote; token) in nats, an upper bound in floating point."""

    def given_vote(self, vote: int) -> FloatArray:
        """P(·|vote), (a,)."""
        if self.gain == math.inf:
            identity: FloatArray = np.eye(self.weights.size)[vote]
            return identity
        row: FloatArray = self.weights / (1.0 + self.gain * self.weights[vote])
        row[vote] *= 1.0 + self.gain
        return row

    def log_likelihood(self, token: int) -> FloatArray:
        """log P(token|v) for every vote v, up to a term that is the same for all v, (a,)."""
        if self.gain == math.inf:
            return np.where(np.arange(self.weights.size) == token, 0.0, -np.inf)
        log_likelihood: FloatArray = -np.log1p(self.gain * self.weights)
        log_likelihood[token] += math.log1p(self.gain)
        return log_likelihood


def optimal_channel(mass: FloatArray, per_token: float) -> Channel:
    """The channel that releases the realized vote most often among those with I(vote; token) ≤ per_token."""
    order = np.argsort(-mass, kind="stable")
    heaviest = mass[order].tolist()
    entropy = _entropy(heaviest) * (1.0 + _ROUNDING)
    if entropy <= per_token:
        return Channel(mass, math.inf, entropy)
    ceiling = per_token * (1.0 - MARGIN)
    gain, sorted_weights, information = _search(heaviest, ceiling, per_token * MARGIN)
    weights = np.zeros(mass.size)
    weights[order[: len(sorted_weights)]] = sorted_weights
    return Channel(weights, gain, information)


def release(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Release:
    """Release a token through the channel and return it with the exact token-level belief."""
    candidates, choice, mass = tally(votes, belief)  # (a,), (m,), (a,)
    if candidates.size == 1:
        return Release(candidates.item(), belief, False)
    channel = optimal_channel(mass / mass.sum(), per_token)
    index = noise.choose(channel.given_vote(int(choice[secret])))
    after = update_belief(belief, choice, channel.log_likelihood(index), mass)
    return Release(int(candidates[index]), after, True, channel.information)


def _entropy(heaviest: list[float]) -> float:
    """H(π) of masses in descending order; the heaviest may round to 1, so it enters as 1 minus the others."""
    lighter = heaviest[1:]
    rest = math.fsum(lighter)
    return -(1.0 - rest) * math.log1p(-rest) - math.fsum(p * math.log(p) for p in lighter if p > 0.0)


def _weights(heaviest: list[float], gain: float) -> list[float]:
    """q on its support, the n heaviest votes, for masses in descending order."""
    total, size = 0.0, 0
    for p in heaviest:
        if p * (gain + size + 1) <= total + p:  # p ≤ c with p itself included: it stays out, and so do all lighter ones
            break
        total, size = total + p, size + 1
    if size <= 1:
        return [1.0]
    weights = [max(0.0, (p * (gain + size) / total - 1.0) / gain) for p in heaviest[:size]]
    scale = math.fsum(weights)
    return [w / scale for w in weights]


def _information(heaviest: list[float], weights: list[float], gain: float) -> float:
    """Σ_v π(v)·KL(P(·|v) ‖ q), free of cancellation. Equals I(V; Y) when q is the marginal, and exceeds it when not."""
    log_gain = math.log1p(gain)
    rest = math.fsum(weights[1:])
    r = gain * rest / (1.0 + gain)
    terms = [heaviest[0] * (-(rest / (1.0 + gain)) / (1.0 - r) * log_gain - math.log1p(-r))]
    for p, q in zip(heaviest[1:], weights[1:], strict=False):
        terms.append(p * (q * (1.0 + gain) / (1.0 + gain * q) * log_gain - math.log1p(gain * q)))
    return math.fsum(terms)


def _search(heaviest: list[float], ceiling: float, slack: float) -> tuple[float, list[float], float]:
    """Bisect ln g from below: end with information in [ceiling − slack, ceiling], or as near as float64 allows."""
    lightest = min(p for p in heaviest if p > 0.0)
    low, high = -80.0, min(math.log(4.0) - math.log(lightest) + 60.0, _LARGEST_LOG_GAIN)
    best: tuple[float, list[float], float] = (0.0, [1.0], 0.0)
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            return best
        gain = math.exp(middle)
        weights = _weights(heaviest, gain)
        information = _information(heaviest, weights, gain)
        if not math.isfinite(information):
            raise UnsoundState(
                f"The channel's information is {information!r} at gain {gain!r}. Nothing may be released."
            )
        if information <= ceiling:
            low, best = middle, (gain, weights, information)
            if information >= ceiling - slack:
                return best
        else:
            high = middle
