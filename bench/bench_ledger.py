"""What a durable commit costs, alone and with a witness, and how much the file grows per step.

The alternative is the same SQLite transaction without waiting for the disk (`synchronous=OFF`): what durability itself
costs on this disk. Bare writes of the same bytes, each synced, say what the disk can do at best.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench")]

from harness import median, print_table, race, spread  # noqa: E402
from paclm.config import MechanismConfig  # noqa: E402
from paclm.ledger.events import Usage  # noqa: E402
from paclm.ledger.ledger import Ledger  # noqa: E402

KEY = bytes(range(32))
SETTINGS = MechanismConfig(per_token=2.0**-40, total=2.0**-4)
PRICE = 2**20
SEALED_BYTES = 12 + 128 * 8 + 16
"""A belief over 128 worlds as AES-GCM seals it: nonce, ciphertext, tag."""
STEPS = 50
HISTORY = 5000


def make(folder: Path, name: str, witness: bool = False) -> Ledger:
    """A fresh ledger in a folder of its own."""
    place = folder / name
    place.mkdir(mode=0o700)
    return Ledger.create(
        place / "ledger.sqlite",
        KEY,
        workspace="bench",
        num_worlds=128,
        settings=SETTINGS,
        sealed_belief=os.urandom(SEALED_BYTES),
        witness=folder / f"{name}.witness" if witness else None,
    )


def steps(ledger: Ledger, num_keys: int, count: int = STEPS) -> None:
    """Steps of 16 tokens that belong to so many API keys."""
    each = 16 // num_keys
    entries = [Usage(f"key-{n}", each, each // 4, each, each * PRICE) for n in range(num_keys)]
    for _ in range(count):
        ledger.commit(entries, os.urandom(SEALED_BYTES))


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


def main() -> None:
    """Two tables: the cost of a commit, and growth with the cost of opening."""
    with tempfile.TemporaryDirectory(dir=ROOT) as name:  # a real disk: /tmp may be memory
        folder = Path(name)
        ledgers = {
            "commit, 16 tokens of one key": (make(folder, "one"), 1),
            "commit, 16 tokens of 16 keys": (make(folder, "many"), 16),
            "commit with a witness, one key": (make(folder, "witnessed", witness=True), 1),
            "not durable (synchronous=OFF)": (make(folder, "careless"), 1),
        }
        ledgers["not durable (synchronous=OFF)"][0].store.db.execute("PRAGMA synchronous=OFF")
        contenders = {label: (lambda x=ledger, k=keys: steps(x, k)) for label, (ledger, keys) in ledgers.items()}
        seconds = race({**contenders, "bare 16 KiB write and sync": bare_writes(folder / "bare")})
        print_table(
            "A durable commit",
            ["", "ms", "spread"],
            [[n, f"{median(s) / STEPS * 1e3:.3f}", spread(s)] for n, s in seconds.items() if n != "control"]
            + [["control (machine)", "", spread(seconds["control"])]],
        )
        for ledger, _ in ledgers.values():
            ledger.close()
        rows = []
        for num_keys in (1, 16):
            ledger = make(folder, f"growth-{num_keys}")
            ledger.store.db.execute("PRAGMA synchronous=OFF")
            steps(ledger, num_keys, HISTORY)
            path = ledger.path
            ledger.close()
            opening = {}
            for in_full in (False, True):
                started = time.perf_counter()
                Ledger.open(path, KEY, in_full=in_full).close()
                opening[in_full] = time.perf_counter() - started
            size = path.stat().st_size / HISTORY
            rows.append([str(num_keys), "1", f"{size:.0f}", *[f"{opening[x] * 1e3:.1f}" for x in (False, True)]])
        print_table(
            f"Growth and opening after {HISTORY:,} steps of 16 tokens",
            ["keys in a step", "rows/step", "bytes/step", "open ms", "open in full ms"],
            rows,
        )


if __name__ == "__main__":
    main()
