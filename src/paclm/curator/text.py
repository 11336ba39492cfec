"""From token ids to text while they come: no half characters, and nothing of a stop string before it is certain.

Knows nothing of worlds, releases or budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paclm.errors import EngineError, InvalidInput

_BROKEN = "\ufffd"
"""What a decoder writes for bytes that are not (yet) a character."""
_OVERLAP = 6
"""Tokens decoded again before the new ones: some tokenizers write a token differently at the start of a text."""
_LONGEST_CHARACTER = 4
"""A character has at most so many bytes, hence tokens; whatever is broken for longer stays broken."""


class Tokenizer(Protocol):
    """What the curator asks of a tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, /, *, add_special_tokens: bool, verbose: bool) -> list[int]: ...

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt, as records are encoded; an empty prompt is the tokenizer's start token."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"The prompt is not valid UTF-8, from character {error.start + 1:,} on. Convert it first: iconv -f latin1 "
            "-t utf-8"
        ) from None
    if tokens := list(tokenizer.encode(text, add_special_tokens=False, verbose=False)):
        return tokens
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise EngineError("This tokenizer has no start token, so an empty prompt cannot be continued. Give some text.")
    return [int(start)]


class TextStream:
    """The text of one answer, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_OVERLAP:])
        self._done = len(self._tokens)  # tokens whose text is known
        self._open = self._count_broken(self._tokens)  # a prompt of token ids may end inside a character
        self._stop = tuple(stop)
        self._held = ""  # known, but perhaps the beginning of a stop string
        self.is_stopped = False
        """A stop string was found; the text ends before it."""

    def push(self, token: int) -> str:
        """Take one token and return the text that may leave now, often of an earlier token."""
        self._tokens.append(token)
        return self._emit(self._decode_new(is_last=False), is_last=False)

    def finish(self) -> str:
        """What was held back; nothing if a stop string was found."""
        return "" if self.is_stopped else self._emit(self._decode_new(is_last=True), is_last=True)

    @classmethod
    def rest(cls, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], tokens: Sequence[int]) -> str:
        """What is held back after these tokens, without a character that is not whole."""
        stream = cls(tokenizer, prompt, stop)
        for token in tokens:
            stream.push(token)
        return stream.finish().rstrip(_BROKEN)

    def _decode_new(self, is_last: bool) -> str:
        start = max(0, self._done - _OVERLAP)
        known = len(self._decode(self._tokens[start : self._done])) - self._open
        text = self._decode(self._tokens[start:])
        is_open = text.endswith(_BROKEN) and len(self._tokens) - self._done < _LONGEST_CHARACTER
        if is_open and not is_last:
            return ""
        self._done, self._open = len(self._tokens), 0
        return text[known:]

    def _emit(self, new: str, is_last: bool) -> str:
        text = self._held + new
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if is_last else self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _count_broken(self, tokens: list[int]) -> int:
        text = self._decode(tokens)
        return len(text) - len(text.rstrip(_BROKEN))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
