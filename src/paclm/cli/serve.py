"""`paclm serve`: the workspace, or a student, over HTTP, in the format of the OpenAI API, and a dashboard."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paclm.cli.console import (
    NO_WITNESS,
    STOP_MESSAGE,
    MixPromisesFlag,
    PromiseOption,
    ServableArgument,
    WitnessOption,
    open_for,
    print_fields,
    print_wrapped,
    require_packages,
)
from paclm.cli.worker_options import (
    InsecureNetworkFlag,
    RendezvousOption,
    WorkersOption,
    refuse_workers,
    workers_of,
)
from paclm.config import ServerConfig
from paclm.errors import InvalidInput

if TYPE_CHECKING:
    from paclm.curator.curator import Curator
    from paclm.curator.plain_decoder import PlainDecoder
    from paclm.server.run import Started

OWN_KEY = (
    "inside the workspace (curator/key): a copy of the folder reveals the secret. To keep the key elsewhere, move the "
    "file and set PACLM_KEY_FILE=/safe/NAME.key"
)


BaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="Of a student: where its base model is, if the name in student.json does not lead to it."
    ),
]
_OF_WORKSPACES = ("promise", "mix_promises", "witness", "take_over", "workers", "rendezvous", "insecure_network")


def serve(
    context: typer.Context,
    workspace: ServableArgument,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; other than loopback needs API keys.", show_default="[server]"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.", show_default="[server]")] = None,
    promise: PromiseOption = "half",
    mix_promises: MixPromisesFlag = False,
    witness: WitnessOption = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take a ledger in PostgreSQL from the server that holds it.")
    ] = False,
    workers: WorkersOption = 1,
    rendezvous: RendezvousOption = None,
    insecure_network: InsecureNetworkFlag = False,
    base: BaseOption = None,
) -> None:
    """
    Serve an OpenAI-compatible API and a dashboard

    One curator per secret: it takes the ledger's lock. A second process speaks HTTP and never holds the secret. Every
    charge is on disk before its token is sent. Under the promise corpus the adapter of `paclm train --what dp:8`
    answers: there is no secret, and nothing is charged. Log lines go to standard error, as JSON with counts only. On
    Ctrl-C, SIGTERM or a closed terminal, running answers are finished first. Where another server holds a ledger in
    PostgreSQL, this one is its standby: it waits until that one is dead, or takes over at once; the other then exits
    with status 75. With `--workers` several processes share the worlds, one for each GPU; while one that was lost is
    started again, or waited for, requests wait. A student, the folder that `paclm distill` wrote, is served by ordinary
    decoding: nothing is charged, and nothing is written into it.

    Example usage:

    \b
        paclm serve clinic
        paclm serve clinic --promise corpus
        paclm keys add clinic alice && paclm serve clinic --host 0.0.0.0
        paclm serve clinic --workers 4
        paclm serve clinic --workers 2 --rendezvous 10.8.0.1:29500
        paclm serve student
        curl localhost:8000/v1/completions -H 'content-type: application/json' \\
            -d '{"model": "clinic", "prompt": "[synthetic note]", "max_tokens": 64}'
    """
    require_packages("fastapi", "uvicorn", "pydantic", "prometheus_client", "cryptography", "torch")
    from paclm.worlds.student_folder import is_student

    if is_student(workspace):
        _refuse_options(context, _OF_WORKSPACES)
        _serve_student(workspace, base, host, port)
        return
    if base is not None:
        raise InvalidInput("--base is for a student; a workspace has the base model that paclm init gave it.")
    opened = open_for(promise, workspace)  # quick checks, also of the port, come before the slow imports
    settings = _begin(workspace, opened.settings.server, host, port)
    refuse_workers(promise, workers)
    from paclm.server.run import serve as run

    run(
        workspace,
        settings,
        _announce,
        _progress(),
        witness,
        promise=promise,
        mix_promises=mix_promises,
        take_over=take_over,
        announce_wait=_announce_wait,
        workers=workers_of(opened, workers, rendezvous, is_insecure=insecure_network),
    )


def _begin(folder: Path, settings: ServerConfig, host: str | None, port: int | None) -> ServerConfig:
    """Check the port before the slow imports; returns the settings with these changes."""
    from paclm.server.address import check_free

    changes: dict[str, Any] = {"host": host, "port": port}
    settings = dataclasses.replace(settings, **{name: value for name, value in changes.items() if value is not None})
    check_free(settings.host, settings.port)
    typer.echo(f"Opening {folder} ...", err=True)
    STOP_MESSAGE.set("Nothing was served.")
    return settings


def _refuse_options(context: typer.Context, names: Sequence[str]) -> None:
    """Options that say nothing about a student; a variable of the environment may be there for a workspace."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidInput(
                f"--{name.replace('_', '-')} is for a workspace. A student has no secret, no ledger and one adapter: "
                "leave it out."
            )


