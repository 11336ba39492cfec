"""Tokens/s that the front carries, against a curator that computes nothing: HTTP, JSON, events and messages alone.

The front is the real one, in its own process, and the scheduler too; only the curator releases fixed tokens at once.
Clients and curator share the machine's cores with the front, so its own CPU time per token says how much one core can
carry; tokens/s is what arrived.

Run: python bench/bench_front.py [--clients 1,16,100 --seconds 4 --tokens 64 --step-ms 0]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

from harness import print_table  # noqa: E402
from paclm.config import MechanismConfig, ServerConfig  # noqa: E402
from paclm.curator.streams import Limits, Piece, Request, Stream, UsageFigures  # noqa: E402
from paclm.engine.base_model import TINY_FOLDER, load_tokenizer  # noqa: E402
from paclm.errors import LedgerError  # noqa: E402
from paclm.privacy.accounting import Account  # noqa: E402
from paclm.server import address  # noqa: E402
from paclm.server.api_keys import KeyStore  # noqa: E402
from paclm.server.database import service_path  # noqa: E402
from paclm.server.front_process import start_front  # noqa: E402
from paclm.server.messages import Setup  # noqa: E402
from paclm.server.scheduler import Scheduler  # noqa: E402
from paclm.worlds.fingerprints import Base  # noqa: E402
from serving.load import Load, Received, Target  # noqa: E402
from serving.load import run as run_load  # noqa: E402


class IdleCurator:
    """Releases the same token for every stream, at once, for free."""

    def __init__(self, places: int, step_seconds: float) -> None:
        self.config = MechanismConfig(per_token=2.0**-40, total=2.0**-10)
        self.limits, self.num_worlds, self.worst_price, self.cautions = Limits(10**6, 1024), 32, 0, []
        self.account, self.reserved_units, self.commit_seconds = Account(2**60), 0, 0.0
        self._tokenizer = load_tokenizer(Base("tiny", TINY_FOLDER, ""))
        self._places, self._running = places, list[Stream]()
        self._step_seconds, self._last = step_seconds, 0.0

    num_active = property(lambda self: len(self._running))
    num_free = property(lambda self: self._places - len(self._running))

    def request(self, prompt: list[int], max_new_tokens: int, **options: Any) -> Request:
        return Request(
            prompt=tuple(prompt), max_new_tokens=max_new_tokens, temperature=0.0, tag=options["tag"], limits=self.limits
        )

    def hold(self, requests: Sequence[Request]) -> list[Stream]:
        return [Stream(request, self._tokenizer, 0) for request in requests]

    def start(self, stream: Stream) -> None:
        self._running.append(stream)

    def cancel(self, stream: Stream) -> None:
        if stream in self._running:
            self._running.remove(stream)

    def step(self) -> list[tuple[Stream, Piece]]:
        time.sleep(max(0.0, self._last + self._step_seconds - time.perf_counter()))
        self._last = time.perf_counter()
        pieces = []
        for stream in self._running:
            stream.tokens.append(7)
            is_last = len(stream.tokens) == stream.request.max_new_tokens
            pieces.append((stream, Piece(7, " patient", "agreed", 1, "length" if is_last else None)))
        self._running = [stream for stream, piece in pieces if piece.finish_reason is None]
        return pieces

    def when_lost(self, call: Callable[[LedgerError], None]) -> None:
        """It has no ledger to lose."""

    def usage(self) -> UsageFigures:
        return UsageFigures({}, {})

    def figures(self) -> dict[str, Any]:
        return {"spent_nats": 0.0, "total_nats": 1.0, "remaining_tokens": 10**12, "mia_bound": 0.5, "world_id_bound": 0}


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default="1,16,100")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=0.0, help="duration of a step; 0 is as fast as it can")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        workspace = SimpleNamespace(path=Path(folder), base=Base("tiny", TINY_FOLDER, ""))
        service_path(workspace.path).parent.mkdir(mode=0o700)
        with KeyStore.open(service_path(workspace.path)) as keys:
            key = keys.add("ward")
        setup = Setup(model_id="clinic", settings=ServerConfig())
        with address.bind("127.0.0.1", 0) as port, start_front(port, workspace.path, workspace.base) as front:
            address.listen(port)
            number = port.getsockname()[1]
            ready = threading.Event()
            scheduler = Scheduler(IdleCurator(256, options.step_ms / 1e3), front.link, 256, ready.set)
            scheduler.hello(workspace=folder, setup=dataclasses.asdict(setup))
            thread = threading.Thread(target=scheduler.run, daemon=True)
            thread.start()
            ready.wait()
            target = Target(port=number, model="clinic", key=key, words=["the", "patient", "has", "a", "cough"])
            for clients in map(int, options.clients.split(",")):
                load = Load(clients=clients, seconds=options.seconds, max_tokens=options.tokens)
                before = cpu_seconds(front.process)
                got = run_load(target, load)
                rows.append(row(clients, got, cpu_seconds(front.process) - before))
            front.process.terminate()
            thread.join()
    header = ["clients", "tokens/s", "tokens per CPU second of the front", "first p50 ms", "failures"]
    print_table(f"front alone, answers of {options.tokens} tokens", header, rows)


def row(clients: int, got: Received, cpu: float) -> list[str]:
    """One line of the table."""
    figures = got.figures()
    cells = (figures["tokens_per_s"], got.tokens / cpu, figures["first_ms"], figures["failures"])
    return [str(clients), *(f"{cell:,.0f}" for cell in cells)]


if __name__ == "__main__":
    main()
