"""Write docs/commands.md and docs/settings.md from the program itself. A test fails when they are out of date.

python tools/make_reference.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from typer.main import get_command

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


PAGES = {"commands.md": commands_page, "settings.md": settings_page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / "docs" / name).write_text(make())
        print(f"docs/{name}")
