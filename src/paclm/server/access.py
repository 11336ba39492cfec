"""Who may send a request: host, origin and API key; and the headers of every response.

A web page of another site must not spend the budget through its reader's browser: requests with a foreign `Origin` are
refused, and on loopback so is a `Host` that is not this machine (DNS rebinding).

loopback, no ordinary key was ever made    no key needed for answers; the caller is `local`. `none`, `EMPTY` and
                                           `DUMMY_KEY` count as no key, because clients always send one
loopback, ordinary keys exist              a key is needed
any other address                          a key is needed; the server does not start without one
admin endpoints                            an admin key, always
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paclm.server.api_keys import LOCAL, KeyInfo
from paclm.server.refusals import Refused, internal_error, no_key, not_admin, too_many_connections, unknown_key
from paclm.server.service import HalfService, Service
from paclm.server.telemetry import Route, log_error

_PROXY_HEADERS = re.compile(
    r"""
    forward | prox(y|ied) | client[-_]?ip | real[-_]?ip                          # anywhere in the name
    | ^x[-_]original[-_] | ^x[-_](scheme|host|request[-_]start)$ | ^remote[-_] | ^x[-_]remote[-_] | ^front[-_]end[-_]
    | (^|[-_])(                                                                  # a whole word of the name
        via | hops? | cdn | ip(v?[46]|s|addr(ess)?|country)? | xff | gateway | ingress | (load)?balancer | lb
        | surrogate | nginx | envoy | istio | traefik | varnish | squid | kong | apisix | bluecoat | auth[-_]request
        | cf | cloudflare | cloudfront | fastly | fly | akamai | vercel | nf | netlify | azure | arr | waws | disguised
        | appengine | cloud[-_]trace | amzn | heroku | railway | rndr | ngrok | tailscale | incap | sucuri | zscaler
        | ali | tencent | bunny
      )([-_]|$)
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Names that proxies, load balancers and content networks add: behind one, the peer on loopback is not the caller. By
words, not by whole names: a header that no list knows yet is found too. A proxy that adds none cannot be detected."""
_NO_KEYS = ("none", "EMPTY", "DUMMY_KEY")
"""What clients send that insist on a key: as our pages, those of other servers and the tool `llm` spell it."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.IGNORECASE)
"""A name or an address, optionally a port, and nothing else that a lenient parser could read as a name."""
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
    "/v1/responses": "responses",
    "/v1/models": "models",
    "/v1/privacy": "privacy",
    "/v1/privacy/plan": "plan",
    "/v1/admin/overview": "admin",
    "/v1/admin/history": "admin",
}


class AccessMiddleware:
    """Checks host and origin, adds headers, counts requests, and turns unexpected errors into a bare 500.

    The message of an unexpected error could quote a prompt, so only its type and place are logged.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._settings = service.setup.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, call the app, add headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = f"req_{secrets.token_hex(12)}"
        route, otel = route_of(scope["path"]), self._service.otel
        trace = state["trace"] = None if otel is None else otel.begin(route, scope)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in {**_HEADERS, "x-request-id": state["request_id"]}.items():
                    headers.setdefault(name, value)
                if "is_kept_place" in state:
                    headers["connection"] = "close"
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is not None and refusal.reason is not None:
                self._service.metrics.count_refusal(refusal.reason)
                if trace is not None:
                    trace.error = refusal.code
            await (refusal.response() if refusal else self._app)(scope, receive, send_with_headers)
        except Exception as error:  # must not pass: uvicorn would log the message
            log_error("unexpected", error)
            if status == 0:
                await internal_error().response()(scope, receive, send_with_headers)
        finally:
            seconds = time.perf_counter() - started
            self._service.metrics.count_request(route, status or 500, seconds)
            if trace is not None:
                trace.responded(status or 500)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        if "is_kept_place" in scope["state"] and scope["path"] != "/health" and "authorization" not in headers:
            return too_many_connections()
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_allowed_host(hosts[0]):
            return Refused(
                403,
                "This server does not answer to that host name. To allow it, add it to allowed_hosts in [server].",
                code="host_not_allowed",
                reason="key",
            )
        own = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
        origins = headers.getlist("origin")
        if len(origins) > 1 or any(o.lower() not in own and o not in self._settings.cors_origins for o in origins):
            return Refused(
                403,
                "Requests from web pages of this origin are refused. To allow it, add it to cors_origins in [server].",
                code="origin_not_allowed",
                reason="key",
            )
        if "transfer-encoding" in headers and "content-length" in headers:
            return Refused(
                400,
                "The request has both Transfer-Encoding and Content-Length, which a proxy may read differently.",
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


def route_of(path: str) -> Route:
    """The name of a path in metrics and logs; clients choose paths, so most are `other`."""
    return _ROUTES.get(path, "other")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the name of an API key, or `local`."""

    name: str
    is_admin: bool
    key: KeyInfo | None
    """None for `local`, which has no quota."""


async def the_service(request: Request) -> Service:
    """The service behind the app; async, because FastAPI calls others in a thread."""
    return service_of(request)


def service_of(request: Request) -> Service:
    """The service behind the app."""
    service: Service = request.app.state.service
    return service


async def identify(request: Request) -> Caller:
    """The caller, or a refusal; a wrong key is refused even where none is needed."""
    service = service_of(request)
    caller = await _holder_of_key(request)
    if caller is not None:
        return caller
    is_needed = not _needs_no_key(request, service) or await _has_ordinary_keys(service)
    if _presented(request):
        raise unknown_key(is_needed=is_needed)
    if is_needed:
        raise no_key()
    return _noted(request, Caller(LOCAL, False, None))


async def identify_admin(request: Request) -> Caller:
    """The caller, who must hold an admin key."""
    caller = await _holder_of_key(request)
    if caller is None:
        raise unknown_key(is_needed=True) if _presented(request) else no_key()
    if not caller.is_admin:
        raise not_admin()
    return caller


async def _holder_of_key(request: Request) -> Caller | None:
    presented = _presented(request)
    scheme, key = _parts(presented[0]) if len(presented) == 1 else ("", "")
    if scheme != "bearer":
        return None
    service = service_of(request)
    found = await service.read(service.keys.identify, key)
    return None if found is None else _noted(request, Caller(found.name, found.is_admin, found))


def _presented(request: Request) -> list[str]:
    """The Authorization headers; a word for no key counts as no header."""
    headers: list[str] = request.headers.getlist("authorization")
    return [] if [_parts(header) for header in headers] in ([("bearer", word)] for word in _NO_KEYS) else headers


def _parts(header: str) -> tuple[str, str]:
    scheme, _, key = header.partition(" ")
    return scheme.lower(), key.strip()


def _noted(request: Request, caller: Caller) -> Caller:
    request.state.key_name = caller.name  # for the log line
    return caller


def _needs_no_key(request: Request, service: Service) -> bool:
    return service.setup.is_loopback and not any(map(_PROXY_HEADERS.search, request.headers))


async def _has_ordinary_keys(service: Service) -> bool:
    """Revoked ones count: an operator who made keys wants them to be required."""
    return any(not key.is_admin for key in await service.read(service.keys.list))


AnyCaller = Annotated[Caller, Depends(identify)]
Admin = Annotated[Caller, Depends(identify_admin)]
TheService = Annotated[Service, Depends(the_service)]
TheHalfService = Annotated[HalfService, Depends(the_service)]
