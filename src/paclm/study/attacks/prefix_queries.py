"""Is a record in the corpus? What a caller counts who prompts every prefix of a record for one token, many times.

At each position of a record something was seen in some of the queries: a charge (under `dissent`, where the worlds
differ), or the record's own next token. Scores of a record, each higher for likelier members:

    rate         how often it was seen
    reference    how much more often than the public model's probabilities say
    calibrated   how much more often than at such positions of records that are known not to be in the corpus
    likelihood   log likelihood ratio, as LiRA: against such positions of known members

"Such positions" are positions with the same features: what the public model says, and how often it was seen in shadow
corpora with and without the record, where there are any. The attacker's models are fitted on other records than those
that they score (by cluster). Knows no engine and no budget.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray

FOLDS = 5
_RIDGE = 1.0  # of standardized features
_STEPS = 30  # of Newton's method; it converges in about six


class Seen(NamedTuple):
    """Counts at the n positions of all records."""

    counts: IntArray  # (n,) queries in which it was seen
    queries: int  # at each position
    record: IntArray  # (n,) which record, from 0

    def rates(self) -> FloatArray:
        """The share of a record's queries in which it was seen, per record."""
        seen: FloatArray = np.bincount(self.record, self.counts) / (np.bincount(self.record) * self.queries)
        return seen


def excess_over(seen: Seen, chance: FloatArray) -> FloatArray:
    """By how many standard deviations each record was seen more often than with these chances (n,)."""
    expected, size = seen.queries * chance, int(seen.record.max()) + 1
    excess = np.bincount(seen.record, seen.counts - expected, size)
    variance = np.bincount(seen.record, expected * (1.0 - chance), size)
    scores: FloatArray = excess / np.sqrt(np.maximum(variance, 1e-12))
    return scores


def score_records(
    seen: Seen, features: FloatArray, is_member: BoolArray, clusters: IntArray, rng: np.random.Generator
) -> dict[str, FloatArray]:
    """The two calibrated scores of every record; features (n, f), is_member and clusters (records,).

    Each record is scored by models fitted on the known members and others of the other folds.
    """
    if not (len(seen.counts) == len(seen.record) == len(features) and len(is_member) == len(clusters)):
        raise InvalidInput("There must be features for every position, and a side and a cluster for every record.")
    names, index = np.unique(clusters, return_inverse=True)
    fold_of = (rng.permutation(len(names)) % FOLDS)[index][seen.record]  # (n,)
    design = with_products(features)
    size = len(is_member)
    excess, variance, ratio = np.zeros(size), np.zeros(size), np.zeros(size)
    for fold in range(FOLDS):
        here = fold_of == fold
        if not here.any():
            continue
        inside, outside = (
            expected_rates(design, seen, ~here & (is_member[seen.record] == side), here) for side in (True, False)
        )
        counts, at = seen.counts[here], seen.record[here]
        excess += np.bincount(at, counts - seen.queries * outside, size)
        variance += np.bincount(at, seen.queries * outside * (1.0 - outside), size)
        gain = counts * np.log(inside / outside) + (seen.queries - counts) * np.log((1.0 - inside) / (1.0 - outside))
        ratio += np.bincount(at, gain, size)
    return {"calibrated": excess / np.sqrt(np.maximum(variance, 1e-12)), "likelihood": ratio}


def expected_rates(design: FloatArray, seen: Seen, known: BoolArray, wanted: BoolArray) -> FloatArray:
    """A binomial regression fitted on the known positions; its rates at the wanted ones."""
    if not known.any():
        raise InvalidInput(f"Records of both sides are needed in each of {FOLDS} folds. Attack more records.")
    x, counts = design[known], seen.counts[known]
    mean, spread = x.mean(axis=0), x.std(axis=0)
    spread = np.where(spread > 1e-9, spread, 1.0)
    x = np.column_stack([np.ones(len(x)), (x - mean) / spread])
    share = (counts.sum() + 0.5) / (seen.queries * len(x) + 1.0)
    weights = np.zeros(x.shape[1])
    weights[0] = logit(share)
    penalty = np.full(x.shape[1], _RIDGE)
    penalty[0] = 1e-6
    for _ in range(_STEPS):
        rates = expit(x @ weights)
        slope = x.T @ (counts - seen.queries * rates) - penalty * weights
        curvature = (x * (seen.queries * rates * (1.0 - rates))[:, None]).T @ x + np.diag(penalty)
        step = np.linalg.solve(curvature, slope)
        weights += step * min(1.0, 5.0 / max(float(np.abs(step).max()), 1e-12))
        if np.abs(step).max() < 1e-6:
            break
    found: FloatArray = expit(np.column_stack([np.ones(wanted.sum()), (design[wanted] - mean) / spread]) @ weights)
    return np.clip(found, 1e-6, 1.0 - 1e-6)


def with_products(features: FloatArray) -> FloatArray:
    """Features (n, f), and the products of any two of them."""
    first, second = np.triu_indices(features.shape[1])
    scaled = (features - features.mean(axis=0)) / np.maximum(features.std(axis=0), 1e-9)
    return np.column_stack([scaled, scaled[:, first] * scaled[:, second]])


def shadow_features(dissent: IntArray, queries: int, is_inside: BoolArray, record: IntArray) -> FloatArray:
    """What shadow corpora add to the features: (n, 4) from counts (n, shadows) and who is inside (records, shadows).

    The rate with and without the record, at the position and over the whole record, as smoothed log odds.
    """
    inside = is_inside[record]  # (n, shadows)
    columns = []
    for side in (inside, ~inside):
        hits, asked = (dissent * side).sum(axis=1), queries * side.sum(axis=1)
        columns.append(logit((hits + 0.5) / (asked + 1.0)))
        whole = np.bincount(record, hits) + 0.5, np.bincount(record, asked) + 1.0
        columns.append(logit(whole[0] / whole[1])[record])
    return np.column_stack(columns)
