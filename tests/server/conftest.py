"""Servers over the curator's small workspaces."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from curator.conftest import make, no_keys_around, template
from curator.deployments import ScriptedEngine
from paclm import Workspace
from server.live import CHAT_TEMPLATE, Live, serve

__all__ = ["make", "no_keys_around", "template"]

Start = Callable[..., Live]


@pytest.fixture
def start(make: Callable[..., Workspace], small_tokenizer: Any) -> Iterator[Start]:
    """Start a server with these settings in [mechanism]; `engine`, `tokenizer` and what `serve` takes can be given."""
    with ExitStack() as servers:

        def start(**options: Any) -> Live:
            engine = options.pop("engine", None) or ScriptedEngine()
            tokenizer = options.pop("tokenizer", small_tokenizer)
            names = ("settings", "is_loopback", "quota")
            serving = {name: options.pop(name) for name in names if name in options}
            return servers.enter_context(serve(make(**options), engine, tokenizer, **serving))

        yield start


@pytest.fixture
def live(start: Start) -> Live:
    return start()


@pytest.fixture(scope="session")
def chat_tokenizer(small_tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(small_tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
