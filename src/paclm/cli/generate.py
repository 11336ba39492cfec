"""`paclm generate`: one answer, its cost, and the guarantee."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.cli.console import (
    STOP_MESSAGE,
    JsonFlag,
    TrainedArgument,
    WitnessOption,
    format_guarantee,
    open_trained,
    print_fields,
    print_json,
    print_wrapped,
)
from paclm.config import format_budget
from paclm.errors import InvalidInput

if TYPE_CHECKING:
    from paclm.curator.curator import Curator
    from paclm.curator.streams import Generation

_FIGURES = (
    *("private_tokens", "public_tokens", "charged_nats", "spent_nats", "total_nats", "remaining_tokens"),
    *("mia_bound", "world_id_bound"),
)


def generate(
    workspace: TrainedArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to add; the end token counts.")],
    greedy: Annotated[bool, typer.Option("--greedy", help="Every world votes for its most likely token.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="τ of the coupled Gumbel votes.", show_default="as in [mechanism]")
    ] = None,
    witness: WitnessOption = None,
    as_json: JsonFlag = False,
) -> None:
    """
    Continue a prompt privately and show what it cost

    Text is streamed to standard output, figures go to standard error. Every charge is on disk before its token is
    shown.

    Example usage:

    \b
        paclm generate clinic --prompt "The patient" --max-tokens 64
        paclm generate clinic --prompt - --max-tokens 64 --greedy < prompt.txt
        paclm generate clinic --prompt "The patient" --max-tokens 64 --json | jq .spent_nats
    """
    if greedy and temperature is not None:
        raise InvalidInput("--greedy and --temperature exclude each other. Use one of them.")
    if max_tokens < 1:
        raise InvalidInput(f"--max-tokens must be at least 1, not {max_tokens}.")
    text = _read_prompt() if prompt == "-" else prompt
    with _open(workspace, witness) as curator:
        STOP_MESSAGE.set("Every token shown is charged, and the ledger is intact.")
        stream = curator.submit(
            curator.request(text, max_tokens, greedy=greedy or None, temperature=temperature, tag="command line")
        )
        while stream.finish_reason is None:
            curator.step()
            for piece in () if as_json else stream.take():
                is_dim = piece.mark == "public" and piece.text  # text of the public model alone
                typer.echo(typer.style(piece.text, dim=True) if is_dim else piece.text, nl=False)
            sys.stdout.flush()
        generation, price = curator.result(stream), curator.config.per_token
    if as_json:
        counts = {"text": generation.text, "tokens": len(generation.tokens)}
        figures = {key: getattr(generation, key) for key in _FIGURES}
        print_json({**counts, **figures, "token_ids": list(generation.tokens)})
        return
    typer.echo()
    if generation.finish_reason == "stop" and not generation.text:
        typer.echo("(empty answer: the first token was the end token)", err=True)
    _show_figures(generation, price, workspace)


def _read_prompt() -> str:
    """Read standard input as bytes: in some locales text mode would accept invalid UTF-8."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"Standard input is not valid UTF-8, from byte {error.start:,} on. Convert it first."
        ) from None
    if not text.strip():
        raise InvalidInput("Standard input is empty. For an empty prompt: --prompt ''")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _open(path: Path, witness: Path | None) -> Curator:
    from paclm.curator.preflight import budgets_of

    budgets_of(open_trained(path))  # quick checks come before the slow imports
    from paclm.curator.curator import Curator
    from paclm.curator.redacted import disable_core_dumps

    disable_core_dumps()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # printed below instead
        curator = Curator.open(path, witness=witness)
    for caution in curator.cautions:
        print_wrapped(f"Warning: {caution}", err=True)
    return curator


def _show_figures(generation: Generation, per_token: float, workspace: Path) -> None:
    from paclm.worlds.manifest import load_manifest

    tokens = f"{generation.private_tokens:,} private"
    if generation.public_tokens:
        left = generation.total_nats - generation.spent_nats
        price = f"one token costs {format_budget(per_token)} nats and only {format_budget(left)} are left"
        tokens += f", {generation.public_tokens:,} from the public model alone: "
        tokens += price if left > 0 else "the budget is exhausted"
    manifest = load_manifest(workspace.expanduser())
    bounds = generation.mia_bound, generation.world_id_bound
    fields = {
        "tokens": tokens,
        "charged": f"{format_budget(generation.charged_nats)} nats",
        "spent so far": f"{format_budget(generation.spent_nats)} of {format_budget(generation.total_nats)} nats, "
        f"{generation.remaining_tokens:,} charged tokens remain",
        "guarantee": "at the committed total, "
        + format_guarantee(*bounds, manifest.arguments["worlds"], manifest.unit),
    }
    print_fields(fields, err=True)
