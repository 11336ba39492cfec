"""`paclm ledger show|verify|extend`: show spending, verify integrity, commit to a larger total."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paclm.cli.console import (
    NO_WITNESS,
    JsonFlag,
    WitnessOption,
    WorkspaceArgument,
    YesFlag,
    confirm,
    format_guarantee,
    print_fields,
    print_json,
    print_wrapped,
)
from paclm.cli.ledger_corpus import corpus_figures, has_dp_log, print_corpus_report, show_corpus, verify_corpus
from paclm.cli.ledger_keys import (
    KeyFilesOption,
    curator_folder,
    existing_ledger,
    find_ledger,
    holding_for,
    mac_keys,
    unplaced_keys,
)
from paclm.config import PromiseName, format_budget
from paclm.errors import InvalidInput, LedgerError, LedgerMissing, WorkspaceError

if TYPE_CHECKING:
    from paclm.ledger.reading import Contents
    from paclm.ledger.verify import Report

ledger = typer.Typer(help="Show spending; verify integrity.", no_args_is_help=True)

PlaceArgument = Annotated[
    Path, typer.Argument(metavar="WORKSPACE", help="Folder made by paclm init, or a ledger file such as a backup.")
]
OnePromiseOption = Annotated[
    PromiseName | None, typer.Option(help="Of one promise only.", show_default="all that were used")
]

_COPY = "This is a backup copy: run paclm ledger adopt before it can serve."
_UNPLACED = (
    "Warning: the key {0} signed no row, and without secret.json beside the file it is unknown whether it is older or "
    "newer than {1}, which signed the newest row. If it is newer, this file dates from before that rotation or was "
    "forged with the old key. Verify the workspace instead, or put its secret.json beside the file."
)
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60
_UNNAMED = "(no name)"  # charged from Python, without a tag


def operator() -> str:
    """The user recorded as having confirmed."""
    return os.environ.get("USER") or f"user {os.getuid()}"


@ledger.command("show")
def show(
    workspace: PlaceArgument,
    promise: OnePromiseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """
    Show spending, remaining tokens and bounds

    Spent is so far; bounds are at the committed total. Under the promise corpus: (ε, δ) of all DP trainings over these
    records together. Needs no key and works while the workspace serves.

    Example usage:

    \b
        paclm ledger show clinic
        paclm ledger show clinic --json | jq .remaining_tokens
        paclm ledger show clinic --promise corpus
        paclm ledger show /backup/clinic-monday.sqlite
    """
    from paclm.ledger.address import exists
    from paclm.ledger.verify import verify as verify_ledger

    has_corpus = promise != "half" and has_dp_log(workspace)
    if promise == "corpus" or (promise is None and has_corpus and not exists(find_ledger(workspace))):
        show_corpus(workspace, as_json)
        return
    try:
        address, folder = find_ledger(workspace), curator_folder(workspace)
        report = verify_ledger(address, only_recent=True, hours=not as_json, folder=folder)
    except LedgerMissing:
        _check_anything_used(workspace, promise)
        raise
    if report.contents is None:
        raise LedgerError(report.problem or "The ledger cannot be read.")
    if as_json:
        more = {"corpus": corpus_figures(workspace)} if has_corpus else {}
        checked = {"intact": report.intact, "verified_through": report.verified_through}
        trusted = {"trusted_through": report.trusted_through, "not_checked": _not_checked(report)}
        print_json({**_figures(report.contents), **checked, **trusted, **more})
        return
    if report.intact:
        since = f"since row {report.trusted_through:,} " if report.trusted_through else ""
        print_wrapped(
            f"Intact through row {report.verified_through:,}, the newest (hashes of all rows {since}and sums). "
            f"{_not_checked(report)}"
        )
        typer.echo()
    else:
        print_wrapped(f"NOT INTACT: {report.problem}")
        typer.echo("The figures below are those of the newest row.\n")
    if report.is_copy:
        typer.echo(f"{_COPY}\n")
    _print_figures(report.contents, unit_at(workspace))
    _print_history(report)
    if has_corpus:
        typer.echo("\nPromise corpus")
        show_corpus(workspace, as_json=False)
    else:
        typer.echo("\nWhether a record is in the corpus at all is not hidden.")


@ledger.command("verify")
def verify(
    workspace: PlaceArgument,
    promise: OnePromiseOption = None,
    key_file: KeyFilesOption = None,
    without_key: Annotated[bool, typer.Option("--without-key", help="Check hashes and sums only, not MACs.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """
    Check every row of the ledger

    Checks hashes, links, sums, figures and, with the key, MACs; and the log of DP trainings, where there is one. Needs
    no secret and works while the workspace serves. Exit status 1 if something is wrong, 2 if it could not be checked.

    Example usage:

    \b
        paclm ledger verify clinic
        paclm ledger verify clinic --promise corpus
        paclm ledger verify /backup/clinic-monday.sqlite --key-file /safe/clinic.key
        paclm ledger verify copy-for-the-auditor --without-key --json | jq .intact
    """
    from paclm.ledger.address import exists
    from paclm.ledger.verify import verify as verify_ledger

    corpus = None if promise == "half" else verify_corpus(workspace)
    if promise == "corpus" and corpus is None:
        corpus_figures(workspace)  # raises: says what is missing
    if corpus is not None and (promise == "corpus" or not exists(find_ledger(workspace))):
        if as_json:
            print_json({"intact": corpus["intact"], "problem": corpus["problem"], "corpus": corpus})
        else:
            print_corpus_report(corpus)
        raise typer.Exit(0 if corpus["intact"] else 1)
    _check_anything_used(workspace, promise)
    keys = None if without_key else mac_keys(workspace, key_file)
    report = verify_ledger(find_ledger(workspace), keys, folder=curator_folder(workspace))
    head = report.contents.head if report.contents else None
    several = key_file if key_file and len(key_file) > 1 and not (without_key or report.is_copy) else None
    figures: dict[str, Any] = {
        "intact": report.intact,
        "problem": report.problem,
        "bad_row": report.bad_seq,
        "verified_through": report.verified_through,
        "rows": report.num_events,
        "lost_rows": head.seq - report.num_events if head else 0,
        "macs_checked": report.macs_checked,
        "is_copy": report.is_copy,
        "unplaced_keys": unplaced_keys(workspace, several, report.signers) if several and report.intact else [],
        "head_row": head.seq if head else None,
        "head_digest": head.digest.hex() if head else None,
    }
    if corpus is not None:
        intact, problem = report.intact and corpus["intact"], report.problem or corpus["problem"]
        figures |= {"intact": intact, "problem": problem, "corpus": corpus}
    if as_json:
        print_json(figures)
    elif report.intact:
        checked = "hashes, sums and MACs" if report.macs_checked else "hashes and sums; without the key no MACs"
        typer.echo(f"Intact: {report.num_events:,} rows ({checked}).")
        lost = f" ({figures['lost_rows']:,} lost before a restore)" if figures["lost_rows"] else ""
        typer.echo(f"Head: row {figures['head_row']}{lost}, {figures['head_digest']}")
        if report.is_copy:
            typer.echo(_COPY)
        if figures["unplaced_keys"]:
            typer.echo(_UNPLACED.format(", ".join(figures["unplaced_keys"]), report.signers[-1]))
    else:
        typer.echo(f"NOT INTACT: {report.problem}", err=True)
    if corpus is not None and not as_json:
        print_corpus_report(corpus)
    if not figures["intact"]:
        raise typer.Exit(1)


@ledger.command("extend")
def extend(
    workspace: WorkspaceArgument, witness: WitnessOption = None, yes: YesFlag = False, as_json: JsonFlag = False
) -> None:
    """
    Commit to a larger total, and a weaker guarantee

    First write the new total into [mechanism] of paclm.toml. The old and the new bound are shown before anything is
    done; the new one then holds for everything, including what was released before.

    Example usage:

    \b
        paclm ledger extend clinic
    """
    from paclm.curator.preflight import check_budgets
    from paclm.ledger.ledger import Ledger
    from paclm.privacy.bounds import format_bound
    from paclm.worlds.layout import SETTINGS_FILE
    from paclm.worlds.settings import load_settings

    address = existing_ledger(workspace)
    config = load_settings(workspace / SETTINGS_FILE).config
    if config is None:
        raise InvalidInput("[mechanism] of paclm.toml sets no total. Write the new total there, then repeat.")
    key, *old_keys = mac_keys(workspace)
    with Ledger.open(address, key, old_keys=old_keys, witness=witness, holding=holding_for(workspace)) as opened:
        total = opened.settings.total
        if config.total <= total:
            raise InvalidInput(
                f"The total in paclm.toml, {format_budget(config.total)} nats, is not larger than the committed "
                f"{format_budget(total)}. Write the larger total into [mechanism], then repeat."
            )
        check_budgets(config, opened.num_worlds)
        old, new = opened.bounds, opened.bounds_for(config.total)
        figures = {
            "total_nats": (total, config.total),
            "mia_bound": (old.mia, new.mia),
            "world_id_bound": (old.world_id, new.world_id),
        }
        nats = " → ".join(map(format_budget, figures["total_nats"]))
        record, world = (
            " → ".join(format_bound(bound, decimals=4) for bound in figures[name])
            for name in ("mia_bound", "world_id_bound")
        )
        if not yes:
            confirm(
                f"Total: {nats} nats.\n"
                f"Bound on attacks on whether {unit_at(workspace)} in the secretly drawn half: {record}.\n"
                f"Bound on naming the realized world: {world}.\n"
                "The new bounds hold for everything, including what was released before. Extend?"
            )
        opened.extend(config.total, confirmed_by=operator())
    if as_json:
        ages = ("old", "new")
        print_json({f"{age}_{name}": pair[i] for name, pair in figures.items() for i, age in enumerate(ages)})
    else:
        typer.echo(f"Committed: {nats} nats, bound {record}.")


def _check_anything_used(place: Path, promise: PromiseName | None) -> None:
    """Where neither promise was used yet, say so of both."""
    from paclm.ledger.address import exists, name_of

    address = find_ledger(place)
    if not exists(address):
        if promise is None and verify_corpus(place) is not None:
            corpus_figures(place)  # raises: the adapter has no log
        also = "" if promise else " No DP training was begun either (promise corpus)."
        raise LedgerMissing(
            f"There is no ledger at {name_of(address)} (promise half). It is made when the workspace first generates a "
            f"token.{also}"
        )


def unit_at(place: Path) -> str:
    """Whom the guarantee is about; a ledger file without its manifest knows no groups."""
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
    from paclm.ledger.address import name_of
    from paclm.privacy.accounting import nats_up

    figures, state = _figures(contents), contents.state
    spent, total, bounds = figures["spent_nats"], figures["total_nats"], state.bounds(contents.opened.num_worlds)
    named = os.environ.get("PACLM_WITNESS")
    place = name_of(named) if named else "the place to set in PACLM_WITNESS"
    print_fields(
        {
            "Spent so far": f"{spent:.6g} of {total:.6g} nats ({spent / total if total else 1.0:.3%})",
            "Private tokens": f"{figures['private_tokens']:,}, of which {figures['dissent_tokens']:,} with dissent, "
            f"{figures['charged_tokens']:,} charged",
            "Public tokens": f"{figures['public_tokens']:,}",
            "Remaining": f"{figures['remaining_tokens']:,} charged tokens at "
            f"{format_budget(contents.settings.per_token)} nats",
            "Guarantee": f"at the committed total of {format_budget(nats_up(state.committed_units))} nats, "
            f"{format_guarantee(bounds.mia, bounds.world_id, contents.opened.num_worlds, unit)}",
            "Witness": f"none: {NO_WITNESS}" if state.witness is None else f"{state.witness}, at {place}",
        },
        indent=0,
    )
    if state.belief_is_lost:
        print_wrapped("This ledger was restored without a witness: no more tokens can be charged to it.")


def _not_checked(report: Report) -> str:
    behind = (
        f"Rows up to {report.trusted_through:,} were not checked: a checkpoint vouches for them, and without the key "
        "nothing shows who made it. "
        if report.trusted_through
        else ""
    )
    return f"{behind}No MAC was checked. To check every row with the key: paclm ledger verify"


def _print_history(report: Report) -> None:
    from paclm.ledger.state import by_day
    from paclm.privacy.accounting import nats_up

    hours = [(hour, used.units) for hour, used in report.by_hour.items()]
    if not hours:
        return
    typer.echo(f"\nSpending over time (UTC), {hours[0][0]}h to {hours[-1][0]}h\n  {draw_bars(hours)}")
    for title, groups in (("day (UTC)", by_day(report.by_hour)), ("key", report.by_key)):
        width = max(len(title), *(len(name or _UNNAMED) for name in groups))
        typer.echo(f"\n{title:<{width}}  {'private':>12}  {'charged':>12}  {'public':>12}  {'nats so far':>12}")
        for name, used in groups.items():
            counts = (f"{count:>12,}" for count in (used.tokens, used.charged_tokens, used.public_tokens))
            typer.echo("  ".join([f"{name or _UNNAMED:<{width}}", *counts, f"{nats_up(used.units):>12.6g}"]))


def draw_bars(hours: list[tuple[str, int]]) -> str:
    """Bars of equal spans of time, from the first hour to the last; a span without spending is a space."""
    first = datetime.fromisoformat(f"{hours[0][0]}:00")
    offsets = [int((datetime.fromisoformat(f"{hour}:00") - first).total_seconds()) // 3600 for hour, _ in hours]
    columns = min(_COLUMNS, offsets[-1] + 1)
    sums = [0] * columns
    for offset, (_, units) in zip(offsets, hours, strict=True):
        sums[offset * columns // (offsets[-1] + 1)] += units
    top = max(sums)
    return "".join(_BARS[(units * len(_BARS) - 1) // top] if units else " " for units in sums)
