"""Torch's numerical switches, set only here, and the check that votes repeat bit for bit.

A release must be reproducible from its votes: the same context, coins and batch shape give the same votes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from paclm.errors import EngineError

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.floating]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Repeatable(Protocol):
    """The part of an engine that the check uses."""

    @property
    def support_size(self) -> int: ...

    def probe(self, context: Sequence[int], coins: FloatArray | None) -> tuple[IntArray, FloatArray]:
        """Votes (W,), the public model's last, and the logits they came from."""


def set_deterministic() -> None:
    """Full float32 products (no TF32), deterministic algorithms only, a fixed cuBLAS workspace."""
    os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")  # cuBLAS reads it once, with the first handle
    # As use_deterministic_algorithms(True), without importing the compiler, which takes a second.
    torch.set_deterministic_debug_mode("error")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # Deterministic mode would fill every new tensor with NaN, a kernel launch each; nothing here reads before writing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_repeatable(
    engine: Repeatable, contexts: Sequence[Sequence[int]] = ((1, 2, 3), (3, 1, 2, 1)), times: int = 3
) -> None:
    """Raise unless votes and logits are bitwise equal every time. Called before anything private is served."""
    generator = np.random.default_rng(0)  # fixed coins of a self-test, never of a release
    for context in contexts:
        for coins in (None, generator.gumbel(size=engine.support_size)):
            first_votes, first_logits = engine.probe(context, coins)
            for _ in range(times - 1):
                votes, logits = engine.probe(context, coins)
                if not (np.array_equal(votes, first_votes) and np.array_equal(logits, first_logits)):
                    differing = int((votes != first_votes).sum())
                    raise EngineError(
                        f"The engine is not repeatable on this machine: the same context and coins changed {differing} "
                        f'of {votes.size} votes. Nothing private is served. Try dtype = "float32" or '
                        'device = "cpu" in [runtime], and report the GPU and torch version.'
                    )
