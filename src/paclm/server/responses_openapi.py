"""What `/v1/responses` returns, for the OpenAPI document; tests check real responses against it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from paclm.server.openapi import Cost, Promise, Shape, StudentPromise


class OutputText(Shape):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: Annotated[list[Any], Field(max_length=0)]


class OutputMessage(Shape):
    """What the model says."""

    type: Literal["message"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Shape):
    """A call that the model asks for; its arguments are JSON, cut off if the answer was."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class IncompleteDetails(Shape):
    """Why the answer ended before its end. `stop_reason` says that it could not go on in its grammar."""

    reason: Literal["max_output_tokens"]
    stop_reason: Literal["grammar"] | None = None


class OfferedTool(Shape):
    """A tool of the request."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


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
    output: list[OutputMessage | OutputCall]
    max_output_tokens: int | None
    temperature: float | None
    top_p: Literal[1]
    text: dict[str, Any]
    tools: list[OfferedTool]
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any]
    parallel_tool_calls: bool
    truncation: Literal["disabled"]
    service_tier: Literal["default"]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    metadata: dict[str, str]
    user: str | None
    usage: ResponseUsage
    privacy: Cost | Promise | StudentPromise
