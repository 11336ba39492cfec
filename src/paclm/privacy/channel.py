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
_LARGEST_GAIN = math.exp(700.0)
"""Beyond it a gain overflows. Votes light enough to need more carry no information that matters."""
_SMALLEST_LOG_EXCESS = -150.0
"""Of a gain over the one at which a vote enters: at e^-150 nothing leaks that a budget of 2^-60 would notice."""
_WEIGHT_BITS = 160
"""Weights are drawn from as integers of so many bits: one of 2^-100 keeps all of its digits."""


class Channel(NamedTuple):
    """P(y|v) ∝ weights[y]·(1 + gain·[y = v]); gain inf is the identity."""

    weights: FloatArray  # (a,) q, the marginal of the released token
    gain: float
    information: float
    """I(vote; token) in nats, an upper bound in floating point."""

    def row(self, vote: int) -> list[int]:
        """P(·|vote) as integers in exact proportion, (a,): what is drawn from.

        In float64 the rows of a small gain differ by little more than rounding, and would leak another amount.
        """
        if self.gain == math.inf:
            return [int(y == vote) for y in range(self.weights.size)]
        numerator, denominator = self.gain.as_integer_ratio()
        weights = [int(math.ldexp(w, _WEIGHT_BITS)) for w in self.weights.tolist()]
        # both entries of every token: one product more where the vote can be released would take 100 ns longer
        entries = [(w * denominator, w * (denominator + numerator)) for w in weights]
        return [entry[y == vote] for y, entry in enumerate(entries)]

    def log_likelihood(self, token: int) -> FloatArray:
        """log P(token|v) for every vote v, up to a term that is the same for all v, (a,)."""
        if self.gain == math.inf:
            return np.where(np.arange(self.weights.size) == token, 0.0, -np.inf)
        log_likelihood: FloatArray = -np.log1p(self.gain * self.weights)
        others = math.fsum(w for y, w in enumerate(self.weights.tolist()) if y != token)
        # ln(1 + g) − ln(1 + g·q), without the cancellation at q near 1
        log_likelihood[token] = math.log1p(self.gain * others / (1.0 + self.gain * self.weights[token]))
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
    information *= 1.0 + _ROUNDING
    weights = np.zeros(mass.size)
    weights[order[: len(sorted_weights)]] = sorted_weights
    return Channel(weights, gain, information)


def release(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Release:
    """Release a token through the channel and return it with the exact token-level belief."""
    candidates, choice, mass = tally(votes, belief)  # (a,), (m,), (a,)
    if candidates.size == 1:
        return Release(candidates.item(), belief, False)
    channel = optimal_channel(mass / mass.sum(), per_token)
    index = noise.pick(channel.row(int(choice[secret])))
    after = update_belief(belief, choice, channel.log_likelihood(index), mass)
    return Release(int(candidates[index]), after, True, channel.information)


def _entropy(heaviest: list[float]) -> float:
    """H(π) of masses in descending order; the heaviest may round to 1, so it enters as 1 minus the others."""
    lighter = heaviest[1:]
    rest = math.fsum(lighter)
    return -(1.0 - rest) * math.log1p(-rest) - math.fsum(p * math.log(p) for p in lighter if p > 0.0)


def _search(heaviest: list[float], ceiling: float, slack: float) -> tuple[float, list[float], float]:
    """Gain, weights and information in [ceiling − slack, ceiling], for masses in descending order.

    Vote n enters the support at the gain g_n = D/π_n, D = Σ_{j≤n}(π_j − π_n). The largest n whose gain leaks no more
    than the ceiling is found first, then the excess g − g_n by bisection of its logarithm. Written in the excess, a
    weight has no cancellation, however light it is.
    """
    positive = [p for p in heaviest if p > 0.0]
    size, above = 2, len(positive) + 1  # at g_2 nothing leaks: only the heaviest vote is released
    while above - size > 1:
        middle = (size + above) // 2
        entering = _entering_gain(positive, middle)
        leaks = entering >= _LARGEST_GAIN or _information(positive, _weights(positive, middle, 0.0), entering) > ceiling
        size, above = (size, middle) if leaks else (middle, above)
    entering = _entering_gain(positive, size)
    low, high = _SMALLEST_LOG_EXCESS, math.log(_LARGEST_GAIN)
    best = (0.0, [1.0], 0.0)  # plurality, which leaks nothing
    while True:
        middle_log = 0.5 * (low + high)
        if not low < middle_log < high:
            return best
        excess = math.exp(middle_log)
        gain = entering + excess
        weights = _weights(positive, size, excess)
        information = _information(positive, weights, gain)
        if not math.isfinite(information):
            raise UnsoundState(
                f"The channel's information is {information!r} at gain {gain!r}. Nothing may be released."
            )
        if information <= ceiling:
            low, best = middle_log, (gain, weights, information)
            if information >= ceiling - slack:
                return best
        else:
            high = middle_log


def _entering_gain(heaviest: list[float], size: int) -> float:
    """The gain at which vote number `size` enters the support: 0 if it is tied with the heaviest."""
    lightest = heaviest[size - 1]
    return min(math.fsum(p - lightest for p in heaviest[:size]) / lightest, _LARGEST_GAIN)


def _weights(heaviest: list[float], size: int, excess: float) -> list[float]:
    """q on the `size` heaviest votes: (1 − s)·(π − π_n)/D + s·π/T, where s = excess/gain and T is their mass."""
    support = heaviest[:size]
    lightest, total = support[-1], math.fsum(support)
    above = [p - lightest for p in support]
    entering, distance = _entering_gain(heaviest, size), math.fsum(above)
    if distance == 0.0:  # all tied
        return [1.0 / size] * size
    share, rest = excess / (entering + excess), entering / (entering + excess)
    return [rest * (a / distance) + share * (p / total) for a, p in zip(above, support, strict=True)]


def _information(heaviest: list[float], weights: list[float], gain: float) -> float:
    """Σ_v π(v)·KL(P(·|v) ‖ q) to about 1e-12 of itself. Equals I(V; Y) if q is the marginal, and exceeds it if not."""
    total = math.fsum(weights)
    others = math.fsum(weights[1:]) / total
    terms = [heaviest[0] * _divergence(weights[0] / total, others, gain)]
    for p, q in zip(heaviest[1:], weights[1:], strict=False):
        terms.append(p * _divergence(q / total, 1.0 - q / total, gain))
    return math.fsum(terms)


def _divergence(weight: float, others: float, gain: float) -> float:
    """KL(P(·|v) ‖ q) where q(v) = weight = 1 − others: two forms of one function, each free of cancellation."""
    if weight > 0.5:
        shift = gain * others / (1.0 + gain * weight)
        return shift * (_log_defect(gain) / gain) - _log_defect(shift)
    part = gain * weight
    return (weight * _entropy_excess(gain) - _entropy_excess(part)) / (1.0 + part)


def _log_defect(t: float) -> float:
    """t − ln(1 + t), about t²/2, accurate for every t ≥ 0."""
    if t > 2.0**-7:
        return t - math.log1p(t)
    return t * t * (1 / 2 - t * (1 / 3 - t * (1 / 4 - t * (1 / 5 - t * (1 / 6 - t * (1 / 7 - t * (1 / 8)))))))


def _entropy_excess(t: float) -> float:
    """(1 + t)·ln(1 + t) − t, about t²/2, accurate for every t ≥ 0."""
    return t * math.log1p(t) - _log_defect(t)
