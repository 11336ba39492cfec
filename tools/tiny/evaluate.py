"""Held-out bits per byte, one definition for every model.

A document is read after one end-of-text token. Windows are as wide as the context and move on by half of it; a window
scores only the tokens no earlier window has scored, so past the first window each token sees at least half a context.
The end of a document is not scored. Bits per byte = total nats / ln 2 / UTF-8 bytes, whatever the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from .data import TokenArray, count_bytes, encode_documents
from .tokenizer import end_of_text_id, load_tokenizer

MAX_CONTEXT = 2048
"""Models with a longer context are read in windows of this size."""

LogitsFunction = Callable[[Tensor], Tensor]  # (B, T) token ids -> (B, T, V)


@dataclass(frozen=True, slots=True)
class Score:
    """What a model lost on a text."""

    total_nats: float
    num_tokens: int
    num_bytes: int
    num_correct: int | None = None
    """Unknown where finding the likeliest token is too slow."""

    def __add__(self, other: Score) -> Score:
        correct = None
        if self.num_correct is not None and other.num_correct is not None:
            correct = self.num_correct + other.num_correct
        return Score(
            self.total_nats + other.total_nats,
            self.num_tokens + other.num_tokens,
            self.num_bytes + other.num_bytes,
            correct,
        )

    def figures(self) -> dict[str, float]:
        found = {
            "bits_per_byte": round(self.total_nats / math.log(2) / self.num_bytes, 5),
            "nats_per_token": round(self.total_nats / self.num_tokens, 5),
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
        }
        if self.num_correct is not None:
            found["next_token_accuracy"] = round(self.num_correct / self.num_tokens, 5)
        return found


@dataclass(frozen=True, slots=True)
class Reader:
    """A language model ready to be measured on text."""

    model: PreTrainedModel
    tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> Reader:
        """From a Hugging Face folder, in single precision, on a GPU where there is one."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        return cls(model.to(device).eval(), load_tokenizer(folder))

    def score(self, texts: list[str]) -> Score:
        return score_documents(
            lambda tokens: self.model(tokens).logits,
            encode_documents(self.tokenizer, texts),
            count_bytes(texts),
            end_of_text_id(self.tokenizer),
            min(self.model.config.max_position_embeddings, MAX_CONTEXT),
            self.model.device,
            batch=max(1, 65_536 // self.model.config.vocab_size),  # logits are the largest array
        )


def measure(score: Callable[[list[str]], Score], sets: dict[str, list[str]]) -> dict[str, Any]:
    """Figures of each set of texts and of all together, with a hash of the text."""
    found = figures_of({name: score(texts) for name, texts in sets.items()})
    return {"text_sha256": hash_texts([text for texts in sets.values() for text in texts]), **found}


def hash_texts(texts: list[str]) -> str:
    digest = sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def figures_of(scores: dict[str, Score]) -> dict[str, dict[str, float]]:
    """Figures of each text and of all together."""
    return {name: score.figures() for name, score in scores.items()} | {"all": total(scores).figures()}


def total(scores: dict[str, Score]) -> Score:
    return sum(scores.values(), start=Score(0.0, 0, 0, 0))


def windows(document: TokenArray, end_of_text: int, context: int) -> list[tuple[TokenArray, int]]:
    """(tokens, first scored target) of each window: inputs are tokens[:-1], targets tokens[1:]."""
    stream = np.concatenate([np.array([end_of_text], dtype=document.dtype), document])
    stride = context // 2
    found = [(stream[: context + 1], 0)]
    start = 0
    while start + context + 1 < len(stream):
        start += stride
        found.append((stream[start : start + context + 1], context - stride))
    return found


@torch.no_grad()
def score_documents(
    logits: LogitsFunction,
    documents: list[TokenArray],
    num_bytes: int,
    end_of_text: int,
    context: int,
    device: torch.device,
    batch: int = 64,
) -> Score:
    """The score of a model on documents given as token ids."""
    cut = sorted(
        (window for document in documents for window in windows(document, end_of_text, context)),
        key=lambda window: len(window[0]),
    )
    nats = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    num_tokens = 0
    for first in range(0, len(cut), batch):
        chunk = cut[first : first + batch]
        width = max(len(tokens) for tokens, _ in chunk)
        padded = np.full((len(chunk), width), end_of_text, dtype=np.int64)
        is_scored = np.zeros((len(chunk), width - 1), dtype=np.bool_)
        for row, (tokens, first_scored) in enumerate(chunk):
            padded[row, : len(tokens)] = tokens
            is_scored[row, first_scored : len(tokens) - 1] = True
        tokens_t = torch.from_numpy(padded).to(device)  # (B, T + 1)
        mask = torch.from_numpy(is_scored).to(device)  # (B, T)
        predicted = logits(tokens_t[:, :-1])[mask].float()  # (N, V)
        target = tokens_t[:, 1:][mask]  # (N,)
        nats += cross_entropy(predicted, target, reduction="sum").double()
        correct += (predicted.argmax(-1) == target).sum()
        num_tokens += int(is_scored.sum())
    return Score(float(nats), num_tokens, num_bytes, int(correct))
