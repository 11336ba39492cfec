"""Answers of `/v1/responses`: the whole object, and events in OpenAI's order with their numbers."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from paclm.curator.streams import Piece
from paclm.server.curator_client import Transcript
from paclm.server.openai_format import Figures, Reply, event, quoted
from paclm.server.refusals import Refused
from paclm.server.responses_schemas import ResponseAsk

_DELTA = "response.output_text.delta"
_PLACE = {"output_index": 0, "content_index": 0}

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseReply(Reply):
    """One message with one part of text."""

    prefix = "resp_"

    def __init__(self, ask: ResponseAsk, model_id: str, *, is_admin: bool) -> None:
        super().__init__(model_id, is_admin=is_admin)
        self._item_id = f"msg_{secrets.token_hex(12)}"
        self._num_events = 0
        self._texts: list[str] = []  # sent so far
        self._asked = {
            "instructions": ask.instructions,
            "max_output_tokens": ask.max_output_tokens,
            "temperature": ask.temperature,
            "top_p": 1,
            "text": {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": ask.tool_choice or "auto",
            "parallel_tool_calls": ask.parallel_tool_calls is not False,
            "truncation": "disabled",
            "service_tier": "default",
            "store": False,
            "background": False,
            "previous_response_id": None,
            "metadata": ask.metadata or {},
            "user": ask.user,
        }

    def opening(self, num_answers: int) -> bytes:
        """What a stream begins with."""
        begun = self._response("in_progress", [])
        return b"".join(
            (
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
                self._event("response.content_part.added", item_id=self._item_id, **_PLACE, part=_part("")),
            )
        )

    def whole(self, streams: Sequence[Transcript], cost: Figures) -> bytes:
        """The whole response body."""
        return json.dumps(self._finished(streams, cost), ensure_ascii=False).encode()

    def events(self, answer: int, piece: Piece, cost: Figures | None = None) -> bytes:
        """The event of one piece; none while its text is held back. The cost comes with the closing."""
        marks = self._unmarked.setdefault(answer, [])
        if piece.mark != "dp":  # as all are, then
            marks.append(piece.mark)
        if not piece.text and piece.finish_reason is None:
            return b""
        shown = self._shown_marks(marks)
        marks.clear()
        return self._delta(piece.text, shown)

    def held_back(self, streams: Sequence[Transcript]) -> bytes:
        """Before the error of a stream that is cut off: text and marks of released tokens that were held back."""
        (stream,) = streams
        return self._delta(stream.held_back, self._shown_marks(self._unmarked.get(0, [])))

    def failure(self, refusal: Refused) -> bytes:
        """The end of a stream that is cut off: what happened, and the response as far as it got."""
        said = self._event("error", code=refusal.code, message=refusal.message, param=None)
        output = [self._message("incomplete", [_part("".join(self._texts))])]
        error = {"code": "server_error", "message": refusal.message}  # of OpenAI's codes
        return said + self._event("response.failed", response=self._response("failed", output, error=error))

    def closing(self, streams: Sequence[Transcript], cost: Figures) -> bytes:
        """The end of a stream: the text, its part, its message and the response with usage and cost."""
        response = self._finished(streams, cost)
        (message,) = response["output"]
        (part,) = message["content"]
        done = {"item_id": self._item_id, **_PLACE}
        return b"".join(
            (
                self._event("response.output_text.done", **done, text=part["text"], logprobs=[]),
                self._event("response.content_part.done", **done, part=part),
                self._event("response.output_item.done", output_index=0, item=message),
                self._event(f"response.{response['status']}", response=response),
            )
        )

    def _event(self, kind: str, **content: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._num_events, **content}
        self._num_events += 1
        return f"event: {kind}\n".encode() + event(content)

    def _delta(self, text: str, marks: Sequence[str]) -> bytes:
        """Written by hand: nearly all events are of this kind."""
        if not text and not marks:
            return b""
        self._texts.append(text)
        privacy = f',"privacy":{{"marks":{json.dumps(marks)}}}' if marks else ""
        number, self._num_events = self._num_events, self._num_events + 1
        return (
            f'event: {_DELTA}\ndata: {{"type":"{_DELTA}","sequence_number":{number},"item_id":"{self._item_id}",'
            f'"output_index":0,"content_index":0,"delta":{quoted(text)},"logprobs":[]{privacy}}}\n\n'
        ).encode()

    def _finished(self, streams: Sequence[Transcript], cost: Figures) -> dict[str, Any]:
        (stream,) = streams
        status: Status = "completed" if stream.finish_reason == "stop" else "incomplete"
        num_input, num_output = len(stream.request.prompt), stream.num_tokens
        usage = {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }
        output = [self._message(status, [_part(stream.text)])]
        return self._response(status, output, usage=usage) | {"privacy": cost}

    def _response(
        self,
        status: Status,
        output: list[dict[str, Any]],
        *,
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": output,
            **self._asked,
            "usage": usage,
        }

    def _message(self, status: Status, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
