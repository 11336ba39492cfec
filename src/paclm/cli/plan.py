"""`paclm plan`: a budget before the first token."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.cli.console import JsonFlag, print_json
from paclm.config import ChargeName, format_budget, parse_budget, parse_probability

if TYPE_CHECKING:
    from paclm.privacy.planner import Plan


def plan(
    mia: Annotated[
        str | None, typer.Option(help="Target: no membership attack succeeds more often (0.51, 51%).")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="How many tokens to release.")] = None,
    per_token: Annotated[str | None, typer.Option(help="Nats charged per token (2^-32, 1e-9).")] = None,
    prior: Annotated[str, typer.Option(help="Success of a guess before anything is released.")] = "1/2",
    worlds: Annotated[int, typer.Option(help="Number of worlds, m.")] = 128,
    charge: Annotated[ChargeName, typer.Option(help="Which tokens are charged.")] = "every-token",
    dissent_rate: Annotated[
        float | None, typer.Option(help="Share of tokens on which worlds differ; worst case 1 when not given.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Tokens per day, to tell how long the budget lasts.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Plan a budget: give two of --mia, --tokens and --per-token, and the third follows.

    Rounds to the safe side. The bounds hold at the total, committed before the first token.

    \b
    Example usage:
        paclm plan --mia 51% --per-token 2^-32
        paclm plan --mia 0.51 --tokens 1000000 --charge dissent --dissent-rate 0.24
        paclm plan --tokens 1000000 --per-token 2^-32 --rate 20000 --json | jq .days
    """
    from paclm.privacy.planner import plan as make_plan

    charges: tuple[ChargeName, ...] = ("every-token", "dissent")
    plans = {
        name: make_plan(
            mia=None if mia is None else parse_probability(mia),
            tokens=tokens,
            per_token=None if per_token is None else parse_budget(per_token),
            prior=parse_probability(prior),
            num_worlds=worlds,
            charge=name,
            dissent_rate=1.0 if dissent_rate is None else dissent_rate,
            tokens_per_day=rate,
        )
        for name in charges
    }
    if as_json:
        print_json(dataclasses.asdict(plans[charge]))
        return
    _print_table(list(plans.values()), dissent_rate)
    _print_words(plans[charge], worlds, prior)


def _print_table(plans: list[Plan], dissent_rate: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("charge", "tokens", "per token", "total nats", "record bound", "world bound", "days"):
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
            f"{plan.mia_bound:.4%}",
            f"{plan.world_id_bound:.4%}",
            "" if plan.days is None else f"{plan.days:,.1f}",
        )
    Console(width=max(Console().width, 100)).print(table)


def _print_words(plan: Plan, worlds: int, prior: str) -> None:
    expected = " expected (the dissent rate is an estimate)" if plan.charge == "dissent" else ""
    typer.echo(
        f"\nCommit a total of {plan.total_nats:.6g} nats before the first token. Until it is gone, "
        f"{plan.tokens:,} tokens{expected},\n"
        f"no attack on a record succeeds more than {plan.mia_bound:.2%} of the time (a guess: {prior}),\n"
        f"and none names the realized world more than {plan.world_id_bound:.2%} of the time (a guess: 1/{worlds})."
    )
    charge = "" if plan.charge == "every-token" else f', charge = "{plan.charge}"'
    typer.echo(
        f"For [mechanism] of paclm.toml: per_token = {plan.per_token_nats!r}, total = {plan.total_nats!r}{charge}"
    )
    if plan.mia_bound >= 1.0:
        typer.echo("That bound says nothing: ln 2 nats and more allow certainty about a record. Lower a number.")
