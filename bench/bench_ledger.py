"""What a durable commit costs in a file and in PostgreSQL, alone and with a witness or a standby; how the file grows.

The alternative is the same commit without waiting for the disk (SQLite `synchronous=OFF`, PostgreSQL
`synchronous_commit=off`, which a ledger refuses outside this file): what durability itself costs on this disk. Bare
writes of the same bytes, each synced, say what the disk can do at best.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from harness import median, print_table, race, spread  # noqa: E402
from paclm.config import MechanismConfig  # noqa: E402
from paclm.ledger.events import Usage  # noqa: E402
from paclm.ledger.ledger import Ledger  # noqa: E402
from paclm.ledger.store import Address, Commit  # noqa: E402
from postgres import HOW_TO_GET_ONE, PostgresServer, find_binaries  # noqa: E402

KEY = bytes(range(32))
SETTINGS = MechanismConfig(per_token=2.0**-40, total=2.0**-4)
PRICE = 2**20
SEALED_BYTES = 12 + 128 * 8 + 16
"""A belief over 128 worlds as AES-GCM seals it: nonce, ciphertext, tag."""
STREAMS = (1, 16, 100)
API_KEYS = 16
STEPS = 30
HISTORY = 5000
FILE, CARELESS_FILE = "SQLite", "SQLite, not durable (synchronous=OFF)"
SOCKET, CARELESS_SOCKET = "PostgreSQL, Unix socket", "the same, not durable (synchronous_commit=off)"


class Contender:
    """One ledger, whose steps are timed: whole commits, and the part in which its store writes."""

    def __init__(self, address: Address, witness: Path | None = None, *, is_durable: bool = True) -> None:
        self.address, self._is_durable = address, is_durable
        self.ledger = Ledger.create(
            address,
            KEY,
            workspace="bench",
            num_worlds=128,
            settings=SETTINGS,
            sealed_belief=os.urandom(SEALED_BYTES),
            witness=witness,
        )
        if not is_durable:
            off = "PRAGMA synchronous=OFF" if isinstance(address, Path) else "SET synchronous_commit = off"
            self.ledger.store.db.execute(off)  # type: ignore[attr-defined]
        self.store_seconds: dict[int, list[float]] = {n: [] for n in STREAMS}
        self.commit_seconds: dict[int, list[float]] = {n: [] for n in STREAMS}
        self._append, self.ledger.store.append = self.ledger.store.append, self._watched  # type: ignore[method-assign]

    def _watched(self, commit: Commit) -> None:
        started = time.perf_counter()
        self._append(commit)
        self.store_seconds[self._streams].append(time.perf_counter() - started)

    def steps(self, streams: int, count: int = STEPS) -> None:
        """Steps of one token for each stream; the streams belong to 16 API keys at most."""
        counts = [len(range(key, streams, API_KEYS)) for key in range(min(streams, API_KEYS))]
        entries = [Usage(f"key-{n}", each, each // 4, each, each * PRICE) for n, each in enumerate(counts)]
        self._streams = streams
        with ExitStack() as stack:
            if not self._is_durable and not isinstance(self.address, Path):
                from paclm.ledger import postgres_store

                careless = postgres_store._COMMIT.replace("ARRAY['on', 'on', 'on']", "ARRAY['off', 'on', 'on']")
                stack.enter_context(patch.object(postgres_store, "_COMMIT", careless))
            for _ in range(count):
                sealed, started = os.urandom(SEALED_BYTES), time.perf_counter()
                self.ledger.commit(entries, sealed)
                self.commit_seconds[streams].append(time.perf_counter() - started)


def file_in(folder: Path, name: str) -> Path:
    """The path of a ledger in a folder of its own."""
    place = folder / name
    place.mkdir(mode=0o700)
    return place / "ledger.sqlite"


def contenders(folder: Path, stack: ExitStack) -> dict[str, Contender]:
    """The ledgers to compare; without PostgreSQL those in files."""
    found = {
        FILE: Contender(file_in(folder, "one")),
        "SQLite with a witness": Contender(file_in(folder, "witnessed"), folder / "witness"),
        CARELESS_FILE: Contender(file_in(folder, "careless"), is_durable=False),
    }
    if find_binaries() is None:
        print(HOW_TO_GET_ONE)
        return found
    alone, primary = (stack.enter_context(PostgresServer(within=folder)) for _ in range(2))
    stack.enter_context(primary.standby())
    return found | {
        SOCKET: Contender(alone.url(alone.create_database(), socket=True)),
        "PostgreSQL, TCP with TLS": Contender(alone.url(alone.create_database(), tls=True)),
        "PostgreSQL, Unix socket, synchronous standby": Contender(primary.url(primary.create_database(), socket=True)),
        CARELESS_SOCKET: Contender(alone.url(alone.create_database(), socket=True), is_durable=False),
    }


def bare_writes(path: Path) -> Callable[[], None]:
    """As many bytes as a commit logs, written and synced by hand."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(descriptor, bytes(1 << 20), 0)
    os.fsync(descriptor)

    def write() -> None:
        for n in range(STEPS):
            os.pwrite(descriptor, os.urandom(16384), n * 16384)
            os.fdatasync(descriptor)

    return write


