"""Training speed of many worlds on one GPU: tokens per second of several ways to take the same step.

    python tools/gpu/bench_gpu_training.py --out training.json
    python tools/gpu/bench_gpu_training.py --overlap    # does the GPU work while the host launches; launches per step
    python tools/gpu/bench_gpu_training.py --trunk      # adapters in the upper half of the layers against all

SmolLM2-135M's shape with random weights, adapters of rank 8 on q, k, v, o and down, batches of 8 blocks of 512 tokens
per world, bf16 base with float32 adapters. Needs torch, transformers, numpy and safetensors only; takes under three
minutes. A way that fails is reported and the others run. `--small` is a smoke test for a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from launches import count_launches
from paclm.config import TrainingConfig
from paclm.engine.adapters import AdapterStack, find_targets
from paclm.engine.loss import batch_loss, make_batch
from paclm.engine.training import GroupTraining, adapter_spec, make_schedule
from paclm.engine.training_forward import Forward, OwnForward, PlainForward
from paclm.engine.training_order import Schedule, make_blocks
from paclm.engine.training_pass import WorldsPass
from paclm.engine.training_queue import GroupQueue, Progress
from paclm.engine.trunk_states import Place, TrunkStates
from paclm.engine.weights import output_layer
from paclm.worlds.assignment import assign_worlds

SETTINGS = TrainingConfig(epochs=50)  # more steps than are ever timed
ROWS = SETTINGS.batch_size
BASELINE = 218_000  # tokens per second of plain eager code on an H200
GOAL = 450_000


@dataclass
class Setup:
    """The model, the data and the time limit."""

    device: torch.device
    model: Any
    schedule: Schedule
    length: int
    vocabulary: int
    num_worlds: int
    deadline: float
    repeats: int
    results: list[dict[str, Any]] = field(default_factory=list)

    def group(
        self, forward: Forward, size: int, settings: TrainingConfig = SETTINGS, states: TrunkStates | None = None
    ) -> GroupTraining:
        spec = adapter_spec(settings)
        start = AdapterStack.initial(find_targets(self.model, spec), spec, size, 7, "bench")
        passes = WorldsPass(forward, output_layer(self.model), start, size)
        return GroupTraining(passes, start, self.schedule, np.arange(size), settings, states)


def make_setup(small: bool, device: str, seconds: float, length: int = 512) -> Setup:
    torch.manual_seed(0)
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    num_worlds = 128
    if small:
        shape = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 300}
        heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
        length, num_worlds = 32, 8
    config = LlamaConfig(**shape, **heads, max_position_embeddings=2048, tie_word_embeddings=True)
    dtype = torch.float32 if small else torch.bfloat16
    model = LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)
    records = np.random.default_rng(0).integers(0, shape["vocab_size"], (256, length)).tolist()
    blocks = make_blocks(records, length, length)
    schedule = make_schedule(blocks, assign_worlds(256, num_worlds, seed=1), SETTINGS, seed=3)
    place = torch.device(device)
    return Setup(
        place, model, schedule, length, shape["vocab_size"], num_worlds, time.monotonic() + seconds, 3 if small else 5
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_steps(setup: Setup, step: Callable[[], object], warm: int = 3) -> float:
    """Median seconds of a step, after a warm-up that includes compilation."""
    for _ in range(warm):
        step()
    seconds = []
    for _ in range(setup.repeats):
        synchronize(setup.device)
        began = time.perf_counter()
        step()
        synchronize(setup.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(setup: Setup, name: str, size: int, make_step: Callable[[], Callable[[], object]]) -> None:
    """Time one way and print its line, also if it fails."""
    if time.monotonic() > setup.deadline:
        print(f"{name:<46} {size:>4} worlds   skipped: out of time", flush=True)
        setup.results.append({"way": name, "worlds_per_step": size, "skipped": True})
        return
    result: dict[str, Any] = {"way": name, "worlds_per_step": size}
    began = time.monotonic()
    try:
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step_seconds = time_steps(setup, make_step())
        tokens = size * ROWS * setup.length
        result |= {"step_ms": 1e3 * step_seconds, "tokens_per_s": tokens / step_seconds}
        if setup.device.type == "cuda":
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        said = f"{result['tokens_per_s']:>12,.0f} tokens/s  {result['step_ms']:>8.1f} ms"
        said += f"  {result.get('peak_gib', 0):>5.1f} GiB"
    except Exception as error:  # the other ways must still run
        result["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        result["traceback"] = traceback.format_exc()[-1500:]
        said = result["error"]
    result["total_s"] = time.monotonic() - began
    setup.results.append(result)
    print(f"{name:<46} {size:>4} worlds {said}", flush=True)


def product_step(
    setup: Setup,
    forward: Forward,
    size: int,
    settings: TrainingConfig = SETTINGS,
    states: TrunkStates | None = None,
) -> Callable[[], object]:
    """The step that `paclm train` takes, batch making, loss and AdamW included."""
    group = setup.group(forward, size, settings, states)
    picks = setup.schedule.batches(group.worlds)

    def step() -> object:
        return group.step(picks[:, group.optimizer.num_steps])

    return step


def whole_logits_step(setup: Setup, size: int) -> Callable[[], object]:
    """The plainest code: the model's own, whole logits, torch's cross entropy and AdamW."""
    forward, head = OwnForward(setup.model), output_layer(setup.model)
    group = setup.group(forward, size)
    leaves = {
        layer: (a.clone().requires_grad_(), group.stack.B[layer].clone().requires_grad_())
        for layer, a in group.stack.A.items()
    }
    optimizer = torch.optim.AdamW([leaf for pair in leaves.values() for leaf in pair], lr=2e-4, fused=True)
    batch = make_batch(setup.schedule.blocks, setup.schedule.batches(group.worlds)[:, 0], setup.device)
    A, B = {name: pair[0] for name, pair in leaves.items()}, {name: pair[1] for name, pair in leaves.items()}

    def step() -> object:
        logits = head(forward(batch.ids, A, B, 2.0))  # (places, V)
        each = functional.cross_entropy(logits[batch.where].float(), batch.targets, reduction="none")
        optimizer.zero_grad()
        (each * batch.weights).sum().backward()
        optimizer.step()
        return float(each.detach().mean())

    return step


def own_code_compiled(setup: Setup) -> Forward:
    """The model's own decoder layers, each compiled; one compilation serves all of them."""
    for layer in setup.model.model.layers:
        layer.compile()
    return OwnForward(setup.model)


