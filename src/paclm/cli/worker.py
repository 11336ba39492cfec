"""`paclm worker`: some of the worlds of a workspace, for a server or a study that runs elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from paclm.cli.console import TrainedArgument, open_trained
from paclm.errors import InvalidInput


def worker(
    workspace: TrainedArgument,
    rank: Annotated[int, typer.Option(help="Which of the workers this is, from 1 on; rank 0 is the command itself.")],
    workers: Annotated[int, typer.Option(help="How many there are, with rank 0.")],
    rendezvous: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where rank 0 waits for its workers.")],
) -> None:
    """
    Hold some of the worlds, on this or another host

    Waits for rank 0 (`paclm serve --workers N --rendezvous HOST:PORT`), proves what it holds, and votes until rank 0
    ends. It gets tokens and coins, and never sees secret, belief, noise or ledger.
    """
    if not 1 <= rank < workers:
        raise InvalidInput(f"--rank must be between 1 and {workers - 1}, not {rank}; rank 0 is the command itself.")
    host, port = parse_address(rendezvous)
    opened = open_trained(workspace)
    from paclm.engine.worker import run_worker

    run_worker(opened, rank, host, port)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [HOST]:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise InvalidInput(f"--rendezvous must be HOST:PORT, such as 10.0.0.1:29500, not {address!r}.")
    return host.strip("[]"), int(port)
