"""Answers in OpenAI's formats: whole objects and stream events, for completions and for chat.

Adds a `privacy` object: what the request cost, what is left, and the bound at the committed total. Only the admin sees
which tokens had dissent, or a cost that counts them; every caller sees which tokens came from the public model.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import quote

from paclm.curator.streams import BudgetFigures, FinishReason, Mark, Piece, Tokenizer
from paclm.privacy.accounting import nats_up
from paclm.server.chat_schemas import Ask, ChatAsk
from paclm.server.curator_client import Transcript
from paclm.server.logprobs import TokenEntry, TokenLogprobs
from paclm.server.refusals import Refused
from paclm.server.schemas import CompletionAsk

DONE = b"data: [DONE]\n\n"
quoted = json.JSONEncoder(ensure_ascii=False).encode
"""A text as JSON."""
_AFTERWARDS = ("charged_nats", "private_tokens", "public_tokens")
Figures = dict[str, Any]


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Reply(ABC):
    """The format of one request's answers."""

    prefix: str

    def __init__(self, model_id: str, *, is_admin: bool) -> None:
        self.id = f"{self.prefix}{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model_id
        self._is_admin = is_admin
        self._unmarked: dict[int, list[Mark]] = {}  # marks of tokens whose text is still held back

    @abstractmethod
    def opening(self, num_answers: int) -> bytes:
        """Events before the first token."""

    @abstractmethod
    def whole(self, streams: Sequence[Transcript], cost: Figures) -> bytes:
        """The whole response body."""

    @abstractmethod
    def events(self, answer: int, piece: Piece, cost: Figures | None = None) -> bytes:
        """The events of one piece; none while its text is held back, as part of a character or of a stop string.

        `cost` is given with the last piece of the request.
        """

    @abstractmethod
    def held_back(self, streams: Sequence[Transcript]) -> bytes:
        """Before the error of a stream that is cut off: text and marks of released tokens that were held back."""

    @abstractmethod
    def failure(self, refusal: Refused) -> bytes:
        """The end of a stream that is cut off."""

    @abstractmethod
    def closing(self, streams: Sequence[Transcript], cost: Figures) -> bytes:
        """The end of a stream that is complete."""

    def _shown_marks(self, marks: list[Mark]) -> list[Mark | Literal["private"]]:
        if self._is_admin:
            return list(marks)
        return [mark if mark == "public" else "private" for mark in marks] if "public" in marks else []


def ending(finish_reason: FinishReason | None) -> dict[str, Any]:
    """Why an answer ended. One that could not go on in its grammar was cut short, and `stop_reason` says by what."""
    if finish_reason == "grammar":
        return {"finish_reason": "length", "stop_reason": "grammar"}
    return {"finish_reason": finish_reason}


