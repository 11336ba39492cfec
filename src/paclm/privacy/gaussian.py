"""The paper's release, Algorithm 1 (`alg:pac-token`): calibrated Gaussian noise on the realized vote, argmax out."""

from __future__ import annotations

import math

import numpy as np

from paclm.errors import UnsoundState
from paclm.privacy.belief import FloatArray, IntArray, Release, tally, update_belief
from paclm.privacy.calibration import calibrate_noise
from paclm.privacy.randomness import NoiseSource


def release(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Release:
    """Release one PAC-private token and return it with the updated belief.

    The noised vote R and the noise are as private as the secret: they never leave this function.
    """
    candidates, choice, mass = tally(votes, belief)  #                         (a,), (m,), (a,)
    if candidates.size == 1:  # lem:singular (iii): nothing to hide, no noise drawn
        return Release(candidates.item(), belief, False)
    if per_token == math.inf:  # no noise at all: the realized vote itself
        log_likelihood = np.where(np.arange(mass.size) == choice[secret], 0.0, -np.inf)
        return Release(votes.item(secret), update_belief(belief, choice, log_likelihood, mass), True, math.inf)

    axes, variances = calibrate_noise(mass, per_token)  #                      (a, a-1), (a-1,)
    drawn = np.sqrt(variances) * noise.standard_normal(variances.size)  #      (a-1,)
    R = axes[choice[secret]] + drawn  #                                        (a-1,)
    token = candidates.item((axes @ R).argmax())  # ties go to the smaller token
    log_likelihood = ((R - axes) ** 2) @ (-0.5 / variances)  #                 (a,)
    after = update_belief(belief, choice, log_likelihood, mass)  #             (m,)
    if after[secret] == -math.inf:
        raise UnsoundState("The belief rules out the realized world. Nothing may be released from it.")
    return Release(token, after, True, per_token, math.sqrt(variances[-1]))
