"""Write the pages of docs/reference/ from the program itself. A test fails when they are out of date.

python tools/make_reference.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typer.main import get_command

import paclm
from paclm import config, errors
from paclm.cli.main import app
from paclm.curator.streams import BudgetFigures, Generation, Piece, UsageFigures
from paclm.ledger.events import Usage
from paclm.worlds.settings import explain_settings

ROOT = Path(__file__).parent.parent
WIDTH = 100

ENVIRONMENT = {
    "PACLM_KEY": "The master key itself, 64 hexadecimal digits or base64: [keys](../internals/curator.md#keys).",
    "PACLM_KEY_FILE": "A file with it, mode 0600.",
    "PACLM_KEY_COMMAND": "A program that prints it, with arguments. Without any of the three the key is `curator/key`.",
    "PACLM_WITNESS": "The ledger's [witness](../internals/ledger.md#the-witness), a file on another disk or "
    "a database on another server (`postgresql://…`). "
    "Same as `--witness`.",
    "PACLM_LEDGER": "Address of the [PostgreSQL database](../guide/operations.md#postgresql) that holds the ledger, in "
    "place of `url` of `[ledger]`.",
    "PACLM_LEDGER_FRONT": "The same for the process that speaks HTTP, in place of `front_url`.",
    "PACLM_STATE_DIR": "Folder of notes about workspaces, default `~/.local/state/paclm`: "
    "[two workspaces over one corpus](../guide/workspace.md#two-workspaces-over-one-corpus).",
    "PACLM_CACHE_DIR": "Folder of downloaded and converted base models, default `~/.cache/paclm`.",
    "PACLM_COMMIT": "The commit that study results name when the code is not in a checkout.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "Where [telemetry](../guide/operations.md#opentelemetry) is sent, if `[server]` has "
    "`otel = true`; the other `OTEL_…` variables of OpenTelemetry count too.",
    "HF_HOME": "The cache of Hugging Face, for base models by name.",
    "OMP_NUM_THREADS": "CPU threads, where `threads` of `[runtime]` is 0; `MKL_NUM_THREADS` counts too.",
}
"""Every environment variable; a test compares the names with the code."""
_WRITTEN = "Generated from the program by `tools/make_reference.py`; do not edit by hand."


def commands_page() -> str:
    """Every command's --help, groups included."""
    lines = [
        "# Commands",
        "",
        "Every command with its options, as `--help` shows them. " + _WRITTEN,
        "",
    ]
    root = get_command(app)
    queue = [("paclm", root)]
    while queue:
        name, command = queue.pop(0)
        context = command.context_class(command, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH)
        lines += [f"## `{name}`", "", "```text", command.get_help(context).rstrip(), "```", ""]
        queue[:0] = [(f"{name} {child}", sub) for child, sub in sorted(getattr(command, "commands", {}).items())]
    return "\n".join(lines)


def settings_page() -> str:
    """Every setting of paclm.toml and every error."""
    lines = [
        "# Settings and errors",
        "",
        "Every setting of `paclm.toml`, every environment variable, and every error class. " + _WRITTEN,
        "",
    ]
    for name, cls in sorted(vars(config).items()):
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and name.endswith("Config")):
            continue
        notes = explain_settings(cls)
        summary = " ".join((cls.__doc__ or "").split())
        lines += [
            f"## `[{name.removesuffix('Config').lower()}]`",
            "",
            summary,
            "",
            "| setting | default | meaning |",
            "|---|---|---|",
        ]
        for field in dataclasses.fields(cls):
            default = (
                "none: must be set" if field.default is dataclasses.MISSING else f"`{config.in_toml(field.default)}`"
            )
            lines.append(f"| `{field.name}` | {default} | {notes[field.name]} |")
        lines.append("")
    lines += ["## Environment", "", "| variable | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in ENVIRONMENT.items()]
    lines += ["", "## Errors", "", "On the command line: [errors and what to do](../guide/errors.md).", ""]
    lines += ["| error | when |", "|---|---|"]
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, errors.PaclmError):
            summary = " ".join((cls.__doc__ or "").split())
            lines.append(f"| `{name}` | {summary} |")
    return "\n".join([*lines, ""])


