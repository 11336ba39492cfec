"""Options of the commands that share the worlds among several processes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.cli.console import print_wrapped
from paclm.config import PromiseName
from paclm.engine.rendezvous import check_workers, find_rendezvous
from paclm.errors import InvalidInput

if TYPE_CHECKING:
    from paclm.engine.workers import WorkerGroup
    from paclm.worlds.workspace import Workspace

WorkersOption = Annotated[
    int, typer.Option(help="Processes that share the worlds, with this one: one for each GPU.", min=1)
]
RendezvousOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Wait at this address for workers on other hosts (paclm worker), instead of starting them here.",
    ),
]
InsecureNetworkFlag = Annotated[
    bool,
    typer.Option(
        "--insecure-network",
        help="Meet workers at an address that others may reach: prompts and votes cross the network unencrypted.",
    ),
]


def quiet_torch() -> None:
    """Before torch is imported: no warnings of its own about addresses without a name, which are no fault."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def refuse_workers(promise: PromiseName, count: int) -> None:
    """One adapter is not shared."""
    if promise == "corpus" and count > 1:
        raise InvalidInput("Under the promise corpus there is one adapter and nothing to share. Leave --workers out.")


def workers_of(
    workspace: Workspace, count: int, rendezvous: str | None, *, is_insecure: bool
) -> AbstractContextManager[WorkerGroup | None]:
    """The workers that the options ask for; none start before an engine is opened with them."""
    check_workers(count, workspace.num_worlds)
    if count == 1:
        if rendezvous is not None:
            raise InvalidInput("--rendezvous is where workers meet: it needs --workers of at least 2.")
        return nullcontext()
    settings = workspace.settings.workers
    where = rendezvous and find_rendezvous(rendezvous, settings.private_networks, is_insecure=is_insecure)
    quiet_torch()
    from paclm.engine.launch import start_workers

    return start_workers(
        workspace.path,
        count,
        rendezvous=where or None,
        timeout=settings.timeout_seconds,
        announce=lambda news: print_wrapped(str(news), err=True),
    )
