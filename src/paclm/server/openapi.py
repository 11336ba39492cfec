"""The OpenAPI document: what each endpoint takes, returns and refuses.

The response models are for the document only; tests check real responses against them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict

from paclm import __version__
from paclm.server.openai_format import header_name

ANSWER_ERRORS = {400, 404, 408, 409, 413, 415, 429}
_EVERYWHERE = {400, 401, 403, 500, 503}
_REASONS = {
    400: "The request is invalid; nothing was charged.",
    401: "No API key, or a wrong one.",
    403: "The host, origin or key may not do this.",
    404: "There is no such model.",
    408: "The body took too long.",
    409: "The Idempotency-Key was used for another request, its reply is lost, or too many repeats wait for it.",
    413: "The body is too long.",
    415: "The body is not JSON, or it is compressed.",
    429: "The privacy budget, or the key's share of it, does not cover the request. Do not retry.",
    500: "A fault of the server.",
    503: "The queue is full, or the server is stopping. Retry later.",
}
_EVENT = {
    "type": "object",
    "description": "One event of a stream, as JSON. Completions and chats end with [DONE], responses by their status.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_HEADERS: dict[str, dict[str, Any]] = {
    "paclm-budget": {
        "description": "`exhausted`: the privacy budget is spent and tokens of this answer come from the public model.",
        "schema": {"type": "string", "enum": ["exhausted"]},
    },
    "idempotent-replayed": {
        "description": "`true`: the answer to an earlier request with this Idempotency-Key; nothing new was charged.",
        "schema": {"type": "string", "enum": ["true"]},
    },
}
_REF = "#/components/schemas/"


class Shape(BaseModel):
    """All fields, and no others."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Shape):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    """Error response."""

    error: ErrorDetail


class TokenUsage(Shape):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Cost(Shape):
    """What the request cost; the bound is at the committed total, for all requests together.

    Without the admin key `charged_nats` is what the private tokens cost at most; `remaining_tokens` as in `Privacy`.
    """

    charged_nats: float
    remaining_tokens: int
    mia_bound: float
    private_tokens: int
    public_tokens: int


class Promise(Shape):
    """The promise `corpus`: the same for every request, and no request is charged. Without it the bounds are null."""

    promise: Literal["corpus"]
    epsilon: float | None
    delta: float | None
    unit: str
    mia_bound: float | None
    is_promised: bool


class StudentPromise(Shape):
    """What a student's student.json claims about the text that it learnt from; null under the other promise."""

    promise: Literal["half", "corpus"]
    mia_bound: float
    world_id_bound: float | None
    total_nats: float | None
    epsilon: float | None
    delta: float | None
    unit: str


ANSWER_HEADERS = _HEADERS | {
    header_name(name): {
        "description": f"`{name}` of `privacy`; absent where it is null, and in a stream where it is known at the end.",
        "schema": {"type": "string"},
    }
    for name in (*Cost.model_fields, *Promise.model_fields, *StudentPromise.model_fields)
}


class TextLogprobs(Shape):
    """Of the tokens of a completion; offsets count from the beginning of the prompt."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(Shape):
    """One answer. `stop_reason` says that it was cut short because it could not go on in its grammar."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: Literal["grammar"] | None = None


class Completion(Shape):
    """`/v1/completions`"""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage
    privacy: Cost | Promise | StudentPromise


class MessageFunction(Shape):
    """What to call."""

    name: str
    arguments: str


class MessageToolCall(Shape):
    """A call that the model asks for; its arguments are JSON, cut off if the answer was."""

    id: str
    type: Literal["function"]
    function: MessageFunction


class ChatMessage(Shape):
    """The model's turn: a text, a call, or a text and then a call."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MessageToolCall] | None = None


class LikelyToken(Shape):
    """A token that was likely at some place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(LikelyToken):
    """A token of the answer."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(Shape):
    """Of the tokens of a message."""

    content: list[ChatToken]
    refusal: None


class ChatChoice(Shape):
    """One answer. `stop_reason` says that it was cut short because it could not go on in its grammar."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: Literal["grammar"] | None = None


class ChatCompletion(Shape):
    """`/v1/chat/completions`"""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    privacy: Cost | Promise | StudentPromise


class Model(Shape):
    """The one model of a workspace; worlds are never listed."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(Shape):
    """`/v1/models`"""

    object: Literal["list"]
    data: list[Model]


class Health(Shape):
    """`/health`"""

    status: Literal["ok", "restoring", "draining", "stopped"]


class OwnKey(Shape):
    """The caller's key. Its own spend bounds nothing: all keys share one belief."""

    name: str
    quota_tokens: int | None
    used_tokens: int


class Privacy(Shape):
    """`/v1/privacy`

    Without the admin key `spent_nats` and `remaining_tokens` are of the last full hour (`as_of`) and rounded to 1 % of
    the total, to the safe side; at once only that the budget is gone.
    """

    object: Literal["privacy"]
    as_of: str | None
    spent_nats: float
    total_nats: float
    per_token_nats: float
    remaining_tokens: int
    mia_bound: float
    world_id_bound: float
    is_exhausted: bool
    on_exhausted: Literal["public", "refuse"]
    charge: str
    release: str
    promise: Literal["half"]
    are_promises_mixed: bool
    sentence: str
    not_promised: str
    key: OwnKey


