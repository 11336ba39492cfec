"""All worlds in one decode step on the CPU, against two ways of doing the same with PEFT, in the same run.

A random GPT-2-shaped model of 7 million parameters (no weights needed), rank 8 adapters on c_attn and c_proj, context
96. (a) PEFT, one world after another: set_adapter, forward, next. (b) PEFT, one mixed batch: a row per world,
adapter_names. Each way keeps keys and values and decodes one token; contenders take turns in every round.

Run: python bench/bench_engine.py [--worlds 32] [--rounds 7] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

sys.path[:0] = [str(Path(__file__).parent)]

from harness import median, print_table, race, spread  # noqa: E402
from paclm.config import RuntimeConfig  # noqa: E402
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets  # noqa: E402
from paclm.engine.loading import build_engine  # noqa: E402
from paclm.engine.peft_io import export_peft  # noqa: E402

VOCABULARY, CONTEXT, SUPPORT = 8192, 96, 200
COSTS = (8, 16, 32, 64, 128)


def make_model() -> GPT2LMHeadModel:
    """7 million random parameters in GPT-2's shape, the same every time."""
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    shape = {"n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape, **special)).eval()


def make_adapters(worlds: int) -> AdapterStack:
    spec = AdapterSpec()
    start = AdapterStack.initial(find_targets(make_model(), spec), spec, worlds, 0, "bench", coupled=False)
    return AdapterStack(spec, "bench", start.A, {layer: torch.randn_like(b) * 0.02 for layer, b in start.B.items()})


def make_text() -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, VOCABULARY, CONTEXT)]


def engine_step(worlds: int, sequences: int = 1, dtype: str = "float32") -> Callable[[], object]:
    """One step of the engine: every world's vote on every sequence."""
    threads = torch.get_num_threads()  # as --threads says, however busy the machine is
    runtime = RuntimeConfig(device="cpu", dtype=dtype, max_sequences=sequences, context=128, threads=threads)  # type: ignore[arg-type]
    engine = build_engine(make_model(), make_adapters(worlds), runtime, SUPPORT)
    handles = [engine.add(make_text()) for _ in range(sequences)]
    coins = np.random.default_rng(1).gumbel(size=(sequences, SUPPORT))
    return lambda: engine.step(handles, coins)


def peft_model(worlds: int) -> Any:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folders = export_peft(make_adapters(worlds), Path(folder) / "peft", "bench", conv1d=True)
        model = peft.PeftModel.from_pretrained(make_model(), folders[0], adapter_name="w0").eval()
        for world, place in enumerate(folders[1:], 1):
            model.load_adapter(place, adapter_name=f"w{world}")
    return model


def loop_step(model: Any, worlds: int) -> Callable[[], object]:
    """(a) set_adapter, forward, next world."""
    prompt, last = torch.tensor([make_text()[:-1]]), torch.tensor([make_text()[-1:]])
    caches = [DynamicCache(config=model.config) for _ in range(worlds)]

    @torch.inference_mode()
    def step(tokens: torch.Tensor = last) -> None:
        for world, cache in enumerate(caches):
            model.set_adapter(f"w{world}")
            model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax()
            if tokens is last:
                cache.crop(-1)

    step(prompt)
    return step


def mixed_step(model: Any, worlds: int) -> Callable[[], object]:
    """(b) one batch, a row per world."""
    names = [f"w{world}" for world in range(worlds)]
    prompt, last = (torch.tensor([part]).repeat(worlds, 1) for part in (make_text()[:-1], make_text()[-1:]))
    cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def step(tokens: torch.Tensor = last) -> None:
        model(input_ids=tokens, past_key_values=cache, use_cache=True, adapter_names=names).logits[:, -1].argmax(-1)
        if tokens is last:
            cache.crop(-1)

    step(prompt)
    return step


def main() -> None:
    """Print two tables and, if asked, write them as JSON."""
    parser = argparse.ArgumentParser(description="All worlds in one decode step on the CPU, against PEFT.")
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    m, model = arguments.worlds, peft_model(arguments.worlds)
    contenders = {
        "engine": engine_step(m),
        "engine, bfloat16": engine_step(m, dtype="bfloat16"),
        "PEFT, mixed batch": mixed_step(model, m),
        "PEFT, set_adapter loop": loop_step(model, m),
        "engine, 16 sequences": engine_step(m, sequences=16),
    }
    seconds = race(contenders, arguments.rounds)
    ours = median(seconds["engine"])
    rows = []
    for name, times in seconds.items():
        tokens = 16 if name.endswith("16 sequences") else 1
        ratio = "" if name == "control" else f"{median(times) / ours:.1f} ×"
        speed = "" if name == "control" else f"{tokens / median(times):.0f}"
        rows.append([name, f"{1e3 * median(times):.1f} ms", ratio, speed, spread(times)])
    title = f"One decode step of {m} worlds, 7 M parameters, context {CONTEXT}, {arguments.threads} threads"
    print_table(title, ["", "step", "÷ engine", "tokens/s", "spread"], rows)

    by_worlds = race({str(worlds): engine_step(worlds) for worlds in COSTS}, arguments.rounds)
    print_table(
        "Cost against m, one sequence",
        ["m", "step", "spread"],
        [[str(w), f"{1e3 * median(by_worlds[str(w)]):.1f} ms", spread(by_worlds[str(w)])] for w in COSTS],
    )
    if arguments.json:
        figures = {"worlds": m, "seconds": seconds, "seconds_by_worlds": by_worlds}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
