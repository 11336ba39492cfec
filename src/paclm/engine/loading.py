"""Build an engine from a workspace, or from a model and its adapters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paclm.config import DtypeName, RuntimeConfig
from paclm.engine.adapters import AdapterStack, linear_layers
from paclm.engine.base_model import base_of, load_model
from paclm.engine.decode_step import DecodeStep, PlainStep, WorldsModel
from paclm.engine.determinism import set_deterministic
from paclm.engine.engine import Engine, check_support_size
from paclm.engine.kv_cache import PAGES
from paclm.engine.memory import GIB, MemoryPlan, available_memory, plan_memory, token_bytes
from paclm.engine.stacked import StackedModel
from paclm.engine.stored_model import read_model
from paclm.engine.threads import set_threads
from paclm.engine.weights import Weights, take_apart, unsupported
from paclm.errors import EngineError
from paclm.worlds.layout import FULL_FILE, WORLDS_FILE

if TYPE_CHECKING:
    from paclm.engine.workers import WorkerGroup
    from paclm.worlds.fingerprints import Base
    from paclm.worlds.workspace import Workspace

_CACHE_SHARE = {"cuda": 0.9, "cpu": 0.5}
"""Of the memory that is free beside weights and activations."""


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


def pick_dtype(setting: DtypeName, device: torch.device) -> DtypeName:
    """`auto` is bfloat16 on a GPU."""
    return setting if setting != "auto" else "bfloat16" if device.type == "cuda" else "float32"


def resolve_runtime(runtime: RuntimeConfig, context: int) -> RuntimeConfig:
    """The settings with automatic ones decided for this machine and a model that holds so many tokens.

    `cache_gib` stays: it depends on the memory that is free when the engine is built.
    """
    device = pick_device(runtime.device)
    is_gpu = device.type == "cuda"
    sequences, chunk = (256, 512) if is_gpu else (16, 128)
    return dataclasses.replace(
        runtime,
        device="cuda" if is_gpu else "cpu",
        dtype=pick_dtype(runtime.dtype, device),
        max_sequences=runtime.max_sequences or sequences,
        context=min(runtime.context or context, context),
        prefill_chunk=runtime.prefill_chunk or chunk,
    )


def plan_engine(
    model: Any, stack: AdapterStack, runtime: RuntimeConfig, support_size: int, available: int
) -> MemoryPlan:
    """Memory that `build_engine` will take of what is available; the model may be on the meta device."""
    runtime = resolve_runtime(runtime, model_context(model))
    dtype = getattr(torch, runtime.dtype)
    rows = max(runtime.prefill_chunk, runtime.max_sequences)
    plan = plan_memory(model, stack.num_parameters, stack.num_rows, dtype, rows=rows, support_size=support_size)
    cache = int(runtime.cache_gib * GIB)
    block = PAGES[runtime.device] * _bytes_of_token(model, stack, dtype)
    if not cache:
        most = block * (1 + runtime.max_sequences * -(-runtime.context // PAGES[runtime.device]))
        cache = min(most, int(_CACHE_SHARE[runtime.device] * (available - plan.total)))
    return dataclasses.replace(plan, cache=max(cache, 2 * block))  # room for one block and the scratch one


def _bytes_of_token(model: Any, stack: AdapterStack, dtype: torch.dtype) -> int:
    """Cache of one token."""
    return token_bytes(model.config, stack.num_rows, dtype, planned_trunk(model, stack.trunk))


def planned_trunk(model: Any, trunk: int) -> int:
    """Layers to plan one row for. Whether a model's own code can share its trunk is known once it runs: none."""
    return trunk if unsupported(model) is None else 0


def build_engine(
    model: Any,
    stack: AdapterStack,
    runtime: RuntimeConfig | None = None,
    support_size: int = 200,
    fingerprint: str | None = None,
) -> Engine:
    """An engine that takes over a loaded Hugging Face model. Sets torch's global numerical switches."""
    runtime = resolve_runtime(runtime or RuntimeConfig(), model_context(model))
    worlds, step, plan = build_step(model, stack, runtime, support_size, fingerprint)
    return Engine(worlds, support_size, runtime.prefill_chunk, step, runtime.max_sequences, plan)