def measure_commits(folder: Path, stack: ExitStack) -> None:
    """Two tables: a commit by the number of streams, and where its time goes."""
    ledgers = contenders(folder, stack)
    bare = "bare 16 KiB write and sync"
    seconds = {
        n: race(
            {**{name: (lambda x=x, n=n: x.steps(n)) for name, x in ledgers.items()}, bare: bare_writes(folder / "b")}
        )
        for n in STREAMS
    }
    rows = []
    for name in (*ledgers, bare, "control"):
        taken = [median(seconds[n][name]) / STEPS * 1e3 for n in STREAMS]
        ratios = [each / (median(seconds[n][FILE]) / STEPS * 1e3) for n, each in zip(STREAMS, taken, strict=True)]
        cells = [f"{each:.3f}" for each in taken] + [f"{ratio:.2f}" for ratio in ratios]
        cells = cells if name != "control" else [""] * len(cells)
        rows.append([name, *cells, spread([second for n in STREAMS for second in seconds[n][name]])])
    header = [f"{n} streams" for n in STREAMS] + [f"÷ SQLite, {n}" for n in STREAMS]
    print_table("A durable commit, ms a step", ["", *header, "spread"], rows)
    rows = []
    for name, careless in ((FILE, CARELESS_FILE), (SOCKET, CARELESS_SOCKET)):
        for n in STREAMS if name in ledgers else ():
            whole = statistics.median(ledgers[name].commit_seconds[n]) * 1e6
            written, not_synced = (statistics.median(ledgers[x].store_seconds[n]) * 1e6 for x in (name, careless))
            parts = (whole, whole - written, not_synced, written - not_synced)
            rows.append([f"{name}, {n}", *(f"{part:.0f}" for part in parts)])
    header = ["commit", "row made and signed", "statements", "disk"]
    print_table(
        "Where a commit goes, µs, medians of single commits (statements: the commit that is not durable)",
        ["", *header],
        rows,
    )
    for contender in ledgers.values():
        contender.ledger.close()


def measure_growth(folder: Path) -> None:
    """One table: bytes of a step, and opening a ledger whose newest rows were checked by no checkpoint yet."""
    rows = []
    for streams in (1, 16):
        path = file_in(folder, f"growth-{streams}")
        contender = Contender(path, is_durable=False)
        contender.steps(streams, HISTORY)
        since = HISTORY + 1 - contender.ledger._last_checkpoint
        contender.ledger.close()
        started = time.perf_counter()
        Ledger.open(path, KEY).close()
        opening = time.perf_counter() - started
        rows.append([str(streams), f"{path.stat().st_size / HISTORY:.0f}", f"{since:,}", f"{opening * 1e3:.1f}"])
    print_table(
        f"Growth and opening after {HISTORY:,} steps", ["API keys", "bytes/step", "rows to check", "open ms"], rows
    )


def main() -> None:
    """Three tables: commits, their parts, growth."""
    with tempfile.TemporaryDirectory(dir=ROOT, prefix="bench-") as name, ExitStack() as stack:  # /tmp may be memory
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL may run as another user
        measure_commits(folder, stack)
        measure_growth(folder)


if __name__ == "__main__":
    main()
