"""Log-probabilities of an answer's tokens in OpenAI's two forms. Offered under the promise `corpus` only.

A token's entry is shown with the text that the token adds, so a stream never shows one whose text is held back, and
the tokens of a stop string or the end token, which are no part of the text, have none.
"""

from __future__ import annotations

import codecs
import re
from functools import lru_cache
from typing import Any, NamedTuple

from paclm.curator.streams import FinishReason, Logprobs, Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_LOWEST = -9999.0
"""JSON has no infinity."""


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token adds to a text, as UTF-8: often a part of a character only."""
    written = str(tokenizer.convert_ids_to_tokens(token))
    if found := _BYTE_TOKEN.fullmatch(written):
        return bytes.fromhex(found[1])
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if "\ufffd" in text and all(sign in _byte_of() for sign in written):
        return bytes(_byte_of()[sign] for sign in written)
    if written.startswith(_SPACE) and not text.startswith(" "):
        text = " " + text
    return str(text).encode()


class TokenEntry(NamedTuple):
    """One token of the answer."""

    number: int
    """Its id."""
    logprobs: Logprobs
    offset: int
    """Where its text begins, in characters."""


class TokenLogprobs:
    """Those of one answer, in the order of its tokens."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._num_characters = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[TokenEntry] = []
        self._num_shown = 0

    def add(self, token: int, logprobs: Logprobs) -> None:
        """A token of the answer; shown once its text is."""
        self._pending.append(TokenEntry(token, logprobs, self._num_characters))
        if token not in self._tokenizer.all_special_ids:
            self._num_characters += len(self._utf8.decode(bytes_of(self._tokenizer, token)))

    def show(self, text: str, finish_reason: FinishReason | None) -> list[TokenEntry]:
        """The entries that go with the next piece of text."""
        self._num_shown += len(text)
        count = sum(entry.offset < self._num_shown for entry in self._pending)
        if finish_reason in ("length", "grammar"):
            count = len(self._pending)
        shown, self._pending = self._pending[:count], self._pending[count:]
        return shown

    def as_chat(self, entries: list[TokenEntry]) -> dict[str, Any]:
        """`logprobs` of a chat completion."""
        return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}

    def _chat_entry(self, entry: TokenEntry) -> dict[str, Any]:
        top = [self._described(*one) for one in entry.logprobs.top[: self._num_top]]
        return {**self._described(entry.number, entry.logprobs.own), "top_logprobs": top}

    def _described(self, token: int, logprob: float) -> dict[str, Any]:
        content = bytes_of(self._tokenizer, token)
        return {"token": _as_text(content), "logprob": max(logprob, _LOWEST), "bytes": list(content)}

    def as_text(self, entries: list[TokenEntry], start: int) -> dict[str, Any]:
        """`logprobs` of a completion; its text starts there, counted from the beginning of the prompt."""
        return {
            "tokens": [self._text_of(entry.number) for entry in entries],
            "token_logprobs": [max(entry.logprobs.own, _LOWEST) for entry in entries],
            "top_logprobs": [self._likely(entry) for entry in entries] if self._num_top else None,
            "text_offset": [start + entry.offset for entry in entries],
        }

    def _likely(self, entry: TokenEntry) -> dict[str, float]:
        """The most likely tokens by text, and the chosen one even if it is not among them."""
        ranked = [*entry.logprobs.top[: self._num_top], (entry.number, entry.logprobs.own)]
        found: dict[str, float] = {}
        for token, logprob in ranked:
            found.setdefault(self._text_of(token), max(logprob, _LOWEST))
        return found

    def _text_of(self, token: int) -> str:
        return _as_text(bytes_of(self._tokenizer, token))


def _as_text(content: bytes) -> str:
    """A part of a character is written as OpenAI does: bytes:\\xe2\\x80"""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