class ChoicesReply(Reply):
    """Answers as a list of choices."""

    kind: str
    chunk_kind: str
    has_plain_events = True
    """Whether a piece of text is shown as it is."""

    def __init__(self, ask: Ask, model_id: str, *, is_admin: bool, tokenizer: Tokenizer) -> None:
        super().__init__(model_id, is_admin=is_admin)
        self._answers_each = ask.answers_each
        self._wants_usage = ask.wants_usage
        self._tokenizer = tokenizer
        self._num_logprobs = ask.num_logprobs
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def _choice(self, index: int, stream: Transcript) -> dict[str, Any]:
        """A finished answer, without log-probabilities."""

    @abstractmethod
    def _delta(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        """A piece of an answer, without log-probabilities."""

    @abstractmethod
    def _written(self, index: int, entries: list[TokenEntry]) -> dict[str, Any]:
        """Log-probabilities of an answer."""

    def opening(self, num_answers: int) -> bytes:
        """Events before the first token: none."""
        return b""

    def whole(self, streams: Sequence[Transcript], cost: Figures) -> bytes:
        """The whole response body."""
        choices = [
            self._choice(index, stream) | self._all_logprobs(index, stream) for index, stream in enumerate(streams)
        ]
        content = self._frame(self.kind, choices) | {"usage": self._usage(streams), "privacy": cost}
        return json.dumps(content, ensure_ascii=False).encode()

    def events(self, answer: int, piece: Piece, cost: Figures | None = None) -> bytes:
        """The event of one piece; none while its text is held back, as part of a character or of a stop string.

        `cost` goes with the last piece of the request.
        """
        marks = self._unmarked.setdefault(answer, [])
        if piece.mark not in ("dp", "student"):  # as all are, then
            marks.append(piece.mark)
        if piece.logprobs is not None:
            self._logprobs_of(answer).add(piece.token, piece.logprobs)
        if not piece.text and piece.finish_reason is None:
            return b""
        shown = self._shown_marks(marks)
        marks.clear()
        is_plain = piece.finish_reason is None and not shown and cost is None and self._num_logprobs is None
        if is_plain and self.has_plain_events:
            before, after = self._plain.get(answer) or self._plain_event(answer)
            return before + quoted(piece.text).encode() + after
        choice = self._delta(answer, piece.text, piece.finish_reason)
        content = self._frame(self.chunk_kind, [choice | self._new_logprobs(answer, piece.text, piece.finish_reason)])
        if shown or cost:
            content["privacy"] = ({"marks": shown} if shown else {}) | (cost or {})
        return event(content | self._no_usage())

    def _plain_event(self, answer: int) -> tuple[bytes, bytes]:
        """What surrounds the text in an event that holds nothing else: nearly all are of this kind."""
        placeholder = secrets.token_hex(16)
        whole = event(self._frame(self.chunk_kind, [self._delta(answer, placeholder, None)]) | self._no_usage())
        before, after = whole.split(f'"{placeholder}"'.encode())
        self._plain[answer] = before, after
        return before, after

    def _logprobs_of(self, answer: int) -> TokenLogprobs:
        if answer not in self._logprobs:
            self._logprobs[answer] = TokenLogprobs(self._tokenizer, self._num_logprobs or 0)
        return self._logprobs[answer]

    def _all_logprobs(self, answer: int, stream: Transcript) -> dict[str, Any]:
        for token, logprobs in stream.logprobs:
            self._logprobs_of(answer).add(token, logprobs)
        return self._new_logprobs(answer, stream.text, stream.finish_reason)

    def _new_logprobs(self, answer: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        """Those of the text that is shown now, if they were asked for."""
        if self._num_logprobs is None:
            return {}
        return {"logprobs": self._written(answer, self._logprobs_of(answer).show(text, finish_reason))}

    def held_back(self, streams: Sequence[Transcript]) -> bytes:
        """Before the error of a stream that is cut off: text and marks of released tokens that were held back."""
        events = []
        for index, stream in enumerate(streams):
            marks = self._shown_marks(self._unmarked.get(index, []))
            rest = self._rest(index, stream)
            if rest or marks:
                content = self._frame(self.chunk_kind, [self._delta(index, rest, None)]) | self._no_usage()
                events.append(event(content | ({"privacy": {"marks": marks}} if marks else {})))
        return b"".join(events)

    def _rest(self, index: int, stream: Transcript) -> str:
        """Text that was held back."""
        return stream.held_back

    def failure(self, refusal: Refused) -> bytes:
        """The error as an event."""
        return event(refusal.body())

    def closing(self, streams: Sequence[Transcript], cost: Figures) -> bytes:
        """The end of a stream, with counts only if asked for: many clients expect a choice in every other event."""
        if not self._wants_usage:
            return DONE
        return event(self._frame(self.chunk_kind, []) | {"usage": self._usage(streams), "privacy": cost}) + DONE

    def _no_usage(self) -> dict[str, Any]:
        return {"usage": None} if self._wants_usage else {}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = {"id": self.id, "object": kind, "created": self._created, "model": self._model}
        return {**frame, "choices": choices}

    def _usage(self, streams: Sequence[Transcript]) -> dict[str, int]:
        prompt = sum(len(stream.request.prompt) for stream in streams[:: self._answers_each])  # each prompt once
        answer = sum(stream.num_tokens for stream in streams)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


class TextReply(ChoicesReply):
    """`/v1/completions`"""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, ask: CompletionAsk, model_id: str, *, is_admin: bool, tokenizer: Tokenizer) -> None:
        super().__init__(ask, model_id, is_admin=is_admin, tokenizer=tokenizer)
        self._has_echo = bool(ask.echo)
        needs_prompts = ask.echo or ask.num_logprobs is not None
        self._prompts = [_as_text(prompt, tokenizer) for prompt in ask.prompt] if needs_prompts else []

    def _echo(self, index: int) -> str:
        return self._prompts[index // self._answers_each] if self._has_echo else ""

    def _written(self, index: int, entries: list[TokenEntry]) -> dict[str, Any]:
        return self._logprobs_of(index).as_text(entries, start=len(self._prompts[index // self._answers_each]))

    def _choice(self, index: int, stream: Transcript) -> dict[str, Any]:
        return self._delta(index, self._echo(index) + stream.text, stream.finish_reason)

    def _delta(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, **ending(finish_reason)}

    def opening(self, num_answers: int) -> bytes:
        echoes = ((index, self._echo(index)) for index in range(num_answers))
        choices = [self._delta(index, echo, None) for index, echo in echoes if echo]
        return b"".join(event(self._frame(self.kind, [choice]) | self._no_usage()) for choice in choices)


class ChatReply(ChoicesReply):
    """`/v1/chat/completions`"""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl-"
    first_content: str | None = ""

    def _written(self, index: int, entries: list[TokenEntry]) -> dict[str, Any]:
        return self._logprobs_of(index).as_chat(entries)

    def _choice(self, index: int, stream: Transcript) -> dict[str, Any]:
        message = {"role": "assistant", "content": stream.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, **ending(stream.finish_reason)}

    def _delta(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, **ending(finish_reason)}

    def opening(self, num_answers: int) -> bytes:
        begins = {"delta": {"role": "assistant", "content": self.first_content}}
        choices = [{"index": index, **begins, "logprobs": None, **ending(None)} for index in range(num_answers)]
        return b"".join(event(self._frame(self.chunk_kind, [choice]) | self._no_usage()) for choice in choices)


def reply_for(ask: Ask, model_id: str, *, is_admin: bool, tokenizer: Tokenizer) -> Reply:
    """The format for the request."""
    if isinstance(ask, ChatAsk):
        return ChatReply(ask, model_id, is_admin=is_admin, tokenizer=tokenizer)
    return TextReply(ask, model_id, is_admin=is_admin, tokenizer=tokenizer)


def _as_text(prompt: str | list[int], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def headers_of(cost: Figures, *, is_complete: bool = True) -> dict[str, str]:
    """The `privacy` object as response headers, for clients that drop it. Before a stream: what is known by then."""
    return {
        header_name(name): quote(value, safe=" ") if isinstance(value, str) else json.dumps(value)
        for name, value in cost.items()
        if value is not None and (is_complete or name not in _AFTERWARDS)
    }


def header_name(figure: str) -> str:
    """The header that says a figure of `privacy`."""
    return f"paclm-{figure.replace('_', '-')}"


def cost_of(streams: Sequence[Transcript], figures: BudgetFigures, price: int | None = None) -> Figures:
    """What a request cost, and the state of the budget. With a price, as if every private token had cost that."""
    num_public = sum(stream.num_public for stream in streams)
    num_private = sum(stream.num_tokens for stream in streams) - num_public
    units = sum(stream.charged_units for stream in streams) if price is None else num_private * price
    return {
        "charged_nats": nats_up(units),
        "remaining_tokens": figures["remaining_tokens"],
        "mia_bound": figures["mia_bound"],
        "private_tokens": num_private,
        "public_tokens": num_public,
    }
