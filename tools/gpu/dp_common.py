"""What the parts of tools/gpu/dp_run.py share: the clock, and σ with what it promises from a file."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import asdict
from typing import Any

from paclm.worlds.storage import write_private_json

SEED = 101  # as paper_run.py

Row = dict[str, Any]


class Clock:
    """Seconds since the start; tells whether another training still fits."""

    def __init__(self, minutes: float) -> None:
        self.began, self.limit = time.monotonic(), 60.0 * minutes

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def has(self, seconds: float) -> bool:
        """Whether so many seconds are left."""
        return self.seconds + seconds <= self.limit

    def say(self, sentence: str) -> None:
        print(f"[{self.seconds:6.1f} s] {sentence}", flush=True)


def make_noise(options: argparse.Namespace) -> None:
    """σ and its guarantee for every combination that the file does not hold yet."""
    rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.is_file() else []
    for wanted in itertools.product(options.units, options.epsilons, options.rates, options.steps):
        if find_noise(rows, *wanted) is None:
            rows.append(noise_row(*wanted))
            write_private_json(options.out, {"rows": rows})


def find_noise(rows: list[Row], num_units: int, epsilon: float, rate: float, steps: int) -> Row | None:
    """The row of this combination."""
    wanted = {"num_units": num_units, "epsilon": epsilon, "sampling_rate": rate, "steps": steps}
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), None)


def noise_row(num_units: int, epsilon: float, rate: float, steps: int) -> Row:
    """What one training with these figures takes and promises."""
    from paclm.privacy.dp import DpMechanism, calibrate_noise, default_delta, guarantee

    delta = default_delta(num_units)
    sigma = calibrate_noise(epsilon, delta, rate, steps)
    promised = asdict(guarantee([DpMechanism(rate, sigma, steps)], delta))
    asked = {"num_units": num_units, "sampling_rate": rate, "steps": steps, "noise_multiplier": sigma}
    return {**asked, **promised, "epsilon_spent": promised["epsilon"], "epsilon": epsilon}


def noise_for(options: argparse.Namespace, num_units: int, epsilon: float, rate: float, steps: int) -> Row:
    """The row of the file, or computed where dp_accounting is installed."""
    rows = json.loads(options.noise.read_text(encoding="utf-8"))["rows"]
    return find_noise(rows, num_units, epsilon, rate, steps) or noise_row(num_units, epsilon, rate, steps)
