"""The vote of a world drawn afresh from the belief. The secret is never read, so nothing leaks.

Under coupled Gumbel decoding at temperature τ the token is, over fresh coins, an exact sample of the belief-weighted
average of the worlds' support-restricted distributions.
"""

from __future__ import annotations

from paclm.privacy.arrays import FloatArray, IntArray
from paclm.privacy.randomness import NoiseSource
from paclm.privacy.step import Step, is_unanimous, tally


def release(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Step:
    """Release a vote with the probability the belief gives it. The belief does not change."""
    del secret, per_token
    if is_unanimous(votes):
        return Step(votes.item(0), belief, False)
    candidates, _, mass = tally(votes, belief)
    return Step(candidates.item(noise.choose(mass)), belief, True)
