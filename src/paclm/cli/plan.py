"""`paclm plan`: plan a budget before the first token, and optionally write it into a workspace's settings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paclm.cli.console import JsonFlag, format_guarantee, print_json, print_wrapped, whole_number
from paclm.config import ChargeName, format_budget, in_shell, parse_budget, parse_count, parse_probability, parse_share
from paclm.errors import InvalidInput, LedgerError
from paclm.worlds.layout import CURATOR_FOLDER, SETTINGS_FILE

if TYPE_CHECKING:
    from paclm.ledger.reading import Contents
    from paclm.privacy.planner import Plan

_WORLDS = 128


def plan(
    mia: Annotated[str | None, typer.Option(help="Target: success of any attack on membership (0.51, 51%).")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to release (1000000, 100k, 2M).")] = None,
    per_token: Annotated[str | None, typer.Option(help="Nats charged per token (2^-32, 1e-9).")] = None,
    prior: Annotated[str, typer.Option(help="Success of a guess before anything is released.")] = "1/2",
    worlds: Annotated[
        int | None, typer.Option(help="Number of worlds, m.", show_default=f"{_WORLDS}; with --write the workspace's")
    ] = None,
    charge: Annotated[
        ChargeName | None,
        typer.Option(help="Which tokens are charged.", show_default="every-token; with --write the workspace's"),
    ] = None,
    dissent_rate: Annotated[
        str | None,
        typer.Option(help="Share of tokens on which worlds differ (0.24, 24%).", show_default="1, the worst"),
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Tokens per day, to show how long it lasts (20000, 20k).")] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="WORKSPACE", help="Write the settings into this workspace's paclm.toml.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """
    Plan a budget from two of --mia, --tokens, --per-token

    Finds the third. Rounds to the safe side. The bounds hold at the total, which is committed before the first token.

    Example usage:

    \b
        paclm plan --mia 51% --tokens 1M --write clinic
        paclm plan --mia 51% --per-token 2^-32
        paclm plan --mia 0.51 --tokens 1000000 --charge dissent --dissent-rate 0.24
        paclm plan --tokens 1M --per-token 2^-32 --rate 20k --json | jq .days
    """
    from paclm.privacy.bounds import success_bound
    from paclm.privacy.planner import plan as make_plan

    found: dict[str, Any] = {} if write is None else _read_workspace(write, worlds)
    chosen: ChargeName = charge or found.get("charge", "every-token")
    num_worlds = found.get("worlds", _WORLDS) if worlds is None else worlds
    charges: tuple[ChargeName, ...] = ("every-token", "dissent")
    share = None if dissent_rate is None else parse_share(dissent_rate)
    plans = {
        name: make_plan(
            mia=None if mia is None else parse_probability(mia),
            tokens=None if tokens is None else whole_number("--tokens", tokens),
            per_token=None if per_token is None else parse_budget(per_token),
            prior=parse_probability(prior),
            num_worlds=num_worlds,
            charge=name,
            dissent_rate=1.0 if share is None else share,
            tokens_per_day=None if rate is None else float(parse_count(rate)),
        )
        for name in charges
    }
    settings = _settings(plans[chosen], found.get("charge", "every-token"))
    stated, committed, note = plans[chosen], 0.0, ""
    if write is not None:
        committed, note = _write(write, settings, num_worlds)
        if committed > stated.total_nats:
            bounds = success_bound(committed, parse_probability(prior)), success_bound(committed, 1 / num_worlds)
            stated = dataclasses.replace(stated, mia_bound=bounds[0], world_id_bound=bounds[1])
    if as_json:
        figures = dataclasses.asdict(stated)
        print_json(figures if write is None else {**figures, "workspace": str(write)})
        return
    _print_table(list(plans.values()), share)
    _print_guarantee(stated, num_worlds, prior, max(stated.total_nats, committed), found.get("unit", "a record was"))
    if write is None:
        typer.echo("For [mechanism] of paclm.toml (or add --write WORKSPACE):")
    else:
        print_wrapped(f"Written into [mechanism] of {write / SETTINGS_FILE}, for its {num_worlds} worlds:")
    for name, value in settings.items():
        typer.echo(f"{name} = {json.dumps(value)}")
    if note:
        print_wrapped(note)


def _settings(plan: Plan, charge_now: str) -> dict[str, Any]:
    """The values for paclm.toml: exact powers of two as `2^-32`, other numbers with every digit."""
    budgets = {"per_token": plan.per_token_nats, "total": plan.total_nats}
    settings: dict[str, Any] = {
        name: format_budget(nats) if "^" in format_budget(nats) else nats for name, nats in budgets.items()
    }
    return settings if plan.charge == charge_now else {**settings, "charge": plan.charge}


def _read_workspace(path: Path, worlds: int | None) -> dict[str, Any]:
    """The number of worlds, the charge rule and the unit of the guarantee."""
    from paclm.worlds.manifest import load_manifest
    from paclm.worlds.settings import load_settings

    manifest = load_manifest(path)
    found = int(manifest.arguments["worlds"])
    if worlds not in (None, found):
        raise InvalidInput(f"{path} has {found} worlds, not {worlds}. Leave out --worlds with --write.")
    mechanism = load_settings(path / SETTINGS_FILE).mechanism
    return {"worlds": found, "charge": mechanism.get("charge", "every-token"), "unit": manifest.unit}


def _write(path: Path, settings: dict[str, Any], num_worlds: int) -> tuple[float, str]:
    """Write settings that the ledger accepts; returns the nats the guarantee is stated at already, and a note or ""."""
    from paclm.cli.ledger_keys import ledger_address
    from paclm.curator.preflight import check_budgets
    from paclm.ledger.address import exists
    from paclm.ledger.verify import verify
    from paclm.worlds.settings import load_settings, write_settings

    file = path / SETTINGS_FILE
    config = load_settings(file).mechanism_with(**settings)
    check_budgets(config, num_worlds)
    committed, note = 0.0, ""
    address = ledger_address(path)
    if exists(address):
        report = verify(address, only_recent=True, folder=path / CURATOR_FOLDER)
        if report.contents is None or not report.intact or report.is_copy:
            # What was ever committed is then unknown, and paclm.toml may hold the only copy: see `ledger adopt`.
            problem = report.problem or f"The ledger of {path} is a backup copy: run paclm ledger adopt first."
            raise LedgerError(f"{problem} Nothing was written into {file}.")
        committed, note = _check_total(path, config.total, report.contents)
    write_settings(file, "mechanism", settings)
    return committed, note


def _check_total(path: Path, total: float, contents: Contents) -> tuple[float, str]:
    """Refuse a total that a ledger in use does not accept; returns as `_write` does."""
    from paclm.privacy.accounting import nats_up, units_down

    account, committed = contents.state.account, contents.state.committed_units
    if units_down(total) < account.spent_units:
        raise InvalidInput(
            f"The plan's total, {format_budget(total)} nats, is less than the {format_budget(account.spent_nats)} "
            "already spent. Nothing was written. Plan for more."
        )
    if units_down(total) <= committed:
        if not account.spent_units or units_down(total) >= committed:
            return 0.0, ""
        nats = nats_up(committed)
        return nats, (
            f"Tokens were charged under a total of {format_budget(nats)} nats, and the guarantee stays at that total: "
            "the smaller one ends spending earlier but does not strengthen it."
        )
    if account.spent_units:
        raise InvalidInput(
            f"The plan's total, {format_budget(total)} nats, is more than the {format_budget(nats_up(committed))} "
            f"committed, with {account.charged_tokens:,} tokens charged: it would weaken the guarantee for everything "
            f"released. Nothing was written. To accept that, write total = {total!r} into [mechanism] of "
            f"{path / SETTINGS_FILE}, then: paclm ledger extend {in_shell(path)}"
        )
    return 0.0, (
        f"The ledger has {format_budget(account.total_nats)} nats committed and nothing charged. Before you serve: "
        f"paclm ledger extend {in_shell(path)}"
    )


def _print_table(plans: list[Plan], dissent_rate: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from paclm.privacy.bounds import format_bound

    table = Table(box=None, pad_edge=False, header_style="bold")
    days = ["days"] if plans[0].days is not None else []
    for title in ("charge", "tokens", "per token", "total nats", "record\nbound", "world\nbound", *days):
        table.add_column(title, justify="left" if title == "charge" else "right", no_wrap=True)
    for plan in plans:
        name: str = plan.charge
        if plan.charge == "dissent":
            name += " (worst case)" if dissent_rate is None else f" (at {dissent_rate:g})"
        table.add_row(
            name,
            f"{plan.tokens:,}",
            format_budget(plan.per_token_nats),
            f"{plan.total_nats:.6g}",
            format_bound(plan.mia_bound),
            format_bound(plan.world_id_bound),
            *([] if plan.days is None else [f"{plan.days:,.1f}"]),
        )
    Console(width=max(Console().width, 100)).print(table)


def _print_guarantee(plan: Plan, worlds: int, prior: str, nats: float, unit: str) -> None:
    from paclm.privacy.bounds import format_bound, success_bound

    expected = " expected (the dissent rate is an estimate)" if plan.charge == "dissent" else ""
    typer.echo()
    print_wrapped(
        f"Commit a total of {plan.total_nats:.6g} nats before the first token. Until it is spent ({plan.tokens:,} "
        f"tokens{expected}),\n{format_guarantee(plan.mia_bound, plan.world_id_bound, worlds, unit, prior=prior)}."
    )
    if parse_probability(prior) != 0.5:
        print_wrapped(
            "Every record is in the drawn half with probability 1/2. For that prior, at which paclm states its "
            f"guarantee, the bound is {format_bound(success_bound(nats, 1 / 2))}."
        )
    if plan.mia_bound >= 1.0:
        print_wrapped("This bound is void: ln 2 nats or more allow certainty about a record. Lower a number.")
