"""`paclm votes`: every world's vote on one context, or along a text. For research: no secret is involved."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paclm.cli.console import JsonFlag, open_trained, print_json, progress
from paclm.errors import InvalidInput

if TYPE_CHECKING:
    from paclm.engine.engine import Engine
    from paclm.worlds.workspace import Workspace


def votes(
    workspace: Annotated[Path, typer.Argument(help="Folder made by paclm init, with trained worlds.")],
    prompt: Annotated[str | None, typer.Option(help="The context to vote on.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file: votes on each of its tokens, given the true ones.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the votes on the text go (.npz), for paclm replay.")] = None,
    decoder: Annotated[
        Literal["greedy", "gumbel"] | None,
        typer.Option(help="How a world votes.", show_default="as in paclm.toml, else gumbel"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="τ of the Gumbel votes.", show_default="as in paclm.toml, else 1")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the coins.", show_default="a fresh one")] = None,
    window: Annotated[int, typer.Option(help="Tokens per window of the text; each window starts afresh.")] = 512,
    limit: Annotated[int | None, typer.Option(help="Use only so many tokens of the text.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """
    Show every world's vote on one context, or record votes along a text

    Nothing is released and nothing is charged: these are the votes of all worlds, realized or not. Keep them private.

    Example usage:

    \b
        paclm votes clinic --prompt "The patient reports" --decoder greedy --json | jq .unanimous
        paclm votes clinic --text heldout.txt --out votes.npz
        paclm replay votes.npz --per-token 2^-16
    """
    if (prompt is None) == (text is None):
        raise InvalidInput("Give either --prompt TEXT, or --text FILE with --out VOTES.npz.")
    if (text is None) != (out is None):
        raise InvalidInput("--text FILE and --out VOTES.npz belong together.")
    from paclm.privacy.randomness import Coins

    opened = open_trained(workspace)
    written = opened.settings.mechanism
    chosen = decoder or written.get("decoder", "gumbel")
    tau = temperature if temperature is not None else float(written.get("temperature", 1.0))
    coins = None if chosen == "greedy" else Coins(seed)
    if prompt is not None:
        _vote_on_prompt(opened, prompt, coins, tau, as_json)
    elif text is not None and out is not None:
        _vote_along_text(opened, text, out, coins, tau, window, limit, as_json)


def _vote_on_prompt(opened: Workspace, prompt: str, coins: Any, temperature: float, as_json: bool) -> None:
    from paclm.engine.base import base_of, load_tokenizer
    from paclm.engine.loading import encode_prompt

    tokenizer = load_tokenizer(base_of(opened))
    tokens = encode_prompt(tokenizer, prompt)
    engine = _open_engine(opened, with_full=False, context=len(tokens))
    ballot = engine.ballot(tokens, None if coins is None else coins.gumbel(engine.support_size), temperature)
    support, chosen = ballot.support[0].tolist(), ballot.votes[0].tolist()
    if as_json:
        print_json({"support": support, "votes": chosen, "unanimous": len(set(chosen)) == 1})
        return
    counts = {token: chosen.count(token) for token in dict.fromkeys(chosen)}
    for token, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        typer.echo(f"{count:5d} of {len(chosen)}  {token:6d}  {tokenizer.decode([token])!r}")
    typer.echo(f"The public model votes for {tokenizer.decode([int(ballot.public[0])])!r}.")
    if coins is not None:
        typer.echo(f"Coins: seed {coins.seed}.")


def _vote_along_text(
    opened: Workspace,
    text: Path,
    out: Path,
    coins: Any,
    temperature: float,
    window: int,
    limit: int | None,
    as_json: bool,
) -> None:
    import numpy as np

    from paclm.engine.base import base_of, load_tokenizer
    from paclm.engine.loading import FULL_FILE
    from paclm.worlds.blocks import encode_texts
    from paclm.worlds.storage import write_private

    try:
        content = text.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{text} cannot be read: {error.strerror}. Check the path after --text.") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{text} is not valid UTF-8, from byte {error.start:,} on. Convert it first.") from None
    tokens = encode_texts(load_tokenizer(base_of(opened)), [content])[0][:limit]
    if len(tokens) < 2:
        raise InvalidInput(f"{text} has {len(tokens)} tokens, and votes need at least 2: one to see, one to vote on.")
    with_full = (opened.adapters_path / FULL_FILE).is_file()
    engine = _open_engine(opened, with_full, window)
    draw = None if coins is None else lambda n: np.stack([coins.gumbel(engine.support_size) for _ in range(n)])
    ballots = []
    with progress(quiet=as_json) as bar:
        task = bar.add_task("votes", total=len(tokens) - 1)
        for ballot in engine.teacher_forced(tokens, min(window, engine.context), draw, temperature):
            ballots.append(ballot)
            bar.advance(task, len(ballot.public))
    every = np.concatenate([ballot.votes for ballot in ballots])
    worlds = every[:, :-1] if with_full else every
    arrays = {
        "votes": worlds.astype(np.int32),
        "truth": np.asarray(tokens[1:], dtype=np.int32),
        "public": np.concatenate([ballot.public for ballot in ballots]).astype(np.int32),
    }
    if with_full:
        arrays["full"] = every[:, -1].astype(np.int32)
    out.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_private(out, buffer.getvalue())
    unanimity = float((worlds == worlds[:, :1]).all(axis=1).mean())
    if as_json:
        print_json({"positions": len(worlds), "worlds": int(worlds.shape[1]), "unanimity": unanimity, "out": str(out)})
        return
    typer.echo(f"{len(worlds):,} positions, {worlds.shape[1]} worlds, unanimous at {unanimity:.1%}: {out}")
    if not with_full:
        typer.echo(
            "No full-corpus adapter was trained (paclm train --what full): the file has no ceiling to compare with."
        )


def _open_engine(opened: Workspace, with_full: bool, context: int) -> Engine:
    from paclm.engine.loading import load_stack, open_engine

    runtime = dataclasses.replace(opened.runtime, max_sequences=1, context=max(opened.runtime.context, context))
    support_size = int(opened.settings.mechanism.get("support_size", 200))
    return open_engine(opened, support_size, runtime, load_stack(opened, with_full))
