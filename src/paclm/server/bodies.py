"""From bytes to a checked request: limits while reading, strict JSON, strict types. Repeats nothing of what it read."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from paclm.config import ServerConfig
from paclm.server.refusals import Refused, invalid

Model = TypeVar("Model", bound=BaseModel)

_DRAIN_SECONDS = 5.0
"""A client that sends too much reads its refusal only if its sending is not cut off at once."""
_JSON = re.compile(r"application/json\s*(;\s*charset=\"?utf-8\"?\s*)?", re.IGNORECASE)
_FIELD = re.compile(r"[a-z][a-z0-9_]{0,40}")
"""An unknown field is named in the refusal if it looks like a field and not like a text."""


async def read_body(request: Request, settings: ServerConfig) -> bytes:
    """The whole body, or a refusal; never more than the limit is kept."""
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
        raise Refused(400, "The connection ended before the body did.", code="incomplete_body") from None


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
    """A JSON object; bytes that are not UTF-8, numbers that are not numbers and deep nesting are refused."""
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
    """The request as its type, or a refusal that names the field and not its value."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
    raise _refusal(found[0])


def _refusal(problem: Any) -> Refused:
    place = problem["loc"]
    field = str(place[0]) if place else ""
    is_shown = _FIELD.fullmatch(field) is not None
    if problem["type"] == "extra_forbidden" and len(place) == 1:
        name = f"The field {field}" if is_shown else "A field"
        return invalid(f"{name} is not known to this server. Leave it out.", field if is_shown else None)
    said = problem["msg"][0].lower() + problem["msg"][1:].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return invalid(f"{field}: this field is needed.", field)
    if not place:
        return invalid(f"{problem['msg']}.")
    return invalid(f"{field}: {said}." if is_shown else f"A field does not fit: {said}.", field if is_shown else None)