def compare_gradients(setup: Setup, forward: Forward, size: int) -> float:
    """Relative distance of the gradients from those of the model's own code, uncompiled."""
    group = setup.group(forward, size)
    generator = torch.Generator(device="cpu").manual_seed(5)
    batch = make_batch(setup.schedule.blocks, setup.schedule.batches(group.worlds)[:, 0], setup.device)
    A = {layer: a.detach().requires_grad_() for layer, a in group.stack.A.items()}
    B = {
        layer: (0.02 * torch.randn(b.shape, generator=generator)).to(setup.device).requires_grad_()
        for layer, b in group.stack.B.items()
    }
    found = []
    reference = OwnForward(setup.model)
    for way in (forward, reference):
        total, _ = batch_loss(way(batch.ids, A, B, 2.0), output_layer(setup.model), batch)
        slopes = torch.autograd.grad(total, [*A.values(), *B.values()])
        found.append(torch.cat([slope.flatten().float() for slope in slopes]))
    reference.close()
    return float((found[0] - found[1]).norm() / found[1].norm())


def measure_ceilings(setup: Setup) -> dict[str, float]:
    """What the machine can do: a large product and a large copy."""
    rows = 65536 if setup.device.type == "cuda" else 256
    ceilings: dict[str, float] = {}
    for name, inner, outer in (("gate_up", 576, 3072), ("attention_out", 576, 576), ("head", 576, 49152)):
        count = rows if name != "head" else rows // 8
        x = torch.randn(count, inner, device=setup.device, dtype=setup.model.dtype)
        w = torch.randn(outer, inner, device=setup.device, dtype=setup.model.dtype)
        seconds = time_steps(setup, lambda x=x, w=w: functional.linear(x, w))
        ceilings[f"{name}_tflops"] = 2e-12 * count * inner * outer / seconds
    source = torch.randn(rows * 2048, device=setup.device)
    target = torch.empty_like(source)
    seconds = time_steps(setup, lambda: target.copy_(source))
    ceilings["copy_gb_per_s"] = 2e-9 * source.numel() * 4 / seconds
    return ceilings


