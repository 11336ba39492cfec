"""The plugins that a research command names: found, imported, checked, and identified in what it writes.

Imports code of others when it is asked to. Nothing that serves imports this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paclm.errors import PluginError
from paclm.plugins import GROUPS, Group, Loaded, Plugin, find_plugins, load, load_named
from paclm.privacy.releases import RULES, Rule
from paclm.study.code import code_digest

TAKING = ("releases", "pmixed", "attacks", "baselines")
"""Regimes that `--release` adds rows to."""


def load_release(name: str) -> Loaded | None:
    """The release that `--release` names, a plugin or `module:NAME`; None if it is built in."""
    find_plugins("releases", RULES)  # refuses a package that claims a built-in name
    if name in RULES:
        return None
    if ":" in name:  # of an installed module, or of one in the current folder
        return load(Plugin("releases", name, name, None), Rule, RULES)
    return load_named("releases", name, Rule, RULES)


def load_for_run(regimes: Sequence[str], releases: Sequence[str]) -> list[Loaded]:
    """The plugins of one run: releases and regimes by name, and all attacks or baselines where their regime runs."""
    found = [loaded for loaded in map(load_release, releases) if loaded is not None]
    kind, built_in = _expected("regimes")
    found += [load_named("regimes", name, kind, built_in) for name in regimes if name not in built_in]
    groups: tuple[Group, ...] = ("attacks", "baselines")
    for group in groups:
        kind, built_in = _expected(group)
        found += [load(one, kind, built_in) for one in find_plugins(group, built_in) if group in regimes]
    names = [(plugin.group, plugin.name) for plugin, _ in found]
    for plugin, _ in found:
        if names.count((plugin.group, plugin.name)) > 1:
            raise plugin.broken("Another plugin of this run has the same name.")
    return found


def identify(loaded: Loaded) -> dict[str, Any]:
    """What a result records of a plugin: where it comes from, and a digest of its code."""
    return {**loaded.plugin._asdict(), "code": code_digest(loaded.plugin.module)}


def survey() -> list[tuple[Plugin, PluginError | None]]:
    """Every installed plugin, imported once, with what is wrong with it."""
    found: list[tuple[Plugin, PluginError | None]] = []
    for group in GROUPS:
        for plugin in find_plugins(group, ()):
            error = None
            try:
                load(plugin, *_expected(group))
            except PluginError as wrong:
                error = wrong
            found.append((plugin, error))
    return found


def _expected(group: Group) -> tuple[Any, Sequence[str]]:
    """What an entry point of a group has to name, and which names it may not take. The study is imported only here."""
    from paclm.study.attacks.attack import BELIEF, Attack
    from paclm.study.baselines.baseline import Baseline
    from paclm.study.regime import Regime
    from paclm.study.regimes import NAMES
    from paclm.worlds.readers import RESERVED

    of_groups: dict[Group, tuple[Any, Sequence[str]]] = {
        "releases": (Rule, tuple(RULES)),
        "regimes": (Regime, (*NAMES, "all")),
        "attacks": (Attack, (BELIEF.name,)),
        "baselines": (Baseline, ("public model", "full corpus", *RULES)),
        "readers": (Callable, RESERVED),
    }
    return of_groups[group]
