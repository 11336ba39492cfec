"""What clients may send to `/v1/chat/completions`: conversations, tools and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paclm.server.schemas import MOST_TOKENS, BaseAsk, CompletionAsk, FunctionName, Remark, Strict
from paclm.server.unused_options import (
    PARTS,
    NoAudio,
    NoCalls,
    NoFunctionChoice,
    NoFunctions,
    NoImages,
    NoReasoning,
    TextModality,
    Unread,
    UsualVerbosity,
    problem,
)

MOST_TOOLS = 128


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: Annotated[str, Field(repr=False)]

    @model_validator(mode="before")
    @classmethod
    def _not_an_image(cls, fields: Any) -> Any:
        kind = fields.get("type") if isinstance(fields, dict) else None
        if isinstance(kind, str) and kind in PARTS:
            raise problem(PARTS[kind])
        return fields


def _read_role(value: object) -> object:
    if value == "function":
        raise problem("the role function is not offered: send the result of a call with the role tool")
    return value


class CalledFunction(Strict):
    """What was called."""

    name: Remark
    arguments: Annotated[str, Field(repr=False)]
    """A JSON text."""
    parsed_arguments: Annotated[Any, Field(repr=False)] = None
    """Accepted and not read: what a client's library made of `arguments`."""


class ToolCall(Strict):
    """A call of an earlier answer."""

    id: Remark
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted and not read: streams number calls."""


def _read_calls(value: object) -> object:
    """Libraries write no calls in several ways."""
    is_nothing = value in ("", [], {}) or (isinstance(value, dict) and all(entry is None for entry in value.values()))
    return [] if is_nothing else value


class Message(Strict):
    """One turn of a conversation, also as a client's library returned it: most of what it adds must be empty."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_read_role)]
    content: Annotated[
        str | Annotated[list[TextPart], Field(min_length=1, max_length=64, fail_fast=True)] | None, Field(repr=False)
    ] = None
    """Required, except of an assistant that calls a tool."""
    name: Remark | None = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None,
        BeforeValidator(_read_calls),
        Field(repr=False),
    ] = None
    """Of an assistant."""
    tool_call_id: Remark | None = None
    """Of a tool: which call it answers."""
    parsed: Annotated[Any, Field(repr=False)] = None
    """Accepted and not read: what a client's library made of `content`."""
    refusal: Unread = None
    annotations: Unread = None
    reasoning: Unread = None
    reasoning_content: Unread = None
    reasoning_items: Unread = None
    thinking_blocks: Unread = None
    provider_specific_fields: Unread = None
    function_call: NoCalls = None
    audio: NoAudio = None
    images: NoImages = None

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def template_role(self) -> str:
        """The role as chat templates name it."""
        return "system" if self.role == "developer" else self.role

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise problem("this field is required", "content")
        if self.tool_calls and self.role != "assistant":
            raise problem("only the assistant calls tools", "tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise problem("this field is required: which call it answers", "tool_call_id")
        return self


def _read_tool_type(value: object) -> object:
    if value == "custom":
        raise problem("custom tools are not offered: the arguments of a call are JSON. Use the type function")
    if value != "function":
        raise problem("must be function: this server has no tools of its own")
    return value


ToolType = Annotated[Literal["function"], BeforeValidator(_read_tool_type)]


class Function(Strict):
    """What may be called."""

    name: FunctionName
    description: Annotated[str | None, Field(repr=False)] = None
    """For the model."""
    parameters: Annotated[dict[str, Any] | None, Field(repr=False)] = None
    """A JSON schema of the arguments; without it there are none."""
    strict: bool | None = None
    """Accepted: the schema is enforced either way."""


class Tool(Strict):
    """Something that the model may ask the client to do."""

    type: ToolType
    function: Function


class NamedFunction(Strict):
    """One of the tools."""

    name: Remark


class NamedTool(Strict):
    """One of the tools."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


class ToolChoice(Strict):
    """Which tools may be called: one that must be, or a part of the list."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _as_its_type_says(self) -> ToolChoice:
        for name, given in (("function", self.function), ("allowed_tools", self.allowed_tools)):
            if (name == self.type) != (given is not None):
                raise problem(f"{name} is needed for the type {name}, and for no other", name)
        return self

    @property
    def names(self) -> set[str]:
        """Of the tools that may be called."""
        if self.allowed_tools is not None:
            return {tool.function.name for tool in self.allowed_tools.tools}
        return set() if self.function is None else {self.function.name}


Choice = Literal["none", "auto", "required"] | ToolChoice | None


def _must_call(choice: Choice) -> bool:
    if isinstance(choice, ToolChoice):
        return choice.allowed_tools is None or choice.allowed_tools.mode == "required"
    return choice == "required"


def check_tools(functions: Sequence[Function], choice: Choice, *, has_outputs: bool) -> None:
    """Refuse a choice that cannot be made. With a call that is required, OpenAI's format of a text has no effect, and
    clients send both; `structured_outputs`, the form of the whole answer, is refused beside it."""
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise problem("tools: two of them have the same name", "tools")
    if isinstance(choice, ToolChoice) and not choice.names <= set(names):
        raise problem("tool_choice: names a tool that is not in tools", "tool_choice")
    if _must_call(choice) and not names:
        raise problem("tool_choice: asks for a call, and tools has none to call", "tool_choice")
    if _must_call(choice) and has_outputs:
        field = "structured_outputs"
        raise problem(f"{field}: the answer has to be a tool call, which has a form of its own: send one", field)


class ChatAsk(BaseAsk):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=512, fail_fast=True, repr=False)]
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    """Log-probabilities of the tokens; only under the promise `corpus`."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Of how many others at each token; needs `logprobs`."""
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    """What the model may ask the client to do."""
    tool_choice: Choice = None
    """Whether it may, which of them, and whether it must; `auto` unless said."""
    parallel_tool_calls: bool | None = None
    """Accepted: an answer has one call at most, whatever it says."""
    functions: NoFunctions = None
    function_call: NoFunctionChoice = None
    modalities: TextModality = None
    audio: NoAudio = None
    reasoning_effort: NoReasoning = None
    verbosity: UsualVerbosity = None

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many others to show at each token; None if no log-probabilities are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def has_tools(self) -> bool:
        """Whether the conversation speaks of tools."""
        return bool(self.tools) or any(message.tool_calls or message.role == "tool" for message in self.messages)

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return _must_call(self.tool_choice)

    @property
    def is_named(self) -> bool:
        """Whether the choice names the one tool that has to be called."""
        return isinstance(self.tool_choice, ToolChoice) and self.tool_choice.type == "function"

    @property
    def callable_tools(self) -> list[Function]:
        """The tools that the answer may call."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, ToolChoice):
            return [function for function in functions if function.name in self.tool_choice.names]
        return [] if self.tool_choice == "none" else functions

    @property
    def is_structured(self) -> bool:
        """Whether a grammar limits the answer."""
        return super().is_structured or bool(self.callable_tools)

    @model_validator(mode="after")
    def _tools_are_known(self) -> ChatAsk:
        functions = [tool.function for tool in self.tools or ()]
        check_tools(functions, self.tool_choice, has_outputs=self.structured_outputs is not None)
        return self

    @model_validator(mode="after")
    def _others_need_logprobs(self) -> ChatAsk:
        if self.top_logprobs and not self.logprobs:
            raise problem("top_logprobs needs logprobs: set logprobs to true, or leave it out", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatAsk:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise problem("max_tokens and max_completion_tokens mean the same and differ: name one", "max_tokens")
        return self


Ask = CompletionAsk | ChatAsk
