"""Is a record in the universe? Scores of two attackers, and how well a score separates members from others.

The guarantee makes no promise about this question. Informed: holds all adapters, but does not know which record is in
which world. Black box: reads released text only, prompts with the beginning of a record it has, and compares the answer
with the rest: by shared n-grams, and by how much better a small model fitted on all released text predicts the record
than the same model fitted on text of the public model. Every score is higher for likelier members.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.leak import Estimate
from paclm.study.statistics import RESAMPLES

Tokens = Sequence[int]

LOWEST = 0.2  # the share of least likely tokens that min-k averages
SIZE = 3  # tokens of the longest n-grams
_WEIGHTS = (0.5, 0.3, 0.19, 0.01)  # of trigram, bigram, unigram and the uniform distribution in the surrogate


def informed_scores(log_probability: FloatArray) -> dict[str, float]:
    """Scores of one record from the log probabilities of its tokens, (worlds and the public model last, n).

    loss: how likely the worlds find it. reference: how much likelier than the public model. min-k: how likely its
    least likely tokens are. spread: how much the worlds differ, because half of them saw a member and half did not.
    """
    worlds, public = log_probability[:-1], log_probability[-1]
    tokens = worlds.mean(axis=0)  # (n,)
    count = max(1, math.ceil(LOWEST * tokens.size))
    return {
        "loss": float(tokens.mean()),
        "reference": float((tokens - public).mean()),
        "min-k": float(np.sort(tokens)[:count].mean()),
        "spread": float(worlds.mean(axis=1).std()),
    }


def shared_ngrams(released: Tokens, record: Tokens) -> float:
    """The share of the record's distinct n-grams that were released, averaged over n = 1 … SIZE."""
    shares = []
    for size in range(1, SIZE + 1):
        own = set(_ngrams(record, size))
        shares.append(len(own & set(_ngrams(released, size))) / len(own) if own else 0.0)
    return math.fsum(shares) / SIZE


class Surrogate:
    """A trigram model of the text it is fitted on, interpolated with shorter contexts."""

    def __init__(self, texts: Iterable[Tokens], vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._counts = [Counter[tuple[int, ...]]() for _ in range(SIZE + 1)]  # by length
        self._contexts = [Counter[tuple[int, ...]]() for _ in range(SIZE)]
        for text in texts:
            for size in range(1, SIZE + 1):
                for gram in _ngrams(text, size):
                    self._counts[size][gram] += 1
                    self._contexts[size - 1][gram[:-1]] += 1

    def log_likelihood(self, text: Tokens, before: Tokens) -> float:
        """Mean log probability of the tokens of a text that follows `before`, in nats."""
        whole = [*before[-(SIZE - 1) :], *text]
        start = len(whole) - len(text)
        terms = (math.log(self._probability(whole[max(0, i - SIZE + 1) : i + 1])) for i in range(start, len(whole)))
        return math.fsum(terms) / len(text)

    def _probability(self, gram: Tokens) -> float:
        total = _WEIGHTS[-1] / self._vocabulary
        for size in range(1, min(SIZE, len(gram)) + 1):
            own = tuple(gram[-size:])
            seen = self._contexts[size - 1][own[:-1]]
            if seen:
                total += _WEIGHTS[SIZE - size] * self._counts[size][own] / seen
        return total


def _ngrams(text: Tokens, size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(text[i : i + size]) for i in range(len(text) - size + 1))


FALSE_POSITIVES = (0.01, 0.001)


class Separation(NamedTuple):
    """One score on members and others."""

    auc: Estimate  # chance that a member scores higher than another record; a half is a guess
    true_positives: Estimate  # share of members found at a false positive rate of 1 % at most
    rare_true_positives: Estimate  # and of 0.1 % at most


def separate(scores: FloatArray, is_member: BoolArray, clusters: IntArray, rng: np.random.Generator) -> Separation:
    """AUC and true positives with bootstrap errors; scores, is_member and clusters are (n,)."""
    wins = _wins(scores, is_member, clusters)  # (members, others)
    members, others = scores[is_member], scores[~is_member]
    resampled = [_resampled_counts(clusters[side], rng) for side in (is_member, ~is_member)]
    whole = [np.ones((1, side.size)) for side in (members, others)]
    values, spread = (
        (_auc(wins, *pair), *(_true_positives(share, members, others, *pair) for share in FALSE_POSITIVES))
        for pair in (whole, resampled)
    )
    return Separation(*(Estimate(float(v[0]), float(s.std(ddof=1))) for v, s in zip(values, spread, strict=True)))


def difference(
    scores: FloatArray, other: FloatArray, is_member: BoolArray, clusters: IntArray, rng: np.random.Generator
) -> Estimate:
    """AUC of the first score less that of the second on the same records; both are resampled together."""
    more = _wins(scores, is_member, clusters) - _wins(other, is_member, clusters)
    resampled = [_resampled_counts(clusters[side], rng) for side in (is_member, ~is_member)]
    return Estimate(float(more.mean()), float(_auc(more, *resampled).std(ddof=1)))


def _wins(scores: FloatArray, is_member: BoolArray, clusters: IntArray) -> FloatArray:
    """Whether each member scores higher than each other record, a half where they tie: (members, others)."""
    if not scores.shape == is_member.shape == clusters.shape or is_member.all() or not is_member.any():
        raise InvalidInput("There must be a score, a side and a cluster for every record, and records on both sides.")
    members, others = scores[is_member], scores[~is_member]
    wins: FloatArray = (members[:, None] > others) + 0.5 * (members[:, None] == others)
    return wins


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


def _true_positives(
    false_positives: float, members: FloatArray, others: FloatArray, drawn: FloatArray, against: FloatArray
) -> FloatArray:
    """Weights of members (r, n) and others (r, k) → the share of members above the threshold of each resample."""
    order = np.argsort(-others, kind="stable")
    taken = against[:, order].cumsum(axis=1)  # false positives when this one and all above are called members
    is_too_many = taken > false_positives * taken[:, -1:]
    threshold = others[order][is_too_many.argmax(axis=1)]  # (r,) only scores above it are called members
    found: FloatArray = (drawn * (members > threshold[:, None])).sum(axis=1) / drawn.sum(axis=1)
    return found
