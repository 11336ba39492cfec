"""The attacker of a user's view: tokens, coins and, knowing all adapters, every world's vote. Not R, so not the belief.

The noise of each step was calibrated to a belief that this attacker does not know, because it depends on the hidden
R of all earlier steps. But that belief is P(S | R_1 … R_t), and tokens are functions of the R: therefore

    P(S = s | tokens) = E[ belief_T(s) | tokens ]

and it suffices to average the curator's belief over the histories that could have given these tokens. A particle is
one such history, stored as its belief: its weight is the probability it gives to each released token, and its next R
is drawn given that token (sequential Monte Carlo, with S summed out exactly).

With finitely many particles the result q is not the exact posterior. But an attacker can compute it, and
for every q, log m + E[log q(S | tokens)] ≤ I(S; tokens): a lower bound on the token leak, up to sampling error.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr, logsumexp, ndtri_exp

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray, uniform_belief
from paclm.privacy.calibration import FLOOR, UPWARD, helmert, pair_variance

PARTICLES = 64
_PROPOSALS = 32  # R drawn per particle where more than two votes are cast: one that gives the token is kept
_DOUBT = 0.1  # probability, times the number of particles, that they all miss the truth


def token_belief(
    votes: IntArray, tokens: IntArray, per_token: float, rng: np.random.Generator, particles: int = PARTICLES
) -> FloatArray:
    """log q(s | tokens), (m,), for a stream of the Gaussian release: votes (T, m), released tokens (T,)."""
    if votes.ndim != 2 or tokens.shape != votes.shape[:1]:
        raise InvalidInput(f"There must be one token per row of votes, not {tokens.shape} for {votes.shape}.")
    if not 0.0 < per_token < math.inf or particles < 1:
        raise InvalidInput(f"The filter needs a finite budget and a particle, not {per_token!r} and {particles!r}.")
    attacker = TokenFilter(votes.shape[1], per_token, rng, particles)
    for row, token in zip(votes, tokens.tolist(), strict=True):
        attacker.see(row, token)
    return attacker.log_belief()


class TokenFilter:
    """The attacker's particles, token by token: for one who chooses the next prompt by what he believes."""

    def __init__(self, num_worlds: int, per_token: float, rng: np.random.Generator, particles: int = PARTICLES) -> None:
        self._per_token, self._rng = per_token, rng
        self._beliefs = np.tile(uniform_belief(num_worlds), (particles, 1))  # (N, m)
        self._log_weights = np.zeros(particles)

    def see(self, votes: IntArray, token: int) -> None:
        """One released token, and the votes (m,) that all worlds had cast."""
        candidates, choice = np.unique(votes, return_inverse=True)  # (a,), (m,)
        if candidates.size == 1:
            return
        index = int(candidates.searchsorted(token))
        step = _pair_step if candidates.size == 2 else _step
        mass = np.exp(self._beliefs) @ np.eye(candidates.size)[choice]
        fit, log_likelihood = step(mass, index, self._per_token, self._rng)
        if not np.isfinite(self._log_weights + fit).any():  # no particle explains the token: skip this step
            return
        beliefs = self._beliefs + log_likelihood[:, choice]
        beliefs -= logsumexp(beliefs, axis=1, keepdims=True)
        self._beliefs, self._log_weights = _resampled(beliefs, self._log_weights + fit, self._rng)

    def log_belief(self) -> FloatArray:
        """log q(s | tokens so far), (m,)."""
        particles, num_worlds = self._beliefs.shape
        joint = self._beliefs + (self._log_weights - logsumexp(self._log_weights))[:, None]  # (N, m)
        doubt = _DOUBT / particles  # few histories can all be certain of a wrong world: q keeps some mass elsewhere
        log_q: FloatArray = np.logaddexp(logsumexp(joint, axis=0) + math.log1p(-doubt), math.log(doubt / num_worlds))
        return log_q


