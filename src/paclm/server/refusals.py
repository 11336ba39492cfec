"""Error responses in OpenAI's format. Reasons that several modules share are functions here.

docs/internals/path.md lists which module refuses what.

No message repeats anything that a client sent: prompts would end up in error messages, and those in logs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse

from paclm.errors import QuotaExceeded
from paclm.server.telemetry import RefusalReason

NO_RETRY = {"x-should-retry": "false"}
"""The official clients retry a refused request unless this header says no."""

_FIELD = re.compile(r"[a-z][a-z0-9_]{0,40}")
"""An unknown field is named in the refusal only if it looks like a field name and not like text."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "insufficient_quota",
    500: "server_error",
    503: "server_error",
}


class Refused(Exception):
    """A request that gets an error response. Nothing was charged, except for `cut_off` and `internal_error`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        reason: RefusalReason | None = "input",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = headers or {}
        self.reason: RefusalReason | None = reason
        """Its label in the metrics; None if something may have been charged."""

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(self.status, self.message, code=self.code, param=self.param)

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`"""
    kind = _KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> Refused:
    """An invalid request, or one for something that is not offered."""
    return Refused(400, message, param=param, code=code)


def misfit(found: Sequence[Any], fields: dict[str, Any]) -> Refused:
    """A body that its Pydantic model refused with these errors. Of several the deepest: in a union it says most."""
    places = [(_place(error, fields), error) for error in found]
    place, worst = max(places, key=lambda pair: (len(pair[0]), pair[1]["type"] != "missing"))
    where = _written(place)
    if worst["type"] == "extra_forbidden":
        is_shown = _FIELD.fullmatch(str(place[-1])) is not None
        name = f"The field {where}" if is_shown else f"A field of {where}" if where else "A field"
        return invalid(f"{name} is not known to this server. Remove it.", where)
    if not place:
        return invalid(f"{worst['msg']}.", worst.get("ctx", {}).get("field"))
    plain = {"missing": "this field is required", "too_short": "must not be empty"}
    said = plain.get(worst["type"], worst["msg"][0].lower() + worst["msg"][1:])
    return invalid(f"{where}: {said}." if where else f"A field does not fit: {said}.", where)


def _place(error: Any, fields: Any) -> list[str | int]:
    """Where in the body. Pydantic adds names of types, which the body does not have."""
    place: list[str | int] = []
    inside, parts = fields, error["loc"]
    for part in parts:
        is_entry = isinstance(inside, list) and isinstance(part, int) and part < len(inside)
        if is_entry or (isinstance(inside, dict) and part in inside):
            place.append(part)
            inside = inside[part]
    if error["type"] == "missing" and len(place) < len(parts):
        place.append(parts[-1])
    field = error.get("ctx", {}).get("field")
    return [*place, field] if place and field else place


def _written(place: Sequence[str | int]) -> str | None:
    """As in `messages[0].content[1]`; up to a name that may be text of the client."""
    written = ""
    for part in place:
        if isinstance(part, str) and not _FIELD.fullmatch(part):
            break
        written += f"[{part}]" if isinstance(part, int) else f".{part}"
    return written.removeprefix(".") or None


def no_key() -> Refused:
    """No key, and one is needed."""
    return Refused(
        401,
        "This needs an API key: send Authorization: Bearer paclm-… The operator makes one with `paclm keys add`.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer", **NO_RETRY},
        reason="key",
    )


def unknown_key(*, is_needed: bool) -> Refused:
    """An unknown or revoked key; refused even where none is needed, since the sender expects to be identified."""
    way_out = (
        " The operator makes one with `paclm keys add`."
        if is_needed
        else " None is needed on this machine: remove it, or send the key none or EMPTY."
    )
    return Refused(
        401,
        f"The API key sent is unknown or was revoked.{way_out}",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer", **NO_RETRY},
        reason="key",
    )


def not_admin() -> Refused:
    """An ordinary key where an admin key is needed."""
    return Refused(403, "This needs an admin key.", code="admin_key_required", headers=NO_RETRY, reason="key")


def budget_exhausted(*, is_gone: bool, is_spent: bool) -> Refused:
    """The budget has fewer tokens left than the request may take, and retrying will not help. Says no number."""
    what_to_do = "is spent:" if is_spent else "has less left than one token costs:"
    if not is_gone:
        what_to_do = "does not cover this request: ask for fewer tokens (GET /v1/privacy shows about what is left), or"
    said = f"The privacy budget of this server {what_to_do} ask its operator."
    return Refused(429, said, code="privacy_budget_exhausted", headers=NO_RETRY, reason="budget")


def budget_reserved() -> Refused:
    """It would cover the request if requests in progress had reserved less; they often free a part."""
    return Refused(
        503,
        "The privacy budget of this server does not cover this request beside those in progress: retry in a moment, or "
        "ask for fewer tokens.",
        code="privacy_budget_held",
        headers={"retry-after": "1"},
        reason="budget",
    )


def quota_exhausted(error: QuotaExceeded) -> Refused:
    """The key's quota does not cover the request."""
    return Refused(429, str(error), code="key_quota_exhausted", headers=NO_RETRY, reason="quota")


def queue_full(waiting: int) -> Refused:
    """The queue is full."""
    return Refused(
        503,
        f"The queue is full: {waiting:,} answers wait. Retry in a moment.",
        code="queue_full",
        headers={"retry-after": "2"},
        reason="queue",
    )


def waiting_for_workers() -> Refused:
    """A worker was lost: figures come with the next step. Completions wait instead."""
    return Refused(
        503,
        "The server waits for a worker that was lost; nothing is released meanwhile. Retry in a moment.",
        code="waiting_for_workers",
        headers={"retry-after": "5"},
        reason="workers",
    )


def stopping() -> Refused:
    """The server is shutting down, or its curator has stopped."""
    return Refused(
        503,
        "The server is shutting down and takes no new requests. Retry when it has restarted.",
        code="server_stopping",
        headers={"retry-after": "10"},
        reason="stopping",
    )


def cut_off() -> Refused:
    """An answer in progress when the server had to stop. No retry is suggested: it would be charged again."""
    return Refused(
        503,
        "The server stopped before the answer was complete. Tokens released by then stay charged; sending the request "
        "again is a new request.",
        code="answer_cut_off",
        headers=NO_RETRY,
        reason=None,
    )


def too_many_connections() -> Refused:
    """The limit of connections is reached."""
    return Refused(
        503,
        "The server has reached its limit of connections. Retry in a moment.",
        code="too_many_connections",
        headers={"retry-after": "2"},
        reason="queue",
    )


def database_unavailable() -> Refused:
    """The database of keys, quotas and replies cannot be read or written."""
    return Refused(
        503,
        "The server cannot read its database of keys and quotas. Retry in a moment.",
        code="books_unavailable",
        headers={"retry-after": "5"},
        reason="books",
    )


def internal_error() -> Refused:
    """An unexpected error."""
    return Refused(500, "Internal error. The server's log says where.", code="internal_error", headers=NO_RETRY)
