"""Answers in OpenAI's shapes: whole objects and stream events, for texts and for conversations.

Adds a `privacy` object: what the request cost, what is left, and the bound at the committed total. Which tokens the
worlds disputed is said to the admin alone; that a token came from the public model is said to everybody.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

from paclm.curator.figures import BudgetFigures
from paclm.curator.streams import Mark, Stream
from paclm.curator.text import Tokenizer
from paclm.server.jobs import Job
from paclm.server.scheduler import Token
from paclm.server.schemas import Ask, ChatAsk, CompletionAsk

DONE = b"data: [DONE]\n\n"
Figures = dict[str, Any]


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Reply(ABC):
    """How one request is answered."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, ask: Ask, model_id: str, *, is_admin: bool) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model_id
        self._answers_each = ask.answers_each
        self._wants_usage = ask.wants_usage
        self._is_admin = is_admin
        self._unmarked: dict[int, list[Mark]] = {}  # marks of tokens whose text has not been shown yet

    @abstractmethod
    def _choice(self, index: int, stream: Stream) -> dict[str, Any]:
        """A finished answer."""

    @abstractmethod
    def _delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A piece of an answer."""

    def opening(self, job: Job) -> Iterator[bytes]:
        """Events before the first token."""
        return iter(())

    def whole(self, job: Job, cost: Figures) -> bytes:
        """Everything at once."""
        choices = [self._choice(index, stream) for index, stream in enumerate(job.streams)]
        content = self._frame(self.kind, choices) | {"usage": self._usage(job), "privacy": cost}
        return json.dumps(content, ensure_ascii=False).encode()

    def events(self, token: Token, cost: Figures | None = None) -> Iterator[bytes]:
        """What one token adds: nothing while its text is held back, because it may be half a character or a stop.

        `cost` goes with the very last token of a stream.
        """
        marks = self._unmarked.setdefault(token.answer, [])
        marks.append(token.piece.mark)
        if not token.piece.text and token.finish_reason is None:
            return
        content = self._frame(self.chunk_kind, [self._delta(token.answer, token.piece.text, token.finish_reason)])
        shown = self._shown_marks(marks)
        if shown or cost:
            content["privacy"] = ({"marks": shown} if shown else {}) | (cost or {})
        self._unmarked[token.answer] = []
        yield event(content | self._no_usage())

    def rest(self, job: Job) -> Iterator[bytes]:
        """Before the error of a stream that was cut off: what was held back of tokens that have left, and their marks.

        A half character is not shown.
        """
        for index, stream in enumerate(job.streams):
            if stream.finish_reason != "cancelled":
                continue
            text, marks = stream.rest(), self._shown_marks(self._unmarked.get(index, []))
            if text or marks:
                content = self._frame(self.chunk_kind, [self._delta(index, text, None)]) | self._no_usage()
                yield event(content | ({"privacy": {"marks": marks}} if marks else {}))

    def closing(self, job: Job, cost: Figures) -> bytes:
        """The end of a stream, with counts if asked for: many clients expect a choice in every other event."""
        if not self._wants_usage:
            return DONE
        return event(self._frame(self.chunk_kind, []) | {"usage": self._usage(job), "privacy": cost}) + DONE

    def _shown_marks(self, marks: list[Mark]) -> list[Mark | Literal["private"]]:
        if self._is_admin:
            return list(marks)
        return [mark if mark == "public" else "private" for mark in marks] if "public" in marks else []

    def _no_usage(self) -> dict[str, Any]:
        return {"usage": None} if self._wants_usage else {}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = {"id": self.id, "object": kind, "created": self._created, "model": self._model}
        return {**frame, "choices": choices}

    def _usage(self, job: Job) -> dict[str, int]:
        prompt, answer = job.prompt_tokens(self._answers_each), job.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


class TextReply(Reply):
    """`/v1/completions`"""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, ask: CompletionAsk, model_id: str, *, is_admin: bool, tokenizer: Tokenizer) -> None:
        super().__init__(ask, model_id, is_admin=is_admin)
        self._echoed = [_as_text(prompt, tokenizer) for prompt in ask.prompt] if ask.echo else None

    def _echo(self, index: int) -> str:
        return "" if self._echoed is None else self._echoed[index // self._answers_each]

    def _choice(self, index: int, stream: Stream) -> dict[str, Any]:
        return self._delta(index, self._echo(index) + stream.text, stream.finish_reason)

    def _delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def opening(self, job: Job) -> Iterator[bytes]:
        for index in range(len(job.streams)):
            if echo := self._echo(index):
                yield event(self._frame(self.kind, [self._delta(index, echo, None)]) | self._no_usage())


class ChatReply(Reply):
    """`/v1/chat/completions`"""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def _choice(self, index: int, stream: Stream) -> dict[str, Any]:
        message = {"role": "assistant", "content": stream.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": stream.finish_reason}

    def _delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def opening(self, job: Job) -> Iterator[bytes]:
        for index in range(len(job.streams)):
            choice = self._delta(index, "", None) | {"delta": {"role": "assistant", "content": ""}}
            yield event(self._frame(self.chunk_kind, [choice]) | self._no_usage())


def reply_for(ask: Ask, model_id: str, *, is_admin: bool, tokenizer: Tokenizer) -> Reply:
    """The shape that fits the request."""
    if isinstance(ask, ChatAsk):
        return ChatReply(ask, model_id, is_admin=is_admin)
    return TextReply(ask, model_id, is_admin=is_admin, tokenizer=tokenizer)


def _as_text(prompt: str | list[int], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def cost_of(job: Job, figures: BudgetFigures) -> Figures:
    """What a request cost, and where the budget stands."""
    return {
        "charged_nats": job.charged_nats,
        "remaining_tokens": figures["remaining_tokens"],
        "mia_bound": figures["mia_bound"],
        "private_tokens": job.private_tokens,
        "public_tokens": job.public_tokens,
    }
