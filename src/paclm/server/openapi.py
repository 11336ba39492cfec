"""The OpenAPI document: what each endpoint takes, gives and refuses, as it really is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from paclm import __version__
from paclm.server.schemas import ChatAsk, CompletionAsk
from paclm.server.shapes import Error

ANSWER_ERRORS = {400, 404, 408, 409, 413, 415, 429}
_EVERYWHERE = {400, 401, 403, 500, 503}
_REASONS = {
    400: "The request does not fit; nothing was charged.",
    401: "No API key, or a wrong one.",
    403: "The host, origin or key may not do this.",
    404: "There is no such model.",
    408: "The body took too long.",
    409: "The Idempotency-Key was used for another request, its first request is under way, or its reply is gone.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "The privacy budget, or the key's share of it, does not cover the request. Do not retry.",
    500: "A fault of the server.",
    503: "Too many wait, or the server is stopping. Retry later.",
}
_EVENT = {
    "type": "object",
    "description": "One event of a stream: a piece of the answer as JSON, and [DONE] at the end.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_BUDGET_HEADER = {
    "description": "`exhausted`: the privacy budget is gone and tokens of this answer come from the public model.",
    "schema": {"type": "string", "enum": ["exhausted"]},
}
_REF = "#/components/schemas/"


def described(
    shape: type[BaseModel],
    errors: Iterable[int],
    *,
    body: str | None = None,
    or_body: str | None = None,
    streams: bool = False,
) -> dict[str, Any]:
    """What a route tells FastAPI about itself. Answers are built by hand, so nothing is converted or left out."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": Error, "description": _REASONS[status]} for status in sorted({*errors, *_EVERYWHERE})
    }
    responses[200] = {"model": shape, "description": "The answer."}
    if streams:
        responses[200]["headers"] = {"paclm-budget": _BUDGET_HEADER}
        responses[200]["content"] = {"text/event-stream": {"schema": _EVENT}}
    extra: dict[str, Any] = {"security": [{"key": []}]}
    if body is not None:
        refs = [{"$ref": _REF + name} for name in (body, or_body) if name]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"responses": responses, "openapi_extra": extra, "response_model": None}


def describe(app: FastAPI, model_id: str) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title="paclm", version=__version__, routes=app.routes, description=_ABOUT)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in (CompletionAsk, ChatAsk):
            schema = model.model_json_schema(ref_template=_REF + "{model}")
            schemas.update(schema.pop("$defs", {}))
            schema["properties"]["model"]["enum"] = [model_id]
            schemas[model.__name__] = schema
        for route in (route for methods in document["paths"].values() for route in methods.values()):
            route["responses"].pop("422", None)  # FastAPI adds it to paths with a parameter; what does not fit is 400
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = document
    return app.openapi_schema


_ABOUT = (
    "Text from a model adapted to private records, in the shapes of the OpenAI API. Every private token is charged to "
    "one budget; the bounds are at the committed total."
)
