"""The answers' shapes, for the OpenAPI document. Nothing is built from these; tests hold answers against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Shape):
    """What went wrong, in a sentence that can be shown."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Shape):
    """Every answer that is none."""

    error: ErrorDetail


class Usage(_Shape):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Cost(_Shape):
    """What the request cost; the bound is at the committed total, for everybody's requests together."""

    charged_nats: float
    remaining_tokens: int
    mia_bound: float
    private_tokens: int
    public_tokens: int


class TextChoice(_Shape):
    """One answer."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"]


class Completion(_Shape):
    """`/v1/completions`"""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    privacy: Cost


class ChatMessage(_Shape):
    """The model's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Shape):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(_Shape):
    """`/v1/chat/completions`"""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    privacy: Cost


class Model(_Shape):
    """The one model of a workspace; worlds are never listed."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(_Shape):
    """`/v1/models`"""

    object: Literal["list"]
    data: list[Model]


class Health(_Shape):
    """`/health`"""

    status: Literal["ok", "draining", "stopped"]


class OwnKey(_Shape):
    """The caller's key. Its own spend bounds nothing: all keys share one belief."""

    name: str
    quota_tokens: int | None
    used_tokens: int


class Privacy(_Shape):
    """`/v1/privacy`"""

    object: Literal["privacy"]
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
    sentence: str
    not_promised: str
    key: OwnKey


class Plan(_Shape):
    """`/v1/privacy/plan`"""

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
    remaining_quota_tokens: int | None
    mia_bound: float
    world_id_bound: float


class Overview(_Shape):
    """`/v1/admin/overview`"""

    model: str
    has_chat_template: bool
    version: str
    state: Literal["serving", "draining", "stopped"]
    uptime_seconds: float
    budget: dict[str, Any]
    sentences: dict[str, str]
    tokens: dict[str, float | None]
    belief: dict[str, float]
    load: dict[str, float]
    keys: list[dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    cautions: list[str]


class Point(_Shape):
    """An hour or a day."""

    at: str
    private_tokens: int
    public_tokens: int
    dissent_tokens: int
    charged_nats: float
    spent_nats: float


class RecentPoint(_Shape):
    """A few seconds."""

    at: str
    private_tokens: int
    public_tokens: int
    dissent_tokens: int
    steps: int


class RecentPoints(_Shape):
    """The last minutes."""

    seconds: int
    points: list[RecentPoint]


class History(_Shape):
    """`/v1/admin/history`"""

    bin: Literal["hour", "day"]
    points: list[Point]
    recent: RecentPoints
