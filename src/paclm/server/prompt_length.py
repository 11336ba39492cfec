"""A lower bound on the tokens of a text: a prompt that surely does not fit is refused before it is tokenized.

A token of a byte-level BPE covers the bytes it is made of. So n bytes of one value need at least n / m tokens, where m
is the most bytes of that value in one token. The bound is the largest of these, and of the same for all bytes together;
bytes that the vocabulary lacks are dropped and do not count. Other tokenizers may drop or merge any characters: for
them the bound is 0.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paclm.curator.streams import Tokenizer

_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""Characters of a byte-level vocabulary, and the bytes they stand for."""
_LONGEST_DECOMPOSITION = 4
"""NFC makes one character of so many at most."""


class PromptLength:
    """The bound for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        described: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
        self._is_known = _known_bytes(described)
        self._is_composed = described.get("normalizer") is not None
        self._most = _most_in_a_token(described) if self._is_known.any() else np.ones(257, dtype=np.int64)

    def least_tokens(self, text: str) -> int:
        """The text has at least this many tokens."""
        if self._is_composed and not text.isascii():
            return len(text) // int(_LONGEST_DECOMPOSITION * self._most[-1]) if self._is_known.all() else 0
        content = np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
        counts = np.bincount(content, minlength=256) * self._is_known
        return int((-(-np.append(counts, counts.sum()) // self._most)).max())


def _known_bytes(described: dict[str, Any]) -> NDArray[np.bool_]:
    """The bytes that a token stands for, one by one or with others; none unless the tokenizer is known to keep them."""
    model, normalizer = described.get("model") or {}, described.get("normalizer") or {"type": "NFC"}
    split = described.get("pre_tokenizer") or {}
    steps = split["pretokenizers"] if split.get("type") == "Sequence" else [split]
    known = np.zeros(256, dtype=np.bool_)
    if (
        model.get("type") == "BPE"
        and not (model["continuing_subword_prefix"] or model["end_of_word_suffix"])
        and normalizer["type"] == "NFC"
        and any(step.get("type") == "ByteLevel" for step in steps)
        and all(step["type"] in ("ByteLevel", "Split", "Digits", "Punctuation") for step in steps)
        and not any(step.get("behavior") == "Removed" for step in steps)
        and not any(token["lstrip"] or token["rstrip"] for token in described["added_tokens"])
    ):
        known[[byte for character, byte in _BYTE_OF.items() if character in model["vocab"]]] = True
    return known


def _most_in_a_token(described: dict[str, Any]) -> NDArray[np.int64]:
    """The most bytes of each value in one token, and in the last place the most bytes of any. (257,)"""
    added = {token["content"] for token in described["added_tokens"]}
    vocabulary = described["model"]["vocab"].keys() - added
    tokens = [token.encode() for token in added]
    tokens += [bytes(_BYTE_OF[character] for character in token if character in _BYTE_OF) for token in vocabulary]
    lengths = np.array([len(token) for token in tokens])
    owner = np.repeat(np.arange(len(tokens)), lengths)
    found, counts = np.unique(owner * 256 + np.frombuffer(b"".join(tokens), np.uint8), return_counts=True)
    most = np.ones(257, dtype=np.int64)
    np.maximum.at(most, found % 256, counts)
    most[-1] = lengths.max()
    return most
