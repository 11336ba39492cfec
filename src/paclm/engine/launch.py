"""Start workers: as processes of this machine, one per GPU, or wait for those that are started on other hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from paclm.config import in_shell
from paclm.engine.rendezvous import Rendezvous
from paclm.engine.workers import WorkerGroup, WorkerNews

_KEPT = "PACLM_CACHE_DIR"
_PRIVATE = ("PACLM_", "PG")
"""Variables with the master key, the witness, the ledger's address and its password."""


def start_workers(
    workspace: Path,
    count: int,
    *,
    rendezvous: Rendezvous | None = None,
    timeout: float = 10.0,
    announce: Callable[[WorkerNews], None] = lambda news: None,
) -> WorkerGroup:
    """This process as rank 0. The other ranks are processes of this machine, or come to the rendezvous from others.

    Nothing starts before the group is asked to, by `open_engine` or `connect`. Local workers end with this process:
    each reads from a pipe. They are in sessions of their own: a Ctrl-C reaches this process alone, which ends them.
    """

    def start(rank: int, address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "paclm", "worker", str(workspace)]
        command += ["--rank", str(rank), "--workers", str(count), "--rendezvous", address, "--ends-with-input"]
        environment = worker_environment(os.environ, rank)
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)

    def command(rank: int, address: str) -> str:
        share, here = f"--rank {rank} --workers {count}", in_shell(workspace)
        return (
            f"paclm worker FOLDER {share} --rendezvous {address}. Make FOLDER here and copy it there: paclm export "
            f"{here} --worker FOLDER {share}. To train, FOLDER is a copy of {here} with an empty curator folder"
        )

    if rendezvous is None:
        return WorkerGroup(count, start=start, timeout=timeout, announce=announce)
    return WorkerGroup(count, rendezvous=rendezvous, command=command, timeout=timeout, announce=announce)


def worker_environment(environment: Mapping[str, str], rank: int) -> dict[str, str]:
    """Variables for a worker on this machine: nothing private, and a GPU of its own where there are enough."""
    found = {name: value for name, value in environment.items() if name == _KEPT or not name.startswith(_PRIVATE)}
    if (gpus := torch.cuda.device_count()) > 1:
        shown = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        found["CUDA_VISIBLE_DEVICES"] = shown[rank % gpus] if len(shown) == gpus else str(rank % gpus)
    return found
