"""Train `tiny` inside a wall-clock budget.

Each step draws a fixed share of its sequences from the notes and the rest from public text, each packed and shuffled
apart. The schedule follows the clock, not a count of steps: learning rate is a function of the share of the training
time that has passed, so the run ends on time with its cosine finished on any machine.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GPT2LMHeadModel

from .data import Corpus, TokenArray, count_bytes, encode_documents, pack, read_corpora
from .evaluate import Score, figures_of, score_documents
from .model import Shape, TinyGPT2, to_hugging_face
from .notes import Hospitals, encoded_by_all
from .optimizer import make_optimizers
from .samples import draw_samples
from .tokenizer import end_of_text_id, load_tokenizer, save_tokenizer

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything a run depends on besides its data."""

    minutes: float
    """Wall clock of the whole run: reading, tokenizing, compiling, training, measuring, saving."""
    reserve_seconds: float = 40.0
    """Kept for measuring and saving at the end."""
    batch: int = 256
    """Sequences of a full context in one step: 131,072 tokens."""
    notes_share: float = 0.5
    """Of these sequences."""
    hospitals: Hospitals = field(default_factory=Hospitals)
    lr: float = 4e-3
    weight_decay: float = 0.2
    warmup_share: float = 0.02
    clip: float = 1.0
    seed: int = 1
    seconds_per_line: float = 10.0
    seconds_per_evaluation: float = 60.0
    is_compiled: bool = True


