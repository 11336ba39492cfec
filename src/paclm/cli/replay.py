"""`paclm replay`: run a release on recorded votes. Needs no model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paclm.cli.console import JsonFlag, print_fields, print_json
from paclm.config import RELEASES, ChargeName, format_budget, parse_budget

Protocol = Literal["session", "fresh"]


def _releases() -> list[str]:
    from paclm.plugins import find_plugins
    from paclm.privacy.releases import RULES

    return [*RULES, *(plugin.name for plugin in find_plugins("releases", ()))]


def replay(
    votes: Annotated[Path, typer.Argument(help="Recorded votes (.npz), as `paclm votes --out` writes them.")],
    per_token: Annotated[
        str | None, typer.Option(help="Nats per token (2^-16), or inf for no noise; plurality and mixture need none.")
    ] = None,
    release: Annotated[
        str,
        typer.Option(
            help="How votes become a token: gaussian, plurality, mixture, channel, a plugin's, or module:NAME.",
            autocompletion=_releases,
        ),
    ] = "gaussian",
    charge: Annotated[ChargeName, typer.Option(help="Which tokens are charged.")] = "every-token",
    protocol: Annotated[
        Protocol,
        typer.Option(help="session: one secret per stream. fresh: new secret and uniform belief at every position."),
    ] = "session",
    sessions: Annotated[
        int | None, typer.Option(help="Streams (default 100), or passes with fresh (default 1).")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens per stream (default 4096), or positions with fresh (default all).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of secrets, starts and noise.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """
    Run a release on recorded votes

    Reports accuracy, noise, charge and leak. Research only: secret and noise follow from the
    seed, so its output is not private.

    Example usage:

    \b
        paclm replay votes.npz --per-token 2^-16
        paclm replay votes.npz --release plurality
        paclm replay votes.npz --release my_rules:RULE --per-token 2^-8
        paclm replay votes.npz --release channel --per-token 2^-8 --protocol fresh --json | jq .retained_gain
    """
    from paclm.cli.progress import progress
    from paclm.study.extensions import identify, load_release
    from paclm.study.recorded_votes import RecordedVotes
    from paclm.study.replay import ReplaySettings, describe_leak, planned_tokens
    from paclm.study.replay import replay as run

    plugin = load_release(release)
    settings = ReplaySettings(
        release=release if plugin is None else plugin.value,
        per_token=None if per_token is None else parse_budget(per_token),
        charge=charge,
        protocol=protocol,
        sessions=sessions,
        tokens=tokens,
        seed=seed,
    )
    recorded = RecordedVotes.load(votes)
    with progress() as bar:
        task = bar.add_task("tokens", total=planned_tokens(recorded, settings))
        figures = run(recorded, settings, lambda count: bar.advance(task, count))
    figures["plugin"] = None if plugin is None else identify(plugin)
    if as_json:
        print_json(figures)
    else:
        _print_figures(figures)
    if figures["tells_more_than"]:
        typer.echo(f"Warning: {describe_leak(figures)}", err=True)


def _print_figures(figures: dict[str, Any]) -> None:
    from paclm.privacy.bounds import format_bound
    from paclm.study.replay import unit_of

    def show(name: str, spec: str) -> str:
        return "–" if figures[name] is None else format(figures[name], spec)

    unit, per_token = unit_of(figures), figures["per_token_nats"]
    price = "no budget" if per_token is None else f"{figures['charge']}, {format_budget(per_token)} per token"
    known = None not in (figures["accuracy_public"], figures["accuracy_full"])
    no_gain = " (the full corpus gains nothing here)" if known and figures["retained_gain"] is None else ""
    can = "can leak" if figures["release"] in RELEASES else "declare"
    plugin = figures["plugin"]
    release = f"{figures['release']} of {plugin['package']} {plugin['version']}" if plugin else figures["release"]
    if plugin and plugin["package"] is None:
        release = f"{figures['release']}, {plugin['target']}"
    print_fields(
        {
            "release": release,
            "votes": f"{show('positions', ',')} positions, {figures['worlds']} worlds, "
            f"unanimity {show('unanimity', '.4f')}",
            "replayed": f"{show('tokens', ',')} tokens, dissent {show('dissent', '.4f')}, "
            f"{show('mean_distinct_given_dissent', '.2f')} distinct votes given dissent",
            "accuracy": f"{show('accuracy', '.4f')} ± {show('accuracy_stderr', '.4f')}  "
            f"(public {show('accuracy_public', '.4f')}, full corpus {show('accuracy_full', '.4f')}, "
            f"no noise {show('accuracy_noiseless', '.4f')})",
            "retained gain": show("retained_gain", ".3f") + no_gain,
            "flips given dissent": show("flip_given_dissent", ".4f"),
            "noise σ": f"median {show('sigma_median', '.4g')}, max {show('sigma_max', '.4g')}",
            f"charged {unit}": f"{show('charged_nats', '.4g')} nats ({price})",
            f"leaked {unit}": f"{show('leaked_nats', '.4g')} ± {show('leaked_stderr', '.2g')} nats, "
            f"÷ charged {show('leaked_over_charged', '.4f')}",
            f"information {unit}": f"{show('conditional_information_nats', '.4g')} ± "
            f"{show('conditional_information_stderr', '.2g')} nats that the steps {can}{_how_computed(figures)}",
            "bounds at the total": f"record {format_bound(figures['mia_bound'])}, "
            f"world {format_bound(figures['world_id_bound'])} (named in {show('world_id_rate', '.4f')} by belief, "
            f"{show('world_id_rate_by_agreement', '.4f')} by agreement)",
            "time": f"{show('seconds', '.1f')} s",
        },
        indent=0,
    )
    if figures["protocol"] == "session" and figures["tokens_per_secret"] > figures["positions"]:
        typer.echo(
            f"Note: sessions of {figures['tokens_per_secret']:,} tokens use the {figures['positions']:,} recorded "
            "positions more than once, so standard errors are too small. Record more votes or lower --tokens."
        )
    if _is_far_below(figures) and not figures["tells_more_than"]:
        typer.echo(
            f"Note: the estimated leak is far below the {show('conditional_information_nats', '.4g')} nats that the "
            "steps declare. Either the release declares more than it leaks, or it leaks in rare events that "
            f"{show('secrets', ',')} secrets seldom show. Trust the larger number."
        )
    typer.echo(figures["stamp"])


def _how_computed(figures: dict[str, Any]) -> str:
    """What kind of number the information is, where each step's is computed and no bound."""
    if figures["release"] != "channel":
        return ""
    unit = "sessions" if figures["protocol"] == "session" else "positions"
    return f" (each step's is computed; this is the sample mean over {unit})"


def _is_far_below(figures: dict[str, Any]) -> bool:
    """Whether the leak is under half of what could leak (at most log m), beyond the error of the estimate."""
    most = min(float(figures["conditional_information_nats"]), math.log(figures["worlds"]))
    gap = most - float(figures["leaked_nats"])
    errors = (figures[name] for name in ("leaked_stderr", "conditional_information_stderr"))
    return gap > 0.5 * most and gap > 3.0 * math.hypot(*(error or 0.0 for error in errors))
