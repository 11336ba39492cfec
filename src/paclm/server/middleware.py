"""The outermost layer: where requests may come from, headers on every response, and an end for every error.

A web page on another site must not spend the budget through its reader's browser: requests with a foreign `Origin` are
refused, and on loopback so is a `Host` that is not this machine (DNS rebinding). An error that nobody foresaw becomes a
bare 500 here; its message could quote a prompt, so only its type and place are logged.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paclm.server.logs import LOGGER
from paclm.server.metrics import Route
from paclm.server.refusals import Refused
from paclm.server.service import Service

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.IGNORECASE)
"""A name or an address and perhaps a port, and nothing else that a lenient parser might read a name from."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_ROUTES: dict[str, Route] = {
    "/": "dashboard",
    "/health": "health",
    "/metrics": "metrics",
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/models": "models",
    "/v1/privacy": "privacy",
    "/v1/privacy/plan": "plan",
    "/v1/admin/overview": "admin",
    "/v1/admin/history": "admin",
}


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._settings = service.setup.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, pass on, and add what every response has."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = f"req_{secrets.token_hex(12)}"

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in {**_HEADERS, "x-request-id": state["request_id"]}.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None and refusal.reason is not None:
                self._service.metrics.count_refusal(refusal.reason)
            await (refusal.response() if refusal else self._app)(scope, receive, send_with_headers)
        except Exception as error:  # the last place: beyond it the server would log the message
            logging.getLogger(LOGGER).error("unforeseen", exc_info=error)
            if status == 0:
                await unforeseen().response()(scope, receive, send_with_headers)
        finally:
            seconds = time.perf_counter() - started
            self._service.metrics.count_request(route_of(scope["path"]), status or 500, seconds)

    def _refusal(self, headers: Headers) -> Refused | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_allowed_host(hosts[0]):
            return Refused(
                403,
                "This server does not answer to that host name. Name it in allowed_hosts of [server] if it should.",
                code="host_not_allowed",
                reason="key",
            )
        own = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
        origins = headers.getlist("origin")
        if len(origins) > 1 or any(o.lower() not in own and o not in self._settings.cors_origins for o in origins):
            return Refused(
                403,
                "Web pages of other origins may not ask. Name them in cors_origins of [server] if they may.",
                code="origin_not_allowed",
                reason="key",
            )
        if "transfer-encoding" in headers and "content-length" in headers:
            return Refused(
                400,
                "The request says its length in two ways. A proxy may read another one than this server.",
                code="ambiguous_length",
                headers={"connection": "close"},
            )
        return None

    def _is_allowed_host(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        allowed = {name.lower() for name in self._settings.allowed_hosts}
        if self._service.setup.is_loopback:
            allowed |= set(LOOPBACK_NAMES)
        return found is not None and (not allowed or (found[1] or found[2]).lower() in allowed)


def unforeseen() -> Refused:
    """An error that nobody foresaw."""
    return Refused(500, "Something went wrong in the server. Its log says where.", code="internal_error")


def route_of(path: str) -> Route:
    """The name of a path in metrics and logs; clients choose paths, so most are `other`."""
    return _ROUTES.get(path, "other")
