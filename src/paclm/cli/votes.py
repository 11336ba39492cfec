"""`paclm votes`: every world's vote on one context, or along a text. For research: reads no secret."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paclm.cli.console import JsonFlag, TrainedArgument, open_trained, print_json
from paclm.cli.worker_options import WorkersOption, workers_of
from paclm.config import check_temperature, in_shell, parse_budget
from paclm.errors import InvalidInput

if TYPE_CHECKING:
    from paclm.engine.engine import Engine
    from paclm.engine.workers import WorkerGroup
    from paclm.privacy.randomness import Coins
    from paclm.study.replay import ReplaySettings
    from paclm.worlds.workspace import Workspace

_WINDOW = 512


def votes(
    workspace: TrainedArgument,
    prompt: Annotated[str | None, typer.Option(help="The context to vote on.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file: votes on each token, given the true ones.")] = None,
    out: Annotated[Path | None, typer.Option(help="New .npz file for votes on the text, for paclm replay.")] = None,
    decoder: Annotated[
        Literal["greedy", "gumbel"] | None,
        typer.Option(help="How a world votes.", show_default="as in paclm.toml, else gumbel"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="τ of the Gumbel votes.", show_default="as in paclm.toml, else 1")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the coins.", show_default="random")] = None,
    window: Annotated[int, typer.Option(help="Tokens per window; each window is a new context.")] = _WINDOW,
    limit: Annotated[int | None, typer.Option(help="Use only this many tokens of the text.")] = None,
    release: Annotated[
        str | None,
        typer.Option(help="On a prompt: the token of this release too; built-in, a plugin's, or module:NAME."),
    ] = None,
    per_token: Annotated[str | None, typer.Option(help="Nats for --release, if it reads the secret.")] = None,
    workers: WorkersOption = 1,
    as_json: JsonFlag = False,
) -> None:
    """
    Show or record every world's votes

    On one context, or along a text. Releases nothing and charges nothing. Keep the output private: it shows the
    votes of all worlds. With --release it shows what a release would give on a prompt, for a secret that is made up for
    this and a uniform belief; the deployment's own secret is not read.

    Example usage:

    \b
        paclm votes clinic --prompt $'[synthetic note]\\nClinic note:' --decoder greedy --json | jq .unanimous
        paclm votes clinic --prompt "The patient" --release my_rules:RULE --per-token 2^-8 --seed 1
        paclm votes clinic --text heldout.txt --out votes.npz
        paclm replay votes.npz --per-token 2^-16
    """
    if (prompt is None) == (text is None):
        raise InvalidInput("Pass either --prompt TEXT, or --text FILE with --out VOTES.npz.")
    if (text is None) != (out is None):
        raise InvalidInput("--text FILE and --out VOTES.npz go together: pass both.")
    if text is None and (limit is not None or window != _WINDOW):
        raise InvalidInput("--limit and --window apply to --text FILE only: a prompt is one context.")
    if (release is not None and prompt is None) or (per_token is not None and release is None):
        raise InvalidInput("--release goes with --prompt, and --per-token with --release. For a text: paclm replay.")
    if limit is not None and limit < 2:
        raise InvalidInput(f"--limit must be at least 2, one token of context and one to vote on, not {limit}.")
    if temperature is not None:
        check_temperature(temperature, "--temperature")
    if out is not None and out.exists():
        raise InvalidInput(f"{out} exists already, and votes never overwrite a file. Pass a new name to --out.")
    from paclm.privacy.randomness import Coins

    rule = None if release is None else _settings_of(release, per_token, seed)
    opened = open_trained(workspace)
    voting = opened.settings.voting
    tau = temperature if temperature is not None else voting.temperature
    coins = None if (decoder or voting.decoder) == "greedy" else Coins(seed)
    with workers_of(opened, workers, None, is_insecure=False) as group:
        if prompt is not None:
            _vote_on_prompt(opened, prompt, coins, tau, group, rule, as_json)
        elif text is not None and out is not None:
            _vote_along_text(opened, text, out, coins, tau, window, limit, group, as_json)


def _settings_of(release: str, per_token: str | None, seed: int | None) -> ReplaySettings:
    """A release by name with its budget, checked as `replay` does."""
    from paclm.study.extensions import load_release
    from paclm.study.replay import ReplaySettings

    plugin = load_release(release)
    return ReplaySettings(
        release=release if plugin is None else plugin.value,
        per_token=None if per_token is None else parse_budget(per_token),
        seed=seed or 0,
    )


def _release(settings: ReplaySettings, chosen: list[int]) -> int:
    """One token, for a secret drawn from the seed."""
    import numpy as np

    from paclm.curator.research import ResearchSession
    from paclm.privacy.randomness import ResearchNoise

    per_token = math.inf if settings.per_token is None else settings.per_token
    session = ResearchSession(len(chosen), settings.rule, per_token, ResearchNoise(settings.seed))
    return session.release(np.array(chosen)).token


def _vote_on_prompt(
    opened: Workspace,
    prompt: str,
    coins: Coins | None,
    temperature: float,
    workers: WorkerGroup | None,
    release: ReplaySettings | None,
    as_json: bool,
) -> None:
    from paclm.curator.streams import encode_prompt
    from paclm.engine.base_model import base_of, load_tokenizer

    tokenizer = load_tokenizer(base_of(opened))
    tokens = encode_prompt(tokenizer, prompt)
    engine = _open_engine(opened, with_full=False, context=len(tokens), workers=workers)
    if len(tokens) > engine.context:
        raise InvalidInput(
            f"The prompt has {len(tokens):,} tokens, more than the base model's context of {engine.context:,}. Shorten "
            "it, or put it into a file and vote along it in windows: --text FILE --out VOTES.npz."
        )
    ballot = engine.ballot(tokens, None if coins is None else coins.gumbel(engine.support_size), temperature)
    support, chosen = ballot.support[0].tolist(), ballot.votes[0].tolist()
    released: dict[str, Any] = (
        {} if release is None else {"release": release.rule.name, "released": _release(release, chosen)}
    )
    if as_json:
        print_json({"support": support, "votes": chosen, "unanimous": len(set(chosen)) == 1, **released})
        return
    counts = {token: chosen.count(token) for token in dict.fromkeys(chosen)}
    for token, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        typer.echo(f"{count:5d} of {len(chosen)}  {token:6d}  {tokenizer.decode([token])!r}")
    typer.echo(f"The public model votes for {tokenizer.decode([int(ballot.public[0])])!r}.")
    if release is not None:
        token = tokenizer.decode([released["released"]])
        typer.echo(f"The release {release.rule.name} gives {token!r} (a made-up secret, seed {release.seed}).")
    if coins is not None:
        typer.echo(f"Coins: seed {coins.seed}.")


def _vote_along_text(
    opened: Workspace,
    text: Path,
    out: Path,
    coins: Coins | None,
    temperature: float,
    window: int,
    limit: int | None,
    workers: WorkerGroup | None,
    as_json: bool,
) -> None:
    from paclm.cli.progress import progress
    from paclm.engine.base_model import base_of, load_tokenizer
    from paclm.study.decoding import GREEDY, Decoding
    from paclm.study.eval_text import Passage, cut_passages
    from paclm.study.recorded_votes import collect_votes
    from paclm.worlds.blocks import encode_texts
    from paclm.worlds.layout import FULL_FILE

    try:
        content = text.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"Cannot read {text}: {error.strerror}. Check the path after --text.") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{text} is not valid UTF-8, from byte {error.start:,} on. Convert it first.") from None
    tokens = encode_texts(load_tokenizer(base_of(opened)), [content])[0][:limit]
    if len(tokens) < 2:
        raise InvalidInput(f"{text} has {len(tokens)} tokens. Votes need at least 2: one of context, one to vote on.")
    with_full = (opened.adapters_path / FULL_FILE).is_file()
    engine = _open_engine(opened, with_full, window, workers)
    passages = cut_passages([Passage.of(tokens)], min(window, engine.context))
    decoding, seed = (GREEDY, 0) if coins is None else (Decoding("gumbel", temperature), coins.seed)
    with progress(quiet=as_json) as bar:
        task = bar.add_task("votes", total=len(tokens) - 1)
        found = collect_votes(engine, passages, [decoding], [seed], with_full, lambda n: bar.advance(task, n))
    recorded = found[decoding.name]
    out.parent.mkdir(parents=True, exist_ok=True)
    recorded.save(out)
    positions, worlds, unanimity = recorded.num_positions, recorded.num_worlds, float((~recorded.is_dissent).mean())
    if as_json:
        print_json({"positions": positions, "worlds": worlds, "unanimity": unanimity, "out": str(out)})
        return
    typer.echo(f"{positions:,} positions, {worlds} worlds, unanimous at {unanimity:.1%}: {out}")
    if not with_full:
        train = f"paclm train {in_shell(opened.path)} --what full"
        typer.echo(f"No full-corpus adapter to compare with. To train one: {train}")


def _open_engine(opened: Workspace, with_full: bool, context: int, workers: WorkerGroup | None) -> Engine:
    from paclm.engine.loading import load_stack, open_engine

    given = opened.runtime.context
    runtime = dataclasses.replace(opened.runtime, max_sequences=1, context=given and max(given, context))
    stack = load_stack(opened, with_full) if with_full else None
    return open_engine(opened, opened.settings.voting.support_size, runtime, stack, workers)
