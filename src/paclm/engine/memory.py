"""How much memory an engine will take, worked out before anything is loaded."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paclm.errors import EngineError

GIB = 2**30
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that memory depends on."""

    num_base_parameters: int
    num_adapter_parameters: int
    """Of one world."""
    num_worlds: int
    """m, without the public model."""
    num_layers: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    widest: int
    """Outputs of the widest product of a layer."""
    vocabulary: int


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

    def check(self, available: int) -> None:
        """Refuse before loading what cannot fit, and say which setting helps most."""
        if self.total <= available:
            return
        advice = {
            "cache": "lower max_sequences or context in [runtime]",
            "activations": "lower prefill_chunk in [runtime]",
            "adapters": 'set dtype = "bfloat16" in [runtime], or train fewer worlds',
            "base": 'set dtype = "bfloat16" in [runtime], or use a smaller base model',
        }
        largest = max(advice, key=lambda part: int(getattr(self, part)))
        raise EngineError(
            f"The engine needs {self}, and {available / GIB:.2f} GiB are free. "
            f"The largest part is the {largest}: {advice[largest]}."
        )


def shape_of(model: Any, num_adapter_parameters: int, num_worlds: int) -> Shape:
    """Sizes of a Hugging Face decoder; a model on the meta device is enough."""
    config = model.config
    heads = config.num_attention_heads
    widths = [p.numel() // min(p.shape) for module in model.modules() for p in _kernels(module)]
    return Shape(
        num_base_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_adapter_parameters=num_adapter_parameters,
        num_worlds=num_worlds,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        widest=max(width for width in widths if width != config.vocab_size),
        vocabulary=config.vocab_size,
    )


def plan_memory(
    shape: Shape, dtype: torch.dtype, *, max_sequences: int, context: int, prefill_chunk: int, support_size: int
) -> MemoryPlan:
    """Bytes for one engine. Activations are those of the larger of a prefill pass and a decode step."""
    size = dtype.itemsize
    rows = shape.num_worlds + 1  # the public model rides along
    chunk = max(prefill_chunk, max_sequences)
    per_row = size * (4 * shape.hidden_size + 3 * shape.widest)
    per_position = 4 * support_size * (shape.hidden_size + 2 * rows) + 28 * shape.vocabulary  # logits, keys, head rows
    return MemoryPlan(
        base=shape.num_base_parameters * size,
        adapters=rows * shape.num_adapter_parameters * size,
        cache=2 * shape.num_layers * rows * shape.num_kv_heads * shape.head_size * context * max_sequences * size,
        activations=chunk * (rows * per_row + per_position),
    )


def available_memory(device: torch.device) -> int:
    """Free bytes on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    for line in MEMINFO.read_text().splitlines() if MEMINFO.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63  # a system that does not say


def release_memory() -> None:
    """Give memory of engines that are gone back to the device: what torch keeps for itself counts as taken."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _kernels(module: nn.Module) -> list[torch.Tensor]:
    return [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 2]
