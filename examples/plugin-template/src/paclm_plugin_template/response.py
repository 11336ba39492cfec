"""The true vote now and then: a release."""

import numpy as np
from scipy.special import entr, xlogy

from paclm.privacy.belief import FloatArray, IntArray, Release, tally, update_belief
from paclm.privacy.randomness import NoiseSource
from paclm.privacy.releases import Rule


def release(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Release:
    """Release one token and return it with exact Bayes for what was released."""
    candidates, choice, mass = tally(votes, belief)  # (a,), (m,), (a,)
    if candidates.size == 1:  # the common vote, no draw, the same belief
        return Release(candidates.item(), belief, False)
    share_of_votes = mass / mass.sum()
    entropy = float(entr(share_of_votes).sum())
    share = 1.0 if entropy <= per_token else per_token / entropy  # of true votes
    probabilities = (1.0 - share) * share_of_votes
    probabilities[choice[secret]] += share
    index = noise.choose(probabilities)
    likelihood = (1.0 - share) * share_of_votes[index] + share * (np.arange(mass.size) == index)  # (a,)
    repeats = share + (1.0 - share) * share_of_votes  # (a,) P(v|v)
    with np.errstate(divide="ignore"):  # a vote that cannot have led here is ruled out; one without mass leaks nothing
        log_likelihood = np.log(likelihood)
        leak = xlogy(share_of_votes * repeats, repeats / share_of_votes).sum()
    leak += (share_of_votes * (1.0 - share_of_votes)).sum() * xlogy(1.0 - share, 1.0 - share)
    after = update_belief(belief, choice, log_likelihood, mass)
    return Release(int(candidates[index]), after, True, min(per_token, max(0.0, float(leak))))


RULE = Rule("response", release, reads_secret=True)
