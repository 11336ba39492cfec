"""The tables, one file each, named by the paper's label: `tab:census` is tab_census.py, with a `TABLE`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from paclm.study.table import Table


def all_tables() -> list[Table]:
    """Every table of this folder, by label."""
    found = [import_module(f"{__name__}.{module.name}").TABLE for module in iter_modules(__path__)]
    return sorted(found, key=lambda table: table.label)
