"""Is a record in the universe? Scores for an attacker who only reads released text.

He prompts with the beginning of a record that he has, and compares what comes back with how the record goes on: by
the n-grams they share, and by how much better a small model fitted on all released text predicts the record than the
same model fitted on text of the public model. The guarantee is silent about this question.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

Tokens = Sequence[int]

SIZE = 3
"""Tokens of the longest n-grams."""
_WEIGHTS = (0.5, 0.3, 0.19, 0.01)
"""Of trigram, bigram, unigram and the uniform distribution in the surrogate."""


def shared_ngrams(released: Tokens, record: Tokens) -> float:
    """The share of the record's distinct n-grams that were released, averaged over n = 1 … SIZE."""
    shares = []
    for size in range(1, SIZE + 1):
        own = set(_ngrams(record, size))
        shares.append(len(own & set(_ngrams(released, size))) / len(own) if own else 0.0)
    return math.fsum(shares) / SIZE


class Surrogate:
    """A trigram model of the text it is fitted on, interpolated with shorter contexts: quick, and good enough to lean
    towards what was released."""

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
        terms = (math.log(self._chance(whole[max(0, i - SIZE + 1) : i + 1])) for i in range(start, len(whole)))
        return math.fsum(terms) / len(text)

    def _chance(self, gram: Tokens) -> float:
        total = _WEIGHTS[-1] / self._vocabulary
        for size in range(1, min(SIZE, len(gram)) + 1):
            own = tuple(gram[-size:])
            seen = self._contexts[size - 1][own[:-1]]
            if seen:
                total += _WEIGHTS[SIZE - size] * self._counts[size][own] / seen
        return total


def _ngrams(text: Tokens, size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(text[i : i + size]) for i in range(len(text) - size + 1))
