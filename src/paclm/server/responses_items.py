"""Entries of `input` in `/v1/responses`: messages, calls and what they returned, as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from paclm.server.chat_schemas import MOST_TOOLS, CalledFunction, Message, ToolCall
from paclm.server.schemas import Remark, Strict
from paclm.server.unused_options import PARTS, empty, problem

Role = Literal["system", "developer", "user", "assistant"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Empty = Annotated[object, empty("must be empty: this model reads text")]


def or_text(schema: dict[str, Any]) -> None:
    """A text stands for a list of one, which the JSON schema of the list does not say."""
    listed = {name: schema.pop(name) for name in ("type", "items", "minItems", "maxItems") if name in schema}
    schema["anyOf"] = [{"type": "string"}, listed]


def _read_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        raise problem("must be a text or a list of parts of text")
    return value


def _read_part_type(value: object) -> object:
    if isinstance(value, str) and value in PARTS:
        raise problem(PARTS[value])
    if value not in ("input_text", "output_text"):
        raise problem("must be input_text or output_text: this model reads text")
    return value


def _read_item_type(value: object) -> object:
    if value not in (None, "message"):
        raise problem(
            "must be message, function_call or function_call_output: reasoning, tools of the server's own and "
            "references to stored items are not offered"
        )
    return value


class InputPart(Strict):
    """A piece of a message, as it was written or as an earlier response returned it."""

    type: Annotated[Literal["input_text", "output_text"], BeforeValidator(_read_part_type)]
    text: Annotated[str, Field(repr=False)]
    annotations: Empty = None
    logprobs: Empty = None
    parsed: Annotated[Any, Field(repr=False)] = None
    """Accepted and not read: what a client's library made of `text`."""


_Parts = Annotated[
    list[InputPart],
    Field(min_length=1, max_length=64, fail_fast=True, repr=False, json_schema_extra=or_text),
    BeforeValidator(_read_parts),  # last, or all entries are read before they are counted
]


class InputMessage(Strict):
    """One turn of the conversation."""

    type: Annotated[Literal["message"] | None, BeforeValidator(_read_item_type)] = None
    role: Role
    content: _Parts
    id: Remark | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class InputCall(Strict):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Remark
    name: Remark
    arguments: Annotated[str, Field(repr=False)]
    """A JSON text."""
    id: Remark | None = None
    status: ItemStatus | None = None
    parsed_arguments: Annotated[Any, Field(repr=False)] = None
    """Accepted and not read: what a client's library made of `arguments`."""


class InputResult(Strict):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: Remark
    """Which call it answers."""
    output: _Parts
    id: Remark | None = None
    name: Remark | None = None
    """Accepted and not read: the call has it."""
    status: ItemStatus | None = None


def _kind_of(item: object) -> str:
    """What is none of these is read as a message, which says why it is refused."""
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if kind in ("function_call", "function_call_output") else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")],
    Discriminator(_kind_of),
]
"""One entry of the conversation; those of an earlier response's `output` can be sent as they are."""


def as_messages(items: Sequence[InputItem]) -> list[Message]:
    """The messages of a chat, which has text and calls of a turn in one: calls join the assistant's before them."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, InputMessage):
            messages.append(Message(role=item.role, content=_text(item.content)))
        elif isinstance(item, InputResult):
            messages.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        else:
            call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
            last = messages[-1] if messages else None
            if last is None or last.role != "assistant" or len(last.tool_calls or ()) == MOST_TOOLS:
                messages.append(Message(role="assistant", tool_calls=[call]))
            else:
                calls = [*(last.tool_calls or ()), call]
                messages[-1] = Message(role="assistant", content=last.content, tool_calls=calls)
    return messages


def _text(parts: list[InputPart]) -> str:
    return "".join(part.text for part in parts)
