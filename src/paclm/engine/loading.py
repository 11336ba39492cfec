"""Build an engine from a workspace, or from a model and its adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paclm.config import RuntimeConfig
from paclm.engine.adapters import AdapterStack, linear_layers
from paclm.engine.base_model import base_of, load_model
from paclm.engine.decode_step import DecodeStep, PlainStep, WorldsModel
from paclm.engine.determinism import set_deterministic
from paclm.engine.engine import Engine, check_support_size
from paclm.engine.memory import MemoryPlan, available_memory, plan_memory
from paclm.engine.stacked import StackedModel
from paclm.engine.stored_model import read_model
from paclm.engine.threads import set_threads
from paclm.engine.weights import take_apart, unsupported
from paclm.errors import EngineError
from paclm.worlds.layout import FULL_FILE, WORLDS_FILE

if TYPE_CHECKING:
    from paclm.worlds.fingerprints import Base
    from paclm.worlds.workspace import Workspace


def pick_device(setting: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if setting == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            'device = "cuda" in [runtime] of paclm.toml, but torch finds no CUDA device. Set "cpu" or "auto", or check '
            "nvidia-smi."
        )
    return torch.device(setting)


def model_context(model: Any) -> int:
    """The context length of the base model."""
    return int(model.config.max_position_embeddings)


def plan_engine(model: Any, stack: AdapterStack, runtime: RuntimeConfig, support_size: int) -> MemoryPlan:
    """Memory that `build_engine` will take; the model may be on the meta device."""
    return plan_memory(
        model,
        stack.num_parameters,
        stack.num_worlds,
        getattr(torch, runtime.dtype),
        max_sequences=runtime.max_sequences,
        context=min(runtime.context, model_context(model)),
        prefill_chunk=runtime.prefill_chunk,
        support_size=support_size,
    )


def build_engine(
    model: Any,
    stack: AdapterStack,
    runtime: RuntimeConfig | None = None,
    support_size: int = 200,
    fingerprint: str | None = None,
) -> Engine:
    """An engine that takes over a loaded Hugging Face model. Sets torch's global numerical switches."""
    runtime = runtime or RuntimeConfig()
    set_deterministic()
    stack.check_fits(linear_layers(model), fingerprint)
    device = pick_device(runtime.device)
    if device.type == "cpu":
        set_threads(runtime.threads)
    check_support_size(support_size, int(model.config.vocab_size))
    plan = plan_engine(model, stack, runtime, support_size)
    plan.check(available_memory(device))
    context = min(runtime.context, model_context(model))
    try:
        model = model.eval().to(device=device, dtype=getattr(torch, runtime.dtype))
        worlds, step = _assemble(model, stack, runtime.max_sequences, context, support_size)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"Out of GPU memory while loading; the plan was {plan}. Lower max_sequences or context in [runtime]."
        ) from error
    return Engine(worlds, support_size, runtime.prefill_chunk, step)


def _assemble(
    model: Any, stack: AdapterStack, num_slots: int, context: int, support_size: int
) -> tuple[WorldsModel, DecodeStep]:
    """The fastest forward pass and decode step for this model and device."""
    if unsupported(model) is not None:
        from paclm.engine.generic import GenericModel

        patched = GenericModel(model, stack, num_slots, context)
        return patched, PlainStep(patched, support_size)
    weights = take_apart(model, stack, context)
    if weights.device.type != "cuda":
        stacked = StackedModel(weights, num_slots)
        return stacked, PlainStep(stacked, support_size)
    from paclm.engine.fused import FusedModel, uncovered
    from paclm.engine.graphs import FusedStep, GraphStep

    if uncovered(weights) is None:
        fused = FusedModel(weights, num_slots)
        return fused, GraphStep(FusedStep(fused, support_size), fused, support_size, reads_whole_reach=False)
    plain = StackedModel(weights, num_slots)
    return plain, GraphStep(FusedStep(plain, support_size), plain, support_size, reads_whole_reach=True)


def load_stack(workspace: Workspace, with_full: bool = False) -> AdapterStack:
    """The worlds' adapters; with_full: the full-corpus adapter as one more world at the end."""
    stack = AdapterStack.load(workspace.adapters_path / WORLDS_FILE)
    if not with_full:
        return stack
    return join_stacks([stack, AdapterStack.load(workspace.adapters_path / FULL_FILE)])


def join_stacks(stacks: Sequence[AdapterStack]) -> AdapterStack:
    """Several stacks over one base as a single one, their worlds in the order given."""
    first = stacks[0]
    for other in stacks[1:]:
        is_alike = other.layers == first.layers and other.base == first.base
        if not is_alike or (other.spec.rank, other.spec.scale) != (first.spec.rank, first.spec.scale):
            raise EngineError("These adapters have different layers, base, rank or scale and cannot run together.")
    return AdapterStack(
        first.spec,
        first.base,
        {layer: torch.cat([stack.A[layer] for stack in stacks]) for layer in first.layers},
        {layer: torch.cat([stack.B[layer] for stack in stacks]) for layer in first.layers},
    )


def open_engine(
    workspace: Workspace,
    support_size: int = 200,
    runtime: RuntimeConfig | None = None,
    stack: AdapterStack | None = None,
) -> Engine:
    """The engine of a workspace: its base model and all its worlds."""
    runtime = runtime or workspace.runtime
    stack = stack or load_stack(workspace)
    if pick_device(runtime.device).type == "cpu":
        set_threads(runtime.threads)  # reading, too, is slow with more threads than idle cores
    base, dtype = base_of(workspace), getattr(torch, runtime.dtype)
    stored = read_model(base.folder, dtype)
    model = load_model(base, dtype) if stored is None or unsupported(stored) else stored
    return build_engine(model, stack, runtime, support_size, base.fingerprint)


def has_conv1d(base: Base) -> bool:
    """Whether the base model stores its weights transposed, as GPT-2 does; PEFT needs this flag."""
    config = json.loads((base.folder / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("model_type") == "gpt2")