def build_step(
    model: Any,
    stack: AdapterStack,
    runtime: RuntimeConfig,
    support_size: int,
    fingerprint: str | None = None,
    agree: Callable[[int], int] = lambda num_tokens: num_tokens,
) -> tuple[WorldsModel, DecodeStep, MemoryPlan]:
    """The forward pass and the decode step of these adapters; `runtime` is resolved.

    `agree`: from the tokens that the cache has room for here to those of all workers.
    """
    set_deterministic()
    stack.check_fits(linear_layers(model), fingerprint)
    device, dtype = torch.device(runtime.device), getattr(torch, runtime.dtype)
    if device.type == "cpu":
        set_threads(runtime.threads)
    check_support_size(support_size, int(model.config.vocab_size))
    available = available_memory(device)
    plan = plan_engine(model, stack, runtime, support_size, available)
    plan.check(available, has_trunk_cache=planned_trunk(model, 1) > 0 and stack.num_rows > 1)
    num_tokens = agree(plan.cache // _bytes_of_token(model, stack, dtype))
    try:
        model = model.eval().to(device=device, dtype=dtype)
        if unsupported(model) is not None:
            from paclm.engine.generic import GenericModel

            context = min(runtime.context, num_tokens)
            num_blocks = 1 + min(runtime.max_sequences, num_tokens // context)
            worlds: WorldsModel = GenericModel(model, stack, num_blocks, context)
            return worlds, PlainStep(worlds, support_size), plan
        weights = take_apart(model, stack, runtime.context)
        del model  # frees what the weights do not share, before the cache takes the rest
        return *_assemble(weights, num_tokens // PAGES[device.type], support_size, runtime.prefill_chunk), plan
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"Out of GPU memory while loading; the plan was {plan}. Set cache_gib in [runtime] to less."
        ) from error


def _assemble(
    weights: Weights, num_blocks: int, support_size: int, prefill_chunk: int
) -> tuple[WorldsModel, DecodeStep]:
    """The fastest forward pass and decode step for this model and device."""
    if weights.device.type != "cuda":
        stacked = StackedModel(weights, num_blocks)
        return stacked, PlainStep(stacked, support_size)
    from paclm.engine.fused import FusedModel, uncovered
    from paclm.engine.graphs import FusedStep, GraphStep

    model = FusedModel(weights, num_blocks) if uncovered(weights) is None else StackedModel(weights, num_blocks)
    return model, GraphStep(FusedStep(model, support_size), model, support_size, prefill_chunk)


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
        if differing := [name for name, value in _shared(other).items() if value != _shared(first)[name]]:
            raise EngineError(
                f"These adapters differ in {', '.join(differing)} and cannot run together. Set [training] as it was "
                "for the worlds and train the others again, such as: paclm train WORKSPACE --what full --again"
            )
    return AdapterStack(
        first.spec,
        first.base,
        {layer: torch.cat([stack.A[layer] for stack in stacks]) for layer in first.layers},
        {layer: torch.cat([stack.B[layer] for stack in stacks]) for layer in first.layers},
    )


def _shared(stack: AdapterStack) -> dict[str, Any]:
    """What adapters that run together have in common."""
    return {"layers": stack.layers, "base model": stack.base, "rank": stack.spec.rank, "scale": stack.spec.scale}


def open_engine(
    workspace: Workspace,
    support_size: int = 200,
    runtime: RuntimeConfig | None = None,
    stack: AdapterStack | None = None,
    workers: WorkerGroup | None = None,
) -> Engine:
    """The engine of a workspace: its base model and all its worlds, or the adapters given; shared with workers.

    Fewer adapters than workers, and one that takes the place of the public model, are not shared.
    """
    runtime = runtime or workspace.runtime
    is_shared = workers is not None and workers.count > 1
    if stack is not None and workers is not None:
        is_shared &= stack.num_worlds >= workers.count and not stack.is_public
    if workers is not None and is_shared:
        from paclm.engine.distributed import open_distributed_engine

        return open_distributed_engine(workspace, support_size, runtime, stack, workers)
    return open_on_base(base_of(workspace), stack or load_stack(workspace), support_size, runtime)


def open_on_base(base: Base, stack: AdapterStack, support_size: int, runtime: RuntimeConfig) -> Engine:
    """An engine of these adapters, in this process. Nothing else refers to the model: it can free parts of it."""
    return build_engine(load_base(base, runtime), stack, runtime, support_size, base.fingerprint)


def load_base(base: Base, runtime: RuntimeConfig) -> Any:
    """The base model on the CPU, in the arithmetic of the engine."""
    device = pick_device(runtime.device)
    if device.type == "cpu":
        set_threads(runtime.threads)  # reading, too, is slow with more threads than idle cores
    dtype = getattr(torch, pick_dtype(runtime.dtype, device))
    stored = read_model(base.folder, dtype)
    return load_model(base, dtype) if stored is None or unsupported(stored) else stored


def has_conv1d(base: Base) -> bool:
    """Whether the base model stores its weights transposed, as GPT-2 does; PEFT needs this flag."""
    config = json.loads((base.folder / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("model_type") == "gpt2")
