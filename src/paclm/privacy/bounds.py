"""Attack bounds: how often any attack can succeed when the released tokens leak at most a given number of nats.

For an attack with prior success π the posterior success δ obeys KL(Bernoulli(δ) ‖ Bernoulli(π)) ≤ I(S; H). All
functions round to the safe side: `success_bound`, `tpr_bound_from_nats`, `format_bound` and `round_up` up, `nats_for`
down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from functools import lru_cache

from paclm.errors import InvalidInput

_ROUNDING = 1e-12
"""Relative safety margin: far more than float64 loses in the divergence, and too small to show in any figure."""


def success_bound(nats: float, prior: float) -> float:
    """The largest success probability of any attack with this prior when at most `nats` leak about the secret.

    >>> round(success_bound(10**6 * 2**-32, 1 / 2), 6)
    0.510789
    """
    prior = _check_prior(prior)
    nats = float(nats)
    if math.isnan(nats) or nats < 0.0:
        raise InvalidInput(f"The information must be a number of nats ≥ 0, not {nats!r}.")
    return prior if nats == 0.0 else _success_bound(nats, prior)


@lru_cache(maxsize=1024)
def _success_bound(nats: float, prior: float) -> float:
    return _raised(prior, nats, lambda gain: _divergence(gain, prior))


def tpr_bound_from_nats(nats: float, fpr: float) -> float:
    """The largest true-positive rate of any attack on a record (prior 1/2) at this false-positive rate.

    The verdict T of an attack with rates (β, α) has I(M; T) = ½ KL(β ‖ μ) + ½ KL(α ‖ μ) with μ = (α + β)/2, and by data
    processing that is at most `nats`. Solved for β, rounded up.

    >>> round(tpr_bound_from_nats(0.0625, 0.01), 4), round(tpr_bound_from_nats(nats_for(0.51, 1 / 2), 0.01), 4)
    (0.2125, 0.0144)
    """
    nats, fpr = float(nats), float(fpr)
    if not nats >= 0.0 or not 0.0 <= fpr < 1.0:
        raise InvalidInput(f"Expected nats ≥ 0 and a false-positive rate of at least 0 and below 1, not {nats}, {fpr}.")

    def information(gain: float) -> float:
        mean = fpr + gain / 2
        return (_divergence(gain / 2, mean) + _divergence(-gain / 2, mean)) / 2

    return fpr if nats == 0.0 else _raised(fpr, nats, information)


def _raised(start: float, nats: float, information: Callable[[float], float]) -> float:
    """The largest probability above `start` whose gain takes at most `nats`, rounded up."""
    target = nats * (1.0 + _ROUNDING)
    low, high = 0.0, 1.0 - start
    if information(high) <= target:
        return 1.0
    while low < (middle := 0.5 * (low + high)) < high:
        if information(middle) > target:
            high = middle
        else:
            low = middle
    return min(1.0, math.nextafter(start + high, 2.0))


def nats_for(success: float, prior: float) -> float:
    """The most nats that keep every attack with this prior at or below `success`; the inverse of `success_bound`.

    >>> int(nats_for(0.51, 1 / 2) * 2**32)  # tokens at 2^-32 nats, rounded down
    859050
    """
    prior = _check_prior(prior)
    success = float(success)
    if not prior <= success < 1.0:
        raise InvalidInput(f"The target success must be at least the prior {prior:g} and below 1, not {success!r}.")
    gain = math.nextafter(success - prior, 0.0)  # the difference is rounded; one step down is the safe side
    nats = _divergence(gain, prior) * (1.0 - _ROUNDING)
    step = _ROUNDING  # doubled each time: near the prior one unit in the last place of the success is many nats
    while nats > 0.0 and success_bound(nats, prior) > success:
        nats *= 1.0 - step
        step = min(0.5, 2.0 * step)
    return nats


def format_bound(bound: float, decimals: int | None = None) -> str:
    """A bound in per cent, rounded up.

    Two decimals or three significant digits, whichever shows more; or exactly `decimals`.

    >>> format_bound(0.5107891), format_bound(0.51), format_bound(0.0096378), format_bound(0.5107891, decimals=4)
    ('51.08%', '51.00%', '0.964%', '51.0790%')
    """
    value = float(bound)
    if not 0.0 <= value <= 1.0:
        raise InvalidInput(f"A bound on success lies between 0 and 1, not {bound!r}.")
    if decimals is None:
        decimals = max(2, -Decimal(repr(abs(value))).adjusted())
    with localcontext(Context(prec=400)):  # independent of the caller's decimal context
        return f"{Decimal(round_up(value, decimals + 2)).scaleb(2):f}%"


def round_up(bound: float, decimals: int) -> str:
    """A bound with the given number of decimals, rounded up.

    >>> round_up(0.5107891, 3), round_up(0.51, 3), round_up(0.5, 3)
    ('0.511', '0.510', '0.500')
    """
    with localcontext(Context(prec=400)):
        shortest = Decimal(repr(float(bound) + 0.0))  # 0.51 is stored as a little more
        return f"{shortest.quantize(Decimal(1).scaleb(-decimals), ROUND_CEILING):f}"


def _divergence(gain: float, prior: float) -> float:
    """KL(Bernoulli(π + x) ‖ Bernoulli(π)) without cancellation: π·G(x/π) + (1−π)·G(−x/(1−π))."""
    return prior * _bregman(gain / prior) + (1.0 - prior) * _bregman(-gain / (1.0 - prior))


def _bregman(t: float) -> float:
    """G(t) = (1+t)·log(1+t) − t, by its series where the difference would cancel."""
    if abs(t) < 0.05:  # Σ_{k≥2} (−t)^k / (k(k−1)); sixteen terms reach 1e-17 relative to the first
        return math.fsum((-t) ** k / (k * (k - 1)) for k in range(2, 18))
    if t <= -1.0:
        return 1.0
    return (1.0 + t) * math.log1p(t) - t


def _check_prior(prior: float) -> float:
    value = float(prior)
    if not 0.0 < value < 1.0:
        raise InvalidInput(f"A prior must lie strictly between 0 and 1, not {prior!r}.")
    return value
