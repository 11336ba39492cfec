"""`paclm generate`: one answer, its cost, and what is promised."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.cli.console import WHEN_STOPPED, JsonFlag, open_trained, print_json
from paclm.cli.ledger_keys import WitnessOption
from paclm.cli.wrap import say
from paclm.config import format_budget
from paclm.errors import InvalidInput

if TYPE_CHECKING:
    from paclm.curator.curator import Curator
    from paclm.curator.streams import Generation, Stream

_FIGURES = (
    *("private_tokens", "public_tokens", "charged_nats", "spent_nats", "total_nats", "remaining_tokens"),
    *("mia_bound", "world_id_bound"),
)


def generate(
    workspace: Annotated[Path, typer.Argument(help="Folder made by paclm init, with trained worlds.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="The most tokens to add; the end token counts.")],
    greedy: Annotated[bool, typer.Option("--greedy", help="Every world votes for its most likely token.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="τ of the coupled Gumbel votes.", show_default="as in [mechanism]")
    ] = None,
    witness: WitnessOption = None,
    as_json: JsonFlag = False,
) -> None:
    """
    Continue a prompt privately, and say what it cost

    The text goes to standard output as it comes, the figures to standard error. Every charge is on the disk before
    its token is shown.

    Example usage:

    \b
        paclm generate clinic --prompt "The patient" --max-tokens 64
        paclm generate clinic --prompt - --max-tokens 64 --greedy < prompt.txt
        paclm generate clinic --prompt "The patient" --max-tokens 64 --json | jq .spent_nats
    """
    if greedy and temperature is not None:
        raise InvalidInput("Choose --greedy or --temperature, not both.")
    if max_tokens < 1:
        raise InvalidInput(f"--max-tokens must be at least 1, not {max_tokens}.")
    text = _read_prompt() if prompt == "-" else prompt
    with _open(workspace, witness) as curator:
        WHEN_STOPPED.set("Every token that left is charged, and the ledger is in order.")
        stream = curator.submit(
            curator.request(text, max_tokens, greedy=greedy or None, temperature=temperature, tag="command line")
        )
        while stream.finish_reason is None:
            curator.step()
            if not as_json:
                _show_pieces(stream)
        generation, price = curator.result(stream), curator.config.per_token
    if as_json:
        counts = {"text": generation.text, "tokens": len(generation.tokens)}
        figures = {key: getattr(generation, key) for key in _FIGURES}
        print_json({**counts, **figures, "token_ids": list(generation.tokens)})
    else:
        typer.echo()
        if generation.finish_reason == "stop" and not generation.text:
            typer.echo("(the model ended its answer at once)", err=True)
        from paclm.worlds.manifest import load_manifest

        _show_figures(generation, price, load_manifest(workspace.expanduser()).unit)


def _read_prompt() -> str:
    """Standard input, read as bytes: in some locales its text would let broken ones through."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"Standard input is not valid UTF-8, from byte {error.start:,} on. Convert it first."
        ) from None
    if not text.strip():
        raise InvalidInput("Standard input holds no text to continue. To go on from nothing at all: --prompt ''")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _open(path: Path, witness: Path | None) -> Curator:
    from paclm.curator.preflight import budgets_of

    budgets_of(open_trained(path))  # the quick refusals come before the slow imports
    from paclm.curator.curator import Curator
    from paclm.curator.redacted import disable_core_dumps

    disable_core_dumps()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # said below, as a sentence
        curator = Curator.open(path, witness=witness)
    for sentence in curator.cautions:
        say(f"Caution: {sentence}", err=True)
    return curator


def _show_pieces(stream: Stream) -> None:
    """Text of the public model is dimmed on a terminal."""
    for piece in stream.take():
        typer.echo(typer.style(piece.text, dim=True) if piece.mark == "public" and piece.text else piece.text, nl=False)
    sys.stdout.flush()


def _show_figures(generation: Generation, per_token: float, unit: str) -> None:
    from paclm.privacy.bounds import format_bound

    tokens = f"{generation.private_tokens:,} private"
    if generation.public_tokens:
        left = generation.total_nats - generation.spent_nats
        why = f"one token costs {format_budget(per_token)} nats, more than the {format_budget(left)} that are left"
        tokens += f", {generation.public_tokens:,} of the public model alone, because "
        tokens += why if left > 0 else "the budget is gone"
    lines = {
        "tokens": tokens,
        "charged": f"{format_budget(generation.charged_nats)} nats",
        "spent so far": f"{format_budget(generation.spent_nats)} of {format_budget(generation.total_nats)} nats, "
        f"{generation.remaining_tokens:,} charged tokens remain",
        "guarantee": f"at the committed total, no attack on whether {unit} in the secretly drawn half succeeds "
        f"more than {format_bound(generation.mia_bound)} of the time, and none names the world more than "
        f"{format_bound(generation.world_id_bound)}",
    }
    for name, line in lines.items():
        say(f"  {name:<13} {line}", err=True, column=16)
