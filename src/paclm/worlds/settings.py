"""paclm.toml: the settings of a workspace, written with explanations and read strictly."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from paclm.config import (
    DpConfig,
    LedgerConfig,
    MechanismConfig,
    RuntimeConfig,
    ServerConfig,
    TrainingConfig,
    WorkersConfig,
    in_shell,
    in_toml,
    read_settings,
)
from paclm.errors import InvalidInput, WorkspaceError
from paclm.worlds.layout import SETTINGS_FILE, ledger_path
from paclm.worlds.storage import write_private

if TYPE_CHECKING:
    from tomlkit.items import Item, Table

_BUDGETS = ("per_token", "total")

_HEAD = """\
# Settings of this workspace. Who is in which world, the seed and the base model are fixed in manifest.json.
# A setting behind a # shows its default (budgets: an example); remove the # to change it.
"""
_ABOUT = {
    "mechanism": """\
# What the guarantee depends on. The two budgets have no default, so that privacy is never spent by accident. Both are
# in nats, written "2^-32", "1e-9" or as a number. `paclm plan` turns a target into values, for example:
#     paclm plan --mia 51% --tokens 1M --write WORKSPACE""",
    "runtime": "# Speed and memory only.",
    "server": "# `paclm serve`: addresses and limits.",
    "workers": "# `--workers`: several processes, on several GPUs or hosts, that share the worlds.",
    "ledger": "# Where charges, belief and secret are kept. A password belongs in PACLM_LEDGER or a .pgpass file.",
    "training": "# The same for every world; after a change the worlds must be trained again.",
    "dp": """\
# `paclm train --what dp:EPSILON`: the adapter of the promise about the corpus. The defaults were found on public text;
# a choice that depends on the private records is outside of the guarantee.""",
}
_ADDRESSES = {"url": "PACLM_LEDGER", "front_url": "PACLM_LEDGER_FRONT"}
ADDRESS_VARIABLES = tuple(_ADDRESSES.values())
"""They may hold passwords."""
_EXAMPLES = {"per_token": "2^-32", "total": "2^-10"}


class Voting(NamedTuple):
    """How worlds vote: the settings of the mechanism that need no budget."""

    decoder: Literal["gumbel", "greedy"]
    temperature: float
    support_size: int


@dataclass(frozen=True, slots=True)
class Settings:
    """paclm.toml, checked."""

    path: Path
    mechanism: Mapping[str, Any]  # as written; complete once both budgets are set
    runtime: RuntimeConfig
    server: ServerConfig
    workers: WorkersConfig
    ledger: LedgerConfig
    training: TrainingConfig
    dp: DpConfig

    @property
    def config(self) -> MechanismConfig | None:
        """The mechanism's settings, or None while no budget is set."""
        return self.mechanism_with() if any(name in self.mechanism for name in _BUDGETS) else None

    @property
    def voting(self) -> Voting:
        """How worlds vote; known before any budget is set."""
        mechanism = self.mechanism_with(**dict.fromkeys(_BUDGETS, 1.0))
        return Voting(mechanism.decoder, mechanism.temperature, mechanism.support_size)

    def mechanism_with(self, **changes: Any) -> MechanismConfig:
        """The mechanism's settings with changes, which must leave both budgets set."""
        way_out = f"To write them: paclm plan --mia 51% --tokens 1M --write {in_shell(self.path.parent)}"
        return read_settings(MechanismConfig, {**self.mechanism, **changes}, "[mechanism] of paclm.toml", way_out)


def render_settings(training: TrainingConfig) -> str:
    """The text of a new paclm.toml: every setting with its explanation from config.py, most of them commented out."""
    sections: dict[str, Any] = {
        "mechanism": MechanismConfig(**_EXAMPLES),  # type: ignore[arg-type]
        "runtime": RuntimeConfig(),
        "server": ServerConfig(),
        "workers": WorkersConfig(),
        "ledger": LedgerConfig(),
        "training": training,
        "dp": DpConfig(),
    }
    text = _HEAD
    for section, settings in sections.items():
        about, mark = explain_settings(type(settings)), "" if settings is training else "# "
        text += f"\n[{section}]\n{_ABOUT[section]}\n"
        for field in dataclasses.fields(settings):
            value = in_toml(_EXAMPLES.get(field.name, getattr(settings, field.name)))
            text += f"\n# {about[field.name]}\n{mark}{field.name} = {value}\n"
    return text


def explain_settings(settings: type) -> dict[str, str]:
    """The docstring under each field and its choices, read from the source because Python does not keep them."""
    (body,) = ast.parse(inspect.getsource(settings)).body
    hints = get_type_hints(settings)
    about = {}
    for field, text in pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            name, words = field.target.id, str(ast.literal_eval(text.value)).split()
            choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
            about[name] = " ".join(words) + (f" One of: {', '.join(choices)}." if choices else "")
    return about


