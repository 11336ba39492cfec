"""Number of torch threads on a CPU: at most as many as there are idle cores.

Threads of one product wait for each other, so a busy core slows down all of them, up to tenfold. The number of threads
changes only the order of sums. Knows neither models nor workspaces.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from paclm.engine.cores import check_threads, read_limit

_STAT = Path("/proc/stat")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_AT_IMPORT = torch.get_num_threads()
_SECONDS = 0.1
_LOOKS = 3  # a core that was idle in one of them counts as idle: starting a program makes short load


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """Threads given to torch, and the cores it could have used."""

    threads: int
    cores: int

    @property
    def busy(self) -> int:
        """Cores left to other programs."""
        return max(0, self.cores - self.threads)


def set_threads(setting: int = 0) -> ThreadChoice | None:
    """Set torch's threads to `threads` of [runtime]; for 0 to the number of idle cores, measured once per process.

    Returns None if nothing was measured: a number is set in paclm.toml, by OMP_NUM_THREADS or in this process, or the
    system does not report how busy its cores are.
    """
    if setting > 0:
        check_threads(setting)
        torch.set_num_threads(setting)
        return None
    if any(os.environ.get(name) for name in _VARIABLES):
        return None
    choice = _measured_choice()
    if choice is None or torch.get_num_threads() not in (_AT_IMPORT, choice.threads):
        return None
    torch.set_num_threads(choice.threads)
    return choice


def idle_cores(before: str, after: str, cpus: Collection[int]) -> float:
    """How many of these CPUs were idle on average between two readings of /proc/stat."""
    start, end = _cpu_times(before), _cpu_times(after)
    idle = 0.0
    for cpu in cpus:
        if cpu in start and cpu in end:
            waited, passed = end[cpu][0] - start[cpu][0], end[cpu][1] - start[cpu][1]
            idle += max(0, waited) / passed if passed > 0 else 1.0  # the kernel may reduce its count of disk waits
    return idle


def choose_threads(idle: float, cores: int) -> int:
    """Idle cores as a whole number, at least one and at most `cores`."""
    return min(max(1, round(idle)), cores)


def _cpu_times(stat: str) -> dict[int, tuple[int, int]]:
    """(idle, all) ticks of each CPU; disk waits are idle, steal time is not."""
    times = {}
    for line in stat.splitlines():
        name, *ticks = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdecimal() and len(ticks) >= 5:
            user, nice, system, idle, waiting, *rest = map(int, ticks[:8])  # the rest is part of user and nice
            times[int(name[3:])] = (idle + waiting, user + nice + system + idle + waiting + sum(rest))
    return times


@cache
def _measured_choice() -> ThreadChoice | None:
    """Measure the cores for up to 0.3 s; at most torch's own number, which counts physical cores."""
    try:
        cpus = os.sched_getaffinity(0)
        cores = choose_threads(min(_AT_IMPORT, read_limit()), len(cpus))
        idle = 0.0
        for _ in range(_LOOKS):
            idle = max(idle, _look(cpus))
            if choose_threads(idle, cores) == cores:
                break
    except (OSError, AttributeError):  # /proc/stat and sched_getaffinity are Linux's
        return None
    return ThreadChoice(choose_threads(idle, cores), cores)


def _look(cpus: Collection[int]) -> float:
    """Idle cores in the next tenth of a second, with this process's own load counted as idle."""
    before, own, began = _STAT.read_text(), time.process_time(), time.perf_counter()
    time.sleep(_SECONDS)
    ours = (time.process_time() - own) / (time.perf_counter() - began)
    return idle_cores(before, _STAT.read_text(), cpus) + ours
