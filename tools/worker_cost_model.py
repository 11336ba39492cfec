"""What a step costs with worlds on N ranks: time, memory and network, from a few measured figures; prints Markdown.

    python tools/worker_cost_model.py           the tables of docs/internals/workers.md

    step(N, m, streams, context) = compute of one rank's rows + exchange(N, streams)

A rank computes ceil(m / N) worlds and the public row. Time on the GPU: weights read or multiplied, whichever is longer;
caches read; what row kernels move; launches. Two of its parameters are fitted to small shapes, and the model is checked
against measurements of an 8B shape that the fit never saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

GIB, BYTES, SUPPORT, RANK, PAGE = 2**30, 2, 200, 8, 16  # bfloat16; the adapters' rank; positions per block
BANDWIDTH = 4.1e12  # bytes/s that attention reaches on an H200 (docs/internals/engine.md); its data sheet says 4.8e12
FLOPS = 650e12  # flop/s of the products at 100 streams (docs/internals/speed.md: 2.74 Tflop in 4.2 ms)
GPU_GIB, RESERVE_GIB = 139.0, 6.0  # of an H200; activations, graphs and the libraries' workspaces
NVLINK = 450e9  # bytes/s one way between two GPUs of one host, data sheet
REDUCE_SECONDS = 12e-6  # latency of one all-reduce inside a host: assumed


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama family, or of GPT-2's."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    is_gated: bool = True
    is_tied: bool = True

    @property
    def layer_weights(self) -> int:
        attention = self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.is_gated else 2) * self.width * self.inner

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.width

    @property
    def base_bytes(self) -> int:
        return BYTES * (self.layers * self.layer_weights + (1 if self.is_tied else 2) * self.head_weights)

    @property
    def layer_adapter(self) -> int:
        """Parameters in one layer: on q, k, v, o and the MLP's last product."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return RANK * ((self.width + q) + 2 * (self.width + kv) + (q + self.width) + (self.inner + self.width))

    @property
    def layer_cache(self) -> int:
        """Bytes of one token of one row."""
        return 2 * self.kv_heads * self.head_size * BYTES


SMOLLM2 = Shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152)
GPT2 = Shape("GPT-2-small", 12, 768, 3072, 12, 12, 64, 50257, is_gated=False)
LLAMA_8B = Shape("8B", 32, 4096, 14336, 32, 8, 128, 128256, is_tied=False)
LLAMA_70B = Shape("70B", 80, 8192, 28672, 64, 8, 128, 128256, is_tied=False)


class Load(NamedTuple):
    """What one rank computes in a step."""

    shape: Shape
    worlds: int
    streams: int
    context: int
    top: int | None = None  # adapted layers; None: all
    split: int = 1  # GPUs that share each product (tensor parallel)

    @property
    def adapted(self) -> int:
        return self.shape.layers if self.top is None else self.top

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(layers, rows) of the trunk and of what is above it."""
        return (self.shape.layers - self.adapted, self.streams), (self.adapted, self.streams * (self.worlds + 1))


def floor_seconds(load: Load) -> float:
    """Weights, adapters and caches of a step, without what is fitted."""
    shape, seconds = load.shape, _product(load.shape.head_weights, load.streams)
    for layers, rows in load.rows:
        seconds += layers * (_product(shape.layer_weights, rows) + rows * load.context * shape.layer_cache / BANDWIDTH)
    return (seconds + load.adapted * load.worlds * shape.layer_adapter * BYTES / BANDWIDTH) / load.split


def _product(weights: int, rows: int) -> float:
    return max(BYTES * weights / BANDWIDTH, 2 * rows * weights / FLOPS) if rows else 0.0


def moved_seconds(load: Load) -> float:
    """Values of rows between products, each moved once: residuals, queries, the MLP's."""
    values = 4 * load.shape.width + 3 * load.shape.inner
    return sum(layers * rows * values * BYTES / BANDWIDTH for layers, rows in load.rows) / load.split


