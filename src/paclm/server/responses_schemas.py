"""What clients may send to `/v1/responses`: a conversation, tools and calls; nothing is stored between requests.

A request is a chat in another format: `as_chat` is the only way from here to the curator. What would need memory,
files or tools of the server's own is refused; fields are accepted while they change nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from paclm.server.chat_schemas import (
    MOST_TOOLS,
    AllowedTools,
    ChatAsk,
    Choice,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    ToolType,
    check_tools,
)
from paclm.server.responses_items import InputItem, as_messages, or_text
from paclm.server.schemas import (
    MOST_TOKENS,
    FunctionName,
    JsonSchema,
    Remark,
    ResponseFormat,
    Strict,
    StructuredOutputs,
)
from paclm.server.unused_options import (
    AnyTier,
    Metadata,
    NotStored,
    Only,
    UsualVerbosity,
    Whole,
    empty,
    none_of,
    one_of,
    problem,
)

_MOST_MESSAGES = 511
"""One less than a conversation has, for the instructions."""
_LIST_OF_DIRECT = {"type": "array", "items": {"const": "direct"}, "minItems": 1, "maxItems": 1}


def _read_items(value: object) -> object:
    """A text is one message of the user's."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise problem("must be a text or a list of messages, calls and their outputs")
    return value


_STATELESS = "this server stores nothing between requests"

NoMemory = Annotated[object, none_of(f"is not offered: {_STATELESS}. Send the whole conversation as input")]
InForeground = Annotated[object, one_of(f"must be false: {_STATELESS}", False)]
NoReasoning = Annotated[object, none_of("is not offered: this model writes its answer only")]
NoLogprobs = Annotated[object, one_of("is not offered here: /v1/chat/completions has it under the promise corpus", 0)]
NoCut = Annotated[object, one_of("must be disabled: an input that does not fit is refused, not shortened", "disabled")]
NoExtras = Annotated[object, empty("must be empty: answers have no further output")]
NotAsync = Annotated[
    object, one_of("must be false: an answer ends with a call, and the client sends its output", False)
]
NotDeferred = Annotated[object, one_of("must be false: the model reads all tools at the beginning", False)]
NoOutputSchema = Annotated[object, none_of("is not offered: say in description what the function returns")]
DirectCaller = Annotated[
    object,
    Only((["direct"],), "must be direct: only the model calls functions", _LIST_OF_DIRECT),
]


class TextFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema", repr=False)] = None
    """What an answer of the type json_schema must fit."""
    description: Annotated[str | None, Field(repr=False)] = None
    """Accepted and not used: the model reads messages only."""
    strict: bool | None = None
    """Accepted: the schema is enforced either way."""

    @model_validator(mode="after")
    def _schema_if_named(self) -> TextFormat:
        for name, given in (("schema", self.schema_), ("name", self.name)):
            if (self.type == "json_schema") != (given is not None):
                raise problem(f"{name} is needed for the type json_schema, and for no other", name)
        return self

    def as_chat(self) -> ResponseFormat:
        """The same in a chat."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        schema = JsonSchema.model_validate({"name": self.name, "schema": self.schema_})
        return ResponseFormat(type=self.type, json_schema=schema)


class TextConfig(Strict):
    """The form of the answer."""

    format: TextFormat | None = None
    verbosity: UsualVerbosity = None


class FunctionTool(Function):
    """A function that the model may ask the client to call."""

    type: ToolType
    allowed_callers: DirectCaller = None
    async_: Annotated[NotAsync, Field(alias="async")] = None
    defer_loading: NotDeferred = None
    output_schema: NoOutputSchema = None

    def as_chat(self) -> Tool:
        """The same in a chat."""
        return Tool(type="function", function=self)


class FunctionChoice(Strict):
    """One of the tools; as a choice, one that has to be called."""

    type: ToolType
    name: Remark

    def as_chat(self) -> ToolChoice:
        """The same in a chat."""
        return ToolChoice(type="function", function=NamedFunction(name=self.name))


class AllowedChoice(Strict):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]

    def as_chat(self) -> ToolChoice:
        """The same in a chat."""
        tools = [NamedTool(type="function", function=NamedFunction(name=tool.name)) for tool in self.tools]
        return ToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=self.mode, tools=tools))


def _kind_of(choice: object) -> str:
    """What is neither is read as a function, which says why it is refused."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    return "allowed_tools" if kind == "allowed_tools" else "function"


_Choice = Annotated[
    Annotated[FunctionChoice, Tag("function")] | Annotated[AllowedChoice, Tag("allowed_tools")], Discriminator(_kind_of)
]


class ResponseStreamOptions(Strict):
    """How a stream is sent."""

    include_obfuscation: bool | None = None


class ResponseAsk(Strict):
    """POST /v1/responses"""

    model: Remark
    """As `/v1/models` names it."""
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True, repr=False, json_schema_extra=or_text),
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
    text: TextConfig | None = None
    """The form of the answer: text, JSON, or JSON that a schema accepts."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the answer as vLLM names it; not together with `text.format`."""
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    """What the model may ask the client to do."""
    tool_choice: Literal["none", "auto", "required"] | _Choice | None = None
    """Whether it may, which of them, and whether it must; `auto` unless said."""
    parallel_tool_calls: bool | None = None
    """Accepted: an answer has one call at most, whatever it says."""
    max_tool_calls: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    """Accepted: an answer has one call at most."""
    store: NotStored = None
    previous_response_id: NoMemory = None
    conversation: NoMemory = None
    background: InForeground = None
    prompt: NoMemory = None
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

    @model_validator(mode="after")
    def _one_form(self) -> ResponseAsk:
        if self.structured_outputs is not None and self.format is not None:
            raise problem("structured_outputs and text.format both give a form: send one", "structured_outputs")
        return self

    @model_validator(mode="after")
    def _tools_are_known(self) -> ResponseAsk:
        check_tools(self.tools or [], self._chat_choice, has_outputs=self.structured_outputs is not None)
        return self

    @property
    def format(self) -> TextFormat | None:
        """The form of the answer, if the request names one."""
        return None if self.text is None else self.text.format

    @property
    def may_call(self) -> bool:
        """Whether the answer may be a call."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def _chat_choice(self) -> Choice:
        return self.tool_choice.as_chat() if isinstance(self.tool_choice, Strict) else self.tool_choice

    def as_chat(self) -> ChatAsk:
        """The same conversation as a chat, instructions first."""
        instructions = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        return ChatAsk(
            model=self.model,
            messages=[*instructions, *as_messages(self.input)],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            response_format=None if self.format is None else self.format.as_chat(),
            structured_outputs=self.structured_outputs,
            tools=None if self.tools is None else [tool.as_chat() for tool in self.tools],
            tool_choice=self._chat_choice,
        )
