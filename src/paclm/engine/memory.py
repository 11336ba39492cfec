"""Memory of an engine, planned before anything is loaded."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paclm.errors import EngineError

GIB = 2**30
MEMINFO = Path("/proc/meminfo")
_CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by what they are for."""

    base: int
    adapters: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        return self.base + self.adapters + self.cache + self.activations

    def __str__(self) -> str:
        parts = ("base", "adapters", "cache", "activations")
        listed = ", ".join(f"{part} {getattr(self, part) / GIB:.2f}" for part in parts)
        return f"{self.total / GIB:.2f} GiB ({listed})"

    def check(self, available: int, has_trunk_cache: bool = True) -> None:
        """Raise if the plan does not fit, naming the setting that helps most; has_trunk_cache: fewer layers help."""
        if self.total <= available:
            return
        fewer = ', or train adapters in fewer layers: layers = "top:D" in [training]' if has_trunk_cache else ""
        advice = {
            "cache": "lower cache_gib, or max_sequences and context, in [runtime]" + fewer,
            "activations": "lower prefill_chunk in [runtime]",
            "adapters": 'set dtype = "bfloat16" in [runtime], or train fewer worlds',
            "base": 'set dtype = "bfloat16" in [runtime], or use a smaller base model',
        }
        largest = max(advice, key=lambda part: int(getattr(self, part)))
        raise EngineError(
            f"The engine needs {self}, and {available / GIB:.2f} GiB are free. "
            f"The largest part is the {largest}: {advice[largest]}."
        )


def plan_memory(
    model: Any,
    num_adapter_parameters: int,
    num_rows: int,
    dtype: torch.dtype,
    *,
    rows: int,
    support_size: int,
) -> MemoryPlan:
    """Bytes of an engine over a Hugging Face decoder, maybe on the meta device; W adapters of so many parameters.

    Without the cache. Activations are those of a pass over so many rows per world, prompt tokens or sequences.
    """
    config, size = model.config, dtype.itemsize
    widths = [p.numel() // min(p.shape) for p in model.parameters() if p.ndim == 2]
    widest = max(width for width in widths if width != config.vocab_size)  # outputs of the widest product of a layer
    per_row = size * (4 * config.hidden_size + 3 * widest)
    # head rows of the support, its logits, and keys of the whole vocabulary
    per_position = 4 * support_size * (config.hidden_size + 2 * num_rows) + 28 * config.vocab_size
    return MemoryPlan(
        base=sum(parameter.numel() for parameter in model.parameters()) * size,
        adapters=num_rows * num_adapter_parameters * size,
        cache=0,
        activations=rows * (num_rows * per_row + per_position),
    )


def token_bytes(config: Any, num_rows: int, dtype: torch.dtype, trunk: int = 0) -> int:
    """Keys and values of one token: in the layers of the trunk once, above it for all W worlds and the public model."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = trunk + (config.num_hidden_layers - trunk) * num_rows
    return int(2 * rows * kv_heads * head_size * dtype.itemsize)


def available_memory(device: torch.device) -> int:
    """Free bytes on the device; practically unlimited on a system that does not report them."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    for line in MEMINFO.read_text().splitlines() if MEMINFO.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63


def free_bytes(device: torch.device) -> int:
    """Free bytes on the device, within the limit of a container."""
    free = available_memory(device)
    if device.type == "cuda":
        return free
    try:
        limit, used = (int(path.read_text()) for path in _CGROUP_FILES)
    except (OSError, ValueError):  # no such limit, or none set ("max")
        return free
    return min(free, limit - used)


def sharing(device: torch.device, processes: int) -> int:
    """How many of the processes on this machine use the memory of one device: GPUs are dealt to them in turn."""
    return processes if device.type != "cuda" else -(-processes // max(1, torch.cuda.device_count()))


def peak_memory(device: torch.device) -> int:
    """The most bytes used so far: on a GPU of it, else of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_memory(process: int) -> int | None:
    """Bytes of a process that are in memory now, shared ones included; None where the system does not say."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    sizes = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")]
    return sizes[0] * 1024 if sizes else None


def release_memory() -> None:
    """Return memory of deleted engines and trainings, which torch and the C library keep, to device and system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # malloc_trim is glibc's
        ctypes.CDLL(None).malloc_trim(0)
