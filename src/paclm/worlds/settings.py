"""paclm.toml: the settings of a workspace, written once with explanations and read strictly ever after."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from paclm.config import MechanismConfig, RuntimeConfig, ServerConfig, TrainingConfig, in_shell, in_toml, read_settings
from paclm.errors import InvalidInput, WorkspaceError
from paclm.worlds.storage import write_private

_SECTIONS = ("mechanism", "runtime", "server", "training")
_BUDGETS = ("per_token", "total")

_HEAD = """\
# Settings of this workspace. Who is in which world, the seed and the base model are fixed in manifest.json.
# A setting behind a # shows its default (budgets: an example); remove the # to change it.
"""
_MECHANISM = """
[mechanism]
# What the guarantee depends on. The two budgets have no default: nobody spends privacy by accident. Both are in nats,
# written "2^-32", "1e-9" or as a number. `paclm plan` turns a target into values, for example:
#     paclm plan --mia 51% --tokens 1M --write WORKSPACE
"""
_RUNTIME = """
[runtime]
# Speed and memory only.
"""
_SERVER = """
[server]
# `paclm serve`: addresses and limits.
"""
_TRAINING = """
[training]
# The same for every world; after a change the worlds must be trained again.
"""
_EXAMPLES = {"per_token": "2^-32", "total": "2^-10"}
_REMARK = re.compile(r"(?<=\S)\s+#.*$")


class Voting(NamedTuple):
    """How worlds vote: the part of the mechanism that needs no budget."""

    decoder: Literal["gumbel", "greedy"]
    temperature: float
    support_size: int


@dataclass(frozen=True, slots=True)
class Settings:
    """paclm.toml, checked."""

    path: Path
    mechanism: Mapping[str, Any]
    """As written; complete only once both budgets are there."""
    runtime: RuntimeConfig
    server: ServerConfig
    training: TrainingConfig

    @property
    def config(self) -> MechanismConfig | None:
        """The mechanism's settings, or None as long as no budget is set."""
        return self.mechanism_with() if any(name in self.mechanism for name in _BUDGETS) else None

    @property
    def voting(self) -> Voting:
        """How worlds vote, as written or else by default; known before any budget is set."""
        mechanism = self.mechanism_with(**dict.fromkeys(_BUDGETS, 1.0))
        return Voting(mechanism.decoder, mechanism.temperature, mechanism.support_size)

    def mechanism_with(self, **changes: Any) -> MechanismConfig:
        """The mechanism's settings with some of them replaced; both budgets must be there by then."""
        way_out = f"To have them written: paclm plan --mia 51% --tokens 1M --write {in_shell(self.path.parent)}"
        return read_settings(MechanismConfig, {**self.mechanism, **changes}, "[mechanism] of paclm.toml", way_out)


def render_settings(training: TrainingConfig) -> str:
    """The text of a new paclm.toml: every setting with what config.py says about it."""
    mechanism = MechanismConfig(**_EXAMPLES)  # type: ignore[arg-type]
    sections = [
        (_MECHANISM, MechanismConfig, {**_values(mechanism), **_EXAMPLES}, "# "),
        (_RUNTIME, RuntimeConfig, _values(RuntimeConfig()), "# "),
        (_SERVER, ServerConfig, _values(ServerConfig()), "# "),
        (_TRAINING, TrainingConfig, _values(training), ""),
    ]
    text = _HEAD
    for head, settings, values, mark in sections:
        about = explain_settings(settings)
        text += head + "".join(
            f"\n# {about[name]}\n{mark}{name} = {in_toml(value)}\n" for name, value in values.items()
        )
    return text


def _values(settings: MechanismConfig | RuntimeConfig | ServerConfig | TrainingConfig) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def explain_settings(settings: type) -> dict[str, str]:
    """The docstring under each field, and what it may be. Python does not keep those, so the source is read."""
    (body,) = ast.parse(inspect.getsource(settings)).body
    hints = get_type_hints(settings)
    about = {}
    for field, text in pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            name, said = field.target.id, str(ast.literal_eval(text.value))
            choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
            about[name] = " ".join(said.split()) + (f" One of: {', '.join(choices)}." if choices else "")
    return about


def write_mechanism(path: Path, changes: Mapping[str, Any]) -> None:
    """Write settings into [mechanism] of paclm.toml; comments, order and everything else stay as they are."""
    _write_section(path, "mechanism", changes)


def write_training(path: Path, changes: Mapping[str, Any]) -> None:
    """Write settings into [training] of paclm.toml, as `write_mechanism` does into its section."""
    _write_section(path, "training", changes)


def _write_section(path: Path, section: Literal["mechanism", "training"], changes: Mapping[str, Any]) -> None:
    text = path.read_bytes().decode("utf-8")
    before, lines = tomllib.loads(text), text.rstrip("\n").split("\n")
    start = next((i + 1 for i, line in enumerate(lines) if re.match(rf"\s*\[\s*{section}\s*\]", line)), None)
    if start is None:
        lines += ["", f"[{section}]"]
        start = len(lines)
    for name, value in reversed(list(changes.items())):
        end = next((i for i in range(start, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
        places = [i for i in range(start, end) if re.match(rf"\s*(#\s*)?{name}\s*=", lines[i])]
        places.sort(key=lambda i: lines[i].lstrip().startswith("#"))
        if not places:  # neither the setting nor its example
            lines.insert(start, f"{name} = {in_toml(value)}")
            continue
        said = _REMARK.search(lines[places[0]])
        lines[places[0]] = f"{name} = {in_toml(value)}{said[0] if said else ''}"
    written = "\n".join(lines) + "\n"
    try:
        after = tomllib.loads(written)
    except tomllib.TOMLDecodeError:
        after = {}
    as_read = json.loads(json.dumps(dict(changes)))  # tuples are lists in a file
    if after != {**before, section: {**before.get(section, {}), **as_read}}:
        wanted = "; ".join(f"{name} = {in_toml(value)}" for name, value in changes.items())
        raise WorkspaceError(f"{path} is written in a way that cannot be changed here. Write by hand: {wanted}")
    write_private(path.resolve(), written.encode())  # a link stays one


def load_settings(path: Path) -> Settings:
    """Read paclm.toml; an unknown section or key is an error, because a misspelt budget must not vanish."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WorkspaceError(f"{path} is missing. Restore it; an empty file means all defaults.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WorkspaceError(
            f"{path} is not valid TOML: {error}. Mend it there; values such as 2^-32 need quotes."
        ) from None
    loose = [name for name, table in tables.items() if not isinstance(table, dict)]
    if loose:
        raise InvalidInput(
            f"{', '.join(loose)} in {path} stands outside of a section. Sections are [{'], ['.join(_SECTIONS)}], each "
            "on a line of its own, with its settings below."
        )
    unknown = sorted(set(tables) - set(_SECTIONS))
    if unknown:
        raise InvalidInput(f"Unknown section {', '.join(unknown)} in {path}. Known: {', '.join(_SECTIONS)}.")
    settings = Settings(
        path=path,
        mechanism=tables.get("mechanism", {}),
        runtime=read_settings(RuntimeConfig, tables.get("runtime", {}), f"[runtime] of {path}"),
        server=read_settings(ServerConfig, tables.get("server", {}), f"[server] of {path}"),
        training=read_settings(TrainingConfig, tables.get("training", {}), f"[training] of {path}"),
    )
    if settings.config is None:  # the other keys are checked even while the budgets are not set
        settings.mechanism_with(per_token=1.0, total=1.0)
    return settings
