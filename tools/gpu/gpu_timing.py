"""Shared by the GPU benchmarks: random models of real shapes, floors, timers, and a time limit."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.decode_step import PlainStep, PromptChunk
from paclm.engine.determinism import set_deterministic
from paclm.engine.graphs import FusedStep
from paclm.engine.kv_cache import PAGES
from paclm.engine.stacked import StackedModel
from paclm.engine.weights import Block, Weights, take_apart

BANDWIDTH, PEAK = 4.8e12, {torch.float32: 67e12, torch.bfloat16: 990e12}  # an H200's data sheet
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SUPPORT, CAPACITY, PAGE = 200, 128, PAGES["cuda"]
TOKENS = 49000  # ids below this exist in every shape used
DEVICE = torch.device("cuda")


SHAPES: dict[str, Any] = {
    "llama": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}
"""SmolLM2-135M's and Llama-3-8B's"""


def shaped(
    family: str, dtype: torch.dtype, worlds: int, layers: int = 0, context: int = CAPACITY, top: int | None = None
) -> Weights:
    """GPT-2-small's shape (`gpt2`) or one of SHAPES, the same random weights and adapters every time.

    top: adapters in so many of the last layers only; those are the same as without it.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            if family == "gpt2":
                model: Any = GPT2LMHeadModel(GPT2Config(n_layer=layers or 12))
            else:
                shape = SHAPES[family] | ({"num_hidden_layers": layers} if layers else {})
                model = LlamaForCausalLM(LlamaConfig(**shape))
    finally:
        torch.set_default_dtype(torch.float32)
    return take_apart(model.eval(), random_adapters(model, worlds, top), context)


def random_adapters(model: Any, worlds: int, top: int | None = None) -> AdapterStack:
    """Adapters that change votes."""
    spec = AdapterSpec(top=top)
    chosen = {target.name for target in find_targets(model, spec)}
    A, B = {}, {}
    for target in find_targets(model, AdapterSpec()):
        a = torch.randn(worlds, spec.rank, target.num_in, device=DEVICE) / target.num_in**0.5
        b = torch.randn(worlds, target.num_out, spec.rank, device=DEVICE) * 0.02
        if target.name in chosen:
            A[target.name], B[target.name] = a.to(model.dtype), b.to(model.dtype)
    return AdapterStack(spec, "bench", A, B)


def cut(w: Weights, top: int, shared: bool = True) -> Weights:
    """The same with adapters in so many of the last layers only; sharing its tensors.

    Not shared: layers below have adapters that are zero and are computed for every world.
    """
    trunk = len(w.blocks) - top
    below = [_without_adapters(block, shared) for block in w.blocks[:trunk]]
    return replace(w, blocks=(*below, *w.blocks[trunk:]), trunk=trunk if shared else 0)


def _without_adapters(block: Block, shared: bool) -> Block:
    names = ("attention_in", "attention_out", "mlp_in", "mlp_out")
    products = {name: getattr(block, name) for name in names if getattr(block, name).B is not None}
    if shared:
        return replace(block, **{name: replace(p, A=None, B=None) for name, p in products.items()})
    return replace(block, **{name: replace(p, B=torch.zeros_like(p.B)) for name, p in products.items()})


def floor_ms(w: Weights, sequences: int, context: int) -> float:
    """A lower bound on a step: every byte moved once at full bandwidth, or every flop at the peak rate."""
    moved, flops = w.head.numel(), 2 * sequences * w.head.numel()
    for layer, block in enumerate(w.blocks):
        rows = sequences * (1 if layer < w.trunk else w.num_worlds)
        products = (block.attention_in, block.attention_out, block.mlp_in, block.mlp_out)
        base = sum(p.weight.numel() for p in products)
        adapters = sum(t.numel() for p in products for t in (p.A, p.B) if t is not None)
        moved += base + adapters + 2 * rows * w.num_kv_heads * w.head_size * context
        flops += 2 * rows * base
    return 1e3 * max(moved * w.dtype.itemsize / BANDWIDTH, flops / PEAK[w.dtype])


def milliseconds(run: Callable[[], object], repeats: int = 50, rounds: int = 5) -> float:
    """Median over rounds of the mean device time of one call."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return float(np.median(times))


def blocks_for(sequences: int, context: int) -> int:
    """Blocks of so many sequences of so many tokens, and the scratch block."""
    return 1 + sequences * -(-context // PAGE)


def prompts_of(lengths: Sequence[int], context: int) -> PromptChunk:
    """Whole prompts of these lengths in one chunk: each with blocks of its own, for two tokens more."""
    tokens = np.random.default_rng(0).integers(0, TOKENS, sum(lengths))
    table, first = np.zeros((len(lengths), -(-context // PAGE)), dtype=np.int32), 1
    for row, length in zip(table, lengths, strict=True):
        pages = -(-(length + 2) // PAGE)
        row[:pages] = np.arange(first, first + pages)
        first += pages
    return PromptChunk(tokens, np.zeros(len(lengths), dtype=np.int64), np.array(lengths), table)


def inputs_of(sequences: int, context: int) -> torch.Tensor:
    """(2 + pages, sequences): tokens, positions and blocks, every sequence at the last position of `context`."""
    tokens = torch.randint(0, TOKENS, (1, sequences))
    table = torch.arange(1, blocks_for(sequences, context)).view(sequences, -1)
    return torch.cat([tokens, torch.full_like(tokens, context - 1), table.T]).to(DEVICE, torch.int32)


def step_of(step: PlainStep, sequences: int, context: int) -> Callable[[], object]:
    """One step, votes included, every sequence at the last position of `context`."""
    integers = inputs_of(sequences, context)
    numbers = torch.randn(sequences, SUPPORT + 1, device=DEVICE)

    @torch.inference_mode()
    def run() -> object:
        if isinstance(step, FusedStep):
            return step.outcome(integers, numbers, context)
        return step.run(integers[0], integers[1], integers[2:].T, numbers[:, :-1], numbers[:, -1], context)

    return run


def step_ms(step: PlainStep, sequences: int, context: int, use_graph: bool = True, repeats: int = 0) -> float:
    """Device time of one step."""
    run = step_of(step, sequences, context)
    repeats = repeats or (50 if sequences <= 4 else 20 if sequences <= 16 else 5)
    return milliseconds(graphed(run) if use_graph else run, repeats, 3)


def graphed(run: Callable[[], object]) -> Callable[[], None]:
    """The same as one graph launch."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(beside):
        run()
        run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, inputs: object) -> None:
    """Replay; the inputs must live as long, because a graph reads them where they were."""
    graph.replay()


def in_processes(run: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], start: str) -> list[Any]:
    """Run all jobs at once, each in a process of its own; raises if one dies."""
    context = multiprocessing.get_context(start)
    with ProcessPoolExecutor(len(jobs), context, set_deterministic) as pool:
        return list(pool.map(run, *zip(*jobs, strict=True)))


def warm(model: StackedModel) -> None:
    """Fill the cache, so that attention has something to read."""
    for tensor in (*model.cache.keys, *model.cache.values):
        tensor.normal_(0.0, 0.5)


def cache_bytes(model: StackedModel) -> int:
    return sum(tensor.nbytes for tensor in (*model.cache.keys, *model.cache.values))
