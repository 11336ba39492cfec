"""Training tokens per second on the CPU: paclm's grouped step against PEFT, one world at a time.

The same base model, adapters, batch and length for everyone, one optimizer step each; contenders take turns in every
round. The base has the shape of the embedded model with random weights.

Run: python bench/bench_training.py [--length 128] [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

sys.path[:0] = [str(Path(__file__).parent)]

from harness import median, print_table, race, spread  # noqa: E402
from paclm.config import TrainingConfig  # noqa: E402
from paclm.engine.adapters import AdapterStack, find_targets  # noqa: E402
from paclm.engine.training import GroupTraining, adapter_spec, make_schedule  # noqa: E402
from paclm.engine.training_forward import Forward, OwnForward, PlainForward  # noqa: E402
from paclm.engine.training_order import Schedule, make_blocks  # noqa: E402
from paclm.engine.training_pass import WorldsPass  # noqa: E402
from paclm.engine.weights import output_layer  # noqa: E402

SETTINGS = TrainingConfig(epochs=200)
BATCH = SETTINGS.batch_size
VOCABULARY = 8192


def make_model(dtype: torch.dtype = torch.float32) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    shape = {"n_embd": 320, "n_layer": 8, "n_head": 5, "n_inner": 1152, "n_positions": 512}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape, **special)).eval().to(dtype)


def paclm_step(model: GPT2LMHeadModel, forward: Forward, schedule: Schedule, worlds: int) -> Callable[[], object]:
    """One step of `paclm train`: batch making, loss and AdamW included."""
    spec = adapter_spec(SETTINGS)
    start = AdapterStack.initial(find_targets(model, spec), spec, worlds, 0, "bench")
    passes = WorldsPass(forward, output_layer(model), start, worlds)
    group = GroupTraining(passes, start, schedule, np.arange(worlds), SETTINGS)
    picks = schedule.batches(group.worlds)
    return lambda: group.step(picks[:, group.optimizer.num_steps])


def peft_step(length: int) -> Callable[[], object]:
    """One step of one world with PEFT and torch's AdamW."""
    import peft

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(make_model(), config).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=SETTINGS.learning_rate, weight_decay=SETTINGS.weight_decay)
    ids = torch.randint(0, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(0))

    def step() -> object:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=128, help="tokens per block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    records = np.random.default_rng(0).integers(0, VOCABULARY, (64, options.length)).tolist()
    blocks = make_blocks(records, options.length, options.length)
    schedule = make_schedule(blocks, np.ones((64, 8), dtype=np.bool_), SETTINGS, seed=0)
    model, half = make_model(), make_model(torch.bfloat16)
    plain, plain_half = PlainForward(model, compiled=False), PlainForward(half, compiled=False)
    contenders: dict[str, tuple[int, Callable[[], object]]] = {"PEFT, one world": (1, peft_step(options.length))}
    for worlds in (1, 2, 4, 8):
        contenders[f"paclm, {worlds} together"] = (worlds, paclm_step(model, plain, schedule, worlds))
    own_model = make_model()
    contenders["model's own code, 2 together"] = (2, paclm_step(own_model, OwnForward(own_model), schedule, 2))
    contenders["paclm, 2 together, bfloat16"] = (2, paclm_step(half, plain_half, schedule, 2))

    seconds = race({name: run for name, (_, run) in contenders.items()}, options.rounds)
    speeds = {name: worlds * BATCH * options.length / median(seconds[name]) for name, (worlds, _) in contenders.items()}
    rows = [
        [name, f"{speed:,.0f}", f"{speed / speeds['PEFT, one world']:.2f}×", spread(seconds[name])]
        for name, speed in speeds.items()
    ]
    title = f"Training, batch {BATCH} of {options.length} tokens, {options.threads} threads"
    print_table(title, ["way", "tokens/s", "against PEFT", "spread"], rows)
    print(f"  control spread {spread(seconds['control'])}")


if __name__ == "__main__":
    main()