@dataclass(frozen=True, slots=True)
class Source:
    """Documents to train on, and how many of the sequences of a step come from them."""

    name: str
    documents: list[TokenArray]
    num_bytes: int
    rows: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents)) + len(self.documents)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out documents of one corpus, ready to score."""

    name: str
    documents: list[TokenArray]
    num_bytes: int


def lr_share(progress: float, warmup_share: float) -> float:
    """Learning rate at a share of the run, as a share of its peak: linear warm-up, then a cosine to zero."""
    if progress < warmup_share:
        return progress / warmup_share
    after = min(1.0, (progress - warmup_share) / (1 - warmup_share))
    return 0.5 * (1 + math.cos(math.pi * after))


def sequence_starts(documents: list[TokenArray], context: int, rng: np.random.Generator) -> list[int]:
    """Where sequences begin in a packed stream of long texts: at even distances, from another offset each time."""
    length = sum(map(len, documents)) + len(documents)
    return list(range(int(rng.integers(context)), length - context, context))


def document_starts(documents: list[TokenArray], context: int) -> list[int]:
    """Where sequences begin in a packed stream of notes: each at a note, the next at the note this one cut off.

    So every note is read whole, and many of them as a user's is: from the first position, with nothing before it.
    """
    ends = np.cumsum([len(document) + 1 for document in documents])
    begins = [0, *ends[:-1].tolist()]
    starts, start = [], 0
    while start < ends[-1] - context:
        starts.append(start)
        cut_off = begins[bisect_right(begins, start + context) - 1]
        start = cut_off if cut_off > start else start + context
    return starts


def batches(
    source: Source, end_of_text: int, context: int, device: torch.device, seed: int
) -> Iterator[tuple[float, Tensor]]:
    """(epoch, tokens (rows, context + 1)) for ever: each epoch has its own order of documents and sequences."""
    rng = np.random.default_rng(seed)
    reach = torch.arange(context + 1, device=device)
    epoch = 0
    while True:
        documents = [source.documents[index] for index in rng.permutation(len(source.documents))]
        stream = torch.from_numpy(pack(documents, end_of_text).astype(np.int32)).to(device)  # (N,)
        are_notes = source.name == "notes"
        starts = document_starts(documents, context) if are_notes else sequence_starts(documents, context, rng)
        if len(starts) < source.rows:
            raise SystemExit(
                f"{len(stream):,} tokens of {source.name} do not fill {source.rows} sequences of {context}: give more."
            )
        shuffled = torch.from_numpy(rng.permutation(np.array(starts))).to(device)
        for first in range(0, len(starts) - source.rows + 1, source.rows):
            rows = shuffled[first : first + source.rows, None] + reach
            yield epoch + first / len(starts), stream[rows].long()
        epoch += 1


def mixed_batches(
    sources: list[Source], end_of_text: int, context: int, device: torch.device, seed: int
) -> Iterator[tuple[dict[str, float], Tensor]]:
    """(epoch by source, tokens (B, context + 1)) for ever."""
    streams = [batches(source, end_of_text, context, device, seed) for source in sources]
    while True:
        drawn = [next(stream) for stream in streams]
        epochs = {source.name: round(epoch, 3) for source, (epoch, _) in zip(sources, drawn, strict=True)}
        yield epochs, torch.cat([tokens for _, tokens in drawn])


def half_precision(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products on a GPU; on a CPU, where trials run, they would be slower than single precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def compiled_or_plain(model: TinyGPT2, example: Tensor, wanted: bool, say: Callable[[str], None]) -> Loss:
    """The loss as a compiled function, tried once forwards and backwards; the plain module where compiling fails."""
    if wanted:
        compiled: Loss = torch.compile(model, dynamic=False)
        try:
            with half_precision(example.device):
                loss = compiled(example)
            loss.backward()
            model.zero_grad(set_to_none=True)
            return compiled
        except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
            say(f"compiling failed, training without: {type(error).__name__}: {str(error)[:500]}")
            model.zero_grad(set_to_none=True)
    return model


def measure(model: TinyGPT2, held_out: list[HeldOut], end_of_text: int, device: torch.device) -> dict[str, Score]:
    model.eval()
    scores = {}
    with half_precision(device):
        for part in held_out:
            scores[part.name] = score_documents(
                model.logits, part.documents, part.num_bytes, end_of_text, model.shape.context, device
            )
    model.train()
    return scores


def save_and_load(model: TinyGPT2, end_of_text: int, out: Path) -> GPT2LMHeadModel:
    """Write the half-precision Hugging Face folder; return what a user would load from it, in single precision."""
    to_hugging_face(model, end_of_text).half().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600; files of a package must be readable by all
    loaded: GPT2LMHeadModel = GPT2LMHeadModel.from_pretrained(out, dtype=torch.float32)
    return loaded.eval()


def read_sources(corpora: list[Corpus], tokenizer: Tokenizer, plan: Plan) -> tuple[list[Source], list[HeldOut]]:
    """What to train on: public text and notes; and what is held out of each."""
    text = [document for corpus in corpora for document in encode_documents(tokenizer, corpus.train)]
    text_bytes = sum(count_bytes(corpus.train) for corpus in corpora)
    held_out = [HeldOut(c.name, encode_documents(tokenizer, c.held_out), count_bytes(c.held_out)) for c in corpora]
    num_notes = round(plan.notes_share * plan.batch)
    sources = [Source("text", text, text_bytes, plan.batch - num_notes)]
    if num_notes:
        of = plan.hospitals
        sources.append(Source("notes", *encoded_by_all(tokenizer, of.train, of.notes_each), num_notes))
        held_out.append(HeldOut("notes", *encoded_by_all(tokenizer, of.held_out, of.notes_each)))
    return [source for source in sources if source.rows], held_out


def train_tiny(
    corpora_folder: Path, tokenizer_folder: Path, out: Path, plan: Plan, shape: Shape, max_records: int | None = None
) -> None:
    """The whole run: a Hugging Face folder in `out`, with curve.json, report.json, samples.json and train.log."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    log = (out / "train.log").open("w", buffering=1)

    def say(line: str) -> None:
        line = f"[{time.monotonic() - began:7.1f} s] {line}"
        print(line, flush=True)
        log.write(line + "\n")

    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    say(f"device {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}, torch {torch.__version__}")
    say(f"{plan} {shape}")

    # 1. Data.
    tokenizer = load_tokenizer(tokenizer_folder)
    end_of_text = end_of_text_id(tokenizer)
    shape = replace(shape, vocab_size=tokenizer.get_vocab_size())
    sources, held_out = read_sources(read_corpora(corpora_folder, max_records), tokenizer, plan)
    for source in sources:
        say(
            f"{source.name}: {source.num_tokens:,} training tokens in {len(source.documents):,} documents, "
            f"{source.num_bytes:,} bytes; {source.rows} sequences a step"
        )
    # Some of the training text, scored like the held-out text: the distance between the two is the overfitting.
    probes = [HeldOut(source.name, source.documents[:1] + source.documents[-200:], 1) for source in sources]

    # 2. Model and optimizers.
    model = TinyGPT2(shape).to(device).train()
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizers = make_optimizers(model, plan.lr, plan.weight_decay)
    drawn = mixed_batches(sources, end_of_text, shape.context, device, plan.seed)
    epochs, example = next(drawn)
    save_and_load(model, end_of_text, out)  # rehearse the end now, so that it fails early if it fails
    loss_of = compiled_or_plain(model, example, plan.is_compiled and device.type == "cuda", say)
    say(f"{num_parameters:,} parameters, ready to train")

    # 3. Training, by the clock.
    train_began = time.monotonic()
    train_seconds = plan.minutes * 60 - plan.reserve_seconds - (train_began - began)
    if train_seconds < 5:
        raise SystemExit(f"{plan.minutes} minutes leave {train_seconds:.0f} s for training: give --minutes more.")
    curve: list[dict[str, Any]] = []
    step, peak, recent, next_line, next_evaluation = 0, plan.lr, [], 0.0, plan.seconds_per_evaluation
    safe_weights = {name: value.clone() for name, value in model.state_dict().items()}
    while (elapsed := time.monotonic() - train_began) < train_seconds:
        lr = peak * lr_share(elapsed / train_seconds, plan.warmup_share)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        epochs, tokens = next(drawn)
        with half_precision(device):
            loss = loss_of(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        step += 1

        if elapsed >= next_line:
            mean_loss = float(torch.stack(recent).mean())
            recent = []
            next_line = elapsed + plan.seconds_per_line
            num_seen = step * plan.batch * shape.context
            point: dict[str, Any] = {
                "seconds": round(elapsed, 1),
                "step": step,
                "epochs": epochs,
                "tokens": num_seen,
            }
            point |= {"lr": lr, "train_loss": round(mean_loss, 4)}
            if not math.isfinite(mean_loss):
                say(f"loss is {mean_loss} at step {step}: back to the last good weights, half the learning rate")
                model.load_state_dict(safe_weights)
                peak /= 2
                optimizers = make_optimizers(model, peak, plan.weight_decay)
            elif elapsed >= next_evaluation:
                next_evaluation = elapsed + plan.seconds_per_evaluation
                safe_weights = {name: value.clone() for name, value in model.state_dict().items()}
                scores = measure(model, held_out, end_of_text, device)
                point["held_out"] = figures_of(scores)
                on_train = measure(model, probes, end_of_text, device)
                point["train_probe"] = {name: score.figures()["nats_per_token"] for name, score in on_train.items()}
                torch.save(safe_weights, out / "checkpoint.pt")
            curve.append(point)
            (out / "curve.json").write_text(json.dumps(curve) + "\n")
            say(json.dumps(point) + f" {num_seen / max(elapsed, 1e-9) / 1e6:.2f} M tokens/s")
    if device.type == "cuda":
        torch.cuda.synchronize()
    trained_seconds = time.monotonic() - train_began
    say(f"training over: {step:,} steps, epochs {epochs}")

    # 4. Save, then measure what was saved.
    torch.save(model.state_dict(), out / "checkpoint.pt")
    save_tokenizer(tokenizer, out, shape.context)
    twin = save_and_load(model, end_of_text, out).to(device)
    say("saved")
    scores = {
        part.name: score_documents(
            lambda t: twin(t).logits, part.documents, part.num_bytes, end_of_text, shape.context, device, batch=32
        )
        for part in held_out
    }
    report = {
        "num_parameters": num_parameters,
        "shape": asdict(shape),
        "plan": asdict(plan),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "is_compiled": loss_of is not model,
        "sources": {
            source.name: {
                "documents": len(source.documents),
                "bytes": source.num_bytes,
                "tokens": source.num_tokens,
                "sequences": source.rows,
                "epochs": epochs[source.name],
            }
            for source in sources
        },
        "steps": step,
        "tokens_seen": step * plan.batch * shape.context,
        "train_seconds": round(trained_seconds, 1),
        "held_out": figures_of(scores),
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    say(f"held out, from the saved half-precision weights: {json.dumps(report['held_out'])}")
    samples = draw_samples(twin, tokenizer, end_of_text)
    (out / "samples.json").write_text(json.dumps(samples, indent=2, ensure_ascii=False) + "\n")
    say("done")
    log.close()
