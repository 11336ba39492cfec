"""Timing that survives slow phases of a machine: contenders take turns, each round, and medians are compared.

A control (a fixed piece of arithmetic) runs in every round too; its spread says how far the machine wavered.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np


def control() -> None:
    """The fixed piece of arithmetic."""
    x = np.arange(4096, dtype=np.float64)
    for _ in range(200):
        x = np.sqrt(x * x + 1.0)


def race(contenders: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, list[float]]:
    """Seconds of each contender in each round, the control first; one untimed round warms everything up."""
    entries = {"control": control, **contenders}
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    for round_number in range(rounds + 1):
        for name, run in entries.items():
            started = time.perf_counter()
            run()
            if round_number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def spread(values: list[float]) -> str:
    """How far the rounds of one contender differ: (max − min) ÷ median."""
    return f"{(max(values) - min(values)) / median(values):.0%}"


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """A plain aligned table."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join([row[0].ljust(widths[0]), *cells[1:]]))