def write_settings(path: Path, section: Literal["mechanism", "training", "ledger"], changes: Mapping[str, Any]) -> None:
    """Write settings into a section of paclm.toml; comments, order, line ends, mode and all else stay unchanged.

    A setting that stands only as an example behind a # takes the example's place.
    """
    import tomlkit  # here: a bare GPU image reads settings and writes none
    from tomlkit.exceptions import TOMLKitError
    from tomlkit.items import Table

    text = path.read_bytes().decode("utf-8")
    has_crlf = "\r\n" in text and text.count("\r\n") == text.count("\n")
    try:
        before, document = tomllib.loads(text), tomlkit.parse(text.replace("\r\n", "\n") if has_crlf else text)
        table: Any = document.setdefault(section, tomlkit.table())
        for name, value in changes.items():
            setting = tomlkit.value(in_toml(value))
            if name in table or not isinstance(table, Table) or not _replace_example(table, name, setting):
                table[name] = setting
        written = tomlkit.dumps(document)
        written = written.replace("\n", "\r\n") if has_crlf else written
        is_written = tomllib.loads(written) == {**before, section: {**before.get(section, {}), **_as_read(changes)}}
    except (tomllib.TOMLDecodeError, TOMLKitError, TypeError, AttributeError):  # broken, or no table
        is_written = False
    if not is_written:
        wanted = "; ".join(f"{name} = {in_toml(value)}" for name, value in changes.items())
        raise WorkspaceError(f"{path} has a form that paclm cannot edit. Write by hand: {wanted}")
    file = path.resolve()  # a link stays one
    write_private(file, written.encode(), mode=stat.S_IMODE(file.stat().st_mode))


def _as_read(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes as they will be read: tuples are lists in a file."""
    found: dict[str, Any] = json.loads(json.dumps(dict(changes)))
    return found


def _replace_example(table: Table, name: str, setting: Item) -> bool:
    """Put a setting in the place of its example, a comment `# name = …`; returns whether there is one."""
    from tomlkit.items import Comment, SingleKey

    for place, (_, item) in enumerate(table.value.body):
        words = item.trivia.comment.removeprefix("#").split("=", 1) if isinstance(item, Comment) else []
        if len(words) == 2 and words[0].strip() == name:
            setting.trivia.indent, setting.trivia.trail = item.trivia.indent, item.trivia.trail
            table.value.body[place] = (SingleKey(name), setting)
            return True
    return False


def load_settings(path: Path) -> Settings:
    """Read paclm.toml; an unknown section or key is an error, because a misspelt budget must not be ignored."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WorkspaceError(f"{path} is missing. Restore it, or make an empty file for all defaults.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WorkspaceError(
            f"{path} is not valid TOML: {error}. Correct it there; values such as 2^-32 and top:4 need quotes."
        ) from None
    loose = [name for name, table in tables.items() if not isinstance(table, dict)]
    if loose:
        raise InvalidInput(
            f"{', '.join(loose)} in {path} is outside of a section. Sections are [{'], ['.join(_ABOUT)}], each on a "
            "line of its own, with its settings below."
        )
    unknown = sorted(set(tables) - set(_ABOUT))
    if unknown:
        raise InvalidInput(f"Unknown section {', '.join(unknown)} in {path}. Known: {', '.join(_ABOUT)}.")
    settings = Settings(
        path=path,
        mechanism=tables.get("mechanism", {}),
        runtime=read_settings(RuntimeConfig, tables.get("runtime", {}), f"[runtime] of {path}"),
        server=read_settings(ServerConfig, tables.get("server", {}), f"[server] of {path}"),
        workers=read_settings(WorkersConfig, tables.get("workers", {}), f"[workers] of {path}"),
        ledger=ledger_settings(tables.get("ledger", {}), f"[ledger] of {path}"),
        training=read_settings(TrainingConfig, tables.get("training", {}), f"[training] of {path}"),
        dp=read_settings(DpConfig, tables.get("dp", {}), f"[dp] of {path}"),
    )
    if settings.config is None:
        settings.mechanism_with(per_token=1.0, total=1.0)  # checks the other keys while no budget is set
    return settings


def ledger_settings(table: Mapping[str, Any], where: str, *, by_environment: bool = True) -> LedgerConfig:
    """[ledger], with what the environment names in place of its addresses."""
    named = {name: os.environ.get(variable) for name, variable in _ADDRESSES.items() if by_environment}
    return read_settings(LedgerConfig, {**table, **{name: url for name, url in named.items() if url}}, where)


def ledger_config(workspace: Path, *, by_environment: bool = True) -> LedgerConfig:
    """[ledger] of a workspace, also where other settings are wrong; the environment is this process's own."""
    try:
        table = tomllib.loads((workspace / SETTINGS_FILE).read_text(encoding="utf-8")).get("ledger", {})
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        table = {}
    return ledger_settings(table, f"[ledger] of {workspace / SETTINGS_FILE}", by_environment=by_environment)


def ledger_address(workspace: Path) -> Path | str:
    """Where a workspace keeps its ledger: a path, or the URL of a database."""
    return ledger_config(workspace).url or ledger_path(workspace)