class Measured(NamedTuple):
    """A step on one H200, bfloat16, votes included, and where it is written down."""

    load: Load
    ms: float
    source: str


_TRUNK, _LARGE = "speed.md, fewer adapted layers", "speed.md, Llama-8B's shape"
_WORLDS = "tools/gpu/bench_workers.py, section one"
FITTED = (
    Measured(Load(SMOLLM2, 128, 1, 96), 1e3 / 703, _TRUNK),
    Measured(Load(SMOLLM2, 128, 16, 96), 16e3 / 4098, _TRUNK),
    Measured(Load(SMOLLM2, 128, 100, 96), 100e3 / 5646, _TRUNK),
    Measured(Load(SMOLLM2, 128, 1, 96, 15), 1e3 / 801, _TRUNK),
    Measured(Load(SMOLLM2, 128, 16, 96, 15), 16e3 / 6288, _TRUNK),
    Measured(Load(SMOLLM2, 128, 100, 96, 15), 100e3 / 10290, _TRUNK),
)
HELD_OUT = (
    Measured(Load(SMOLLM2, 128, 16, 96, 8), 16e3 / 8451, _TRUNK),
    Measured(Load(SMOLLM2, 128, 100, 96, 8), 100e3 / 16940, _TRUNK),
    Measured(Load(SMOLLM2, 128, 256, 96), 36.5, "engine.md, with blocks"),
    Measured(Load(SMOLLM2, 128, 16, 512), 8.48, _WORLDS),
    Measured(Load(SMOLLM2, 128, 76, 512), 34.45, _WORLDS),
    Measured(Load(SMOLLM2, 64, 16, 96), 2.98, _WORLDS),
    Measured(Load(SMOLLM2, 64, 100, 96), 9.46, _WORLDS),
    Measured(Load(SMOLLM2, 64, 100, 512), 23.14, _WORLDS),
    Measured(Load(SMOLLM2, 16, 1, 96), 1.32, _WORLDS),
    Measured(Load(SMOLLM2, 16, 100, 96), 3.67, _WORLDS),
    Measured(Load(SMOLLM2, 16, 100, 512), 7.52, _WORLDS),
    Measured(Load(GPT2, 128, 16, 96), 3.21, "engine.md, with copies"),
    Measured(Load(GPT2, 128, 100, 96), 16.5, "engine.md, with copies"),
    Measured(Load(LLAMA_8B, 128, 8, 912), 8e3 / 152, _LARGE),
    Measured(Load(LLAMA_8B, 128, 8, 912, 8), 8e3 / 458, _LARGE),
    Measured(Load(LLAMA_8B, 128, 8, 2048, 8), 8e3 / 306, _LARGE),
)


class Fit(NamedTuple):
    """Fitted: seconds of launches per layer, and how often row kernels move the values of a row."""

    launch: float
    moves: float

    def ms(self, load: Load) -> float:
        seconds = floor_seconds(load) + self.moves * moved_seconds(load) + self.launch * load.shape.layers
        if load.split > 1:  # two all-reduces a layer, of all its rows
            for layers, rows in load.rows:
                seconds += 2 * layers * (REDUCE_SECONDS + 2 * rows * load.shape.width * BYTES / NVLINK)
        return 1e3 * seconds

    def error(self, measured: Measured) -> float:
        return self.ms(measured.load) / measured.ms - 1


def fit() -> Fit:
    """Least squares of relative errors over FITTED."""
    left = 1e-3 * np.array([m.ms for m in FITTED]) - [floor_seconds(m.load) for m in FITTED]
    terms = np.array([[m.load.shape.layers, moved_seconds(m.load)] for m in FITTED])
    weights = 1e3 / np.array([m.ms for m in FITTED])
    found, *_ = np.linalg.lstsq(terms * weights[:, None], left * weights, rcond=None)
    return Fit(*found.tolist())


# --- the exchange -----------------------------------------------------------------------------------------------------

