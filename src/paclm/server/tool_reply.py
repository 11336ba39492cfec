"""Chat answers that may be tool calls, in OpenAI's format: whole, and as pieces of the arguments."""

from __future__ import annotations

from typing import Any

from paclm.curator.streams import FinishReason, Piece, Tokenizer
from paclm.server.chat_schemas import ChatAsk
from paclm.server.curator_client import Transcript
from paclm.server.openai_format import ChatReply, Figures, ending
from paclm.server.tool_calls import AnswerPart, CallSplitter


class ToolReply(ChatReply):
    """`/v1/chat/completions` with tools that may be called."""

    has_plain_events = False
    first_content = None  # there may be none

    def __init__(self, ask: ChatAsk, model_id: str, *, is_admin: bool, tokenizer: Tokenizer) -> None:
        super().__init__(ask, model_id, is_admin=is_admin, tokenizer=tokenizer)
        self._finished_call = "stop" if ask.is_named else "tool_calls"
        self._splitters: dict[int, CallSplitter] = {}
        self._split: dict[int, AnswerPart] = {}  # what the next event of an answer shows

    def events(self, answer: int, piece: Piece, cost: Figures | None = None) -> bytes:
        """The event of one piece; none while it may be the beginning of a call."""
        text = self._read(answer, piece.text, is_last=piece.finish_reason is not None)
        return super().events(answer, piece._replace(text=text), cost)

    def _read(self, index: int, text: str, *, is_last: bool) -> str:
        split = self._splitters.setdefault(index, CallSplitter()).feed(text, is_last=is_last)
        self._split[index] = split
        return split.raw

    def _rest(self, index: int, stream: Transcript) -> str:
        return self._read(index, stream.held_back, is_last=True)

    def _choice(self, index: int, stream: Transcript) -> dict[str, Any]:
        splitter = CallSplitter()
        split = splitter.feed(stream.text, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": split.content, "refusal": None}
        if split.name is not None:
            call = {"id": self._call_id(index), "type": "function", "function": _function(split)}
            message |= {"content": split.content or None, "tool_calls": [call]}
        return {"index": index, "message": message, "logprobs": None, **self._ending(splitter, stream.finish_reason)}

    def _delta(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        split = self._split[index]
        delta: dict[str, Any] = {"content": split.content} if split.content else {}
        if split.name is not None:
            call = {"index": 0, "id": self._call_id(index), "type": "function", "function": _function(split)}
            delta["tool_calls"] = [call]
        elif split.arguments:
            delta["tool_calls"] = [{"index": 0, "function": {"arguments": split.arguments}}]
        return {
            "index": index,
            "delta": delta,
            "logprobs": None,
            **self._ending(self._splitters[index], finish_reason),
        }

    def _ending(self, splitter: CallSplitter, finish_reason: FinishReason | None) -> dict[str, Any]:
        """As OpenAI does: a named tool ends with `stop`, one that the model chose with `tool_calls`."""
        if finish_reason == "stop" and splitter.is_complete:
            return {"finish_reason": self._finished_call}
        return ending(finish_reason)

    def _call_id(self, index: int) -> str:
        """The same in a stream and in its repeats: both have the id of the reply."""
        return f"call_{self.id.removeprefix(self.prefix)}{index}"


def _function(split: AnswerPart) -> dict[str, Any]:
    return {"name": split.name, "arguments": split.arguments}
