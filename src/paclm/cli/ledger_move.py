"""`paclm ledger move`: from the workspace's SQLite file into PostgreSQL, or back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

import typer

from paclm.cli.console import JsonFlag, WitnessOption, WorkspaceArgument, YesFlag, confirm, print_json, print_wrapped
from paclm.cli.ledger import operator
from paclm.cli.ledger_keys import existing_ledger, holding_for, mac_keys
from paclm.config import is_postgres
from paclm.errors import InvalidInput

VARIABLE = "PACLM_LEDGER"


def move(
    workspace: WorkspaceArgument,
    to: Annotated[
        str, typer.Option(metavar="URL", help="postgresql://USER@HOST/DATABASE, or sqlite: the workspace's own file.")
    ],
    witness: WitnessOption = None,
    write: Annotated[bool, typer.Option("--write", help="Write the new place into [ledger] of paclm.toml.")] = False,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """
    Move the ledger into PostgreSQL, or back

    Stop the server first. Charges, belief, secret, API keys, quotas and stored replies move together; every row is
    checked before and after. The old place is then closed for good: it never opens again. After a crash or an error,
    repeat the command: at no time can both places be used.

    Example usage:

    \b
        paclm ledger move clinic --to postgresql://paclm@db.example/clinic --write
        paclm ledger move clinic --to sqlite --write
    """
    from paclm.cli.progress import progress, task_starter
    from paclm.ledger.address import name_of
    from paclm.ledger.events import LedgerKeys
    from paclm.ledger.move import move as move_ledger
    from paclm.worlds.layout import SETTINGS_FILE, ledger_path
    from paclm.worlds.settings import write_settings

    if to != "sqlite" and not is_postgres(to):
        raise InvalidInput("--to must be postgresql://USER@HOST/DATABASE, or sqlite for the file of the workspace.")
    if write and has_password(to):
        raise InvalidInput(
            "--write would put the password into paclm.toml. Leave it out of the address and keep it in ~/.pgpass or "
            f"PGPASSWORD, or set {VARIABLE} instead of --write."
        )
    source, target = existing_ledger(workspace), ledger_path(workspace).absolute() if to == "sqlite" else to
    old, new = name_of(source), name_of(target)
    key, *old_keys = mac_keys(workspace)
    if not yes:
        confirm(f"The ledger in {old} moves to {new}. The old one is then closed for good. Move?")
    with progress(quiet=as_json) as bar:
        head = move_ledger(
            source,
            target,
            LedgerKeys(key, old_keys),
            confirmed_by=operator(),
            holding=holding_for(workspace),
            witness=witness,
            carry=lambda: _carry(workspace, source, target),
            report=task_starter(bar),
        )
    if write:
        write_settings(workspace / SETTINGS_FILE, "ledger", {"url": "" if to == "sqlite" else to})
    if as_json:
        print_json({"source": old, "target": new, "row": head.seq, "digest": head.digest.hex(), "is_written": write})
        return
    typer.echo(f"Moved: {new} continues after row {head.seq:,}; {old} is closed for good.")
    print_wrapped(_what_to_set(workspace / SETTINGS_FILE, to, write))


def has_password(url: str) -> bool:
    """Whether an address holds a password."""
    parts = urlsplit(url)
    return bool(parts.password or "password" in parse_qs(parts.query))


def _what_to_set(file: Path, to: str, is_written: bool) -> str:
    """What every command and server needs to find the ledger."""
    if to == "sqlite":
        url = "Written" if is_written else f"Take url out of [ledger] of {file}"
        return f"{url}; {VARIABLE} must not be set."
    if is_written:
        also = f" {VARIABLE} is set and comes first: set it to the same, or unset it." if VARIABLE in os.environ else ""
        return f"Written: url of [ledger] in {file}.{also}"
    if has_password(to):
        return f"Set {VARIABLE} to the address that you passed with --to, for every command and server."
    return f'Write url = "{to}" into [ledger] of {file}, or set {VARIABLE} to it, for every command and server.'


def _carry(workspace: Path, source: Path | str, target: Path | str) -> None:
    """Copy what is kept beside the ledger."""
    from paclm.curator.promises import move_promises

    move_promises(workspace, source, target)
    _carry_service(workspace, source, target)


def _carry_service(workspace: Path, source: Path | str, target: Path | str) -> None:
    """Copy API keys, quotas and stored replies; what an earlier move left in a file is kept under another name."""
    from paclm.ledger.move import set_aside
    from paclm.server.database import copy_service, open_database, service_path

    path = service_path(workspace.absolute())
    if isinstance(source, Path) and not path.exists():
        return
    if isinstance(target, Path):
        set_aside(path)
    places = (path if isinstance(place, Path) else place for place in (source, target))
    with open_database(next(places)) as old, open_database(next(places)) as new:
        copy_service(old, new)
