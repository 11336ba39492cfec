"""The paper's release, Algorithm 1 (`alg:pac-token`): calibrated Gaussian noise on the realized vote, argmax out."""

from __future__ import annotations

import math

import numpy as np

from paclm.errors import UnsoundState
from paclm.privacy.belief import (
    SAFE_MASS,
    FloatArray,
    IntArray,
    Release,
    is_unanimous,
    tally,
    uniform_belief,
    update_belief,
)
from paclm.privacy.calibration import Calibration, calibrate_noise, helmert, information_bound, pair_variance
from paclm.privacy.randomness import NoiseSource


def release(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Release:
    """Release one PAC-private token and return it with the updated belief.

    The noised vector R and the noise are as secret as the secret: they live in this frame only.
    """
    if is_unanimous(votes):  # lem:singular (iii): nothing to hide, no draw is taken
        return Release(votes.item(0), belief, False)
    candidates, choice, mass = tally(votes, belief)  # (a,), (m,), (a,)
    if per_token == np.inf:  # no noise at all: the realized vote itself
        log_likelihood = np.where(np.arange(mass.size) == choice[secret], 0.0, -np.inf)
        return Release(int(votes[secret]), update_belief(belief, choice, log_likelihood, mass), True, np.inf)
    if mass.size == 2:
        return _release_pair(candidates, choice, mass, belief, secret, per_token, noise)
    calibration = calibrate_noise(mass, per_token)
    return _release_through(calibration, candidates, choice, mass, belief, secret, per_token, noise)


def release_forgetting(
    votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource
) -> Release:
    """The release of a curator who forgets: noise for the prior at every step, while an onlooker's belief goes on.

    UNSOUND, for studies of what forgetting costs: no release by name, and serving cannot ask for it. The belief after
    is exact Bayes; `information` is a bound at that belief, and may exceed `per_token`.
    """
    if is_unanimous(votes):
        return Release(votes.item(0), belief, False)
    prior = tally(votes, uniform_belief(votes.size)).mass  # (a,)
    candidates, choice, mass = tally(votes, belief)
    calibration = calibrate_noise(prior, per_token)
    told = information_bound(mass / mass.sum(), calibration)
    return _release_through(calibration, candidates, choice, mass, belief, secret, told, noise)


def _release_through(
    calibration: Calibration,
    candidates: IntArray,
    choice: IntArray,
    mass: FloatArray,
    belief: FloatArray,
    secret: int,
    information: float,
    noise: NoiseSource,
) -> Release:
    """Noise the realized vote, take the largest entry, and update the belief by what was drawn."""
    axes, variances = calibration  # (a, a-1), (a-1,)
    R = axes[choice[secret]] + np.sqrt(variances) * noise.standard_normal(variances.size)  # (a-1,)
    token = candidates.item((axes @ R).argmax())
    log_likelihood = ((R - axes) ** 2) @ (-0.5 / variances)  # (a,)
    after = update_belief(belief, choice, log_likelihood, mass)
    if after[secret] == -np.inf:
        raise _ruled_out()
    return Release(token, after, True, information, calibration.scale)


_HALF = float(helmert(2)[0, 0])


def _release_pair(
    candidates: IntArray,
    choice: IntArray,
    mass: FloatArray,
    belief: FloatArray,
    secret: int,
    per_token: float,
    noise: NoiseSource,
) -> Release:
    """The same for two distinct votes, three disputed tokens in four: one direction, where plain numbers are faster."""
    side = (_HALF, -_HALF)  # where each vote lies along that direction
    low, high = mass.tolist()
    variance = pair_variance(low, high, per_token)
    R = side[choice[secret]] + math.sqrt(variance) * noise.standard_normal(1).item()
    log_likelihood = [(R - x) * (R - x) * (-0.5 / variance) for x in side]
    # `update_belief` written out, bit for bit: through an array and back a release takes a tenth longer.
    top = max(log_likelihood)
    evidence = low * math.exp(log_likelihood[0] - top) + high * math.exp(log_likelihood[1] - top)
    if evidence > SAFE_MASS:
        shift = top + math.log(evidence)
        after = belief + np.array([log_likelihood[0] - shift, log_likelihood[1] - shift])[choice]
    else:
        after = update_belief(belief, choice, np.array(log_likelihood), mass)
    if after[secret] == -math.inf:
        raise _ruled_out()
    return Release(candidates.item(0 if R >= 0.0 else 1), after, True, per_token, math.sqrt(variance))


def _ruled_out() -> UnsoundState:
    return UnsoundState("The belief had ruled the realized world out. Nothing may be released from it.")
