"""`paclm keys`: API keys of the server and their quotas. Takes effect while it runs, without a restart."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paclm.cli.console import JsonFlag, WorkspaceArgument, print_json, whole_number
from paclm.config import ServerConfig, in_shell
from paclm.errors import ServiceError

if TYPE_CHECKING:
    from paclm.server.api_keys import KeyInfo, KeyStore

keys = typer.Typer(help="API keys of the server, and their quotas.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="Name of the key in the ledger, in logs and in metrics.")]


@keys.command("add")
def add(
    workspace: WorkspaceArgument,
    name: NameArgument,
    admin: Annotated[bool, typer.Option("--admin", help="May also see dashboard, metrics and belief.")] = False,
    quota: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Private tokens in all (100000, 100k); no limit if left out.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """
    Make a key and show it once

    A quota is a share of the one budget. It does not change the guarantee, which is the one at the committed total.
    Once there is a key that is not an admin's, every request needs one.

    Example usage:

    \b
        paclm keys add clinic ward-3 --quota 100k
        paclm keys add clinic operator --admin
        export OPENAI_API_KEY=$(paclm keys add clinic me --json | jq -r .key)
    """
    quota_tokens = None if quota is None else whole_number("--quota", quota)
    remaining, (url, source) = _remaining_tokens(workspace), _base_url(workspace)  # can fail, so before the key is made
    with _open(workspace) as store:
        key = store.add(name, admin=admin, quota_tokens=quota_tokens)
        held = store.list()
    _check_kept(workspace, name, key)
    if not admin and sum(not other.is_admin for other in held) == 1:
        typer.echo(
            "From now on every request needs a key, even after this key is revoked. Until now a server that listens on "
            "127.0.0.1 only answered local programs without one.",
            err=True,
        )
    if as_json:
        print_json({"name": name, "key": key, "is_admin": admin, "quota_tokens": quota_tokens})
        return
    kind = "Admin key" if admin else "Key"
    allowed = "no quota" if quota_tokens is None else f"{quota_tokens:,} tokens in all"
    typer.echo(f"{kind} {name!r}, {allowed}:\n\n    {key}\n")
    typer.echo("Only its hash is stored: it cannot be shown again. A running server accepts it immediately:\n")
    typer.echo(f"    export OPENAI_API_KEY={key}\n    export OPENAI_BASE_URL={url}\n")
    typer.echo(source)
    if note := _note(held, remaining):
        typer.echo(f"\n{note}")


@keys.command("list")
def list_keys(workspace: WorkspaceArgument, as_json: JsonFlag = False) -> None:
    """
    Show every key's name, quota and use; never a key

    Used and held are private tokens; held is the most that running requests can use.

    Example usage:

    \b
        paclm keys list clinic
        paclm keys list clinic --json | jq '.keys[] | select(.revoked_at == null) | .name'
    """
    with _open(workspace) as store:
        held = store.list()
    remaining = _remaining_tokens(workspace)
    if as_json:
        print_json({"keys": [_figures(key) for key in held], "budget_remaining_tokens": remaining})
        return
    if not held:
        typer.echo(f"No keys. Make one: paclm keys add {in_shell(workspace)} NAME")
        return
    width = max(4, *(len(key.name) for key in held))
    row = "{:<{width}}  {:<5}  {:>14}  {:>14}  {:>10}  {:>14}  {:<10}  {}".format
    typer.echo(row("name", "", "quota", "used", "held", "left", "created", "state", width=width))
    for key in held:
        tokens = (key.quota_tokens, key.used_tokens, key.reserved_tokens, key.remaining_tokens)
        counts = ("–" if count is None else f"{count:,}" for count in tokens)
        state = f"revoked {key.revoked_at[:10]}" if key.revoked_at else "in force"
        typer.echo(row(key.name, "admin" if key.is_admin else "", *counts, key.created[:10], state, width=width))
    if note := _note(held, remaining):
        typer.echo(f"\n{note}")


@keys.command("revoke")
def revoke(workspace: WorkspaceArgument, name: NameArgument, as_json: JsonFlag = False) -> None:
    """
    Revoke a key permanently

    A running server refuses it from the next request on; requests under way run to their end. Its charges stay; its
    stored replies are deleted.

    Example usage:

    \b
        paclm keys revoke clinic ward-3
    """
    with _open(workspace) as store:
        revoked = store.revoke(name)
    if as_json:
        print_json(_figures(revoked))
        return
    typer.echo(
        f"Revoked {name!r} ({revoked.revoked_at}). Its {revoked.used_tokens:,} tokens stay charged; its stored replies "
        "are deleted."
    )


def _open(workspace: Path) -> KeyStore:
    from paclm.ledger.verify import check_not_moved
    from paclm.server.address import identity, running_server
    from paclm.server.api_keys import KeyStore
    from paclm.server.database import service_address, service_path
    from paclm.worlds.layout import CURATOR_FOLDER
    from paclm.worlds.manifest import load_manifest
    from paclm.worlds.settings import ledger_address
    from paclm.worlds.student_folder import is_student

    folder = _home(workspace)
    if has_ledger := not is_student(workspace):
        if not (folder / CURATOR_FOLDER).is_dir():
            load_manifest(folder)  # raises if there is no workspace
        address = service_address(folder)
    else:
        address = service_path(folder)
    server = running_server(folder)
    if server is not None and identity(address) != server.service:
        raise ServiceError(
            f"The running server (process {server.process}) has other keys open than those of this command. Where they "
            "are in a database, set PACLM_LEDGER as it has it. Where they are in a file, that was removed or replaced: "
            "stop the server, restore the newest curator/service.sqlite, and start it again."
        )
    if has_ledger:
        check_not_moved(ledger_address(folder))
    return KeyStore.open(address)


def _home(folder: Path) -> Path:
    """Where keys are kept: in the workspace; those of a student, which is published, with the user."""
    from paclm.worlds.student_folder import is_student, make_state_folder, read_student

    return make_state_folder(read_student(folder)) if is_student(folder) else folder.expanduser().absolute()


def _check_kept(workspace: Path, name: str, key: str) -> None:
    """Read the key back before it is shown, so that no key is handed out that the server does not know."""
    with _open(workspace) as store:
        found = store.identify(key)
    if found is None or found.name != name:
        raise ServiceError(
            f"The key {name!r} is missing when the file is read again: the file was replaced meanwhile. "
            "The key is not shown. Restore the newest file, then add a key with another name."
        )


def _base_url(workspace: Path) -> tuple[str, str]:
    """The address of the running server, else the one in the settings; and a sentence on which of the two it is."""
    from paclm.server.address import running_server
    from paclm.worlds.layout import SETTINGS_FILE
    from paclm.worlds.settings import load_settings

    folder = _home(workspace)
    if (server := running_server(folder)) is not None:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        return _url(host.strip("[]"), port), f"The address is that of the running server (process {server.process})."
    path = folder / SETTINGS_FILE
    settings = load_settings(path).server if path.exists() else ServerConfig()
    place = "from [server] of paclm.toml" if path.exists() else "the default"
    source = f"No server is running here. The address is {place}; --host and --port override it."
    return _url(settings.host, str(settings.port or "PORT")), source


def _url(host: str, port: str) -> str:
    """As seen from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _figures(key: KeyInfo) -> dict[str, Any]:
    return {**dataclasses.asdict(key), "remaining_tokens": key.remaining_tokens}


def _remaining_tokens(workspace: Path) -> int | None:
    """What the budget has left by the newest row of the ledger; None before the first token, and of a student."""
    from paclm.ledger.address import exists
    from paclm.ledger.verify import remaining_tokens
    from paclm.worlds.layout import CURATOR_FOLDER
    from paclm.worlds.settings import ledger_address
    from paclm.worlds.student_folder import is_student

    if is_student(workspace):
        return None
    place = workspace.expanduser()
    address = ledger_address(place)
    return remaining_tokens(address, place / CURATOR_FOLDER) if exists(address) else None


def _note(held: list[KeyInfo], remaining: int | None) -> str | None:
    """A note if the quotas add up to more than the budget: requests are then served in order of arrival."""
    promised = sum(key.remaining_tokens or 0 for key in held if key.revoked_at is None)
    if remaining is None or promised <= remaining:
        return None
    return (
        f"The quotas have {promised:,} tokens left and the budget {remaining:,}: requests are served in order of "
        "arrival. To guarantee each key its quota, keep their sum below the budget."
    )
