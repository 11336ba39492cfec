"""Cut texts into token blocks: at most so many tokens per record, and per block the base model's context.

The unit of privacy stays the record (or its group): all blocks of a record are in the same worlds. Knows no model; the
tokenizer is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from paclm.config import TrainingConfig
from paclm.worlds.records import Record

_TEXTS_AT_ONCE = 1000


class TextEncoder(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    @property
    def all_special_ids(self) -> list[int]: ...
    def __len__(self) -> int: ...
    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]: ...
    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """Lengths of the records in tokens, and what the cap cuts off."""

    num_tokens: int  # trained on, after the cap
    median_per_record: float
    longest_record: int
    num_records_cut: int
    num_tokens_dropped: int


def encode_texts(tokenizer: TextEncoder, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, without special tokens and of any length."""
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def block_length(training: TrainingConfig, context: int) -> int:
    """Tokens per block under these settings, for a base model with this context."""
    return min(training.block_tokens or context, training.max_record_tokens)


def cut_blocks(token_ids: Sequence[int], block_tokens: int, max_record_tokens: int) -> list[list[int]]:
    """Cut one record into blocks; tokens beyond the cap are left out.

    Each block starts with the last token of the one before, so every token but the first is a target exactly once.
    """
    kept = list(token_ids[:max_record_tokens])
    stride = block_tokens - 1
    return [kept[start : start + block_tokens] for start in range(0, max(len(kept) - 1, 1), stride)]


def count_tokens(records: Iterable[Record], tokenizer: TextEncoder, max_record_tokens: int) -> TokenCounts:
    """Tokenize all records once and measure their lengths."""
    texts, counts = (record.text for record in records), list[int]()
    while batch := list(islice(texts, _TEXTS_AT_ONCE)):
        counts += [len(ids) for ids in encode_texts(tokenizer, batch)]
    lengths = np.array(counts)  # (n,)
    kept = np.minimum(lengths, max_record_tokens)
    return TokenCounts(
        num_tokens=int(kept.sum()),
        median_per_record=float(np.median(lengths)),
        longest_record=int(lengths.max()),
        num_records_cut=int((lengths > max_record_tokens).sum()),
        num_tokens_dropped=int((lengths - kept).sum()),
    )
