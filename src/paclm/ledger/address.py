"""Open the store at an address: the path of a file, or the URL of a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paclm.config import is_postgres
from paclm.errors import LedgerMissing, MissingExtra
from paclm.ledger.sqlite_store import SqliteStore
from paclm.ledger.store import Address, Copy, Kind, Store

if TYPE_CHECKING:
    from paclm.ledger.postgres_hold import Hold
    from paclm.ledger.postgres_store import PostgresStore


class Holding(NamedTuple):
    """How a process takes the right to write. In a file the operating system's lock alone decides."""

    folder: Path | None = None
    """The curator's folder, where this machine notes the newest row of a database."""
    stale_seconds: float = 15.0
    """A holder that the database has not seen for this long counts as dead."""
    take_over: bool = False
    """Take the right from a holder that is alive."""


def open_writer(address: Address, holding: Holding) -> Store:
    """Take the right to write, and open for writing."""
    if is_postgres(address):
        return _postgres().open_writer(address, holding)
    return SqliteStore.open_writer(Path(address).absolute())


def open_reader(address: Address, folder: Path | None = None) -> Store:
    """Open for reading alone, also while another process writes; `folder` has this machine's note about a database."""
    if is_postgres(address):
        return _postgres().open_reader(address, folder)
    return SqliteStore.open_reader(Path(address))


def create(address: Address, content: Copy, kind: Kind = "live", holding: Holding | None = None) -> None:
    """Make a ledger where there is none: complete or absent, also after a crash."""
    if is_postgres(address):
        _postgres().create(address, content, kind, holding or Holding())
    else:
        SqliteStore.create(Path(address).absolute(), content, kind)


def discard(address: Address, holding: Holding) -> None:
    """Remove the target of an unfinished move."""
    if is_postgres(address):
        _postgres().discard(address, holding)
    else:
        SqliteStore.discard(Path(address).absolute())


def exists(address: Address) -> bool:
    """Whether there is a ledger, readable or not; raises where a database cannot be asked."""
    if not is_postgres(address):
        return Path(address).exists()
    try:
        open_reader(address).close()
    except LedgerMissing:
        return False
    return True


def take_hold(address: Address, holding: Holding) -> Hold | None:
    """Take the right to write beside a ledger in a database, which need not exist yet; None where it is a file."""
    if not is_postgres(address):
        return None
    _postgres()
    from paclm.ledger.postgres_hold import Hold

    return Hold.take(address, holding)


def refuse_if_held(address: Address, stale_seconds: float) -> None:
    """Raise `LedgerHeld` while a process that is alive holds a ledger in a database."""
    if is_postgres(address):
        _postgres()
        from paclm.ledger import postgres_hold

        postgres_hold.refuse_if_held(address, stale_seconds)


def refuse_if_fenced(address: Address, epoch: int | None) -> None:
    """Raise `LedgerFenced` where another process has taken a ledger in a database since."""
    if isinstance(address, str) and is_postgres(address) and epoch is not None:
        from paclm.ledger import postgres_hold

        postgres_hold.refuse_if_fenced(address, epoch)


def promises_in(address: Address) -> set[str]:
    """Promises on record in a database (see `postgres_promises`); beside a file `DpLog` has them all."""
    if not is_postgres(address):
        return set()
    _postgres()
    from paclm.ledger import postgres_promises

    return postgres_promises.promises_in(address)


def record_promise(address: Address, kind: str, epoch: int | None) -> None:
    """Put a promise on record in a database whose epoch this process holds."""
    if is_postgres(address) and epoch is not None:
        from paclm.ledger import postgres_promises

        postgres_promises.record_promise(address, kind, epoch)


def carry_promises(address: Address, kinds: Iterable[str]) -> None:
    """Put promises on record in a database to which a ledger is being moved."""
    if is_postgres(address):
        from paclm.ledger import postgres_promises

        postgres_promises.carry_promises(address, kinds)


def name_of(address: Address) -> str:
    """The address for messages, without user and password."""
    if not is_postgres(address):
        return str(address)
    _postgres()
    from paclm.ledger.postgres import name_of as name_of_url

    return name_of_url(address)


def on_one_server(address: Address, witness: Address | None) -> bool:
    """Whether ledger and witness are databases of one server, as far as it tells: they are lost together."""
    if not is_postgres(address) or not is_postgres(witness):
        return False
    _postgres()
    from paclm.ledger.postgres import server_of

    server = server_of(address)
    return server is not None and server == server_of(witness)


def without_password(url: str) -> str:
    """The address of a database to be written down, without passwords; empty where it is not valid."""
    _postgres()
    from paclm.ledger import postgres

    return "" if name_of(url) == postgres.NO_ADDRESS else postgres.without_password(url)


def _postgres() -> type[PostgresStore]:
    try:
        from paclm.ledger.postgres_store import PostgresStore
    except ImportError:
        raise MissingExtra("psycopg") from None
    return PostgresStore
