"""How many cores this process may use, and how many threads are too many for them. Needs no torch: quick to ask."""

from __future__ import annotations

import math
import os
from pathlib import Path

from paclm.errors import InvalidInput

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
MOST_PER_CORE = 4
"""Threads of one product wait for each other: a few too many cost a part of the speed, thousands all of it."""


def read_limit(path: Path = _CPU_LIMIT) -> float:
    """Cores that a container may use; infinite where nothing is set."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")


def usable_cores() -> int:
    """Cores that this process may run on, busy or not; part of one counts as one."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        cpus = os.cpu_count() or 1
    return max(1, math.ceil(min(cpus, read_limit())))


def check_threads(threads: int) -> None:
    """Refuse a number with which nothing would ever end."""
    cores = usable_cores()
    if threads > MOST_PER_CORE * cores:
        raise InvalidInput(
            f"threads = {threads} in [runtime] of paclm.toml, and this machine gives paclm {_count(cores)}: so many "
            f"threads wait for each other, and a token takes minutes. Set {cores}, or 0 for as many as are idle."
        )


def crowding(threads: int) -> str:
    """A caution about more threads than cores; empty where they are not too many, and where they will be refused."""
    cores = usable_cores()
    if not cores < threads <= MOST_PER_CORE * cores:
        return ""
    return (
        f"threads = {threads} in [runtime], and this machine gives paclm {_count(cores)}: more threads than cores wait "
        f"for each other. Set {cores}, or 0 for as many as are idle."
    )


def _count(cores: int) -> str:
    return f"{cores} core{'s' * (cores != 1)}"