EXCHANGES = {
    (2, 1): 0.244,
    (2, 16): 0.239,
    (2, 100): 0.438,
    (4, 1): 0.544,
    (4, 16): 0.547,
    (4, 100): 0.840,
    (8, 1): 1.181,
    (8, 16): 1.134,
    (8, 100): 1.624,
}
"""Milliseconds by ranks and streams: bench/bench_workers.py, every rank on the same two cores."""


class ExchangeFit(NamedTuple):
    """Fitted: milliseconds of any exchange, for each stream, for each worker, and for each worker and stream."""

    fixed: float
    checked: float  # rank 0's own work for a stream: the digest, and whether all votes are of the support
    worker: float
    stream: float

    def ms(self, ranks: int, streams: int) -> float:
        if ranks == 1:
            return 0.0
        return self.fixed + streams * self.checked + (ranks - 1) * (self.worker + streams * self.stream)


def fit_exchange(held_out: int = 4) -> ExchangeFit:
    """Least squares of relative errors over all but so many ranks."""
    some = {key: ms for key, ms in EXCHANGES.items() if key[0] != held_out}
    weights = 1 / np.array(list(some.values()))
    terms = np.array([[1, streams, ranks - 1, (ranks - 1) * streams] for ranks, streams in some])
    found, *_ = np.linalg.lstsq(terms * weights[:, None], np.ones(len(some)), rcond=None)
    return ExchangeFit(*found.tolist())


