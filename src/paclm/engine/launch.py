"""Start workers: as processes of this machine, one per GPU, or wait for those that are started on other hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from paclm.engine.workers import WorkerGroup

_KEPT = "PACLM_CACHE_DIR"
_PRIVATE = ("PACLM_", "PG")
"""Variables with the master key, the witness, the ledger's address and its password."""


def start_workers(
    workspace: Path, count: int, *, timeout: float = 10.0, announce: Callable[[str], None] = lambda sentence: None
) -> WorkerGroup:
    """This process as rank 0, and the other ranks as processes of this machine that end with it."""

    def start(rank: int, address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "paclm", "worker", str(workspace)]
        command += ["--rank", str(rank), "--workers", str(count), "--rendezvous", address]
        return subprocess.Popen(command, env=worker_environment(os.environ, rank), stdin=subprocess.DEVNULL)

    return WorkerGroup(count, start=start, timeout=timeout, announce=announce)


def worker_environment(environment: Mapping[str, str], rank: int) -> dict[str, str]:
    """Variables for a worker on this machine: nothing private, and a GPU of its own where there are enough."""
    found = {name: value for name, value in environment.items() if name == _KEPT or not name.startswith(_PRIVATE)}
    if (gpus := torch.cuda.device_count()) > 1:
        shown = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        found["CUDA_VISIBLE_DEVICES"] = shown[rank % gpus] if len(shown) == gpus else str(rank % gpus)
    return found
