"""Count the kernel launches of a step: what a GPU waits for when the host is slower.

On a GPU these are launches of kernels, copies and fills, as torch's profiler sees them. On a CPU, where nothing is
launched, they are torch's operations other than views: another number, but it varies with the first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_LAUNCH = re.compile(r"cu(da)?(Launch|Memcpy|Memset)")
_NO_WORK = ("empty", "_unsafe_view", "_reshape_alias")  # of operations that no schema calls a view


def count_launches(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Launches of one step: how many, and of which kinds, the most frequent first."""
    kinds = _on_gpu(step) if device.type == "cuda" else _on_cpu(step)
    return {"launches_per_step": sum(kinds.values()), "launches_by_kind": dict(kinds.most_common())}


def launches_among(names: Iterable[str]) -> Counter[str]:
    """Calls of CUDA's runtime and driver that give the GPU work, of all that a profiler recorded."""
    return Counter(name for name in names if _LAUNCH.match(name))


def _on_gpu(step: Callable[[], object]) -> Counter[str]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as record:
        step()
        torch.cuda.synchronize()
    return launches_among(event.name for event in record.events())


def _on_cpu(step: Callable[[], object]) -> Counter[str]:
    with _Operations() as seen:
        step()
    return seen.kinds


class _Operations(TorchDispatchMode):
    """Records every operation that reaches a kernel, including the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._schema.name.removeprefix("aten::")
        if not operation.is_view and not name.startswith(_NO_WORK):
            self.kinds[name] += 1
        return operation(*args, **(kwargs or {}))
