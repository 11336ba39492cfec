"""Plugins: releases, regimes, attacks, baselines and readers that other packages declare as entry points.

    [project.entry-points."paclm.releases"]
    response = "my_package.response:RULE"

Only research commands and `paclm init` look for them. A lookup reads the metadata of installed packages and imports
nothing; `load` imports the one that was asked for. No plugin may take a built-in name. Processes that serve import
neither this module nor any plugin: the proof is about the built-in releases, and other code has no business beside the
secret. Imports only `errors`; `tests/test_rooms.py` lists the files that may import it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from paclm.errors import InvalidInput, PluginError

Group = Literal["releases", "regimes", "attacks", "baselines", "readers"]
GROUPS: tuple[Group, ...] = get_args(Group)
_TAKEN = "That name is built in, and no plugin may replace what is built in."


class Plugin(NamedTuple):
    """One entry point, not imported yet."""

    group: Group
    name: str
    target: str  # module:NAME
    package: str | None  # None: named on the command line as module:NAME, of no installed package
    version: str | None = None

    @property
    def origin(self) -> str:
        """The package and its version, or the module."""
        return f"{self.package} {self.version}" if self.package else f"the module {self.module}"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0].strip()

    def broken(self, why: str) -> PluginError:
        """An error about this plugin: a sentence that says why, then what to do."""
        remedy = f"Update that package or remove it: pip uninstall {self.package}" if self.package else "Correct it."
        return PluginError(f"The {self.group[:-1]} {self.name!r} of {self.origin} cannot be used. {why} {remedy}")


class Loaded(NamedTuple):
    """An imported plugin and what its entry point names."""

    plugin: Plugin
    value: Any


def find_plugins(group: Group, built_in: Collection[str]) -> list[Plugin]:
    """The installed plugins of a group, by name. Imports none. One that declares a built-in name is an error."""
    found = [
        Plugin(group, point.name, point.value, point.dist.name, point.dist.version)
        for point in metadata.entry_points(group=f"paclm.{group}")
        if point.dist is not None
    ]
    for plugin in found:
        if plugin.name in built_in:
            raise plugin.broken(_TAKEN)
    return sorted(found)


def plugin_named(group: Group, name: str, built_in: Collection[str]) -> Plugin | None:
    """The installed plugin of that name, if there is one; two packages that declare it are an error."""
    found = [plugin for plugin in find_plugins(group, built_in) if plugin.name == name]
    if len(found) > 1:
        raise found[0].broken(f"{found[1].origin} declares the same name.")
    return found[0] if found else None


def load(plugin: Plugin, kind: Any, built_in: Collection[str] = ()) -> Loaded:
    """Import a plugin. It must name an object of that kind, which bears the same name and none that is built in."""
    if plugin.name in built_in:  # before any of its code runs
        raise plugin.broken(_TAKEN)
    if plugin.package is None and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last, so that a file here replaces no installed module
    try:
        value = metadata.EntryPoint(plugin.name, plugin.target, f"paclm.{plugin.group}").load()
    except (Exception, SystemExit) as error:  # code of others may raise anything
        raise plugin.broken(f"Importing {plugin.target} failed with {type(error).__name__}: {error}.") from error
    if not isinstance(value, kind):
        raise plugin.broken(f"{plugin.target} is a {type(value).__name__}, not a {kind.__name__}.")
    name = getattr(value, "name", plugin.name)
    if plugin.package is None:
        plugin = plugin._replace(name=name)
    if name != plugin.name:
        raise plugin.broken(f"{plugin.target} calls itself {name!r}, and the two names must be the same.")
    if name in built_in:
        raise plugin.broken(_TAKEN)
    return Loaded(plugin, value)


def load_named(group: Group, name: str, kind: Any, built_in: Collection[str]) -> Loaded:
    """Import the installed plugin of that name."""
    found = plugin_named(group, name, built_in)
    if found is None:
        known = ", ".join((*built_in, *(plugin.name for plugin in find_plugins(group, built_in))))
        raise InvalidInput(
            f"Unknown {group[:-1]} {name!r}. Choose one of: {known}; or install the package that has it."
        )
    return load(found, kind, built_in)
