"""Answers of `/v1/responses`: the whole object, and events in OpenAI's order with their numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Literal

from paclm.curator.streams import Piece
from paclm.server.curator_client import Transcript
from paclm.server.openai_format import Figures, Reply, event, quoted
from paclm.server.refusals import Refused
from paclm.server.responses_schemas import ResponseAsk
from paclm.server.schemas import Strict
from paclm.server.tool_calls import AnswerPart, CallSplitter

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputItem:
    """A message with one part of text, or a call; as much of it as is shown."""

    def __init__(self, suffix: str, index: int, name: str | None) -> None:
        """Without a name, a message."""
        self.id = f"msg_{suffix}" if name is None else f"fc_{suffix}"
        self.index = index
        self.is_call = name is not None
        self._call = {"call_id": f"call_{suffix}", "name": name}
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        """Text of the message, or of the call's arguments."""
        self._pieces.append(text)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._pieces)

    @property
    def place(self) -> dict[str, Any]:
        """Where its text stands in the output."""
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.is_call else {**place, "content_index": 0}

    def content(self, status: Status) -> dict[str, Any]:
        """In OpenAI's format."""
        if self.is_call:
            return {"type": "function_call", "id": self.id, **self._call, "arguments": self.text, "status": status}
        parts = [] if status == "in_progress" else [_part(self.text)]
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": parts}


