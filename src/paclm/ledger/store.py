"""Where a ledger is kept, as an interface: `sqlite_store` keeps it in a file, `postgres_store` in a database.

A store knows rows, sealed bytes and sums, but no budget, no price and no witness. Its errors are the ledger's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from paclm.errors import LedgerError, LedgerTampered
from paclm.ledger.events import Checkpoint, Head, Row, Usage
from paclm.ledger.head_notes import HeadNote
from paclm.ledger.state import UsageTable

Kind = Literal["live", "copy", "moved", "incoming", "none"]
"""In use; a backup, to be adopted first; closed by a move; target of an unfinished move; no ledger at all."""
Address = Path | str
"""The path of a file, or the URL of a database."""


class Commit(NamedTuple):
    """What one event writes, all or nothing."""

    row: Row
    after: int
    """The row that must be the newest so far."""
    entries: tuple[Usage, ...] = ()
    belief: tuple[int, bytes] | None = None
    """The row that it was sealed for, and the sealed bytes; None: it did not move."""
    secret: bytes | None = None
    """The sealed secret, where this row changes it."""
    checkpoint: Checkpoint | None = None


class Copy(NamedTuple):
    """Everything in a ledger, to fill another store with."""

    rows: Iterable[Row]
    belief: tuple[Any, Any]
    secret: bytes | None = None
    checkpoint: Checkpoint | None = None
    usage: UsageTable | None = None


class Store(ABC):
    """One open ledger: by its single writer, or by a reader."""

    why_rows_vanish: ClassVar[str]
    """What can have happened where the newest rows are missing; continues a sentence."""
    name: str
    """For messages: the path, or the URL without its password."""

    @abstractmethod
    def append(self, commit: Commit) -> None:
        """Write a row and what belongs to it in one transaction; all is durable when this returns.

        Refused where the row before is not the newest, or where another process took the ledger over.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up the right to write."""

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """What this store is."""

    @abstractmethod
    def mark(self, kind: Kind) -> None:
        """Change what this store is, durably."""

    @property
    @abstractmethod
    def note(self) -> HeadNote | None:
        """The newest row when the ledger was last in use on this machine, as noted beside it."""

    @abstractmethod
    def note_head(self, head: Head) -> None:
        """Note the newest row on this machine. Only a writer does."""

    @abstractmethod
    def migrate(self, at: str) -> None:
        """Apply the migrations that the store lacks."""

    @abstractmethod
    def settle(self) -> None:
        """After all checks of an opening: make it ready for commits."""

    @abstractmethod
    def set_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint without a row."""

    @abstractmethod
    def freeze_view(self) -> None:
        """Read one state from here on, whatever a writer does meanwhile."""

    @abstractmethod
    def check_pages(self) -> None:
        """Run the database's own check that it is whole."""

    @abstractmethod
    def check_schema(self) -> None:
        """Refuse tables or triggers that are not a ledger's."""

    @abstractmethod
    def count_rows(self, after: int = 0) -> int:
        """How many rows there are after that one."""

    @abstractmethod
    def newest_row(self) -> Row | None:
        """The row with the highest number."""

    @abstractmethod
    def row(self, seq: int) -> Row | None:
        """One row by its number."""

    @abstractmethod
    def rows(self, after: int = 0) -> Iterator[Row]:
        """The rows after that one, oldest first."""

    @abstractmethod
    def notable_rows(self) -> Iterator[Row]:
        """All rows but engine steps, oldest first; found by an index."""

    @abstractmethod
    def signers(self) -> tuple[str, ...]:
        """Names of the keys that the rows name as theirs, oldest first."""

    @abstractmethod
    def belief(self) -> tuple[Any, Any]:
        """The row that the stored belief was sealed for, and the sealed bytes; not checked."""

    @abstractmethod
    def secret(self) -> bytes | None:
        """The sealed secret; not checked."""

    @abstractmethod
    def checkpoint(self) -> Checkpoint | None:
        """The stored checkpoint; not checked."""

    @abstractmethod
    def usage(self) -> UsageTable:
        """The stored sums by hour and key."""

    @abstractmethod
    def usage_by(self, column: Literal["hour", "key"]) -> dict[str, Usage]:
        """The same, added up by the database for each hour or each key, sorted; `key` of an entry is its name."""

    @property
    @abstractmethod
    def epoch(self) -> int | None:
        """Of a writer in a database: what its writes must name. None for a file."""

    @abstractmethod
    def when_lost(self, call: Callable[[LedgerError], None]) -> None:
        """Call this, from another thread and once, if another process takes over or the connection is lost."""

    def copy(self) -> Copy:
        """Everything in it. Freeze the view first, or hold the right to write."""
        return Copy(self.rows(), self.belief(), self.secret(), self.checkpoint(), self.usage())


def not_a_number() -> LedgerTampered:
    """The error for stored sums that are none."""
    return LedgerTampered("The sums by hour and key hold something that is not a number.")
