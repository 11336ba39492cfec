"""Algorithm 1, its charges and its bounds a second time, from the paper's text alone: imports nothing of paclm.

In the space of all candidates, with a dense pseudo-inverse, exact fractions for charges and mpmath for bounds.
"""

from fractions import Fraction

import mpmath
import numpy as np

UNIT = Fraction(1, 2**60)


def precision_of(votes, belief, per_token):
    """Candidates, votes as indices, and covariance and inverse covariance of the noise among candidates."""
    candidates = sorted(set(votes))
    index = np.array([candidates.index(vote) for vote in votes])
    mass = np.array([belief[index == y].sum() for y in range(len(candidates))])
    covariance = np.diag(mass) - np.outer(mass, mass)
    values, vectors = np.linalg.eigh(covariance)
    flat = np.argmax(np.abs(vectors.sum(axis=0)))  # the direction in which votes do not differ
    values = np.delete(np.clip(values, 0.0, None), flat) + 1e-14
    vectors = np.delete(vectors, flat, axis=1)
    variances = np.sqrt(values) * np.sqrt(values).sum() / (2.0 * per_token)
    return candidates, index, (vectors * variances) @ vectors.T, (vectors / variances) @ vectors.T


def expected_moves(votes, belief, secret, per_token):
    """d²(s, s') of all worlds to the realized one's vote: Gram matrix of the log-likelihood's dependence on noise."""
    _, index, _, precision = precision_of(votes, belief, per_token)
    away = np.eye(len(precision))[index[secret]] - np.eye(len(precision))[index]  # (m, a)
    return away @ precision @ away.T


def released(votes, belief, secret, per_token, rng):
    """One token and the next belief (probabilities), with noise drawn here."""
    if len(set(votes)) == 1:
        return int(votes[0]), belief
    candidates, index, covariance, precision = precision_of(votes, belief, per_token)
    onehot = np.eye(len(candidates))
    values, vectors = np.linalg.eigh(covariance)
    noise = vectors @ (np.sqrt(np.clip(values, 0.0, None)) * rng.standard_normal(len(values)))
    seen = onehot[index[secret]] + noise
    away = seen - onehot[index]
    scores = np.log(np.maximum(belief, 1e-300)) - 0.5 * np.einsum("si,ij,sj->s", away, precision, away)
    weights = np.exp(scores - scores.max())
    return int(candidates[int(np.argmax(seen))]), weights / weights.sum()


def units(nats):
    """A charge in units of 2^-60 nats, rounded up."""
    return -(-Fraction(nats) // UNIT)


def spent(votes, per_token, charge):
    """What a stream of votes is charged, in units."""
    price = units(per_token)
    return sum(price for row in votes if charge == "every-token" or len(set(row.tolist())) > 1)


def success_bound(nats, prior):
    """The largest p ≥ prior with KL(p ‖ prior) ≤ nats."""
    with mpmath.workdps(40):
        prior, nats = mpmath.mpf(prior), mpmath.mpf(nats)

        def divergence(p):
            return sum(x * mpmath.log(x / y) for x, y in ((p, prior), (1 - p, 1 - prior)) if x > 0)

        low, high = prior, mpmath.mpf(1)
        if divergence(high) <= nats:
            return 1.0
        for _ in range(120):
            middle = (low + high) / 2
            low, high = (middle, high) if divergence(middle) <= nats else (low, middle)
        return float(low)