class ResponseReply(Reply):
    """A message, a call, or a message and then a call."""

    prefix = "resp_"

    def __init__(self, ask: ResponseAsk, model_id: str, *, is_admin: bool) -> None:
        super().__init__(model_id, is_admin=is_admin)
        self._splitter = CallSplitter() if ask.may_call else None
        self._items: list[OutputItem] = []
        self._num_events = 0
        choice = ask.tool_choice or "auto"
        self._asked = {
            "instructions": ask.instructions,
            "max_output_tokens": ask.max_output_tokens,
            "temperature": ask.temperature,
            "top_p": 1,
            "text": {"format": {"type": "text"} if ask.format is None else _as_asked(ask.format)},
            "tools": [
                {"type": "function", "name": tool.name, "description": tool.description}
                | {"parameters": tool.parameters, "strict": tool.strict}
                for tool in ask.tools or ()
            ],
            "tool_choice": choice if isinstance(choice, str) else _as_asked(choice),
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
        """What a stream begins with. An answer that may be a call shows its first item when it is known."""
        begun = self._response("in_progress")
        return b"".join(
            (
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._begin() if self._splitter is None else b"",
            )
        )

    def whole(self, streams: Sequence[Transcript], cost: Figures) -> bytes:
        """The whole response body."""
        (stream,) = streams
        split = self._split(stream.text, is_last=True)
        if split.content or split.name is None:
            self._new_item().add(split.content)
        if split.name is not None:
            self._new_item(split.name).add(split.arguments)
        return json.dumps(self._finished(stream, cost), ensure_ascii=False).encode()

    def events(self, answer: int, piece: Piece, cost: Figures | None = None) -> bytes:
        """The events of one piece; none while its text is held back. The cost comes with the closing."""
        marks = self._unmarked.setdefault(answer, [])
        if piece.mark not in ("dp", "student"):  # as all are, then
            marks.append(piece.mark)
        is_last = piece.finish_reason is not None
        split = self._split(piece.text, is_last=is_last)
        if not split.raw and not is_last:
            return b""
        shown = self._shown_marks(marks)
        marks.clear()
        return self._show(split, shown, is_last=is_last)

    def held_back(self, streams: Sequence[Transcript]) -> bytes:
        """Before the error of a stream that is cut off: text and marks of released tokens that were held back."""
        (stream,) = streams
        split = self._split(stream.held_back, is_last=True)
        return self._show(split, self._shown_marks(self._unmarked.get(0, [])), is_last=True)

    def failure(self, refusal: Refused) -> bytes:
        """The end of a stream that is cut off: what happened, and the response as far as it got."""
        said = self._event("error", code=refusal.code, message=refusal.message, param=None)
        error = {"code": "server_error", "message": refusal.message}  # of OpenAI's codes
        failed = self._response("failed", output=self._output("incomplete"), error=error)
        return said + self._event("response.failed", response=failed)

    def closing(self, streams: Sequence[Transcript], cost: Figures) -> bytes:
        """The end of a stream: that of its last item, and the response with usage and cost."""
        (stream,) = streams
        response = self._finished(stream, cost)
        return self._end(response["status"]) + self._event(f"response.{response['status']}", response=response)

    # --- the output -------------------------------------------------------------------------------------------------

    def _split(self, text: str, *, is_last: bool) -> AnswerPart:
        if self._splitter is None:
            return AnswerPart(text, text, None, "")
        return self._splitter.feed(text, is_last=is_last)

    def _new_item(self, name: str | None = None) -> OutputItem:
        self._items.append(OutputItem(self.id.removeprefix(self.prefix), len(self._items), name))
        return self._items[-1]

    def _output(self, status: Status) -> list[dict[str, Any]]:
        """All items; the status is that of the last one."""
        before, last = self._items[:-1], self._items[-1:]
        return [item.content("completed") for item in before] + [item.content(status) for item in last]

    # --- events -----------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **content: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._num_events, **content}
        self._num_events += 1
        return f"event: {kind}\n".encode() + event(content)

    def _show(self, split: AnswerPart, marks: Sequence[str], *, is_last: bool) -> bytes:
        """Marks come with the first text that is shown."""
        events = []
        if not self._items and (split.content or (is_last and split.name is None)):
            events.append(self._begin())
        if split.content:
            events.append(self._delta(split.content, marks))
            marks = ()
        if split.name is not None:
            events += [self._end("completed")] if self._items else []
            events.append(self._begin(split.name))
        return b"".join((*events, self._delta(split.arguments, marks)))

    def _begin(self, name: str | None = None) -> bytes:
        """The next item: a message, or a call of this function."""
        item = self._new_item(name)
        added = self._event("response.output_item.added", output_index=item.index, item=item.content("in_progress"))
        if item.is_call:
            return added
        return added + self._event("response.content_part.added", **item.place, part=_part(""))

    def _delta(self, text: str, marks: Sequence[str]) -> bytes:
        """Text of the last item. Written by hand: nearly all events are of this kind."""
        if not text and not marks:
            return b""
        item = self._items[-1]
        item.add(text)
        kind = f"response.{'function_call_arguments' if item.is_call else 'output_text'}.delta"
        place = f'"item_id":"{item.id}","output_index":{item.index}' + ("" if item.is_call else ',"content_index":0')
        logprobs = "" if item.is_call else ',"logprobs":[]'
        privacy = f',"privacy":{{"marks":{json.dumps(marks)}}}' if marks else ""
        number, self._num_events = self._num_events, self._num_events + 1
        return (
            f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{place},'
            f'"delta":{quoted(text)}{logprobs}{privacy}}}\n\n'
        ).encode()

    def _end(self, status: Status) -> bytes:
        """The end of the last item."""
        item = self._items[-1]
        if item.is_call:
            ended = self._event("response.function_call_arguments.done", **item.place, arguments=item.text)
        else:
            ended = self._event("response.output_text.done", **item.place, text=item.text, logprobs=[])
            ended += self._event("response.content_part.done", **item.place, part=_part(item.text))
        return ended + self._event("response.output_item.done", output_index=item.index, item=item.content(status))

    # --- the response -----------------------------------------------------------------------------------------------

    def _finished(self, stream: Transcript, cost: Figures) -> dict[str, Any]:
        status: Status = "completed" if stream.finish_reason == "stop" else "incomplete"
        num_input, num_output = len(stream.request.prompt), stream.num_tokens
        usage = {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }
        details = None if status == "completed" else {"reason": "max_output_tokens"}
        if details and stream.finish_reason == "grammar":
            details["stop_reason"] = "grammar"
        return self._response(status, output=self._output(status), usage=usage, details=details) | {"privacy": cost}

    def _response(
        self,
        status: Status,
        *,
        output: Sequence[dict[str, Any]] = (),
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
        details: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": details,
            "model": self._model,
            "output": output,
            **self._asked,
            "usage": usage,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _as_asked(value: Strict) -> dict[str, Any]:
    return value.model_dump(by_alias=True, exclude_unset=True)
