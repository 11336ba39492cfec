"""How many cores this process may use, and how many threads are too many. Without torch, so that checks are quick."""

from __future__ import annotations

import math
import os
from pathlib import Path

from paclm.errors import InvalidInput

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
MOST_PER_CORE = 4
"""Threads of one product wait for each other: a few too many cost some speed, thousands nearly all of it."""


def read_limit(path: Path = _CPU_LIMIT) -> float:
    """Cores that a container may use; infinite where nothing is set."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")


def usable_cores() -> int:
    """Cores that this process may run on, busy or not; a fraction is rounded up."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        cpus = os.cpu_count() or 1
    return max(1, math.ceil(min(cpus, read_limit())))


def check_threads(threads: int) -> str:
    """A caution about more threads than cores, else empty; raises on a number that would stall the machine."""
    cores = usable_cores()
    if threads <= cores:
        return ""
    found = f"threads = {threads} in [runtime], but paclm may use {cores} core{'s' * (cores != 1)} here"
    remedy = f"Set {cores}, or 0 for as many as are idle."
    if threads > MOST_PER_CORE * cores:
        raise InvalidInput(f"{found}: with so many threads a token takes minutes. {remedy}")
    return f"{found}: this is slow. {remedy}"