def profile(setup: Setup, step: Callable[[], object], rows: int = 22) -> list[dict[str, Any]]:
    """Device time of a step by kernel."""
    for _ in range(2):
        step()
    with torch.profiler.profile() as record:
        step()
        synchronize(setup.device)
    kernels = [event for event in record.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return [
        {"kernel": event.key[:110], "ms": event.self_device_time_total / 1e3, "calls": event.count}
        for event in kernels
        if "autograd::" not in event.key
    ][:rows]


def with_attention(backend: SDPBackend, step: Callable[[], object]) -> Callable[[], object]:
    """The same step with this kernel for attention."""

    def inside() -> object:
        with sdpa_kernel(backend):
            return step()

    return inside


class EnoughError(Exception):
    """Raised when enough steps have been timed."""


def take_steps(group: GroupTraining, num_steps: int) -> tuple[list[float], list[float]]:
    """The loss of each step and when it was reported, with steps taken one after another as `paclm train` does."""
    losses: list[float] = []
    times: list[float] = []

    def note(now: Progress) -> None:
        losses.append(now.loss)
        times.append(time.perf_counter())
        if len(losses) == num_steps:
            raise EnoughError

    with suppress(EnoughError):
        group.run(0, GroupQueue([int(group.num_steps.max())], on_progress=note), float("inf"))
    return losses, times


def waits_inside(step: Callable[[], object]) -> list[str]:
    """Lines of a step where the host waits for the GPU, as far as torch reports."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{item.filename}:{item.lineno}" for item in caught if "called a synchronizing" in str(item.message)]


def measure_overlap(setup: Setup, out: Path | None, num_steps: int = 20, warm: int = 4) -> None:
    """A step by itself against a step among others; short blocks and many worlds, where launching takes longest."""
    gpu = setup.device.type == "cuda"
    forward = PlainForward(setup.model, compiled=gpu)
    step = product_step(setup, forward, setup.num_worlds)
    alone = time_steps(setup, step, warm)
    began = time.perf_counter()
    step()
    launch = time.perf_counter() - began
    waits = waits_inside(step) if gpu else []
    losses, times = take_steps(setup.group(forward, setup.num_worlds), warm + num_steps)
    among = (times[-1] - times[warm - 1]) / num_steps
    group = setup.group(forward, setup.num_worlds)
    picks = setup.schedule.batches(group.worlds)
    at_once = [group.read(group.step(picks[:, number])) for number in range(len(losses))]
    report = {
        "worlds_per_step": setup.num_worlds,
        "positions_per_step": setup.num_worlds * ROWS * setup.length,
        "step_alone_ms": 1e3 * alone,
        "step_launch_ms": 1e3 * launch,
        "step_among_others_ms": 1e3 * among,
        "waits_inside_a_step": waits,
        "losses_differ_by": max(abs(one - other) for one, other in zip(losses, at_once, strict=True)),
        "losses_spread": statistics.stdev(losses),
    }
    try:
        report |= count_launches(step, setup.device)
        report["step_of_one_world_ms"] = 1e3 * time_steps(setup, product_step(setup, forward, 1), warm)
    except RuntimeError as error:  # of the driver or the profiler: keep the figures measured before
        report["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(report, indent=2))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2))


def measure_trunk(setup: Setup, out: Path | None) -> None:
    """Adapters in the upper half of the layers, with the trunk's states stored or not, against adapters in all."""
    gpu = setup.device.type == "cuda"
    forward, head, blocks = PlainForward(setup.model, compiled=gpu), output_layer(setup.model), setup.schedule.blocks
    trunk, size = setup.model.config.num_hidden_layers // 2, 32 if gpu else 4
    half = replace(SETTINGS, layers=f"top:{setup.model.config.num_hidden_layers - trunk}")
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if gpu else "cpu", "ways": setup.results}
    places: list[Place] = ["device", "host"]
    stored = {place: TrunkStates.compute(forward, head, blocks, trunk, place) for place in places}
    seconds = time_steps(setup, lambda: TrunkStates.compute(forward, head, blocks, trunk, "device"), warm=1)
    report["states"] = {"tokens": len(blocks.tokens), "seconds": seconds, "bytes": stored["device"].states.nbytes}
    ways = {
        "all": (SETTINGS, None),
        f"{half.layers}, states on the device": (half, stored["device"]),
        f"{half.layers}, states in host memory": (half, stored["host"]),
        f"{half.layers}, trunk in every step": (half, None),
        "all again": (SETTINGS, None),
    }
    for name, (settings, states) in ways.items():
        make = partial(product_step, setup, forward, size, settings, states)
        measure(setup, name, size, make)
    group = setup.group(forward, size, half)
    picks = setup.schedule.batches(group.worlds)[:, 0]
    batch = make_batch(blocks, picks, setup.device)
    hidden = torch.randn(batch.ids.numel(), head.in_features, device=setup.device, dtype=setup.model.dtype)
    parts = {
        "output layer and loss": lambda: batch_loss(hidden.requires_grad_(), head, batch),
        "AdamW": lambda: group.optimizer.step(group.passes.gradient),
        "batch and its states": lambda: make_batch(blocks, picks, setup.device, states=stored["device"]),
    }
    report["parts_ms"] = {name: 1e3 * time_steps(setup, part) for name, part in parts.items()}
    rates = {item["way"]: item["tokens_per_s"] for item in setup.results if "tokens_per_s" in item}
    report["against_all"] = {name: rate / rates["all"] for name, rate in rates.items()} if "all" in rates else {}
    if gpu:
        name = f"{half.layers}, states on the device"
        report["profile"] = profile(setup, product_step(setup, forward, size, *ways[name]))
    print(json.dumps({name: value for name, value in report.items() if name != "ways"}, indent=2))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2))


