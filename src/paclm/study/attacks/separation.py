"""How well a score separates members from others: AUC, and the true positive rate at a small false positive rate.

Higher scores mean member. Errors come from resampling clusters (for example a patient's notes), each side on its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.leak import Estimate
from paclm.study.statistics import RESAMPLES

FALSE_POSITIVES = 0.01


class Separation(NamedTuple):
    """One score on members and others."""

    auc: Estimate  # chance that a member scores higher than another record; a half is a guess
    true_positives: Estimate  # share of members found at a false positive rate of 1 % at most


def separate(scores: FloatArray, is_member: BoolArray, clusters: IntArray, rng: np.random.Generator) -> Separation:
    """AUC and true positives with bootstrap errors; scores, is_member and clusters are (n,)."""
    if not scores.shape == is_member.shape == clusters.shape or is_member.all() or not is_member.any():
        raise InvalidInput("There must be a score, a side and a cluster for every record, and records on both sides.")
    members, others = scores[is_member], scores[~is_member]
    wins = (members[:, None] > others) + 0.5 * (members[:, None] == others)  # (members, others)
    resampled = [_resampled_counts(clusters[side], rng) for side in (is_member, ~is_member)]
    whole = [np.ones((1, side.size)) for side in (members, others)]
    values, spread = ((_auc(wins, *pair), _true_positives(members, others, *pair)) for pair in (whole, resampled))
    return Separation(*(Estimate(float(v[0]), float(s.std(ddof=1))) for v, s in zip(values, spread, strict=True)))


def roc(scores: FloatArray, is_member: BoolArray) -> tuple[FloatArray, FloatArray]:
    """False and true positive rates over all thresholds, from none to all."""
    thresholds = np.unique(scores)[::-1]
    sides = [np.sort(scores[side]) for side in (~is_member, is_member)]
    false, true = (1.0 - side.searchsorted(thresholds, side="left") / side.size for side in sides)
    return np.concatenate([[0.0], false]), np.concatenate([[0.0], true])


def _resampled_counts(clusters: IntArray, rng: np.random.Generator) -> FloatArray:
    """How often each record is drawn when whole clusters are resampled, (resamples, n)."""
    _, index = np.unique(clusters, return_inverse=True)
    size = int(index.max()) + 1
    counts = rng.multinomial(size, np.full(size, 1.0 / size), size=RESAMPLES)  # (resamples, clusters)
    return counts[:, index].astype(np.float64)


def _auc(wins: FloatArray, members: FloatArray, others: FloatArray) -> FloatArray:
    found: FloatArray = ((members @ wins) * others).sum(axis=1) / (members.sum(axis=1) * others.sum(axis=1))
    return found


def _true_positives(members: FloatArray, others: FloatArray, drawn: FloatArray, against: FloatArray) -> FloatArray:
    """Weights of members (r, n) and others (r, k) → the share of members above the threshold of each resample."""
    order = np.argsort(-others, kind="stable")
    taken = against[:, order].cumsum(axis=1)  # false positives when this one and all above are called members
    is_too_many = taken > FALSE_POSITIVES * taken[:, -1:]
    threshold = others[order][is_too_many.argmax(axis=1)]  # (r,) only scores above it are called members
    found: FloatArray = (drawn * (members > threshold[:, None])).sum(axis=1) / drawn.sum(axis=1)
    return found
