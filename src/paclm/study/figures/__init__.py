"""The figures, one file each, named by the paper's label: `fig:flatness` is fig_flatness.py, with a `FIGURE`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from paclm.study.figure import Figure


def all_figures() -> list[Figure]:
    """Every figure of this folder, by label."""
    found = [import_module(f"{__name__}.{module.name}").FIGURE for module in iter_modules(__path__)]
    return sorted(found, key=lambda figure: figure.label)