def run(setup: Setup, out: Path | None) -> None:
    gpu = setup.device.type == "cuda"
    sizes = (16, 8, 32) if gpu else (2, 4)
    middle, small = sizes[0], sizes[1] if gpu else sizes[0]  # the model's own code keeps much more for its gradients
    report: dict[str, Any] = {"torch": torch.__version__, "ways": setup.results, "goal": GOAL, "baseline": BASELINE}
    report["device"] = torch.cuda.get_device_name() if gpu else "cpu"
    report["ceilings"] = measure_ceilings(setup)
    print(f"{report['device']}, torch {torch.__version__}; ceilings {report['ceilings']}", flush=True)

    def save() -> None:
        timed = [item for item in setup.results if "tokens_per_s" in item]
        report["best"] = max(timed, key=lambda item: item["tokens_per_s"]) if timed else None
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=2))

    product = PlainForward(setup.model, compiled=gpu)
    for size in sizes:
        measure(
            setup, "paclm train (compiled between products)", size, lambda size=size: product_step(setup, product, size)
        )
        save()
    way = "paclm train, compiled for any shape by now"
    measure(setup, way, middle, lambda: product_step(setup, product, middle))
    if gpu:
        cudnn = SDPBackend.CUDNN_ATTENTION
        way = "paclm train, cuDNN attention"
        measure(setup, way, middle, lambda: with_attention(cudnn, product_step(setup, product, middle)))
        flash = SDPBackend.FLASH_ATTENTION
        way = "paclm train, flash attention"
        measure(setup, way, middle, lambda: with_attention(flash, product_step(setup, product, middle)))
    save()
    try:
        report["gradient_distance"] = compare_gradients(setup, product, 2)
        report["profile"] = profile(setup, product_step(setup, product, middle)) if gpu else []
    except Exception as error:  # keep the figures measured before
        report["checks_error"] = f"{type(error).__name__}: {error}"
    save()
    plain = PlainForward(setup.model, compiled=False)
    measure(setup, "plain tensors, nothing compiled", middle, lambda: product_step(setup, plain, middle))
    own = OwnForward(setup.model)
    measure(setup, "model's own code, loss in chunks", small, lambda: product_step(setup, own, small))
    own.close()
    measure(setup, "model's own code, whole logits (plainest)", small, lambda: whole_logits_step(setup, small))
    OwnForward(setup.model).close()
    save()
    if gpu:
        way = "model's own code, layers compiled"
        measure(setup, way, small, lambda: product_step(setup, own_code_compiled(setup), small))
    save()
    for line in report.get("profile", []):
        print(f"  {line['ms']:>8.2f} ms {line['calls']:>6}  {line['kernel']}")
    print(
        f"gradient distance to the model's own code: {report.get('gradient_distance')}",
        report.get("checks_error", ""),
    )
    if report["best"]:
        best = report["best"]
        print(
            f"best: {best['tokens_per_s']:,.0f} tokens/s ({best['way']}, {best['worlds_per_step']} worlds);",
            f"goal {GOAL:,}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument("--seconds", type=float, default=150.0, help="start nothing new after this long")
    parser.add_argument("--overlap", action="store_true", help="only compare a step by itself with a step among others")
    parser.add_argument("--trunk", action="store_true", help="only compare adapters in half of the layers with all")
    parser.add_argument("--small", action="store_true", help="a smoke test on the CPU")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --small runs a smoke test on the CPU")
    device = "cpu" if arguments.small else "cuda"
    setup = make_setup(arguments.small, device, arguments.seconds, 64 if arguments.overlap else 512)
    if arguments.overlap:
        measure_overlap(setup, arguments.out)
    elif arguments.trunk:
        measure_trunk(setup, arguments.out)
    else:
        run(setup, arguments.out)


if __name__ == "__main__":
    main()
