"""Is a record in the universe? Scores of two attackers; the guarantee makes no promise about this question.

Informed: holds all adapters, but does not know which record is in which world. Black box: reads released text only,
prompts with the beginning of a record it has, and compares the answer with the rest of the record: by shared n-grams,
and by how much better a small model fitted on all released text predicts the record than the same model fitted on text
of the public model. Every score is higher for likelier members.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from paclm.privacy.belief import FloatArray

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
