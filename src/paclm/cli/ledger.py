"""`paclm ledger`: what was spent, whether the books can be believed, and a larger total when someone wants one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paclm.cli.console import JsonFlag, confirm, print_json
from paclm.cli.ledger_keys import (
    NO_WITNESS,
    KeyFilesOption,
    WitnessOption,
    find_ledger,
    ledger_path,
    mac_keys,
    unplaced_keys,
)
from paclm.cli.wrap import say
from paclm.config import format_budget
from paclm.errors import InvalidInput, LedgerError, WorkspaceError

if TYPE_CHECKING:
    from paclm.ledger.reading import Contents
    from paclm.ledger.state import UsageTable

ledger = typer.Typer(help="What was spent, and whether the books can be believed.", no_args_is_help=True)

WorkspaceArgument = Annotated[Path, typer.Argument(help="Folder made by paclm init.")]
PlaceArgument = Annotated[
    Path, typer.Argument(metavar="WORKSPACE", help="Folder made by paclm init; or the file of a ledger, as a backup.")
]
YesFlag = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

NOT_HIDDEN = "Whether a record is in the corpus at all is not hidden."

_COPY = "This is a backup copy: paclm ledger adopt is needed before it can serve."
_UNPLACED = (
    "Caution: the key {0} signed no row here, and nothing beside the file says whether it came before {1}, which "
    "signed the newest, or after it. If it replaced {1}, this file is from before that exchange, or was made by "
    "someone who knows the old key: verify the workspace instead, or put its secret.json beside the file."
)
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60
_UNNAMED = "(no name)"
"""Charged from Python, without a tag."""


def operator() -> str:
    """Who is recorded as having confirmed."""
    return os.environ.get("USER") or f"user {os.getuid()}"


@ledger.command("show")
def show(workspace: PlaceArgument, as_json: JsonFlag = False) -> None:
    """
    Show spending, remaining tokens and bounds

    Spent is so far; bounds are at the committed total. Needs no key and works while the workspace serves.

    Example usage:

    \b
        paclm ledger show clinic
        paclm ledger show clinic --json | jq .remaining_tokens
        paclm ledger show /backup/clinic-monday.sqlite
    """
    from paclm.ledger.verify import verify as verify_ledger

    report = verify_ledger(find_ledger(workspace))
    if report.contents is None:
        raise LedgerError(report.problem or "The ledger cannot be read.")
    if as_json:
        print_json({**_figures(report.contents), "intact": report.intact})
        return
    if report.intact:
        typer.echo(f"{report.num_events:,} rows, intact (hashes and sums; with the key: paclm ledger verify).\n")
    else:
        say(f"NOT INTACT: {report.problem}")
        typer.echo("What follows is what the newest row says.\n")
    if report.is_copy:
        typer.echo(f"{_COPY}\n")
    _print_figures(report.contents, _unit(workspace))
    _print_history(report.usage)
    typer.echo(f"\n{NOT_HIDDEN}")


@ledger.command("verify")
def verify(
    workspace: PlaceArgument,
    key_file: KeyFilesOption = None,
    without_key: Annotated[
        bool, typer.Option("--without-key", help="Check hashes and sums only: no MAC, no key needed.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """
    Check every row of the ledger

    Hashes, links, sums, figures and, with the key, MACs. Works without the secret and while the workspace serves.
    Exit status 1 when something is wrong, 2 when it could not be checked.

    Example usage:

    \b
        paclm ledger verify clinic
        paclm ledger verify /backup/clinic-monday.sqlite --key-file /safe/clinic.key
        paclm ledger verify copy-for-the-auditor --without-key --json | jq .intact
    """
    from paclm.ledger.verify import verify as verify_ledger

    report = verify_ledger(find_ledger(workspace), None if without_key else mac_keys(workspace, key_file))
    lost = report.contents.head.seq - report.num_events if report.contents else 0
    several = key_file if key_file and len(key_file) > 1 and not (without_key or report.is_copy) else None
    unplaced = unplaced_keys(workspace, several, report.signers) if several and report.intact else []
    figures: dict[str, Any] = {
        "intact": report.intact,
        "problem": report.problem,
        "bad_row": report.bad_seq,
        "rows": report.num_events,
        "lost_rows": lost,
        "macs_checked": report.macs_checked,
        "is_copy": report.is_copy,
        "unplaced_keys": unplaced,
        "head_row": report.contents.head.seq if report.contents else None,
        "head_digest": report.contents.head.digest.hex() if report.contents else None,
    }
    if as_json:
        print_json(figures)
    elif report.intact:
        checked = "hashes, sums and MACs" if report.macs_checked else "hashes and sums; without the key no MACs"
        typer.echo(f"Intact: {report.num_events:,} rows ({checked}).")
        missing = f" ({lost:,} lost before a restore)" if lost else ""
        typer.echo(f"Head: row {figures['head_row']}{missing}, {figures['head_digest']}")
        if report.is_copy:
            typer.echo(_COPY)
        if unplaced:
            typer.echo(_UNPLACED.format(", ".join(unplaced), report.signers[-1]))
    else:
        typer.echo(f"NOT INTACT: {report.problem}", err=True)
    if not report.intact:
        raise typer.Exit(1)


@ledger.command("extend")
def extend(
    workspace: WorkspaceArgument, witness: WitnessOption = None, yes: YesFlag = False, as_json: JsonFlag = False
) -> None:
    """
    Commit to a larger total, and a weaker guarantee

    Write the new total into [mechanism] of paclm.toml first. The old and the new bound are shown before anything is
    done; the weaker one then holds for everything, also for what was released before.

    Example usage:

    \b
        paclm ledger extend clinic
    """
    from paclm.curator.preflight import check_budgets
    from paclm.ledger.ledger import Ledger
    from paclm.privacy.bounds import format_bound
    from paclm.worlds.layout import SETTINGS_FILE
    from paclm.worlds.settings import load_settings

    config = load_settings(workspace / SETTINGS_FILE).config
    if config is None:
        raise InvalidInput("[mechanism] of paclm.toml sets no total. Write the new total there, then repeat.")
    key, *old_keys = mac_keys(workspace)
    with Ledger.open(ledger_path(workspace), key, old_keys=old_keys, witness=witness) as books:
        if config.total <= books.settings.total:
            raise InvalidInput(
                f"paclm.toml has a total of {format_budget(config.total)} nats, and "
                f"{format_budget(books.settings.total)} are committed. Write the larger total into [mechanism] of "
                "paclm.toml, then repeat."
            )
        check_budgets(config, books.num_worlds)
        old, new = books.bounds, books.bounds_for(config.total)
        figures = {
            "old_total_nats": books.settings.total,
            "new_total_nats": config.total,
            "old_mia_bound": old.mia,
            "new_mia_bound": new.mia,
            "old_world_id_bound": old.world_id,
            "new_world_id_bound": new.world_id,
        }
        unit = _unit(workspace)
        records, worlds = (
            f"{format_bound(before, decimals=4)} → {format_bound(after, decimals=4)}"
            for before, after in ((old.mia, new.mia), (old.world_id, new.world_id))
        )
        question = (
            f"Total: {format_budget(books.settings.total)} → {format_budget(config.total)} nats.\n"
            f"Bound on attacks on whether {unit} in the secretly drawn half: {records}.\n"
            f"Bound on naming the realized world: {worlds}.\n"
            "The new bounds hold for everything, also for what has left already. Extend?"
        )
        if not yes:
            confirm(question)
        books.extend(config.total, confirmed_by=operator())
    if as_json:
        print_json(figures)
    else:
        bound = format_bound(new.mia, decimals=4)
        typer.echo(f"Committed: {format_budget(config.total)} nats, {bound} on whether {unit} in the drawn half.")


def _unit(place: Path) -> str:
    """Whom the guarantee is about; the file of a ledger, or a copy without its manifest, knows of records only."""
    from paclm.worlds.manifest import load_manifest, unit_of

    try:
        return load_manifest(place).unit
    except WorkspaceError:
        return unit_of(None)


def _figures(contents: Contents) -> dict[str, Any]:
    state, account = contents.state, contents.state.account
    bounds = state.bounds(contents.opened.num_worlds)
    return {
        "private_tokens": account.tokens,
        "public_tokens": state.public_tokens,
        "dissent_tokens": account.dissent_tokens,
        "charged_tokens": account.charged_tokens,
        "spent_nats": account.spent_nats,
        "total_nats": account.total_nats,
        "remaining_tokens": account.remaining_tokens(contents.settings.per_token),
        "mia_bound": bounds.mia,
        "world_id_bound": bounds.world_id,
        "witness": state.witness,
    }


def _print_figures(contents: Contents, unit: str) -> None:
    from paclm.privacy.accounting import nats_up
    from paclm.privacy.bounds import format_bound

    figures, worlds = _figures(contents), contents.opened.num_worlds
    share = figures["spent_nats"] / figures["total_nats"] if figures["total_nats"] else 1.0
    committed = format_budget(nats_up(contents.state.committed_units))
    price = format_budget(contents.settings.per_token)
    record, world = (format_bound(figures[name]) for name in ("mia_bound", "world_id_bound"))
    for name, text in (
        ("Spent so far", f"{figures['spent_nats']:.6g} of {figures['total_nats']:.6g} nats ({share:.3%})"),
        (
            "Private tokens",
            f"{figures['private_tokens']:,}, of which {figures['dissent_tokens']:,} disputed, "
            f"{figures['charged_tokens']:,} charged",
        ),
        ("Public tokens", f"{figures['public_tokens']:,}"),
        ("Remaining", f"{figures['remaining_tokens']:,} charged tokens at {price} nats"),
        (
            "Guarantee",
            f"at the committed total of {committed} nats, whatever was spent so far:\n"
            f"{'':<16}no attack on whether {unit} in the secretly drawn half succeeds\n"
            f"{'':<16}more than {record} of the time (a guess: 50%),\n"
            f"{'':<16}none names the realized world more than {world} (a guess: 1/{worlds}).",
        ),
        ("Witness", _witness(contents.state.witness)),
    ):
        say(f"{name:<16}{text}", column=16)
    if contents.state.belief_is_lost:
        say("This ledger was restored without a witness: nothing can be charged to it any more.")


def _witness(name: str | None) -> str:
    if name is None:
        return f"none: {NO_WITNESS}"
    place = os.environ.get("PACLM_WITNESS")
    return f"{name}, at {place} (PACLM_WITNESS)" if place else f"{name}; where it is, PACLM_WITNESS must say"


def _print_history(usage: UsageTable) -> None:
    from paclm.ledger.state import by_day, by_hour, by_key
    from paclm.privacy.accounting import nats_up

    hours = [(hour, had.units) for hour, had in by_hour(usage).items()]
    if not hours:
        return
    typer.echo(f"\nSpending over time (UTC), {hours[0][0]}h to {hours[-1][0]}h\n  {picture(hours)}")
    for title, groups in (("day (UTC)", by_day(usage)), ("key", by_key(usage))):
        width = max(len(title), *(len(name or _UNNAMED) for name in groups))
        typer.echo(f"\n{title:<{width}}  {'private':>12}  {'charged':>12}  {'public':>12}  {'nats so far':>12}")
        for name, had in groups.items():
            typer.echo(
                f"{name or _UNNAMED:<{width}}  {had.tokens:>12,}  {had.charged_tokens:>12,}  {had.public_tokens:>12,}  "
                f"{nats_up(had.units):>12.6g}"
            )


def picture(hours: list[tuple[str, int]]) -> str:
    """Bars of equal spans of time, from the first hour to the last; a span without spending is a space."""
    from datetime import datetime

    first = datetime.fromisoformat(f"{hours[0][0]}:00")
    offsets = [int((datetime.fromisoformat(f"{hour}:00") - first).total_seconds()) // 3600 for hour, _ in hours]
    columns = min(_COLUMNS, offsets[-1] + 1)
    sums = [0] * columns
    for offset, (_, units) in zip(offsets, hours, strict=True):
        sums[offset * columns // (offsets[-1] + 1)] += units
    top = max(sums)
    return "".join(_BARS[(units * len(_BARS) - 1) // top] if units else " " for units in sums)
