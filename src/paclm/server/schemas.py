"""What clients may send, as strict types, and how a body becomes one.

Every field is checked before anything is charged. A field that is not listed is refused: a client that relies on an
option which is silently ignored would spend budget on something it did not ask for. Null counts as left out, whatever
the field. A refusal names the place, such as `messages[1].tool_calls`, and repeats no value.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from paclm.config import ServerConfig
from paclm.server.refusals import Refused, invalid, misfit
from paclm.server.unused_options import (
    LONGEST_REMARK,
    AnyTier,
    Metadata,
    NoBias,
    NoSuffix,
    NotStored,
    OneOnly,
    Whole,
    Zero,
    problem,
)

Model = TypeVar("Model", bound=BaseModel)

_DRAIN_SECONDS = 5.0
"""How long to keep reading a body that is too long: the client reads the refusal only if it can finish sending."""
_LARGE_BYTES = 65_536
_JSON = re.compile(r"application/json\s*(;\s*charset=\"?utf-8\"?\s*)?", re.IGNORECASE)
MOST_TOKENS = 2**31 - 1
_MOST_STOPS, _LONGEST_STOP, _ALL_STOPS = 64, 1000, 4000
_MOST_CHOICES = 1000
_TEXT = {"type": "string"}
_STOP = {"type": "string", "minLength": 1, "maxLength": _LONGEST_STOP}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Prompt = str | list[int]


def _read_prompts(value: object) -> list[Prompt]:
    """One prompt or several, each text or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [value]
        if all(isinstance(entry, str) for entry in value):
            return value
        if all(isinstance(entry, list) and entry and _are_ids(entry) for entry in value):
            return value
    raise problem("must be a text, a list of texts, a list of token ids or a list of such lists; none may be empty")


def _are_ids(entries: list[Any]) -> bool:
    return all(type(entry) is int and entry >= 0 for entry in entries)


def _read_stops(value: object) -> tuple[str, ...]:
    """No stop string, one, or a few."""
    stops: Any = [value] if isinstance(value, str) else value
    is_short = isinstance(stops, list) and len(stops) <= _MOST_STOPS
    if (
        is_short
        and all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops)
        and sum(map(len, stops)) <= _ALL_STOPS  # every answer of the request carries them
    ):
        return tuple(stops)
    raise problem(
        f"must be a text or a list of at most {_MOST_STOPS} texts, each of 1 to {_LONGEST_STOP:,} characters, together "
        f"at most {_ALL_STOPS:,}"
    )


def _without_default(schema: dict[str, Any]) -> None:
    """A generated client may send a default that is a list as a text."""
    schema.pop("default", None)


Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_read_stops),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": _MOST_STOPS}, {"type": "null"}]}),
]
Remark = Annotated[str, StringConstraints(max_length=LONGEST_REMARK)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""Of a tool or a schema, as OpenAI limits it."""


class Strict(BaseModel):
    """A part of a body. Fields that are not listed are refused unless they are null."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,
        frozen=True,
        use_attribute_docstrings=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None}
        unknown = [name for name in given if name not in cls.model_fields and name not in cls._aliases()]
        for name in unknown[1:]:  # one is enough to refuse; an error for each of thousands takes seconds
            del given[name]
        return given

    @classmethod
    def _aliases(cls) -> set[str | None]:
        """Names of fields that Pydantic has as methods."""
        return {field.alias for field in cls.model_fields.values()}


class StreamOptions(Strict):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Strict):
    """What an answer in JSON must fit."""

    name: FunctionName
    description: Annotated[str | None, Field(repr=False)] = None
    """Accepted and not used: the model reads messages only."""
    schema_: Annotated[dict[str, Any], Field(alias="schema", repr=False)]
    strict: bool | None = None
    """Accepted: the schema is enforced either way."""


class ResponseFormat(Strict):
    """The form of the answer, as OpenAI names it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_if_named(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise problem("json_schema is needed for the type json_schema, and for no other", "json_schema")
        return self


def _read_schema(value: object) -> dict[str, Any]:
    """An object, or its JSON text."""
    if isinstance(value, str):
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError:
            raise problem("must be a JSON schema: an object, or its JSON as a text") from None
    if not isinstance(value, dict):
        raise problem("must be a JSON schema: an object, or its JSON as a text")
    return value


_Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=_MOST_CHOICES, fail_fast=True)
]


class StructuredOutputs(Strict):
    """The form of the answer, as vLLM names it: one of these."""

    json_: Annotated[
        dict[str, Any] | None,
        PlainValidator(_read_schema),
        WithJsonSchema({"anyOf": [{"type": "object"}, _TEXT, {"type": "null"}]}),
        Field(alias="json", repr=False),
    ] = None
    """A JSON schema."""
    regex: Annotated[Annotated[str, Field(min_length=1)] | None, Field(repr=False)] = None
    """A pattern that the whole answer matches."""
    choice: Annotated[_Choices | None, Field(repr=False)] = None
    """The texts among which the answer is one."""
    grammar: Annotated[Annotated[str, Field(min_length=1)] | None, Field(repr=False)] = None
    """A grammar in llguidance's dialect of Lark, or in GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(form is not None for form in given) != 1:
            raise problem("needs exactly one of json, regex, choice, grammar and json_object")
        return self


