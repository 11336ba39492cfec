"""What the server says when it does not answer: OpenAI's error bodies, one function per reason.

No message repeats anything a client sent: prompts end up in error messages, and error messages in logs.
"""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from paclm.errors import QuotaExceeded
from paclm.server.metrics import Refusal as Reason

NO_RETRY = {"x-should-retry": "false"}
"""The official clients send a refused request again unless they are told not to."""

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
    """A request that gets an error body instead of an answer. Nothing was charged for it, but for `cut_off`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        reason: Reason | None = "input",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = headers or {}
        self.reason: Reason | None = reason
        """What it is counted under; None for one that was refused after something may have been charged."""

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(self.status, self.message, code=self.code, param=self.param)

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`"""
    kind = _KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> Refused:
    """A request that cannot be understood or is not offered."""
    return Refused(400, message, param=param, code=code)


def no_key() -> Refused:
    """Neither a key nor the right to do without one."""
    return Refused(
        401,
        "This needs an API key of this server: Authorization: Bearer paclm-… Whoever runs the server makes one with "
        "`paclm keys add`.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer", **NO_RETRY},
        reason="key",
    )


def unknown_key(*, is_needed: bool) -> Refused:
    """A key that is nobody's; refused also where none is needed, since whoever sends one means to be somebody."""
    way_out = (
        " Whoever runs the server makes one with `paclm keys add`."
        if is_needed
        else " None is needed on this machine: leave it out, or send the key none."
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


def budget_exhausted(left: int, *, is_gone: bool) -> Refused:
    """The budget has fewer tokens left than the request may take, and waiting will not change that."""
    what_to_do = "is gone:" if is_gone else "has less left than one token costs:"
    if left:
        what_to_do = f"has room for {left:,} tokens: ask for at most {left:,} tokens, or"
    said = f"The privacy budget of this server {what_to_do} ask its operator."
    return Refused(429, said, code="privacy_budget_exhausted", headers=NO_RETRY, reason="budget")


def budget_held(free: int) -> Refused:
    """It would cover the request if less were held for those under way; they often give some back."""
    return Refused(
        503,
        f"The privacy budget of this server has room for {free:,} tokens beside the requests under way: try again in a "
        "moment, or ask for fewer tokens.",
        code="privacy_budget_held",
        headers={"retry-after": "1"},
        reason="budget",
    )


def quota_exhausted(error: QuotaExceeded) -> Refused:
    """The key's slice of the budget does not cover the request."""
    return Refused(429, str(error), code="key_quota_exhausted", headers=NO_RETRY, reason="quota")


def queue_full(waiting: int) -> Refused:
    """Too many wait already."""
    return Refused(
        503,
        f"{waiting:,} answers wait for a place already. Try again in a moment.",
        code="queue_full",
        headers={"retry-after": "2"},
        reason="queue",
    )


def stopping() -> Refused:
    """The server ends, or its curator has stopped."""
    return Refused(
        503,
        "The server is stopping and takes no new requests. Try again when it is back.",
        code="server_stopping",
        headers={"retry-after": "10"},
        reason="stopping",
    )


def cut_off() -> Refused:
    """An answer that was under way when the server had to stop. A retry would be charged anew: none is asked for."""
    return Refused(
        503,
        "The server stopped before the answer was complete. What had been released by then stays charged, and asking "
        "again is a new request.",
        code="answer_cut_off",
        headers=NO_RETRY,
        reason=None,
    )


def too_many_connections() -> Refused:
    """There is no room for another connection."""
    return Refused(
        503,
        "The server has as many connections as it takes. Try again in a moment.",
        code="too_many_connections",
        headers={"retry-after": "2"},
        reason="queue",
    )


def books_unavailable() -> Refused:
    """The file of keys, quotas and replies cannot be read or written just now."""
    return Refused(
        503,
        "The server cannot reach its books of keys and quotas. Try again in a moment.",
        code="books_unavailable",
        headers={"retry-after": "5"},
        reason="books",
    )
