"""`paclm ledger explain`: who spent what, what happened, and why it ended or goes on, in sentences to forward."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

from paclm.cli.console import JsonFlag, format_guarantee, print_json, print_wrapped
from paclm.cli.ledger import PlaceArgument, unit_at
from paclm.cli.ledger_keys import curator_folder, find_ledger
from paclm.config import format_budget, format_duration

if TYPE_CHECKING:
    from paclm.ledger.events import Event, Row
    from paclm.ledger.reading import Contents
    from paclm.ledger.state import UsageTable
    from paclm.ledger.store import Kind

_WEEK = timedelta(days=7)
_PROOFS = {
    "current": "its witness shows that nothing is missing",
    "witness": "what was lost was taken from its witness",
    "none": "without a witness, so that the whole budget counts as spent",
}
_ORIGINS = {"drawn": "The secret was drawn", "file": "The secret moved into the ledger"}


def utc_now() -> datetime:
    """The end of the last week."""
    return datetime.now(UTC)


def explain(workspace: PlaceArgument, as_json: JsonFlag = False) -> None:
    """
    Explain who spent what, and whether and why it ended

    Sentences to forward: the committed total and its bound, what each key spent and when, what happened to the ledger,
    and how long the rest lasts. Holds no prompt, secret or key. Needs no key and works while the workspace serves.

    Example usage:

    \b
        paclm ledger explain clinic
        paclm ledger explain clinic --json | jq .verdict
    """
    from contextlib import closing

    from paclm.ledger.address import open_reader
    from paclm.ledger.reading import check_note, kind_of, read_contents

    with closing(open_reader(find_ledger(workspace), curator_folder(workspace))) as store:
        store.freeze_view()
        kind, contents = kind_of(store), read_contents(store, None)
        usage, rows = store.usage(), list(store.notable_rows())
        if kind == "live":
            check_note(store, contents.head.seq, store.note)
        newest, place = store.newest_row(), store.name
    bounds, account = contents.state.bounds(contents.opened.num_worlds), contents.state.account
    figures: dict[str, Any] = {
        "place": place,
        "row": contents.head.seq,
        "at": newest.at if newest else None,
        "committed_nats": _nats(contents.state.committed_units),
        "spent_nats": account.spent_nats,
        "guarantee": format_guarantee(bounds.mia, bounds.world_id, contents.opened.num_worlds, unit_at(workspace)),
        "keys": _spenders(usage),
        "history": _history(rows),
        **_verdict(kind, contents, usage, rows),
    }
    if as_json:
        print_json(figures)
    else:
        _print(figures, contents)


def _nats(units: int) -> float:
    from paclm.privacy.accounting import nats_up

    return nats_up(units)


def _spenders(usage: UsageTable) -> list[dict[str, Any]]:
    """What each key spent, the largest first."""
    from paclm.ledger.state import by_key

    total = sum(used.units for used in usage.values())
    spenders = []
    for name, used in sorted(by_key(usage).items(), key=lambda item: (-item[1].units, item[0])):
        hours = sorted(hour for hour, key in usage if key == name)
        counts = {"private_tokens": used.tokens, "charged_tokens": used.charged_tokens}
        spent = {"nats": _nats(used.units), "share": used.units / total if total else 0.0}
        span = {"first_hour": hours[0], "last_hour": hours[-1]}
        spenders.append({"name": name, **counts, "public_tokens": used.public_tokens, **spent, **span})
    return spenders


def _history(rows: Iterable[Row]) -> list[dict[str, Any]]:
    from paclm.ledger.state import parse_row

    return [{"row": row.seq, "at": row.at, "kind": row.kind, "text": _sentence(parse_row(row)[0])} for row in rows]


def _sentence(event: Event) -> str:
    """What happened in one row that is no engine step."""
    from paclm.ledger import events

    match event:
        case events.Opened():
            total, per_token = _nats(event.total_units), event.settings["per_token"]
            return f"The ledger was opened with {format_budget(total)} nats, {format_budget(per_token)} a token."
        case events.SettingsChanged():
            changed = {name: value for name, value in event.new.items() if event.old.get(name) != value}
            return "Settings were changed: " + ", ".join(f"{name} = {value}" for name, value in changed.items()) + "."
        case events.Extended():
            old, new = (format_budget(_nats(units)) for units in (event.old_total_units, event.new_total_units))
            return f"{event.confirmed_by} extended the total from {old} to {new} nats: the bound holds at the new one."
        case events.KeyRotated():
            return f"The master key was replaced: {event.new_key} signs from here on, not {event.old_key}."
        case events.SecretSealed():
            return f"{_ORIGINS.get(event.origin, 'The secret was sealed under another key')}."
        case events.Moved():
            return f"{event.confirmed_by} moved it from {event.source} to {event.target}."
        case events.Arrived():
            return f"From here on it is in {event.target}."
        case events.WitnessChanged():
            return f"The witness became {event.new or 'none'}, not {event.old or 'none'} ({event.confirmed_by})."
        case events.Restored():
            return f"{event.confirmed_by} restored it from a backup: {_PROOFS.get(event.proof, event.proof)}."
        case _:
            return "An engine step."


def _verdict(kind: Kind, contents: Contents, usage: UsageTable, rows: list[Row]) -> dict[str, Any]:
    """Whether private tokens can still be charged, why not, or for how long."""
    state, account = contents.state, contents.state.account
    left = account.remaining_tokens(contents.settings.per_token)
    then = {
        "public": "requests are answered by the public model alone, which leaks nothing",
        "refuse": "requests are refused",
    }[contents.settings.on_exhausted]
    days = None
    if kind in ("moved", "incoming"):
        why = f"Here it ended: {_history(rows)[-1]['text']} This place is closed; paclm ledger move finishes a move."
    elif kind == "copy":
        why = "This is a backup copy: nothing is served from it before paclm ledger adopt."
    elif state.belief_is_lost:
        why = f"Private tokens ended: it was restored without a witness, and what was released is unknown. Now {then}."
    elif not left:
        why = (
            f"Private tokens ended: the committed total is spent. Now {then}. paclm ledger extend commits to a larger "
            "total, which weakens the guarantee for everything released before."
        )
    else:
        since = (utc_now() - _WEEK).strftime("%Y-%m-%dT%H")
        week = sum(used.units for (hour, _), used in usage.items() if hour >= since)
        days = 7 * (account.total_units - account.spent_units) / week if week else None
        lasts = (
            "Nothing was charged in the last week."
            if days is None
            else f"At the rate of the last week that lasts {format_duration(days * 86_400)}."
        )
        why = f"It goes on: {left:,} charged tokens are left. {lasts} When it is spent, {then}."
    return {"is_over": not why.startswith("It goes on"), "left_tokens": left, "days_left": days, "verdict": why}


def _print(figures: dict[str, Any], contents: Contents) -> None:
    account = contents.state.account
    share = account.spent_units / account.total_units if account.total_units else 1.0
    print_wrapped(f"The ledger in {figures['place']}, as of row {figures['row']:,} ({_when(figures['at'])}).")
    print_wrapped(
        f"\nAt most {format_budget(figures['committed_nats'])} nats are ever spent. At that total, "
        f"{figures['guarantee']}."
    )
    print_wrapped(
        f"\nSpent so far: {figures['spent_nats']:.6g} nats ({share:.3%}) for {account.tokens:,} private tokens, "
        f"{account.charged_tokens:,} of them charged. All keys share one guarantee: a key's own share bounds nothing."
    )
    for key in figures["keys"]:
        print_wrapped(
            f"  {key['name'] or '(no name)'}: {key['nats']:.6g} nats ({key['share']:.1%}) for "
            f"{key['private_tokens']:,} private tokens, {key['charged_tokens']:,} charged; {key['public_tokens']:,} "
            f"public ones cost nothing. From {key['first_hour']}h to {key['last_hour']}h (UTC).",
            column=4,
        )
    typer.echo("\nWhat happened:")
    for step in figures["history"]:
        print_wrapped(f"  {_when(step['at'])}: {step['text']}", column=4)
    print_wrapped(f"\n{figures['verdict']}")
    typer.echo("\nThese are the figures of the newest row. To check every row: paclm ledger verify")


def _when(at: str) -> str:
    return f"{at[:10]} {at[11:16]} UTC"
