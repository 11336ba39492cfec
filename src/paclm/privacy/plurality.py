"""The belief-weighted plurality of all worlds: a function of the history alone. The secret is never read."""

from __future__ import annotations

from paclm.privacy.arrays import FloatArray, IntArray
from paclm.privacy.randomness import NoiseSource
from paclm.privacy.step import Step, is_unanimous, tally


def release(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Step:
    """Release the vote with the most belief behind it; ties go to the smaller token. The belief does not change."""
    del secret, per_token, noise
    if is_unanimous(votes):
        return Step(votes.item(0), belief, False)
    candidates, _, mass = tally(votes, belief)
    return Step(candidates.item(mass.argmax()), belief, True)
