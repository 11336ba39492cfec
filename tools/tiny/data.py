"""The public text `tiny` is trained on, and the part of it held out; the notes are in `notes.py`.

Knows files and token ids; knows nothing of models. Each corpus is an xz-compressed JSONL file with one `text` a line.
The split is by order: the last 1 % of the records of each corpus, rounded up, are held out of the tokenizer's training,
of the model's and of the n-gram model's.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

CORPORA = ("public-books", "public-simplewiki")
HELD_OUT_SHARE = 0.01
END_OF_TEXT = "<|endoftext|>"

TokenArray = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Corpus:
    """One corpus, split by order."""

    name: str
    train: list[str]
    held_out: list[str]


def read_corpus(folder: Path, name: str, max_records: int | None = None) -> Corpus:
    """The texts of one corpus in file order; `max_records` takes only the front of the file, for trials."""
    path = folder / f"{name}.jsonl.xz"
    if not path.is_file():
        raise SystemExit(f"{path} is not there: --corpora must name the folder that holds {name}.jsonl.xz.")
    texts: list[str] = []
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if max_records is not None and len(texts) >= max_records:
                break
            texts.append(json.loads(line)["text"])
    num_held_out = math.ceil(HELD_OUT_SHARE * len(texts))
    return Corpus(name, texts[:-num_held_out], texts[-num_held_out:])


def read_corpora(folder: Path, max_records: int | None = None) -> list[Corpus]:
    return [read_corpus(folder, name, max_records) for name in CORPORA]


def count_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def pieces(text: str, size: int = 20_000) -> Iterator[str]:
    """Cut a long text after line breaks, where the tokenizer cuts as well: pieces encode as the whole does."""
    start = 0
    while len(text) - start > size:
        cut = text.find("\n", start + size) + 1
        while 0 < cut < len(text) and text[cut].isspace():
            cut = text.find("\n", cut) + 1
        if not 0 < cut < len(text):
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def encode_documents(tokenizer: Tokenizer, texts: list[str], batch: int = 4096) -> list[TokenArray]:
    """One array of token ids a document, without end-of-text. Parallel over all cores inside `tokenizers`."""
    owner: list[int] = []
    cut: list[str] = []
    for index, text in enumerate(texts):
        for piece in pieces(text):
            owner.append(index)
            cut.append(piece)
    parts: list[list[TokenArray]] = [[] for _ in texts]
    for first in range(0, len(cut), batch):
        encoded = tokenizer.encode_batch_fast(cut[first : first + batch], add_special_tokens=False)
        for index, encoding in zip(owner[first : first + batch], encoded, strict=True):
            parts[index].append(np.asarray(encoding.ids, dtype=np.uint16))
    return [np.concatenate(chunks) for chunks in parts]


def pack(documents: list[TokenArray], end_of_text: int) -> TokenArray:
    """All documents in one stream, end-of-text before each."""
    separator = np.array([end_of_text], dtype=np.uint16)
    return np.concatenate([part for document in documents for part in (separator, document)])
