"""A 5-gram model for comparison, with interpolated modified Kneser–Ney smoothing, over the tokens of `tiny`.

Knows token ids only. One end-of-text token precedes each document; contexts reach back to it and no further. It
is never predicted here, whereas `tiny` keeps some probability for it at every position: the comparison favours the
n-grams.

A table of n-grams is sorted by one integer each: (row of its first n-1 tokens in the table below) × vocabulary + its
last token. Rows fit 32 bits, so five tokens of 13 bits need no wider key, and counting is one sort for each order.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1998), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .data import TokenArray, pack

ORDER = 5
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
"""Where a text is too small to have n-grams seen one, two, three and four times."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Table:
    """The n-grams of one order: p(last | context) = share + left_over[context] · p(last | context less its first)."""

    keys: IntArray  # (G,), ascending
    share: FloatArray  # (G,)
    left_over: FloatArray  # (H,): of each (n-1)-gram, 1 where nothing was ever seen after it


@dataclass(frozen=True, slots=True)
class KneserNey:
    vocab_size: int
    end_of_text: int
    tables: tuple[Table, ...]  # of 1-grams, 2-grams, …


def train_ngrams(documents: list[TokenArray], vocab_size: int, end_of_text: int, order: int = ORDER) -> KneserNey:
    """Count and smooth. 45 million tokens take 5.2 GiB at the peak."""
    stream = pack(documents, end_of_text)  # (N,)
    is_target = stream[1:] != end_of_text
    rows = stream.astype(np.int32)  # (N,): of the n-gram that ends here, -1 where a document starts inside it
    keys: IntArray = np.arange(vocab_size)
    counts: IntArray = np.bincount(stream[stream != end_of_text], minlength=vocab_size)
    is_opening = keys == end_of_text  # n-grams that start with end-of-text
    num_contexts = 1
    tables = []
    for _ in range(order - 1):
        has_longer = (rows[:-1] >= 0) & is_target
        longer = rows[:-1][has_longer] * np.int64(vocab_size) + stream[1:][has_longer]
        longer, rows_of, longer_counts = np.unique(longer, return_inverse=True, return_counts=True)
        # Below the highest order an n-gram counts the different tokens seen before it; nothing precedes an opening one.
        suffix = np.empty(len(longer), dtype=np.int32)
        suffix[rows_of] = rows[1:][has_longer]
        counts = np.where(is_opening, counts, np.bincount(suffix, minlength=len(keys)))
        tables.append(smooth(keys, counts, num_contexts, vocab_size))
        # One order up.
        rows = np.full(len(stream), -1, dtype=np.int32)
        rows[1:][has_longer] = rows_of
        is_opening = is_opening[longer // vocab_size]
        num_contexts, keys, counts = len(keys), longer, longer_counts
    tables.append(smooth(keys, counts, num_contexts, vocab_size))
    return KneserNey(vocab_size, end_of_text, tuple(tables))


def smooth(keys: IntArray, counts: IntArray, num_contexts: int, vocab_size: int) -> Table:
    """Take a discount off every count; what a context loses goes to the next lower order."""
    context = keys // vocab_size  # (G,)
    discount = discounts(counts)[np.minimum(counts, 3)]  # (G,)
    total = np.bincount(context, weights=counts, minlength=num_contexts)  # (H,)
    lost = np.bincount(context, weights=discount, minlength=num_contexts)  # (H,)
    left_over = np.divide(lost, total, out=np.ones(num_contexts), where=total > 0)
    return Table(keys, (counts - discount) / total[context], left_over)


def discounts(counts: IntArray) -> FloatArray:
    """What an n-gram seen 0, 1, 2, and 3 or more times loses."""
    num_seen = [int(np.count_nonzero(counts == times)) for times in (1, 2, 3, 4)]
    found = FALLBACK_DISCOUNTS
    if all(num_seen):
        one, two, three, four = num_seen
        share = one / (one + 2 * two)
        estimate = (1 - 2 * share * two / one, 2 - 3 * share * three / two, 3 - 4 * share * four / three)
        if all(0 < value < times for times, value in enumerate(estimate, 1)):
            found = estimate
    return np.array([0.0, *found])


def token_nats(model: KneserNey, documents: list[TokenArray]) -> FloatArray:
    """The loss in nats of every token of the documents, one after another."""
    stream = pack(documents, model.end_of_text)  # (N,)
    is_target = stream[1:] != model.end_of_text
    chance = np.full(len(stream) - 1, 1 / model.vocab_size)  # (N-1,): of stream[1:]
    above = np.zeros(len(stream) - 1, dtype=np.int64)  # row of the context in the table below, -1 if it is not there
    for table in model.tables:
        key = above * model.vocab_size + stream[1:]
        row = np.minimum(np.searchsorted(table.keys, key), len(table.keys) - 1)
        is_context = above >= 0
        is_seen = is_context & (table.keys[row] == key)
        left_over = np.where(is_context, table.left_over[above], 1.0)
        chance = left_over * chance + np.where(is_seen, table.share[row], 0.0)
        if table is model.tables[0]:
            above = stream[:-1].astype(np.int64)
        else:
            above = np.concatenate([[-1], np.where(is_seen & is_target, row, -1)[:-1]])
    nats: FloatArray = -np.log(chance[is_target])
    return nats


def next_token(model: KneserNey, context: list[int]) -> FloatArray:
    """The distribution after a context that starts a document if its first token is end-of-text."""
    chance = np.full(model.vocab_size, 1 / model.vocab_size)  # (V,)
    for n, table in enumerate(model.tables):
        if n > len(context):
            break
        row = _find(model, context[len(context) - n :])
        if row is None:
            break  # nor is any longer context
        first, last = np.searchsorted(table.keys, [row * model.vocab_size, (row + 1) * model.vocab_size])
        chance = table.left_over[row] * chance
        chance[table.keys[first:last] % model.vocab_size] += table.share[first:last]
    return chance


def _find(model: KneserNey, tokens: list[int]) -> int | None:
    """The row of an n-gram in its table, found token by token."""
    row = 0
    for table, token in zip(model.tables, tokens, strict=False):
        key = row * model.vocab_size + token
        row = int(np.searchsorted(table.keys, key))
        if row == len(table.keys) or table.keys[row] != key:
            return None
    return row