def order_bytes(streams: int, context: int) -> int:
    """To each worker: coins, temperature, token, position and blocks of every stream."""
    return streams * (4 * SUPPORT + 4 + 8 + 8 + 4 * -(-context // PAGE))


def answer_bytes(streams: int, worlds: int) -> int:
    """From each worker: votes and the digest."""
    return streams * 4 * worlds + 32


def network_ms(remote: int, streams: int, context: int, worlds: int, gigabits: float) -> float:
    """All orders leave and all answers reach rank 0's host by one card."""
    return 1e3 * remote * 8 * max(order_bytes(streams, context), answer_bytes(streams, worlds)) / (gigabits * 1e9)


# --- larger machines, on paper ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """GPUs on hosts of eight; each product is split over `split` of them."""

    shape: Shape
    worlds: int
    top: int | None
    gpus: int
    context: int = 1024

    @property
    def split(self) -> int:
        """The least power of two of GPUs whose share of the base leaves two thirds of each for caches."""
        return next(s for s in (1, 2, 4, 8) if self.shape.base_bytes / s < GPU_GIB * GIB / 3)

    @property
    def ranks(self) -> int:
        return self.gpus // self.split

    def load(self, streams: int) -> Load:
        return Load(self.shape, -(-self.worlds // self.ranks), streams, self.context, self.top, self.split)

    @property
    def token_bytes(self) -> float:
        return sum(layers * rows * self.shape.layer_cache for layers, rows in self.load(1).rows) / self.split

    @property
    def base_gib(self) -> float:
        return self.shape.base_bytes / self.split / GIB

    @property
    def adapters_gib(self) -> float:
        load = self.load(1)
        return load.adapted * load.worlds * self.shape.layer_adapter * BYTES / self.split / GIB

    @property
    def streams(self) -> int:
        """How many of this context fit beside base and adapters."""
        free = (GPU_GIB - RESERVE_GIB - self.base_gib - self.adapters_gib) * GIB
        return max(0, int(free / self.token_bytes / self.context))

    @property
    def name(self) -> str:
        layers = "all" if self.top is None else f"top:{self.top}"
        return f"{self.shape.name}, {self.worlds} worlds, {layers} | {self.ranks} × {self.split}"


def sites() -> list[Site]:
    return [
        Site(shape, worlds, top, gpus)
        for shape in (LLAMA_8B, LLAMA_70B)
        for gpus in (8, 32)
        for worlds in (128, 512)
        for top in (None, shape.layers // 4)
    ]


def memory_table() -> str:
    rows = ["| | ranks × GPUs of each | worlds a rank | base | adapters | cache of a token | streams of 1,024 tokens |"]
    rows += ["|---|---|---:|---:|---:|---:|---:|"]
    for site in sites():
        sizes = f"{site.base_gib:.0f} GiB | {site.adapters_gib:.1f} GiB | {site.token_bytes / 1e6:.2f} MB"
        rows.append(f"| {site.name} | {site.load(1).worlds} | {sizes} | {site.streams:,} |")
    return "\n".join(rows)


def time_table() -> str:
    compute, exchange = fit(), fit_exchange()
    rows = ["| | ranks × GPUs of each | step, 16 streams | tokens/s | step, 100 streams | tokens/s | exchange in it |"]
    rows += ["|---|---|---:|---:|---:|---:|---:|"]
    for site in sites():
        cells = []
        for streams in (16, 100):
            step = compute.ms(site.load(streams)) + exchange.ms(site.ranks, streams)
            fits = streams <= site.streams
            cells += [f"{step:.1f} ms", f"{1e3 * streams / step:,.0f}"] if fits else ["no room", ""]
        inside = " and ".join(f"{exchange.ms(site.ranks, n):.1f}" for n in (16, 100))
        rows.append(f"| {site.name} | {' | '.join(cells)} | {inside} ms |")
    return "\n".join(rows)


def network_table() -> str:
    rows = ["| other hosts' ranks | streams | sent by rank 0 | received | at 25 Gb/s | at 100 Gb/s |"]
    rows += ["|---:|---:|---:|---:|---:|---:|"]
    for remote, worlds in ((6, 64), (24, 16)):
        for streams in (16, 100):
            sent, got = remote * order_bytes(streams, 1024), remote * answer_bytes(streams, worlds)
            times = " | ".join(f"{network_ms(remote, streams, 1024, worlds, g):.2f} ms" for g in (25, 100))
            rows.append(f"| {remote} | {streams} | {sent / 1e6:.2f} MB | {got / 1e6:.2f} MB | {times} |")
    return "\n".join(rows)


def check_table() -> str:
    compute = fit()
    rows = ["| | worlds | layers | streams | context | measured | model | error |"]
    rows += ["|---|---:|---|---:|---:|---:|---:|---:|"]
    for used, group in (("fitted", FITTED), ("held out", HELD_OUT)):
        for found in group:
            load = found.load
            layers = "all" if load.top is None else f"top:{load.top}"
            times = f"{found.ms:.2f} ms | {compute.ms(load):.2f} ms | {compute.error(found):+.0%}"
            where = f"{load.worlds} | {layers} | {load.streams} | {load.context:,}"
            rows.append(f"| {load.shape.name}, {used} | {where} | {times} |")
    return "\n".join(rows)


def exchange_table() -> str:
    found = fit_exchange()
    rows = ["| ranks | streams | measured | model | error |", "|---:|---:|---:|---:|---:|"]
    for (ranks, streams), ms in EXCHANGES.items():
        used = " (held out)" if ranks == 4 else ""
        model = found.ms(ranks, streams)
        rows.append(f"| {ranks}{used} | {streams} | {ms:.2f} ms | {model:.2f} ms | {model / ms - 1:+.0%} |")
    return "\n".join(rows)


TABLES = {
    "The model against measurements": check_table,
    "The exchange": exchange_table,
    "Memory of each GPU": memory_table,
    "Time of a step": time_table,
    "Network": network_table,
}


def main() -> None:
    """Print the parameters and all tables."""
    compute, exchange = fit(), fit_exchange()
    print(f"launches {1e6 * compute.launch:.0f} µs a layer, values of rows moved {compute.moves:.1f} times")
    print(
        f"exchange {exchange.fixed:.2f} + streams · {exchange.checked:.5f} "
        f"+ workers · ({exchange.worker:.3f} + streams · {exchange.stream:.5f}) ms"
    )
    for title, table in TABLES.items():
        print(f"\n{title}\n\n{table()}")


if __name__ == "__main__":
    main()