class BaseAsk(Strict):
    """What completions and chats have in common."""

    model: Remark
    """As `/v1/models` names it."""
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    """How many answers; under the promise `half` each is charged."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """τ of the Gumbel draws; 0 is greedy."""
    stop: Annotated[Stops, Field(repr=False, json_schema_extra=_without_default)] = ()
    """Texts that end an answer; they are not part of it."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Sets the coins, never the noise."""
    stream: bool | None = None
    """Whether to send pieces as they are released."""
    stream_options: StreamOptions | None = None
    user: Remark | None = None
    """Accepted; neither used nor stored."""
    safety_identifier: Remark | None = None
    """Accepted; neither used nor stored."""
    prompt_cache_key: Remark | None = None
    """Accepted and not used: prompts of one API key share their cache."""
    metadata: Metadata | None = None
    """Accepted; neither used nor stored."""
    response_format: ResponseFormat | None = None
    """The form of the answer: text, JSON, or JSON that a schema accepts."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the answer as vLLM names it; not together with `response_format`."""
    store: NotStored = None
    service_tier: AnyTier = None
    top_p: Whole = None
    logit_bias: NoBias = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None

    @property
    def answers_each(self) -> int:
        """n, which is 1 unless said."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with an event of counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def is_structured(self) -> bool:
        """Whether a grammar limits the answer."""
        has_format = self.response_format is not None and self.response_format.type != "text"
        return has_format or self.structured_outputs is not None

    @model_validator(mode="after")
    def _one_form(self) -> BaseAsk:
        if self.structured_outputs is not None and self.response_format is not None:
            raise problem("structured_outputs and response_format both give a form: send one", "structured_outputs")
        return self

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> BaseAsk:
        if self.stream_options is not None and not self.stream:
            raise problem("stream_options is for streams: set stream to true, or leave it out", "stream_options")
        return self


class CompletionAsk(BaseAsk):
    """POST /v1/completions"""

    prompt: Annotated[
        list[Prompt],
        Field(repr=False),
        PlainValidator(_read_prompts),
        WithJsonSchema(
            {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _IDS, {**_IDS, "items": _IDS}]}
        ),
    ]
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    """The most tokens of an answer; `[server]` has the default."""
    echo: bool | None = None
    """Whether the prompt comes back in front of the answer."""
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    """Log-probabilities of the tokens, and of so many others at each; only under the promise `corpus`."""
    best_of: OneOnly = None
    suffix: NoSuffix = None

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many others to show at each token; None if no log-probabilities are wanted."""
        return self.logprobs

    @model_validator(mode="after")
    def _no_echo_with_logprobs(self) -> CompletionAsk:
        if self.echo and self.logprobs is not None:
            raise problem(
                "logprobs are those of the answer: leave out echo, which asks for the prompt's as well", "echo"
            )
        return self


def is_large(request: Request) -> bool:
    """Whether the body takes long to read and to check, as far as the headers tell."""
    length = request.headers.get("content-length", "")
    return not length.isdecimal() or int(length) > _LARGE_BYTES


async def read_body(request: Request, settings: ServerConfig) -> bytes:
    """Read the whole body or refuse; never keeps more than the limit."""
    if any(encoding.strip().lower() != "identity" for encoding in request.headers.getlist("content-encoding")):
        raise Refused(
            415,
            "The body is compressed, and this server reads plain JSON: send it without content-encoding.",
            code="unsupported_content_encoding",
            headers={"accept-encoding": "identity"},
        )
    if not _JSON.fullmatch(request.headers.get("content-type", "")):
        raise Refused(415, "The body must be JSON: content-type: application/json", code="unsupported_media_type")
    try:
        async with asyncio.timeout(settings.read_seconds):
            return await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise Refused(
            408, f"The body did not arrive within {settings.read_seconds:g} seconds.", code="request_timeout"
        ) from None
    except ClientDisconnect:
        raise Refused(400, "The connection closed before the body was complete.", code="incomplete_body") from None


async def _read(request: Request, limit: int) -> bytes:
    content = bytearray()
    started = time.monotonic()
    is_too_long = False
    async for piece in request.stream():
        is_too_long = is_too_long or len(content) + len(piece) > limit
        if not is_too_long:
            content += piece
        elif time.monotonic() - started > _DRAIN_SECONDS:
            break
    if is_too_long:
        raise Refused(
            413,
            f"The body is longer than {limit:,} bytes, the most that max_body_bytes in [server] allows.",
            code="body_too_large",
            headers={"connection": "close"},
        )
    return bytes(content)


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object; invalid UTF-8, NaN, infinities and deep nesting are refused."""
    try:
        value = from_json(content, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        place = re.search(r"line \d+ column \d+", str(error))
        where = f" ({place[0]})" if place else ""
        raise invalid(f"The body is not valid JSON in UTF-8{where}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return value


def check(model: type[Model], fields: dict[str, Any]) -> Model:
    """Validate, or refuse with the place and without its value."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    raise misfit(found, fields)