def _pair_step(
    mass: FloatArray, token: int, per_token: float, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Two votes: log P(token) of every particle, and the log likelihood (N, 2) of an R drawn given the token."""
    axis = helmert(2)[:, 0]  # (2,)
    scale = np.sqrt(pair_variance(mass[:, 0], mass[:, 1], per_token))[:, None]  # (N, 1)
    side = 1.0 if token == 0 else -1.0  # R ≥ 0 releases the first
    standard = side * axis / scale  # (N, 2)
    log_tails = log_ndtr(standard)
    with np.errstate(divide="ignore"):  # a side whose mass has underflowed gets weight 0
        chances = np.log(mass) + log_tails  # (N, 2)
    fit: FloatArray = np.logaddexp(chances[:, 0], chances[:, 1])
    first = np.exp(chances[:, 0] - np.where(np.isfinite(fit), fit, 0.0))
    vote = (rng.random(len(mass)) > first).astype(np.int64)  # (N,) drawn given the token
    depth = np.log(1.0 - rng.random(len(mass))) + log_tails[np.arange(len(mass)), vote]
    R = axis[vote] - side * scale[:, 0] * ndtri_exp(depth)  # a uniform part of the tail that gives the token
    return fit, -0.5 * ((R[:, None] - axis) / scale) ** 2


def _step(mass: FloatArray, token: int, per_token: float, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Any number of votes: R is proposed many times, and one that gives the token is kept."""
    size, count = mass.shape[1], len(mass)
    axes, variances = calibrate_many(mass, per_token)  # (N, a, a-1), (N, a-1)
    points = rng.random((count, _PROPOSALS, 1)) * mass.sum(axis=1)[:, None, None]
    votes = np.minimum((points > mass.cumsum(axis=1)[:, None, :]).sum(axis=2), size - 1)  # (N, K)
    R = np.take_along_axis(axes, votes[:, :, None], axis=1)  # (N, K, a-1)
    R = R + np.sqrt(variances)[:, None] * rng.standard_normal(R.shape)
    is_token = (R @ axes.transpose(0, 2, 1)).argmax(axis=2) == token  # (N, K)
    with np.errstate(divide="ignore"):
        fit = np.log(is_token.mean(axis=1))  # (N,) unbiased before the logarithm; −inf: this history is dropped
    kept = R[np.arange(count), is_token.argmax(axis=1)]  # (N, a-1)
    log_likelihood = -0.5 * ((kept[:, None] - axes) ** 2 / variances[:, None]).sum(axis=2)  # (N, a)
    return fit, log_likelihood


def calibrate_many(mass: FloatArray, per_token: float) -> tuple[FloatArray, FloatArray]:
    """`calibrate_noise` for many masses (N, a): axes (N, a, a-1) and variances (N, a-1)."""
    basis = helmert(mass.shape[1])
    mass = mass / mass.sum(axis=1, keepdims=True)
    projected = mass @ basis  # (N, a-1)
    covariance = np.einsum("ai,na,aj->nij", basis, mass, basis) - projected[:, :, None] * projected[:, None, :]
    eigenvalues, eigenvectors = np.linalg.eigh(covariance)
    roots = np.sqrt(np.maximum(eigenvalues, 0.0) + FLOOR)
    return basis @ eigenvectors, roots * roots.sum(axis=1, keepdims=True) * UPWARD / (2.0 * per_token)


def _resampled(beliefs: FloatArray, log_weights: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """The same particles, or, where few of them carry the weight, a systematic draw from them."""
    weights = np.exp(log_weights - logsumexp(log_weights))
    count = len(weights)
    if 1.0 / float(weights @ weights) > 0.5 * count:
        return beliefs, log_weights - log_weights.max()
    points = (np.arange(count) + rng.random()) / count
    drawn = np.minimum(weights.cumsum().searchsorted(points), count - 1)
    return beliefs[drawn], np.zeros(count)


def leak_samples_by_tokens(beliefs: FloatArray, token_beliefs: FloatArray) -> FloatArray:
    """Their mean is a lower bound on I(S; tokens): log m + Σ_s belief(s) · log q(s), from beliefs and q (sessions, m).

    Given the whole history the secret is distributed as the belief says, so this is E[log q(S | tokens)] with far
    less sampling error than the realized secrets alone would give; `leak_by_truth` on q is that plain average. Worlds
    that the history rules out do not count, whatever q says.
    """
    p = np.exp(beliefs)
    terms = p * np.where(p > 0.0, token_beliefs, 0.0)
    leaked: FloatArray = math.log(beliefs.shape[1]) + terms.sum(axis=1)
    return leaked
