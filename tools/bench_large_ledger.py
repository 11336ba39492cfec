"""Time `paclm ledger show`, opening and `verify` on a ledger of ten million rows, in a file and in PostgreSQL.

The rows are real: each is made, linked and signed as the ledger does, one step of one API key each, one a second. The
ledger stops 1,000 rows after its last checkpoint. Every command runs in a process of its own, whose start is included;
the first run comes after the files were dropped from the machine's memory, as far as the system does that.

Run: python tools/bench_large_ledger.py [--rows 10000000] [--verify-rows 1000000] [--folder DIR]
Needs about 0.8 kB of disk for a row and store, and 40 µs a row and store to make them. Removes both at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from harness import print_table  # noqa: E402
from paclm.config import MechanismConfig  # noqa: E402
from paclm.curator.master_key import KEY_FILE, MasterKeys, write_key  # noqa: E402
from paclm.curator.redacted import Redacted  # noqa: E402
from paclm.ledger.address import Holding, create, open_reader, open_writer  # noqa: E402
from paclm.ledger.events import GENESIS, Checkpoint, Event, Head, LedgerKeys, Opened, Row, Stepped, Usage, make_row  # noqa: E402
from paclm.ledger.ledger import hash_sealed  # noqa: E402
from paclm.ledger.state import UsageTable, add_usages, apply, to_state_fields  # noqa: E402
from paclm.ledger.store import Copy  # noqa: E402
from paclm.privacy.accounting import units_down  # noqa: E402
from postgres import PostgresServer  # noqa: E402

MASTER_KEY = Redacted(bytes(range(32)))
KEY = MasterKeys.derived(MASTER_KEY).mac.reveal()
SETTINGS = MechanismConfig(per_token=2.0**-40, total=2.0**-4)
PRICE = 2**20
BELIEF = bytes(12 + 128 * 8 + 16)
API_KEYS = 16
SINCE_CHECKPOINT = 1000
RUNS = 5
PACLM = str(Path(sys.executable).with_name("paclm"))
OPEN = """
import sys, time
from pathlib import Path
from paclm.ledger.address import Holding
from paclm.ledger.ledger import Ledger
address, folder, key = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
started = time.perf_counter()
ledger = Ledger.open(address if "://" in address else Path(address), key, holding=Holding(Path(folder)))
print(time.perf_counter() - started)
ledger.close()
"""


def make_rows(num_rows: int, usage: UsageTable, checkpoints: list[Checkpoint]) -> Iterator[Row]:
    """The rows, made one after another; fills the sums, and the checkpoint once its row is made."""
    keys, head, state = LedgerKeys(KEY), Head(0, GENESIS), None
    ledger, belief, total = "00" * 16, hash_sealed(BELIEF), units_down(SETTINGS.total)
    steps = [Stepped((Usage(f"key-{n}", 16, 4, 16, 16 * PRICE),), belief) for n in range(API_KEYS)]
    event: Event = Opened(ledger, "bench", 128, dataclasses.asdict(SETTINGS), total, belief)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for seq in range(1, num_rows + 1):
        at = f"{(start + timedelta(seconds=seq)).isoformat()[:19]}.000Z"
        state = apply(state, seq, event)
        row = make_row(head, seq, at, event, to_state_fields(state), keys)
        if isinstance(event, Stepped):
            add_usages(usage, at, event.entries)
        yield row
        head, event = Head(seq, row.digest), steps[seq % API_KEYS]
        if seq == num_rows - SINCE_CHECKPOINT:
            checkpoints.append(Checkpoint.sign(ledger, head, keys))


def make_in_file(path: Path, num_rows: int) -> None:
    """A ledger in a file."""
    usage: UsageTable = {}
    checkpoints: list[Checkpoint] = []
    create(path, Copy(make_rows(num_rows, usage, checkpoints), (num_rows, BELIEF), usage=usage))
    with closing(open_writer(path, Holding())) as store:
        store.set_checkpoint(checkpoints[0])


def copy_to_database(path: Path, url: str) -> None:
    """The same ledger in a database, as a move copies it."""
    with closing(open_reader(path)) as store:
        store.freeze_view()
        create(url, store.copy())


def run(command: list[str], url: str | None) -> tuple[float, str]:
    """Seconds of a whole command, and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PACLM_LEDGER"}
    started = time.perf_counter()
    done = subprocess.run(
        command, env=environment | ({"PACLM_LEDGER": url} if url else {}), check=True, capture_output=True, text=True
    )
    return time.perf_counter() - started, done.stdout


def forget(folder: Path) -> None:
    """Drop the files in a folder from the machine's memory."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(workspace: Path, url: str | None, data: Path) -> list[str]:
    """Seconds of `show` and of opening: the first time, and the median of the next."""
    curator = workspace / "curator"
    opening = [sys.executable, "-c", OPEN, url or str(curator / "ledger.sqlite"), str(curator), KEY.hex()]
    cells = []
    for what in ("show", "open"):
        forget(data)
        seconds = []
        for _ in range(RUNS):
            if what == "show":
                taken, printed = run([PACLM, "ledger", "show", str(workspace)], url)
                assert printed.startswith("Intact through row"), printed
            else:
                taken = float(run(opening, None)[1])
            seconds.append(taken)
        cells += [f"{seconds[0]:.2f}", f"{statistics.median(seconds[1:]):.2f}"]
    return cells


def main() -> None:
    """Make the ledgers, measure, print one table, remove them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--verify-rows", type=int, default=1_000_000, help="verify is timed on a ledger this long")
    parser.add_argument("--folder", type=Path, default=ROOT, help="on a real disk; /tmp may be memory")
    options = parser.parse_args()
    table, verified = [], []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="large-ledger-") as name:
        Path(name).chmod(0o755)  # PostgreSQL may run as another user
        for num_rows in sorted({options.verify_rows, options.rows}):
            workspace = Path(name) / str(num_rows)
            (workspace / "curator").mkdir(mode=0o700, parents=True)
            (workspace / "paclm.toml").touch()
            write_key(workspace / "curator" / KEY_FILE, MASTER_KEY)
            path = workspace / "curator" / "ledger.sqlite"
            print(f"Making {num_rows:,} rows ...", flush=True)
            started = time.perf_counter()
            make_in_file(path, num_rows)
            print(f"  in a file: {time.perf_counter() - started:.0f} s, {path.stat().st_size / 1e9:.2f} GB", flush=True)
            with PostgresServer(within=Path(name)) as server:
                url = server.url(server.create_database(), socket=True)
                started = time.perf_counter()
                copy_to_database(path, url)
                size = sum(file.stat().st_size for file in (server.data / "base").rglob("*") if file.is_file())
                print(f"  in PostgreSQL: {time.perf_counter() - started:.0f} s, {size / 1e9:.2f} GB", flush=True)
                for place, at, data in (("file", None, workspace), ("PostgreSQL", url, server.data)):
                    table.append([f"{num_rows:,} rows, {place}", *measure(workspace, at, data)])
                    if num_rows == options.verify_rows:
                        seconds, _ = run([PACLM, "ledger", "verify", str(workspace)], at)
                        verified.append([f"{num_rows:,} rows, {place}", f"{seconds:.1f}", f"{num_rows / seconds:,.0f}"])
            shutil.rmtree(workspace)
    header = ["seconds", "show, first", "again", "open, first", "again"]
    print_table("Reading a long ledger (show: the whole command)", header, table)
    print_table("paclm ledger verify, with the key", ["", "seconds", "rows/s"], verified)


if __name__ == "__main__":
    main()
