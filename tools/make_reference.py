"""Write the reference pages of docs/ from the program itself. A test fails when they are out of date.

python tools/make_reference.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from typer.main import get_command

import paclm
from paclm import config, errors
from paclm.cli.main import app
from paclm.worlds.settings import explain_settings

ROOT = Path(__file__).parent.parent
WIDTH = 100


def commands_page() -> str:
    """Every command's --help, groups included."""
    lines = ["# Commands", "", "Written by `tools/make_reference.py` from the program; do not edit by hand.", ""]
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
        "Written by `tools/make_reference.py` from the program; do not edit by hand.",
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
            default = "none: must be set" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            lines.append(f"| `{field.name}` | {default} | {notes[field.name]} |")
        lines.append("")
    lines += ["## Errors", "", "| error | when |", "|---|---|"]
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
        "Written by `tools/make_reference.py` from the program; do not edit by hand. These names are public; "
        "everything else may change.",
        "",
    ]
    for name in paclm.__all__:
        thing = getattr(paclm, name)
        lines += _entry("##", f"paclm.{name}", thing)
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_"):
                    lines += _member(name, member, value)
    return "\n".join(lines)


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


PAGES = {"commands.md": commands_page, "settings.md": settings_page, "python.md": python_page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / "docs" / name).write_text(make())
        print(f"docs/{name}")
