"""`paclm worker`: some of the worlds of a workspace, for a server or a study that runs elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from paclm.cli.console import print_wrapped
from paclm.cli.worker_options import InsecureNetworkFlag, quiet_torch
from paclm.engine.rendezvous import check_workers, find_rendezvous
from paclm.errors import InvalidInput


def worker(
    workspace: Annotated[
        Path,
        typer.Argument(help="Folder made by paclm init, or one of paclm export --worker with a rank's worlds."),
    ],
    rank: Annotated[int, typer.Option(help="Which of the workers this is, from 1 on; rank 0 is the command itself.")],
    workers: Annotated[int, typer.Option(help="How many there are, with rank 0.")],
    rendezvous: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where rank 0 waits for its workers.")],
    insecure_network: InsecureNetworkFlag = False,
    ends_with_input: Annotated[bool, typer.Option("--ends-with-input", hidden=True)] = False,
) -> None:
    """
    Hold some of the worlds, on this or another host

    Waits for rank 0 (`paclm serve --workers N --rendezvous HOST:PORT`), proves what it holds, and votes until rank 0
    ends. It gets prompts, tokens and coins, and never sees secret, belief, noise or ledger. On another host it
    needs no workspace, only the folder of `paclm export --worker`; for `paclm train` it needs the workspace with its
    records, and trains some of the worlds.

    Example usage:

    \b
        paclm worker clinic --rank 1 --workers 2 --rendezvous 10.8.0.1:29500
    """
    if ends_with_input:
        threading.Thread(target=_end_with_input, daemon=True).start()
    from paclm.worlds.workspace import Workspace

    opened = Workspace.open_for_worker(workspace)
    check_workers(workers, opened.num_worlds)
    if not 1 <= rank < workers:
        raise InvalidInput(f"--rank must be between 1 and {workers - 1}, not {rank}; rank 0 is the command itself.")
    networks = opened.settings.workers.private_networks
    where = find_rendezvous(rendezvous, networks, is_insecure=insecure_network)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # waiting for rank 0 does not return to Python; nothing is to be kept
    quiet_torch()
    from paclm.curator.redacted import hide_memory
    from paclm.engine.worker import run_worker

    hide_memory()
    if not ends_with_input:
        print_wrapped(f"Worker {rank} of {workers} waits for rank 0 at {where}.", err=True)
    run_worker(opened, rank, *where, workers)


def _end_with_input() -> None:
    """End with the process that has the other end of standard input, whatever this one is doing."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)
