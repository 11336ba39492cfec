"""Who asks, and whether they may. Knows keys by name only; the key store compares them in constant time.

loopback, no ordinary key was ever made    no key needed for answers; the caller is `local`. `none` counts as no key,
                                           because the official clients do not work without one
loopback, ordinary keys exist              a key is needed
any other address                          a key is needed; the server does not start without one
admin endpoints                            an admin key, always
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

from fastapi import Depends, Request

from paclm.server.jobs import Caller
from paclm.server.refusals import no_key, not_admin, unknown_key
from paclm.server.service import Service

_PROXY_HEADERS = re.compile(r"forwarded|via|x-forwarded.*|x-real-ip|(x-|true-|cf-connecting-|x-cluster-)(client-)?ip")
"""Behind a proxy the neighbour on loopback is not the one who asks. One that adds no header cannot be told apart."""


def service_of(request: Request) -> Service:
    """The service behind the app."""
    service: Service = request.app.state.service
    return service


async def identify(request: Request) -> Caller:
    """The caller, or a refusal; a wrong key is refused also where none is needed."""
    service = service_of(request)
    caller = await _holder_of_key(request)
    if caller is not None:
        return caller
    is_needed = not _needs_no_key(request, service) or await asyncio.to_thread(_has_ordinary_keys, service)
    if _presented(request):
        raise unknown_key(is_needed=is_needed)
    if is_needed:
        raise no_key()
    return _noted(request, Caller.local())


async def identify_admin(request: Request) -> Caller:
    """The caller if they hold an admin key."""
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
    found = await asyncio.to_thread(service_of(request).keys.identify, key)
    return None if found is None else _noted(request, Caller(found.name, found.is_admin, found))


def _presented(request: Request) -> list[str]:
    """What was sent as a key; the word `none` is as good as nothing."""
    headers: list[str] = request.headers.getlist("authorization")
    return [] if [_parts(header) for header in headers] == [("bearer", "none")] else headers


def _parts(header: str) -> tuple[str, str]:
    scheme, _, key = header.partition(" ")
    return scheme.lower(), key.strip()


def _noted(request: Request, caller: Caller) -> Caller:
    request.state.key_name = caller.name  # for the log line
    return caller


def _needs_no_key(request: Request, service: Service) -> bool:
    return service.setup.is_loopback and not any(map(_PROXY_HEADERS.fullmatch, request.headers))


def _has_ordinary_keys(service: Service) -> bool:
    """Revoked ones count: whoever has made keys means them to be needed."""
    return any(not key.is_admin for key in service.keys.list())


AnyCaller = Annotated[Caller, Depends(identify)]
Admin = Annotated[Caller, Depends(identify_admin)]
TheService = Annotated[Service, Depends(service_of)]
