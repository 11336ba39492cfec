"""The release in the full candidate space, as the paper writes it: dense covariance, matrix square root, pinv."""

import numpy as np
import scipy.linalg


def vote_covariance(votes, belief, num_candidates):
    """Covariance of the one-hot vote over all candidates under the belief (probabilities)."""
    onehot = np.eye(num_candidates)[votes]  # (m, k)
    mean = belief @ onehot
    return (onehot.T * belief) @ onehot - np.outer(mean, mean)


def noise_covariance(covariance, per_token):
    """Σ = C^{1/2}·tr(C^{1/2}) / (2b), the matrix form of the calibration."""
    eigenvalues, eigenvectors = scipy.linalg.eigh(covariance)
    root = (eigenvectors * np.sqrt(np.maximum(eigenvalues, 0.0))) @ eigenvectors.T
    return root * np.trace(root) / (2.0 * per_token)


def posterior(votes, belief, released, sigma):
    """Brute-force Bayes over worlds, one world at a time, with the pseudo-inverse of the noise covariance."""
    precision = np.linalg.pinv(sigma, rcond=1e-10, hermitian=True)
    log_weights = np.empty(len(votes))
    for world, vote in enumerate(votes):
        difference = released - np.eye(len(sigma))[vote]
        log_weights[world] = np.log(belief[world]) - 0.5 * difference @ precision @ difference
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def release(votes, belief, secret, per_token, rng, num_candidates):
    """One release over all candidates: (token, belief as probabilities). The benchmark's alternative.

    Dense but not wasteful: one eigendecomposition serves noise and pseudo-inverse, and worlds are scored as one array.
    """
    eigenvalues, vectors = np.linalg.eigh(vote_covariance(votes, belief, num_candidates))
    roots = np.sqrt(np.where(eigenvalues > 1e-12, eigenvalues, 0.0))
    variances = roots * roots.sum() / (2.0 * per_token)
    onehot = np.eye(num_candidates)
    released = onehot[votes[secret]] + vectors @ (np.sqrt(variances) * rng.standard_normal(num_candidates))
    voted = np.unique(votes)
    token = int(voted[np.argmax(released[voted])])
    inverse = np.divide(1.0, variances, out=np.zeros_like(variances), where=variances > 0)
    distance = ((released - onehot[votes]) @ vectors) ** 2 @ inverse  # (m,)
    log_weights = np.log(belief) - 0.5 * distance
    weights = np.exp(log_weights - log_weights.max())
    return token, weights / weights.sum()