class CorpusPrivacy(Promise):
    """`/v1/privacy` under the promise `corpus`"""

    object: Literal["privacy"]
    tpr_at_fpr_0_1_percent: float | None
    tpr_at_fpr_1_percent: float | None
    trainings: int
    sentence: str
    budget: str
    not_promised: str
    key: OwnKey


class CorpusPlan(Promise):
    """`/v1/privacy/plan` under the promise `corpus`"""

    object: Literal["privacy.plan"]
    answers: int
    prompt_tokens: int
    max_tokens: int
    fits: bool
    remaining_quota_tokens: int | None
    budget: str


class StudentPrivacy(StudentPromise):
    """`/v1/privacy` of a student"""

    worlds: int | None
    object: Literal["privacy"]
    sentence: str
    budget: str
    not_promised: str
    key: OwnKey


class StudentPlan(StudentPromise):
    """`/v1/privacy/plan` of a student"""

    object: Literal["privacy.plan"]
    answers: int
    prompt_tokens: int
    max_tokens: int
    fits: bool
    remaining_quota_tokens: int | None
    budget: str


class RequestPlan(Shape):
    """`/v1/privacy/plan`

    Without the admin key `fits` goes by `remaining_tokens` of the last full hour (`as_of`), so it may be wrong.
    """

    object: Literal["privacy.plan"]
    answers: int
    prompt_tokens: int
    max_tokens: int
    per_token_nats: float
    max_nats: float
    charge: str
    fits: bool
    on_exhausted: Literal["public", "refuse"]
    remaining_tokens: int
    as_of: str | None
    remaining_quota_tokens: int | None
    mia_bound: float
    world_id_bound: float


class Overview(Shape):
    """`/v1/admin/overview`"""

    model: str
    has_chat_template: bool
    version: str
    state: Literal["serving", "restoring", "draining", "stopped"]
    uptime_seconds: float
    budget: dict[str, Any]
    sentences: dict[str, str]
    tokens: dict[str, float | None]
    belief: dict[str, float]
    load: dict[str, float]
    keys: list[dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    cautions: list[str]


class PlainOverview(Shape):
    """`/v1/admin/overview` under the promise `corpus`, and of a student"""

    model: str
    has_chat_template: bool
    version: str
    state: Literal["serving", "restoring", "draining", "stopped"]
    uptime_seconds: float
    promise: dict[str, Any]
    sentences: dict[str, str]
    load: dict[str, float]
    keys: list[dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    cautions: list[str]


class Point(Shape):
    """An hour or a day."""

    at: str
    private_tokens: int
    public_tokens: int
    dissent_tokens: int
    charged_nats: float
    spent_nats: float


class RecentPoint(Shape):
    """A few seconds. Where nothing is charged every token counts as private and `dissent_tokens` is 0."""

    at: str
    private_tokens: int
    public_tokens: int
    dissent_tokens: int
    steps: int


class RecentPoints(Shape):
    """The last minutes."""

    seconds: int
    points: list[RecentPoint]


class History(Shape):
    """`/v1/admin/history`"""

    bin: Literal["hour", "day"]
    points: list[Point]
    recent: RecentPoints


def described(
    shape: type[BaseModel],
    errors: Iterable[int],
    *,
    body: str | None = None,
    or_bodies: Iterable[str] = (),
    streams: bool = False,
) -> dict[str, Any]:
    """Route arguments for FastAPI: responses and request body. Responses are built by hand and not converted."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": Error, "description": _REASONS[status]} for status in sorted({*errors, *_EVERYWHERE})
    }
    responses[200] = {"model": shape, "description": "The answer."}
    if streams:
        responses[200]["headers"] = ANSWER_HEADERS
        responses[200]["content"] = {"text/event-stream": {"schema": _EVENT}}
    extra: dict[str, Any] = {"security": [{"key": []}]}
    if body is not None:
        refs = [{"$ref": _REF + name} for name in (body, *or_bodies)]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"responses": responses, "openapi_extra": extra, "response_model": None}


def describe(app: FastAPI, model_id: str, bodies: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """The document, built once, with the bodies that requests may have."""
    if app.openapi_schema is None:
        document = get_openapi(title="paclm", version=__version__, routes=app.routes, description=_ABOUT)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in bodies:
            schema = model.model_json_schema(ref_template=_REF + "{model}")
            schemas.update(schema.pop("$defs", {}))
            schema["properties"]["model"]["enum"] = [model_id]
            schemas[model.__name__] = schema
        for route in (route for methods in document["paths"].values() for route in methods.values()):
            route["responses"].pop("422", None)  # FastAPI adds it to paths with a parameter; invalid requests get 400
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = document
    return app.openapi_schema


_ABOUT = (
    "Text from a model adapted to private records, in the formats of the OpenAI API. Every private token is charged to "
    "one budget; the bounds are at the committed total."
)
