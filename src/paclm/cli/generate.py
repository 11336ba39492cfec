"""`paclm generate`: one answer, its cost, and the guarantee."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paclm.cli.console import (
    STOP_MESSAGE,
    JsonFlag,
    MixPromisesFlag,
    PromiseOption,
    ServedArgument,
    WitnessOption,
    format_corpus_guarantee,
    format_guarantee,
    open_for,
    print_fields,
    print_json,
    print_wrapped,
)
from paclm.cli.worker_options import (
    InsecureNetworkFlag,
    RendezvousOption,
    WorkersOption,
    refuse_workers,
    workers_of,
)
from paclm.config import PromiseName, format_budget
from paclm.errors import InvalidInput

if TYPE_CHECKING:
    from paclm.curator.curator import Curator
    from paclm.curator.dp_decoder import DpDecoder
    from paclm.curator.streams import Stream
    from paclm.engine.workers import WorkerGroup
    from paclm.worlds.workspace import Workspace

_FIGURES = (
    *("private_tokens", "public_tokens", "charged_nats", "spent_nats", "total_nats", "remaining_tokens"),
    *("mia_bound", "world_id_bound"),
)


def generate(
    workspace: ServedArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to add; the end token counts.")],
    greedy: Annotated[bool, typer.Option("--greedy", help="Every world votes for its most likely token.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="τ of the coupled Gumbel votes.", show_default="as in [mechanism]")
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON schema; the answer is JSON that it accepts, or the exit status is 1.", dir_okay=False
        ),
    ] = None,
    promise: PromiseOption = "half",
    mix_promises: MixPromisesFlag = False,
    witness: WitnessOption = None,
    workers: WorkersOption = 1,
    rendezvous: RendezvousOption = None,
    insecure_network: InsecureNetworkFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """
    Continue a prompt privately and show what it cost

    Text is streamed to standard output, figures go to standard error. Every charge is on disk before its token is
    shown. Under the promise corpus nothing is charged and no budget is needed.

    Example usage:

    \b
        paclm generate clinic --prompt "[synthetic note]" --max-tokens 64
        paclm generate clinic --prompt - --max-tokens 64 --greedy < prompt.txt
        paclm generate clinic --prompt "[synthetic note]" --max-tokens 64 --json | jq .spent_nats
        paclm generate clinic --prompt "[synthetic note]" --max-tokens 64 --promise corpus
        paclm generate clinic --prompt "[synthetic note]" --max-tokens 64 --json-schema visit.json
    """
    if greedy and temperature is not None:
        raise InvalidInput("--greedy and --temperature exclude each other. Use one of them.")
    if max_tokens < 1:
        raise InvalidInput(f"--max-tokens must be at least 1, not {max_tokens}.")
    text = _read_prompt() if prompt == "-" else prompt
    schema = None if json_schema is None else _read_schema(json_schema)
    refuse_workers(promise, workers)
    opened = open_for(promise, workspace)  # quick checks come before the slow imports
    typer.echo(f"Opening {workspace} ...", err=True)
    with (
        workers_of(opened, workers, rendezvous, is_insecure=insecure_network) as group,
        _open(opened, promise, witness, mix_promises, group) as curator,
    ):
        STOP_MESSAGE.set("Every token shown is charged, and the ledger is intact." if promise == "half" else "")
        stream = curator.submit(
            curator.request(
                text,
                max_tokens,
                greedy=greedy or None,
                temperature=temperature,
                tag="command line",
                json_schema=schema,
            )
        )
        while stream.finish_reason is None:
            curator.step()
            for piece in () if as_json else stream.take():
                is_dim = piece.mark == "public" and piece.text  # text of the public model alone
                typer.echo(typer.style(piece.text, dim=True) if is_dim else piece.text, nl=False)
            sys.stdout.flush()
        answer = curator.result(stream)
        figures, fields = _figures(curator, stream, workspace)
    if as_json:
        counts = {"text": answer.text, "tokens": len(answer.tokens), "finish_reason": answer.finish_reason}
        print_json({**counts, **figures, "token_ids": list(answer.tokens)})
        if schema is not None and answer.finish_reason != "stop":
            raise typer.Exit(1)
        return
    typer.echo()
    if answer.finish_reason == "stop" and not answer.text:
        typer.echo("(empty answer: the first token was the end token)", err=True)
    if schema is not None and answer.finish_reason != "stop":
        why = "--max-tokens ended it" if answer.finish_reason == "length" else "no token fits the schema here"
        typer.echo(f"(not complete: {why}, so this is not JSON that the schema accepts)", err=True)
    print_fields(fields, err=True)
    if schema is not None and answer.finish_reason != "stop":
        raise typer.Exit(1)


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"The JSON schema {path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError):
        raise InvalidInput(f"{path} is not JSON.") from None
    if not isinstance(schema, dict):
        raise InvalidInput(f'{path} holds no JSON schema. It must be an object, such as {{"type": "object"}}.')
    return schema


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


def _open(
    workspace: Workspace, promise: PromiseName, witness: str | None, mix_promises: bool, workers: WorkerGroup | None
) -> Curator | DpDecoder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # printed below instead
        if promise == "corpus":
            from paclm.curator.dp_decoder import DpDecoder

            curator: Curator | DpDecoder = DpDecoder.open(workspace, mix_promises=mix_promises)
        else:
            from paclm.curator.curator import Curator

            curator = Curator.open(workspace, witness=witness, mix_promises=mix_promises, workers=workers)
    for caution in curator.cautions:
        print_wrapped(f"Warning: {caution}", err=True)
    return curator


def _figures(curator: Curator | DpDecoder, stream: Stream, workspace: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What an answer cost and what is promised: for JSON, and for people."""
    from paclm.curator.curator import Curator
    from paclm.worlds.manifest import load_manifest

    manifest = load_manifest(workspace.expanduser())
    if not isinstance(curator, Curator):
        figures = curator.promise_figures()
        guarantee = format_corpus_guarantee(figures, manifest.unit)
        return dict(figures), {"tokens": f"{len(stream.tokens):,}; nothing is charged", "guarantee": guarantee}
    answer = curator.result(stream)
    tokens = f"{answer.private_tokens:,} private"
    if answer.public_tokens:
        left = answer.total_nats - answer.spent_nats
        price = (
            f"one token costs {format_budget(curator.config.per_token)} nats and only {format_budget(left)} are left"
        )
        tokens += f", {answer.public_tokens:,} from the public model alone: "
        tokens += price if left > 0 else "the budget is exhausted"
    bounds = answer.mia_bound, answer.world_id_bound
    return {key: getattr(answer, key) for key in _FIGURES}, {
        "tokens": tokens,
        "charged": f"{format_budget(answer.charged_nats)} nats",
        "spent so far": f"{format_budget(answer.spent_nats)} of {format_budget(answer.total_nats)} nats, "
        f"{answer.remaining_tokens:,} charged tokens remain",
        "guarantee": "at the committed total, "
        + format_guarantee(*bounds, manifest.arguments["worlds"], manifest.unit),
    }