def python_page() -> str:
    """Every public name: its signature and docstring; of classes also the methods."""
    lines = [
        "# Python",
        "",
        "These names are public; everything else may change. " + _WRITTEN,
        "",
    ]
    for name in paclm.__all__:
        thing = getattr(paclm, name)
        lines += _entry("##", f"paclm.{name}", thing)
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_"):
                    lines += _member(name, member, value)
    lines += ["## What a curator returns", ""]
    for cls in (Generation, Piece, BudgetFigures, UsageFigures, Usage):
        lines += _fields(cls)
    return "\n".join(lines)


def _fields(cls: type) -> list[str]:
    notes, docstring = explain_settings(cls), (inspect.getdoc(cls) or "").strip()
    lines = [f"### `{cls.__name__}`", "", docstring, "", "| field | type | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | `{kind}` | {notes.get(name, '')} |" for name, kind in _written_types(cls).items()]
    return [*lines, ""]


def _written_types(cls: type) -> dict[str, str]:
    """The types of fields as written in the source."""
    (body,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(body, ast.ClassDef)
    return {
        line.target.id: ast.unparse(line.annotation)
        for line in body.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _member(owner: str, name: str, value: object) -> list[str]:
    if isinstance(value, property):
        return [f"### `{owner}.{name}`", "", inspect.getdoc(value) or "", ""]
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    return _entry("###", f"{owner}.{name}", value) if inspect.isfunction(value) else []


def _entry(level: str, name: str, thing: object) -> list[str]:
    documentation = inspect.getdoc(thing)
    if not documentation:
        raise SystemExit(f"{name} is public and has no docstring.")
    signature = str(inspect.signature(thing)) if callable(thing) else ""
    short = re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r"\((self|cls)(, )?", "(", signature))
    return [f"{level} `{name}`", "", "```python", f"{name.rsplit('.', 1)[-1]}{short}", "```", "", documentation, ""]


def http_page() -> str:
    """Every path of the server, its requests and responses, from the OpenAPI document."""
    from paclm.server.app import create_app

    setup = SimpleNamespace(model_id="clinic", settings=config.ServerConfig())
    document, of_corpus = (
        create_app(SimpleNamespace(setup=setup, promise=promise)).openapi()  # type: ignore[arg-type]
        for promise in config.PROMISES
    )
    shapes = document["components"]["schemas"]
    lines = [
        "# HTTP",
        "",
        "Every path, field and status, for clients. [The server](../guide/server.md) explains them. " + _WRITTEN,
        "",
    ]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            lines += [f"## `{method.upper()} {path}`", "", route["description"], ""]
            if (other := of_corpus["paths"][path][method]["description"]) != route["description"]:
                lines += [f"Under the promise `corpus`: {other[0].lower()}{other[1:]}", ""]
            for name in _shapes_of(route.get("requestBody", {})):
                lines += [f"`{name}`:", "", "| field | type | |", "|---|---|---|"]
                required = shapes[name].get("required", [])
                for field, about in shapes[name]["properties"].items():
                    note = " ".join(about.get("description", "").split()) + (" Required." if field in required else "")
                    lines.append(f"| `{field}` | {_type_of(about)} | {note.strip()} |")
                lines.append("")
            lines += ["| status | |", "|---|---|"]
            lines += [f"| {code} | {answer['description']} |" for code, answer in sorted(route["responses"].items())]
            lines.append("")
    return "\n".join(lines)


def _shapes_of(body: dict[str, Any]) -> list[str]:
    schema = body.get("content", {}).get("application/json", {}).get("schema", {})
    return [part["$ref"].rsplit("/", 1)[-1] for part in schema.get("anyOf", [schema]) if "$ref" in part]


def _type_of(about: dict[str, Any]) -> str:
    if parts := about.get("anyOf") or about.get("oneOf"):
        return " or ".join(dict.fromkeys(_type_of(part) for part in parts))
    if "$ref" in about:
        return f"`{about['$ref'].rsplit('/', 1)[-1]}`"
    if about.get("type") == "array":
        return f"list of {_type_of(about.get('items', {}))}"
    return str(about.get("const", about.get("type", "any")))


PAGES = {"http.md": http_page, "commands.md": commands_page, "settings.md": settings_page, "python.md": python_page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / "docs" / "reference" / name).write_text(make())
        print(f"docs/reference/{name}")
