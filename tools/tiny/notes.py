"""Notes of made-up hospitals: which are trained on, which are not, and writing many of them on all cores.

A seed names a hospital (`paclm.worlds.clinic`). Those trained on have seeds from 1,000,000; of these, the last 1 % are
held out like the last 1 % of books and articles. Hospital 7 is the private one of `clinic:N`, 100 to 199 are for tuning
and measuring; none of them is ever trained on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from tokenizers import Tokenizer

from paclm.worlds.clinic import generate_notes

from .data import HELD_OUT_SHARE, TokenArray, count_bytes, encode_documents

FIRST_TRAINED = 1_000_000
NEVER_TRAINED = range(100, 200)

_tokenizer: Tokenizer | None = None  # of a worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Hospitals:
    """Which hospitals, and how many notes of each: the first ones. Many of few notes are harder to learn by heart."""

    count: int = 20_000
    notes_each: int = 40

    @property
    def num_held_out(self) -> int:
        return math.ceil(HELD_OUT_SHARE * self.count)

    @property
    def train(self) -> range:
        return range(FIRST_TRAINED, FIRST_TRAINED + self.count - self.num_held_out)

    @property
    def held_out(self) -> range:
        return range(self.train.stop, FIRST_TRAINED + self.count)


def write_notes(seed: int, num_notes: int) -> list[str]:
    """The first notes of one hospital."""
    return [note["text"] for note in generate_notes(num_notes, seed)]


def written_by_all(seeds: range, num_notes: int) -> list[str]:
    """The first notes of each hospital, in the order of the seeds."""
    with _workers() as run:
        return [text for texts in run(partial(write_notes, num_notes=num_notes), seeds) for text in texts]


def encoded_by_all(tokenizer: Tokenizer, seeds: range, num_notes: int) -> tuple[list[TokenArray], int]:
    """The same as token ids, one array a note, and the bytes of their text."""
    documents: list[TokenArray] = []
    num_bytes = 0
    with _workers(tokenizer.to_str()) as run:
        for encoded, size in run(partial(_encode_notes, num_notes=num_notes), seeds):
            documents += encoded
            num_bytes += size
    return documents, num_bytes


def _encode_notes(seed: int, num_notes: int) -> tuple[list[TokenArray], int]:
    texts = write_notes(seed, num_notes)
    assert _tokenizer is not None
    return encode_documents(_tokenizer, texts), count_bytes(texts)


@contextmanager
def _workers(tokenizer: str | None = None) -> Iterator[Callable[..., Iterator]]:
    """A `map` over one process a core; results come in order, so they do not depend on the number of cores."""
    # Not forked: threads of torch and CUDA may run already.
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=get_context("spawn"), initializer=_begin_worker, initargs=(tokenizer,)
    ) as pool:
        yield partial(pool.map, chunksize=16)


def _begin_worker(tokenizer: str | None) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core already
    _tokenizer = None if tokenizer is None else Tokenizer.from_str(tokenizer)
