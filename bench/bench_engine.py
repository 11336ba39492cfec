"""All worlds in one decode step on the CPU, against two ways of doing the same with PEFT, in the same run.

    python bench/bench_engine.py [--worlds 32] [--repeats 7] [--json engine.json]

A random GPT-2-shaped model of 7 million parameters (no weights needed), rank 8 adapters on c_attn and c_proj, context
96, one sequence. (a) PEFT, one world after another: set_adapter, forward, next. (b) PEFT, one mixed batch: a row per
world, adapter_names. Each way keeps a cache of keys and values and decodes one token. Medians; ratios to the engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import peft
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from paclm.config import RuntimeConfig
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.engine import Engine
from paclm.engine.loading import build_engine
from paclm.engine.peft_io import export_peft

VOCABULARY, CONTEXT, SUPPORT = 8192, 96, 200


def build_model() -> GPT2LMHeadModel:
    """7 million random parameters in GPT-2's shape, the same every time."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=256, n_layer=6, n_head=8, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).eval()


def random_adapters(worlds: int) -> AdapterStack:
    spec = AdapterSpec()
    start = AdapterStack.initial(find_targets(build_model(), spec), spec, worlds, 0, "bench", coupled=False)
    return AdapterStack(spec, "bench", start.A, {layer: torch.randn_like(b) * 0.02 for layer, b in start.B.items()})


def text(length: int = CONTEXT) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, VOCABULARY, length)]


def median_ms(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


def engine_ms(stack: AdapterStack, sequences: int, repeats: int, dtype: str = "float32") -> float:
    """One step of the engine: every world's vote on every sequence."""
    runtime = RuntimeConfig(device="cpu", dtype=dtype, max_sequences=sequences, context=128)  # type: ignore[arg-type]
    engine: Engine = build_engine(build_model(), stack, runtime, SUPPORT)
    handles = [engine.add(text()) for _ in range(sequences)]
    coins = np.random.default_rng(1).gumbel(size=(sequences, SUPPORT))
    return median_ms(lambda: engine.step(handles, coins), repeats)


def peft_model(stack: AdapterStack, folder: Path) -> Any:
    folders = export_peft(stack, folder, "bench", conv1d=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(build_model(), folders[0], adapter_name="w0").eval()
        for world, place in enumerate(folders[1:], 1):
            model.load_adapter(place, adapter_name=f"w{world}")
    return model


@torch.inference_mode()
def loop_ms(model: Any, worlds: int, repeats: int) -> float:
    """(a) set_adapter, forward, next world."""
    prompt, last = torch.tensor([text()[:-1]]), torch.tensor([text()[-1:]])
    caches = []
    for world in range(worlds):
        model.set_adapter(f"w{world}")
        caches.append(DynamicCache(config=model.config))
        model(input_ids=prompt, past_key_values=caches[-1], use_cache=True)

    def step() -> None:
        for world in range(worlds):
            model.set_adapter(f"w{world}")
            model(input_ids=last, past_key_values=caches[world], use_cache=True).logits[:, -1].argmax()
            caches[world].crop(-1)

    return median_ms(step, repeats)


@torch.inference_mode()
def mixed_ms(model: Any, worlds: int, repeats: int) -> float:
    """(b) one batch, a row per world."""
    names = [f"w{world}" for world in range(worlds)]
    prompt, last = torch.tensor([text()[:-1]]).repeat(worlds, 1), torch.tensor([text()[-1:]]).repeat(worlds, 1)
    cache = DynamicCache(config=model.config)
    model(input_ids=prompt, past_key_values=cache, use_cache=True, adapter_names=names)

    def step() -> None:
        model(input_ids=last, past_key_values=cache, use_cache=True, adapter_names=names).logits[:, -1].argmax(-1)
        cache.crop(-1)

    return median_ms(step, repeats)


def main() -> None:
    """Print a table and, if asked, write it as JSON."""
    parser = argparse.ArgumentParser(description="All worlds in one decode step on the CPU, against PEFT.")
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    m, repeats = arguments.worlds, arguments.repeats
    stack = random_adapters(m)
    ours = engine_ms(stack, 1, 3 * repeats)
    with tempfile.TemporaryDirectory() as folder:
        model = peft_model(stack, Path(folder) / "peft")
        mixed, loop = mixed_ms(model, m, repeats), loop_ms(model, m, repeats)
    del model
    many = engine_ms(stack, 16, repeats)
    figures: dict[str, Any] = {
        "worlds": m,
        "threads": torch.get_num_threads(),
        "engine_ms": ours,
        "peft_loop_ms": loop,
        "peft_mixed_ms": mixed,
        "loop_over_engine": loop / ours,
        "mixed_over_engine": mixed / ours,
        "engine_bfloat16_ms": engine_ms(stack, 1, repeats, "bfloat16"),
        "tokens_per_second_16_sequences": 16e3 / many,
        "engine_ms_by_worlds": {w: engine_ms(random_adapters(w), 1, repeats) for w in (8, 16, 32, 64, 128)},
    }
    print(f"one decode step, {m} worlds, 7 M parameters, context {CONTEXT}, {figures['threads']} threads, medians")
    print(f"  engine, all worlds at once  {ours:9.1f} ms")
    print(f"  PEFT, mixed batch           {mixed:9.1f} ms   {mixed / ours:6.1f} ×")
    print(f"  PEFT, set_adapter loop      {loop:9.1f} ms   {loop / ours:6.1f} ×")
    print(f"  engine in bfloat16          {figures['engine_bfloat16_ms']:9.1f} ms")
    print(f"  engine, 16 sequences        {figures['tokens_per_second_16_sequences']:9.0f} tokens/s")
    for worlds, cost in figures["engine_ms_by_worlds"].items():
        print(f"  engine, m = {worlds:<4}            {cost:9.1f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
