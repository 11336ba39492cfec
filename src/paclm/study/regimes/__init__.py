"""The built-in regimes, one file each with a `REGIME`, named in `NAMES`. Regimes of plugins are found by name."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from paclm.errors import InvalidInput
from paclm.study.regime import Regime

NAMES = (  # in the order of the paper, then what goes past it
    *("census", "accuracy", "flatness", "sweep", "sessions", "generation", "ablation", "canaries", "capacity", "cost"),
    *(
        "precision",
        "pmixed",
        "releases",
        "knowledge",
        "forgetting",
        "coupling",
        "worlds",
        "tokens_only",
        "temperature",
        "content",
        "chosen_prompts",
        "universe",
        "meter",
        "choices",
        "depth",
        "dp",
        "student",
        "controls",
        "attacks",
        "baselines",
        "lm_eval",
    ),
)
SPENDING = ("dp",)
"""Regimes that use up a promise about the corpus."""
ON_REQUEST = (*SPENDING, "controls", "attacks", "baselines", "lm_eval")
"""Regimes that `all` leaves out, as it does plugins: run by name; `controls` needs a text of its own."""
ASKING = ("knowledge",)
"""Regimes that need questions; `all` leaves them out where there are none."""


def check_names(names: Iterable[str]) -> None:
    """Refuse names that neither a built-in regime nor a plugin has. Imports no plugin."""
    from paclm.plugins import find_plugins

    installed = [plugin.name for plugin in find_plugins("regimes", (*NAMES, "all"))]
    for name in names:
        if name not in (*NAMES, *installed, "all"):
            raise InvalidInput(
                f"There is no regime {name!r}. There are: {', '.join((*NAMES, *installed))}; or all, without "
                f"{', '.join((*ON_REQUEST, *installed))}."
            )


def regime_named(name: str) -> Regime:
    """The regime of that name; a plugin is imported for it."""
    if name not in NAMES:
        from paclm.plugins import load_named

        plugged: Regime = load_named("regimes", name, Regime, (*NAMES, "all")).value
        return plugged
    regime: Regime = import_module(f"paclm.study.regimes.{name}").REGIME
    return regime
