"""A server that waits until it may serve: another one holds the ledger, which is in a database.

The database's clock decides whether that one is alive, and the epoch that `opening` takes decides who serves: of two
servers that wait, one is refused and waits on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from paclm.config import is_postgres
from paclm.engine.base_model import base_of, load_tokenizer
from paclm.errors import LedgerBusy, LedgerFull, LedgerUnwritable, ServiceError
from paclm.ledger.address import refuse_if_held
from paclm.server import telemetry
from paclm.worlds.workspace import Workspace

T = TypeVar("T")

_POLL_SECONDS = 1.0


def check_take_over(workspace: Workspace) -> None:
    """Refuse where there is nothing to take over."""
    if not is_postgres(workspace.ledger_address):
        raise ServiceError(
            f"--take-over is for a ledger in PostgreSQL. The ledger of {workspace.path} is a file, whose lock ends "
            "with the process that holds it: stop that process, and start this one without --take-over."
        )


def open_when_free(
    workspace: Workspace,
    opening: Callable[[], T],
    announce: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    *,
    take_over: bool = False,
) -> T:
    """What `opening` returns. Waits while another process holds a ledger in a database, and announces that once.

    `check` raises what `opening` would raise later: a standby that could never serve must not wait.
    """
    if not is_postgres(workspace.ledger_address):
        return opening()
    is_standby = False
    while True:
        try:
            if not take_over:
                refuse_if_held(workspace.ledger_address, workspace.settings.ledger.stale_seconds)
            return opening()
        except LedgerBusy as busy:
            if not is_standby:
                check()
                announce(str(busy))
                telemetry.install()
                telemetry.write(telemetry.Entry(event="standby"))
                _prepare(workspace)
            is_standby = True
        except (LedgerUnwritable, LedgerFull):  # a standby outlives a restart of the database
            if not is_standby:
                raise
        time.sleep(_POLL_SECONDS)


def _prepare(workspace: Workspace) -> None:
    """Import what `opening` will need, which takes seconds."""
    import_module("paclm.engine.loading")
    load_tokenizer(base_of(workspace))
