"""Cut texts into token blocks: at most so many tokens per record, and per block the base model's context.

The unit of privacy stays the record (or its group): all blocks of a record are in the same worlds. Knows no model; the
tokenizer is passed in.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paclm.config import TrainingConfig
from paclm.worlds import storage

IntArray = NDArray[np.int64]

_TEXTS_AT_ONCE = 4096
_CHARACTERS_AT_ONCE = 1 << 22


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


def encode_stream(tokenizer: TextEncoder, texts: Iterable[str]) -> Iterator[list[int]]:
    """Token ids of texts one after another, of which only some are in memory at a time."""
    for part in _parts(texts):
        yield from encode_texts(tokenizer, part)


def measure_lengths(
    texts: Iterable[str],
    tokenizer: TextEncoder,
    folder: Path,
    name: str,
    advance: Callable[[int], None] = lambda count: None,
) -> IntArray:
    """Tokenize texts in parts and return their lengths, (n,); finished parts are kept in `folder` and not repeated.

    A part is found again by the hash of its texts and of the tokenizer's `name`. The tokenizer works on all cores, and
    meanwhile the next part is read.
    """
    lengths, working = array("q"), list[Future[list[int]]]()

    def take() -> None:
        found = working.pop(0).result()
        lengths.extend(found)
        advance(len(found))

    with ThreadPoolExecutor(1) as pool:
        for part in _parts(texts):
            working.append(pool.submit(_measure_part, part, tokenizer, folder, name))
            if len(working) > 1:
                take()
        while working:
            take()
    return np.array(lengths, dtype=np.int64)


def _measure_part(texts: Sequence[str], tokenizer: TextEncoder, folder: Path, name: str) -> list[int]:
    digest = hashlib.sha256(name.encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    path = folder / digest.hexdigest()
    if path.is_file() and path.stat().st_size == 8 * len(texts):
        return list(array("q", path.read_bytes()))
    counter: Callable[[Sequence[str]], list[int]] | None = getattr(tokenizer, "token_counts", None)
    lengths = counter(texts) if counter else [len(ids) for ids in encode_texts(tokenizer, texts)]
    storage.write_private(path, array("q", lengths).tobytes())
    return lengths


def _parts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists of bounded size."""
    part, size = list[str](), 0
    for text in texts:
        part.append(text)
        size += len(text)
        if len(part) == _TEXTS_AT_ONCE or size >= _CHARACTERS_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def count_tokens(lengths: IntArray, max_record_tokens: int) -> TokenCounts:
    """What the cap leaves of records of these lengths."""
    kept = np.minimum(lengths, max_record_tokens)
    return TokenCounts(
        num_tokens=int(kept.sum()),
        median_per_record=float(np.median(lengths)),
        longest_record=int(lengths.max()),
        num_records_cut=int((lengths > max_record_tokens).sum()),
        num_tokens_dropped=int((lengths - kept).sum()),
    )
