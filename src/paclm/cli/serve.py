"""`paclm serve`: the workspace over HTTP, in the shapes of the OpenAI API, and a dashboard."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.cli.console import WHEN_STOPPED, need, open_trained
from paclm.cli.ledger_keys import NO_WITNESS, WitnessOption
from paclm.cli.wrap import say

if TYPE_CHECKING:
    from paclm.server.run import Started

OWN_KEY = (
    "inside the workspace (curator/key): whoever copies the folder can read the secret. Keep it elsewhere: move the "
    "file, then PACLM_KEY_FILE=/safe/NAME.key"
)


def serve(
    workspace: Annotated[Path, typer.Argument(help="Folder made by paclm init, with trained worlds.")],
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; another than loopback needs keys.", show_default="[server]"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.", show_default="[server]")] = None,
    witness: WitnessOption = None,
) -> None:
    """
    Serve an OpenAI-compatible API and a dashboard

    One process per secret: it takes the ledger's lock. Every charge is on the disk before its token is sent. Log lines
    go to standard error, as JSON with counts only. Ctrl-C, SIGTERM or a terminal that is closed: answers under way are
    finished first.

    Example usage:

    \b
        paclm serve clinic
        paclm keys add clinic alice && paclm serve clinic --host 0.0.0.0
        curl localhost:8000/v1/completions -H 'content-type: application/json' \\
            -d '{"model": "clinic", "prompt": "The patient", "max_tokens": 16}'
    """
    need("fastapi", "uvicorn", "pydantic", "prometheus_client", "cryptography", "torch")
    from paclm.curator.preflight import budgets_of
    from paclm.server.address import check_free

    opened = open_trained(workspace)
    budgets_of(opened)  # the quick refusals, also of a taken port, come before the slow imports
    settings = opened.settings.server
    settings = dataclasses.replace(
        settings, host=settings.host if host is None else host, port=settings.port if port is None else port
    )
    check_free(settings.host, settings.port)
    typer.echo(f"Opening {workspace} ...", err=True)
    WHEN_STOPPED.set("Nothing was served.")
    from paclm.server.run import serve as run

    run(workspace, settings, _announce, witness)


def _announce(started: Started) -> None:
    from paclm.curator.master_key import keeps_own_key
    from paclm.server.stats import guarantee, left

    service = started.service
    figures = service.curator.figures()
    for sentence in service.curator.cautions:
        say(f"Caution: {sentence}", err=True)
    lines = {
        "API": f"{started.url}/v1  (model {service.setup.model_id})",
        "dashboard": f"{started.url}/  (admin key)",
        "left": left(figures, service.curator.config.on_exhausted),
        "guarantee": guarantee(figures, service.setup.unit),
    }
    if not service.curator.has_witness:
        lines["no witness"] = NO_WITNESS
    if keeps_own_key():
        lines["key"] = OWN_KEY
    for name, line in lines.items():
        say(f"  {name:<10} {line}", err=True, column=13)
    if started.new_admin_key is not None:
        typer.echo(f"  admin key  {started.new_admin_key}  (shown this once)", err=True)