def _serve_student(folder: Path, base: str | None, host: str | None, port: int | None) -> None:
    from paclm.curator.student_decoder import check_claims
    from paclm.engine.base_model import base_of_student
    from paclm.worlds.student_folder import read_student

    student = read_student(folder)
    check_claims(student)
    settings = _begin(folder, ServerConfig(), host, port)
    student.verify()
    found = base_of_student(student, base)
    from paclm.server.run import serve_student

    serve_student(student, found, settings, _announce, _progress())


def _progress() -> Callable[[int, int], None]:
    """A bar while what can be compiled and recorded is."""
    from paclm.cli.progress import progress

    bar = progress(transient=True)

    def show(done: int, total: int) -> None:
        if not bar.tasks:
            bar.start()
            bar.add_task("Preparing the models", total=total)
        bar.update(bar.tasks[0].id, completed=done)
        if done >= total:
            bar.stop()

    return show


def _announce_wait(reason: str) -> None:
    who = reason.partition(". ")[0]
    print_wrapped(f"{who}. This server is a standby: it serves when that one has ended or is dead.", err=True)


def _announce(started: Started) -> None:
    curator, setup = started.curator, started.setup
    for caution in curator.cautions:
        print_wrapped(f"Warning: {caution}", err=True)
    fields = {
        "API": f"{started.url}/v1  (model {setup.model_id})",
        "dashboard": f"{started.url}/  (admin key)",
        "engine": curator.engine_summary,
        "memory": _memory(started),
        **_promise_fields(curator, setup.unit),
    }
    if started.new_admin_key is not None:
        fields["admin key"] = f"{started.new_admin_key}  (shown only once)"
    print_fields(fields, err=True)


def _memory(started: Started) -> str:
    """What the server takes: the engine at most, and both processes now."""
    from paclm.engine.memory import GIB, resident_memory

    now = {"curator": resident_memory(os.getpid()), "front": resident_memory(started.front)}
    shown = ", ".join(f"{name} process {size / GIB:.2f} GiB" for name, size in now.items() if size is not None)
    return f"engine at most {started.curator.engine_memory}" + (f"; now in use: {shown}" if shown else "")


def _promise_fields(curator: Curator | PlainDecoder, unit: str) -> dict[str, str]:
    from paclm.curator.curator import Curator
    from paclm.curator.master_key import keeps_own_key
    from paclm.curator.student_decoder import StudentDecoder
    from paclm.server import corpus, stats, student

    if isinstance(curator, StudentDecoder):
        claims = dict(curator.figures)
        return {"claimed": student.guarantee(claims, unit), "note": student.CLAIMED, "budget": student.NO_BUDGET}
    if not isinstance(curator, Curator):
        return {"promise": corpus.guarantee(dict(curator.promise_figures()), unit), "budget": corpus.NO_BUDGET}
    figures = curator.figures()
    fields = {
        "left": stats.left(figures, curator.config.on_exhausted),
        "guarantee": stats.guarantee(figures, unit),
    }
    if not curator.has_witness:
        fields["no witness"] = NO_WITNESS
    if keeps_own_key():
        fields["key"] = OWN_KEY
    return fields
