"""`paclm keys`: who may ask the server, and how much. Works while it runs; nothing needs a restart."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paclm.cli.console import JsonFlag, print_json, whole_number
from paclm.config import ServerConfig, in_shell
from paclm.errors import ServiceError

if TYPE_CHECKING:
    from paclm.server.api_keys import KeyInfo, KeyStore

keys = typer.Typer(help="API keys of the server, and their quotas.", no_args_is_help=True)

WorkspaceArgument = Annotated[Path, typer.Argument(help="Folder made by paclm init.")]
NameArgument = Annotated[str, typer.Argument(help="What the key is called in the ledger, in logs and in metrics.")]

_NEEDED_FROM_NOW_ON = (
    "From now on every request needs a key. Until now a server that listens on 127.0.0.1 alone answered programs of "
    "this machine without one; revoking this key does not bring that back."
)


@keys.command("add")
def add(
    workspace: WorkspaceArgument,
    name: NameArgument,
    admin: Annotated[
        bool, typer.Option("--admin", help="Also for the dashboard, metrics, belief and leak estimate.")
    ] = False,
    quota: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Private tokens the key may have in all (100000, 100k); else no limit."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """
    Make a key and show it, once

    A quota is a slice of the one budget. It shares the budget out and bounds nothing: whatever a key may use, the
    guarantee is the one at the committed total. From the first key on that is not an admin's, every request needs one.

    Example usage:

    \b
        paclm keys add clinic ward-3 --quota 100k
        paclm keys add clinic operator --admin
        export OPENAI_API_KEY=$(paclm keys add clinic me --json | jq -r .key)
    """
    quota_tokens = None if quota is None else whole_number("--quota", quota)
    remaining, (url, whose) = _remaining_tokens(workspace), _base_url(workspace)  # what can fail comes first
    with _open(workspace) as store:
        key = store.add(name, admin=admin, quota_tokens=quota_tokens)
        held = store.list()
    _check_kept(workspace, name, key)
    if not admin and sum(not other.is_admin for other in held) == 1:
        typer.echo(_NEEDED_FROM_NOW_ON, err=True)
    if as_json:
        print_json({"name": name, "key": key, "is_admin": admin, "quota_tokens": quota_tokens})
        return
    kind = "Admin key" if admin else "Key"
    allowed = "no quota" if quota_tokens is None else f"{quota_tokens:,} tokens in all"
    typer.echo(f"{kind} {name!r}, {allowed}:\n\n    {key}\n")
    typer.echo("It is stored hashed and cannot be shown again. A running server takes it at once:\n")
    typer.echo(f"    export OPENAI_API_KEY={key}\n    export OPENAI_BASE_URL={url}\n")
    typer.echo(whose)
    if note := _note(held, remaining):
        typer.echo(f"\n{note}")


@keys.command("list")
def list_keys(workspace: WorkspaceArgument, as_json: JsonFlag = False) -> None:
    """
    Show every key's name, quota and use; never a key

    Used and held are private tokens; held are the worst cases of requests under way.

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
    typer.echo(
        f"{'name':<{width}}  {'':<5}  {'quota':>14}  {'used':>14}  {'held':>10}  {'left':>14}  created     state"
    )
    for key in held:
        quota, left = (_count(value) for value in (key.quota_tokens, key.remaining_tokens))
        state = f"revoked {key.revoked_at[:10]}" if key.revoked_at else "in force"
        typer.echo(
            f"{key.name:<{width}}  {'admin' if key.is_admin else '':<5}  {quota:>14}  {key.used_tokens:>14,}  "
            f"{key.reserved_tokens:>10,}  {left:>14}  {key.created[:10]}  {state}"
        )
    if note := _note(held, remaining):
        typer.echo(f"\n{note}")


@keys.command("revoke")
def revoke(workspace: WorkspaceArgument, name: NameArgument, as_json: JsonFlag = False) -> None:
    """
    Refuse a key from now on, for ever

    A running server refuses it from the next request. What it was charged stays; replies stored for it are forgotten.
    A request under way runs to its end.

    Example usage:

    \b
        paclm keys revoke clinic ward-3
    """
    with _open(workspace) as store:
        revoked = store.revoke(name)
    if as_json:
        print_json(_figures(revoked))
        return
    typer.echo(f"Revoked {name!r} ({revoked.revoked_at}): refused from the next request, also by a running server.")
    typer.echo(f"It used {revoked.used_tokens:,} tokens, which stay charged; replies stored for it are forgotten.")


def _open(workspace: Path) -> KeyStore:
    from paclm.server.address import identity, running_server
    from paclm.server.api_keys import KeyStore, service_path
    from paclm.worlds.layout import CURATOR_FOLDER
    from paclm.worlds.manifest import load_manifest

    folder = workspace.expanduser().absolute()
    if not (folder / CURATOR_FOLDER).is_dir():
        load_manifest(folder)  # says so where there is no workspace at all
    path, server = service_path(folder), running_server(folder)
    if server is not None and not (path.exists() and identity(path) == server.service_file):
        raise ServiceError(
            f"{path} is not the file that the running server (process {server.process}) has open: it was removed or "
            "put back meanwhile, and what is written there would reach no server. Stop the server, put the newest "
            "file there, and start it again."
        )
    return KeyStore.open(path)


def _check_kept(workspace: Path, name: str, key: str) -> None:
    """Look whether a key is on record before it is shown: nobody should hand out one that no server knows."""
    with _open(workspace) as store:
        found = store.identify(key)
    if found is None or found.name != name:
        raise ServiceError(
            f"The key {name!r} was written and is not there when the file is read again: the file of keys was put "
            "back or replaced meanwhile. The key is not shown. Put the newest file there, and make a key of another "
            "name."
        )


def _base_url(workspace: Path) -> tuple[str, str]:
    """Where the running server listens, else where one started without options would; and which of the two it is."""
    from paclm.server.address import running_server
    from paclm.worlds.layout import SETTINGS_FILE
    from paclm.worlds.settings import load_settings

    folder = workspace.expanduser().absolute()
    if (server := running_server(folder)) is not None:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        return _url(host.strip("[]"), port), f"The address is that of the running server (process {server.process})."
    path = folder / SETTINGS_FILE
    settings = load_settings(path).server if path.exists() else ServerConfig()
    said = (
        "No server of this workspace is running here. The address is as set in [server] of paclm.toml; --host and "
        "--port of `paclm serve` make it another."
    )
    return _url(settings.host, str(settings.port or "PORT")), said


def _url(host: str, port: str) -> str:
    """As seen from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _figures(key: KeyInfo) -> dict[str, Any]:
    return {**dataclasses.asdict(key), "remaining_tokens": key.remaining_tokens}


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _remaining_tokens(workspace: Path) -> int | None:
    """What the budget still has, as the newest row of the ledger tells it; None before the first token."""
    from paclm.ledger.verify import remaining_tokens
    from paclm.worlds.layout import ledger_path

    path = ledger_path(workspace.expanduser())
    return remaining_tokens(path) if path.exists() else None


def _note(held: list[KeyInfo], remaining: int | None) -> str | None:
    """Quotas may promise more than there is: first come, first served. Said, because it surprises."""
    promised = sum(key.remaining_tokens or 0 for key in held if key.revoked_at is None)
    if remaining is None or promised <= remaining:
        return None
    return (
        f"The quotas in force have {promised:,} tokens left and the budget {remaining:,}: whoever comes first is "
        "served first. Quotas that add up to less than the budget keep a share for everyone."
    )
