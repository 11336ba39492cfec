"""What clients may send to `/v1/responses` and what they get: plain text, nothing stored between requests.

A request is a conversation in another format: `as_chat` is the only way from here to the curator. What would need
memory, tools or files is refused; fields are accepted while they change nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paclm.server.chat_schemas import ChatAsk, Message
from paclm.server.openapi import Cost, Promise, Shape
from paclm.server.schemas import MOST_TOKENS, Remark, Strict
from paclm.server.unused_options import (
    PARTS,
    AnyTier,
    Metadata,
    NoToolChoice,
    NoTools,
    NotStored,
    TextOnly,
    UsualVerbosity,
    Whole,
    empty,
    none_of,
    one_of,
    problem,
)

Role = Literal["system", "developer", "user", "assistant"]
_MOST_MESSAGES = 511
"""One less than a conversation has, for the instructions."""
_TEXT = {"type": "string"}


def _or_text(schema: dict[str, Any]) -> None:
    """A text stands for a list of one, which the JSON schema of the list does not say."""
    listed = {name: schema.pop(name) for name in ("type", "items", "minItems", "maxItems") if name in schema}
    schema["anyOf"] = [_TEXT, listed]


def _read_items(value: object) -> object:
    """A text is one message of the user's."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise problem("must be a text or a list of messages")
    return value


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
        raise problem("must be message: tools, reasoning and references to stored items are not offered")
    return value


_STATELESS = "this server stores nothing between requests"

NoMemory = Annotated[object, none_of(f"is not offered: {_STATELESS}. Send the whole conversation as input")]
InForeground = Annotated[object, one_of(f"must be false: {_STATELESS}", False)]
NoReasoning = Annotated[object, none_of("is not offered: this model writes its answer only")]
NoLogprobs = Annotated[object, one_of("is not offered here: /v1/chat/completions has it under the promise corpus", 0)]
NoCut = Annotated[object, one_of("must be disabled: an input that does not fit is refused, not shortened", "disabled")]
NoExtras = Annotated[object, empty("must be empty: answers have no further output")]
Empty = Annotated[object, empty("must be empty: this model reads text")]


class InputPart(Strict):
    """A piece of a message, as it was written or as an earlier response returned it."""

    type: Annotated[Literal["input_text", "output_text"], BeforeValidator(_read_part_type)]
    text: Annotated[str, Field(repr=False)]
    annotations: Empty = None
    logprobs: Empty = None
    parsed: Empty = None


class InputItem(Strict):
    """One turn of the conversation; items of an earlier response's `output` can be sent as they are."""

    type: Annotated[Literal["message"] | None, BeforeValidator(_read_item_type)] = None
    role: Role
    content: Annotated[
        list[InputPart],
        Field(min_length=1, max_length=64, fail_fast=True, repr=False, json_schema_extra=_or_text),
        BeforeValidator(_read_parts),  # last, or all entries are read before they are counted
    ]
    id: Remark | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class TextConfig(Strict):
    """The form of the answer: text."""

    format: TextOnly = None
    verbosity: UsualVerbosity = None


class ResponseStreamOptions(Strict):
    """How a stream is sent."""

    include_obfuscation: bool | None = None


class ResponseAsk(Strict):
    """POST /v1/responses"""

    model: Remark
    """As `/v1/models` names it."""
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True, repr=False, json_schema_extra=_or_text),
        BeforeValidator(_read_items),
    ]
    """A text, or the conversation so far."""
    instructions: Annotated[str | None, Field(repr=False)] = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    """The most tokens of the answer; `[server]` has the default."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """τ of the Gumbel draws; 0 is greedy."""
    stream: bool | None = None
    """Whether to send pieces as they are released."""
    stream_options: ResponseStreamOptions | None = None
    user: Remark | None = None
    """Accepted; neither used nor stored."""
    safety_identifier: Remark | None = None
    """Accepted; neither used nor stored."""
    prompt_cache_key: Remark | None = None
    """Accepted; neither used nor stored."""
    metadata: Metadata | None = None
    """Returned with the answer; neither used nor stored."""
    parallel_tool_calls: bool | None = None
    """Accepted: without tools it changes nothing."""
    max_tool_calls: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    """Accepted: without tools it changes nothing."""
    text: TextConfig | None = None
    store: NotStored = None
    previous_response_id: NoMemory = None
    conversation: NoMemory = None
    background: InForeground = None
    prompt: NoMemory = None
    tools: NoTools = None
    tool_choice: NoToolChoice = None
    reasoning: NoReasoning = None
    include: NoExtras = None
    top_logprobs: NoLogprobs = None
    top_p: Whole = None
    truncation: NoCut = None
    service_tier: AnyTier = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> ResponseAsk:
        if self.stream_options is not None and not self.stream:
            raise problem("stream_options is for streams: set stream to true, or leave it out", "stream_options")
        return self

    @property
    def answers_each(self) -> int:
        """One."""
        return 1

    @property
    def is_structured(self) -> bool:
        """No: there are no formats here yet."""
        return False

    def as_chat(self) -> ChatAsk:
        """The same conversation as a chat, instructions first."""
        instructions = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        messages = [Message(role=item.role, content="".join(part.text for part in item.content)) for item in self.input]
        return ChatAsk(
            model=self.model,
            messages=[*instructions, *messages],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
        )


class OutputText(Shape):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: Annotated[list[Any], Field(max_length=0)]


class OutputMessage(Shape):
    """The model's turn."""

    type: Literal["message"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class IncompleteDetails(Shape):
    """Why the answer ended before its end."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Shape):
    """Always 0: the server does not count what its cache saved."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Shape):
    """Always 0: there is no reasoning."""

    reasoning_tokens: int


class ResponseUsage(Shape):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(Shape):
    """`/v1/responses`"""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    instructions: str | None
    output: list[OutputMessage]
    max_output_tokens: int | None
    temperature: float | None
    top_p: Literal[1]
    text: dict[str, Any]
    tools: Annotated[list[Any], Field(max_length=0)]
    tool_choice: Literal["none", "auto"]
    parallel_tool_calls: bool
    truncation: Literal["disabled"]
    service_tier: Literal["default"]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    metadata: dict[str, str]
    user: str | None
    usage: ResponseUsage
    privacy: Cost | Promise
