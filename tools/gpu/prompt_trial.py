"""A trial on one GPU: how much of the gain is left if prompts are read by the public model only?

    python tools/gpu/prompt_trial.py --corpus wiki.jsonl.xz --base smollm2.gguf --out wiki-prompt.json --minutes 4

Adapters then act on generated positions alone, so that a prompt is computed and cached once for all worlds. The ways:

| way | training | prompts of the evaluation |
|---|---|---|
| A | as usual, the paper's settings | read by every world |
| B | that of A | public |
| C, D | blocks split at a random place, adapters act and learn after it; D twice the epochs of C | public |
| E | as C with twice the learning rate | public |
| A2 | A with twice the epochs, as a control of D | read by every world |

`A15`, `B15`, `C15` and `D15` are the same with adapters in the upper half of the layers (15 of SmolLM2's). The worlds
and the adapter of the whole corpus are trained together. Windows of held-out records are scored by teacher forcing: a
prompt of P tokens, then the next 64 or 128; all ways share positions, supports and coins. Results are written after
every way; a training that would end after `--minutes` is left out. Needs torch, transformers, numpy, scipy and
safetensors only. `--small` is a rehearsal for a CPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
from torch import Tensor

from dp_common import SEED, Clock, Row
from paclm.config import TrainingConfig
from paclm.engine.adapters import AdapterStack, find_targets
from paclm.engine.base_model import load_model, load_tokenizer, resolve_base
from paclm.engine.decode_step import coupled_votes, support_logits, top_tokens
from paclm.engine.loading import pick_device
from paclm.engine.memory import release_memory
from paclm.engine.optimizer import unflatten
from paclm.engine.training import GroupTraining, adapter_spec, make_schedule
from paclm.engine.training_forward import make_forward
from paclm.engine.training_order import Schedule, make_blocks
from paclm.engine.training_pass import WorldsPass
from paclm.engine.weights import output_layer
from paclm.errors import PaclmError
from paclm.privacy.releases import rule_named
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.results import plain
from paclm.study.statistics import clustered_mean, retained_gain
from paclm.study.streams import play_fresh
from paclm.worlds.assignment import assign_groups, units_of
from paclm.worlds.blocks import block_length, encode_texts
from paclm.worlds.readers import read_corpus
from paclm.worlds.records import ReadOptions
from paclm.worlds.storage import write_private_json

BUDGET = 2.0**-32
SUPPORT = 200
DECODERS = ("gumbel", "greedy")
Hits = dict[str, Any]  # (n,) arrays by name


class Size(NamedTuple):
    """How large the trial is."""

    records: int
    held_out: int
    worlds: int
    tokens: int  # of a record
    prompts: tuple[int, ...]
    horizons: tuple[int, ...]
    top: int  # adapted layers of the ways called 15
    rows: int  # windows of one pass
    epochs: int


FULL_SIZE = Size(1024, 256, 32, 512, (32, 64, 128, 256), (64, 128), 15, 16, 2)
SMALL_SIZE = Size(24, 8, 4, 48, (8, 16), (8, 16), 2, 4, 1)


@dataclass(frozen=True)
class Training:
    """One training and the ways that are evaluated: (name, epochs after which, whether prompts are public)."""

    is_split: bool
    ways: tuple[tuple[str, int, bool], ...]  # epochs in units of the usual ones
    is_half: bool = False
    rate: float = 1.0  # times the usual learning rate

    @property
    def passes(self) -> int:
        return max(times for _, times, _ in self.ways)


TRAININGS = (
    Training(False, (("A", 1, False), ("B", 1, True))),
    Training(True, (("C", 1, True), ("D", 2, True))),
    Training(True, (("E", 1, True),), rate=2.0),
    Training(False, (("A15", 1, False), ("B15", 1, True)), is_half=True),
    Training(True, (("C15", 1, True), ("D15", 2, True)), is_half=True),
    Training(False, (("A2", 2, False),)),
)


def main() -> None:
    """Run the trial; report an error of paclm as one line."""
    options = parse_arguments()
    try:
        run(options)
    except PaclmError as error:
        sys.exit(f"Error: {error}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="records to train on, and to hold out from")
    parser.add_argument("--held-out", help="records to score on; default: of the corpus")
    parser.add_argument("--base", default="smollm2", help="base model, as `paclm init --base`")
    parser.add_argument("--out", type=Path, required=True, help="results, JSON")
    parser.add_argument("--minutes", type=float, default=4.0, help="start no training that would end after this")
    parser.add_argument("--ways", nargs="*", help="only the trainings of these ways; A is always run")
    parser.add_argument("--worlds-per-step", type=int, default=17, help="worlds trained together")
    parser.add_argument("--small", action="store_true", help="a rehearsal: few records, short, few worlds")
    options = parser.parse_args()
    known = [name for training in TRAININGS for name, _, _ in training.ways]
    if strangers := [name for name in options.ways or [] if name not in known]:
        parser.error(f"--ways: {', '.join(strangers)} is none of {', '.join(known)}")
    return options


def run(options: argparse.Namespace) -> None:
    """Train and score way after way. The releases are computed beside, by another process."""
    clock, size = Clock(options.minutes), SMALL_SIZE if options.small else FULL_SIZE
    trial = Trial(options, size, clock)
    wanted = [t for t in TRAININGS if not options.ways or {"A", *options.ways} & {name for name, _, _ in t.ways}]
    slowest = 0.0  # seconds for the usual number of epochs
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for training in wanted:
            if not clock.has(slowest * training.passes):
                clock.say(f"no time for {', '.join(name for name, _, _ in training.ways)}")
                continue
            began = clock.seconds
            for name, stack, is_public in trial.train(training):
                for prompt, found in trial.votes(stack, is_public).items():
                    trial.expect(name, prompt, pool.submit(score, found))
                clock.say(f"  {name}: voted")
                trial.write()
            slowest = max(slowest, (clock.seconds - began) / training.passes)
        trial.write(wait=True)
    trial.print_table()
    clock.say("done")


class Trial:
    """The base model, the records of one corpus, and what was found."""

    def __init__(self, options: argparse.Namespace, size: Size, clock: Clock) -> None:
        self.options, self.size, self.clock = options, size, clock
        device = pick_device("auto")
        base = resolve_base(options.base)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model: Any = load_model(base, dtype).to(device)
        self.device = device
        self.head, self.forward = output_layer(self.model), make_forward(self.model)
        clock.say("base model loaded")
        self.settings = TrainingConfig(max_record_tokens=size.tokens, epochs=size.epochs)
        records = read_corpus(options.corpus, ReadOptions()).records
        order = np.random.default_rng(SEED).permutation(len(records))
        own = [records[i] for i in order[: size.records]]
        if options.held_out is not None:
            others = read_corpus(options.held_out, ReadOptions()).records[: size.held_out]
        else:
            others = [records[i] for i in order[size.records : size.records + size.held_out]]
        if len(own) < size.records or len(others) < size.held_out:
            sys.exit(f"Error: {size.records:,} records and {size.held_out:,} held out are needed; bring more.")
        tokenizer = load_tokenizer(base)
        encoded = encode_texts(tokenizer, [record.text for record in own])
        blocks = make_blocks(
            encoded, block_length(self.settings, self.model.config.max_position_embeddings), size.tokens
        )
        membership = assign_groups(units_of(own), size.worlds, SEED)  # (n, m)
        full = np.ones((len(own), 1), dtype=np.bool_)
        self.schedule = make_schedule(blocks, np.hstack([membership, full]), self.settings, SEED)
        clock.say(f"{len(own):,} records, {int(blocks.lengths.sum()):,} tokens in {len(blocks):,} blocks")
        self.windows = Windows(encode_texts(tokenizer, [record.text for record in others]), size)
        self.read_public()
        clock.say(f"public model: support and votes on {self.windows.counts}")
        self.expected: dict[tuple[str, int], Future[Hits]] = {}
        self.hits: dict[tuple[str, int], Hits] = {}
        self.facts: Row = {
            "corpus": Path(options.corpus).name.split(".")[0],
            "base": Path(base.name).name,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "size": size._asdict(),
            "windows": self.windows.counts,
            "training": {},
        }

    def train(self, training: Training) -> Iterator[tuple[str, AdapterStack, bool]]:
        """Train worlds and full together; yields the adapters of each way: worlds first, full last."""
        layers = f"top:{self.size.top}" if training.is_half else "all"
        rate, epochs = self.settings.learning_rate * training.rate, self.settings.epochs * training.passes
        settings = replace(self.settings, layers=layers, learning_rate=rate, epochs=epochs)
        schedule = replace(self.schedule, epochs=epochs, public_prompts=training.is_split)
        began = time.monotonic()
        spec = adapter_spec(settings)
        start = AdapterStack.initial(
            find_targets(self.model, spec), spec, schedule.num_worlds, SEED, "trial", settings.coupled
        )
        kept: dict[int, Tensor] = {}
        passes = None
        for worlds in schedule.groups(min(self.options.worlds_per_step, schedule.num_worlds)):
            passes = passes or WorldsPass(self.forward, self.head, start, len(worlds))
            group = GroupTraining(passes, start.worlds(worlds.tolist()), schedule, worlds, settings)
            for times, rows in self.train_group(group, schedule, training).items():
                kept.setdefault(times, torch.zeros(schedule.num_worlds, rows.shape[1], device=self.device))
                kept[times][torch.from_numpy(worlds)] = rows
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, tokens = time.monotonic() - began, int(schedule.num_tokens.sum())
        names = ", ".join(name for name, _, _ in training.ways)
        self.clock.say(f"{names}: trained {tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s")
        self.facts["training"][names] = {"tokens": tokens, "seconds": seconds, "layers": layers, "epochs": epochs}
        del passes, group
        release_memory()
        for name, times, is_public in training.ways:
            yield name, unflatten(kept[times], start), is_public

    def train_group(self, group: GroupTraining, schedule: Schedule, training: Training) -> dict[int, Tensor]:
        """All steps; the adapters (G, p) after once, and twice, the usual epochs. The learning rate is constant, so a
        longer training begins as a shorter one."""
        picks = schedule.batches(group.worlds)  # (G, steps, batch)
        splits = schedule.splits(group.worlds, picks)
        per_pass = group.num_steps // training.passes  # (G,)
        kept = {times: torch.empty_like(group.optimizer.rows) for times in {times for _, times, _ in training.ways}}
        unread = None
        for step in range(picks.shape[1]):
            before, unread = unread, group.step(picks[:, step], None if splits is None else splits[:, step])
            for times, rows in kept.items():
                for world in np.flatnonzero(per_pass * times == step + 1):
                    rows[world] = group.optimizer.rows[world]
            if before is not None:
                loss = group.read(before)
                if before.step % 100 == 0:
                    self.clock.say(f"  step {before.step} of {picks.shape[1]}, loss {loss:.3f}")
        if unread is not None:
            group.read(unread)
        return kept

    @torch.no_grad()
    def read_public(self) -> None:
        """Support, coins, votes and loss of the public model at every position of the windows, once for all ways."""
        windows, count = self.windows, len(self.windows.tokens)
        self.support = torch.zeros(count, windows.length, SUPPORT, dtype=torch.int32, device=self.device)
        self.votes_public = np.zeros((2, count, windows.length), dtype=np.int32)
        self.loss_public = np.zeros((count, windows.length))
        drawn = np.random.default_rng(SEED).gumbel(size=(count, windows.length, self.support_size))
        self.coins = torch.from_numpy(drawn.astype(np.float32)).to(self.device)
        self.support = self.support[:, :, : self.support_size]
        for row in range(count):
            ids = torch.from_numpy(windows.tokens[row : row + 1]).to(self.device)
            hidden = self.forward(ids[:, :-1], {}, {}, 1.0)  # (length, d)
            whole = whole_logits(hidden, self.head.weight)  # (length, V)
            support = top_tokens(whole, self.support_size)
            self.support[row] = support
            logits = support_logits(hidden.unsqueeze(0), self.head.weight, support)  # (length, 1, k)
            self.votes_public[:, row] = both_votes(logits, support, self.coins[row])[:, :, 0]
            self.loss_public[row] = losses_of(whole, ids[0, 1:])

    @property
    def support_size(self) -> int:
        return min(SUPPORT, int(self.head.weight.shape[0]))

    @torch.no_grad()
    def votes(self, stack: AdapterStack, is_public: bool) -> dict[int, Hits]:
        """By prompt length: votes of the worlds and of full, with the truth, along the positions after the prompts."""
        worlds, horizon, head = stack.num_worlds, max(self.size.horizons), self.head.weight
        found = {}
        for prompt in self.size.prompts:
            rows = self.windows.rows(prompt)
            first, last = prompt - 1, prompt + horizon - 1  # the positions that predict
            acts = torch.arange(last, device=self.device) >= first if is_public else None
            voted, losses = [], []
            for start in range(0, len(rows), self.size.rows):
                own = rows[start : start + self.size.rows]
                ids = torch.from_numpy(self.windows.tokens[own]).to(self.device)  # (r, length + 1)
                acting = None if acts is None else acts.float().repeat(worlds * len(own))
                hidden = self.forward(ids[:, :last].repeat(worlds, 1), stack.A, stack.B, stack.spec.scale, acting)
                hidden = hidden.view(worlds, len(own), last, -1)[:, :, first:].flatten(1, 2)  # (W, r · horizon, d)
                support, coins = (x[own, first:last].flatten(0, 1) for x in (self.support, self.coins))
                logits = support_logits(hidden, head, support.long())
                voted.append(both_votes(logits, support.long(), coins))
                losses.append(losses_of(whole_logits(hidden[-1], head), ids[:, first + 1 : last + 1].flatten()))
            found[prompt] = {
                "votes": np.concatenate(voted, 1),  # (decoders, n, W)
                "truth": self.windows.tokens[rows, prompt : prompt + horizon].ravel(),
                "public": self.votes_public[:, rows, first:last].reshape(2, -1),
                "loss": np.concatenate(losses),
                "loss_public": self.loss_public[rows, first:last].ravel(),
                "cluster": np.repeat(rows, horizon),
                "offset": np.tile(np.arange(horizon), len(rows)),
            }
        return found

    def expect(self, way: str, prompt: int, hits: Future[Hits]) -> None:
        """Figures that are being computed."""
        self.expected[way, prompt] = hits

    def write(self, wait: bool = False) -> None:
        """Write all figures that are there."""
        for key, future in list(self.expected.items()):
            if wait or future.done():
                self.hits[key] = self.expected.pop(key).result()
        self.rows = rows_of(self.hits, self.size)
        write_private_json(self.options.out, plain({**self.facts, "rows": self.rows}))

    def print_table(self) -> None:
        """All prompts together and each alone, under both decoders, over the longest horizon."""
        for decoder in DECODERS:
            print(f"\n{decoder}, the next {max(self.size.horizons)} tokens; points; ± one standard error")
            print(
                "way  prompt  public   full    noiseless private  kept           unanimous  loss   gain of A  net of A"
            )
            for row in self.rows:
                if row["decoder"] == decoder and row["horizon"] == max(self.size.horizons):
                    print(line_of(row))
        print("", flush=True)


class Windows:
    """The beginnings of held-out records, padded to the longest that is scored."""

    def __init__(self, encoded: Sequence[Sequence[int]], size: Size) -> None:
        self.horizon = max(size.horizons)
        self.length = max(size.prompts) + self.horizon - 1  # positions that are read; one more token is predicted
        self.lengths = np.array([len(tokens) for tokens in encoded])
        self.tokens = np.zeros((len(encoded), self.length + 1), dtype=np.int64)
        for row, tokens in enumerate(encoded):
            own = tokens[: self.length + 1]
            self.tokens[row, : len(own)] = own
        self.counts = {prompt: len(self.rows(prompt)) for prompt in size.prompts}

    def rows(self, prompt: int) -> Any:
        """The windows that are long enough for a prompt of this length."""
        return np.flatnonzero(self.lengths >= prompt + self.horizon)


def whole_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """(n, d) → (n, V) float32."""
    return torch.mm(hidden, head.T, out_dtype=torch.float32) if hidden.is_cuda else hidden.float() @ head.float().T


def losses_of(whole: Tensor, targets: Tensor) -> Any:
    """−log probability of the targets (n,)."""
    return torch.nn.functional.cross_entropy(whole, targets, reduction="none").double().cpu().numpy()


def both_votes(logits: Tensor, support: Tensor, coins: Tensor) -> Any:
    """Votes (decoders, n, W) in the order of DECODERS."""
    pair = coupled_votes(logits, support, coins, 1.0), coupled_votes(logits, support, None)
    return torch.stack(pair).to(torch.int32).cpu().numpy()


def score(found: Mapping[str, Any]) -> Hits:
    """Whether each choice is the token of the text, by decoder and source; the release has a fresh secret each time."""
    hits = {name: found[name] for name in ("loss", "loss_public", "cluster", "offset")}
    for decoder, votes, public in zip(DECODERS, found["votes"], found["public"], strict=True):
        truth, worlds = found["truth"], votes[:, :-1]
        recorded = RecordedVotes(votes=worlds)
        (stream,) = play_fresh(recorded, rule_named("gaussian"), BUDGET, 1, len(worlds), SEED)
        hits |= {
            f"{decoder}.public": public == truth,
            f"{decoder}.full": votes[:, -1] == truth,
            f"{decoder}.noiseless": (worlds == truth[:, None]).mean(1),
            f"{decoder}.private": stream.released == truth,
            f"{decoder}.unanimous": ~recorded.is_dissent,
        }
    return {name: np.asarray(array, dtype=np.float64) for name, array in hits.items()}


def rows_of(hits: Mapping[tuple[str, int], Hits], size: Size) -> list[Row]:
    """A row of figures for every way, prompt length (and all together), horizon and decoder."""
    ways = dict.fromkeys(way for way, _ in hits)
    rows = []
    for way in ways:
        for prompt in (*size.prompts, "all"):
            lengths = size.prompts if prompt == "all" else (prompt,)
            usual = "A15" if way.endswith("15") else "A"
            if any((name, length) not in hits for name in (way, usual) for length in lengths):
                continue
            own, base = (join([hits[name, length] for length in lengths]) for name in (way, usual))
            for horizon in size.horizons:
                near = own["offset"] < horizon
                parts = [{name: array[near] for name, array in each.items()} for each in (own, base)]
                rows += [
                    {"way": way, "prompt": prompt, "horizon": horizon, "decoder": decoder, **figures(*parts, decoder)}
                    for decoder in DECODERS
                ]
    return rows


def join(parts: Sequence[Hits]) -> Hits:
    """Several prompt lengths as one; a window is one cluster in all of them."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def figures(own: Hits, usual: Hits, decoder: str) -> Row:
    """Means, what is kept of the gain, and paired differences from the usual way, with errors clustered by window."""
    clusters, rng = own["cluster"].astype(np.int64), np.random.default_rng(SEED)
    columns = ("public", "full", "noiseless", "private", "unanimous")
    now, before = ({name: each[f"{decoder}.{name}"] for name in columns} for each in (own, usual))
    public = now["public"]
    row: Row = {"positions": len(public), "windows": len(np.unique(clusters))}
    row |= {name: estimate(now[name], clusters, rng) for name in columns}
    row |= {name: estimate(own[name], clusters, rng) for name in ("loss", "loss_public")}
    row["gain"] = estimate(now["full"] - public, clusters, rng)
    row["kept"] = pair(retained_gain(now["private"], public, now["full"], clusters, rng))
    row["gain_of_usual"] = pair(retained_gain(now["full"], public, before["full"], clusters, rng))
    row["net_of_usual"] = pair(retained_gain(now["private"], public, before["private"], clusters, rng))
    row["less_loss_of_usual"] = pair(
        retained_gain(-own["loss"], -own["loss_public"], -usual["loss"], clusters, rng)  # of the gain in nats
    )
    row |= {f"{name}_minus_usual": estimate(now[name] - before[name], clusters, rng) for name in columns[1:]}
    return row


def estimate(values: Any, clusters: Any, rng: np.random.Generator) -> list[float]:
    """Mean and standard error."""
    return list(clustered_mean(values, clusters, rng))


def pair(ratio: Any) -> list[float] | None:
    return None if ratio is None else list(ratio)


def line_of(row: Row) -> str:
    """A line of the table."""
    points = [f"{100 * row[name][0]:6.2f}  " for name in ("public", "full", "noiseless", "private")]
    shares = [
        f"{100 * row[name][0]:6.1f} ± {100 * row[name][1]:4.1f}" if row[name] else "       –     "
        for name in ("kept", "unanimous", "gain_of_usual", "net_of_usual")
    ]
    start = f"{row['way']:4} {row['prompt']!s:>6} {''.join(points)}"
    return f"{start} {shares[0]} {shares[1]} {row['loss'][0]:.4f} {shares[2]} {shares[3]}"


if __name__ == "__main__":
    main()
