"""The regimes, one file each. To add one: write a file with a `REGIME` and put its name into `NAMES`."""

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
        "tokens_only",
        "universe",
        "meter",
        "depth",
        "dp",
        "lm_eval",
    ),
)
SPENDING = ("dp",)
"""Regimes that use up a promise about the corpus; `all` leaves them out."""
ASKING = ("knowledge",)
"""Regimes that need questions; `all` leaves them out where there are none."""
READING = ("lm_eval",)
"""Regimes that read what another program has measured; `all` leaves them out."""


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no regime has; `all` is every one that spends nothing and reads no other program's results."""
    for name in names:
        if name not in (*NAMES, "all"):
            raise InvalidInput(
                f"There is no regime {name!r}. There are: {', '.join(NAMES)}; or all, without "
                f"{', '.join((*SPENDING, *READING))}."
            )


def regime_named(name: str) -> Regime:
    """The regime of that name."""
    check_names([name])
    regime: Regime = import_module(f"paclm.study.regimes.{name}").REGIME
    return regime
