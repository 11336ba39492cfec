"""From (ε, δ) to nats: two guarantees of different kinds, brought to the one quantity that both bound.

Any attack on one record's membership, from even odds, succeeds with probability at most 1 − (1−δ)/(1+e^ε) under
(ε, δ)-DP, and at most `success_bound(nats, 1/2)` under a budget of nats. DP holds for every data set and every prior
knowledge; the nats hold for the stated draw of the world. Equal success is not equal strength.
"""

from __future__ import annotations

import math

from paclm.errors import InvalidInput
from paclm.privacy.bounds import nats_for


def success_at_half(epsilon: float, delta: float = 0.0) -> float:
    """The largest success of any membership attack from even odds under (ε, δ)-DP.

    >>> round(success_at_half(1.0, 1e-5), 7)
    0.7310613
    """
    if not (epsilon >= 0.0 and 0.0 <= delta < 1.0):
        raise InvalidInput(f"ε must be at least 0 and δ in [0, 1), not {epsilon!r} and {delta!r}.")
    return 1.0 - (1.0 - delta) / (1.0 + math.exp(epsilon)) if epsilon < 700.0 else 1.0


def matched_nats(epsilon: float, delta: float) -> float:
    """The total budget whose bound at even odds is that of (ε, δ)-DP, from below."""
    return nats_for(success_at_half(epsilon, delta), 0.5)
