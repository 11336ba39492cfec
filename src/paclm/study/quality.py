"""Quality of text: repetition, diversity, and perplexity under the public model.

All three change with length for any text, so only texts of equal length are compared. Errors are a bootstrap over whole
sequences: tokens inside one are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.leak import Estimate
from paclm.study.likelihood import score_targets
from paclm.study.results import Row
from paclm.study.statistics import cluster_bootstrap, clustered_mean

if TYPE_CHECKING:
    from paclm.engine.engine import Engine
    from paclm.study.serving import Prompts


def repetition(tokens: Sequence[int]) -> float:
    """rep-3: the share of 3-grams that occurred earlier in the sequence."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    if not grams:
        raise InvalidInput(f"Repetition of 3-grams needs at least 3 tokens, not {len(tokens)}.")
    return 1.0 - len(set(grams)) / len(grams)


def diversity(tokens: Sequence[int]) -> float:
    """distinct-1: distinct tokens ÷ tokens."""
    return len(set(tokens)) / len(tokens)


def public_surprise(engine: Engine, prompts: Prompts, tokens: IntArray) -> FloatArray:
    """−log probability under the public model of every token (n, T), given its prompt and the tokens before."""
    rows = [
        -score_targets(engine, [*prompt, *own], first=len(prompt)).log_probability[-1]
        for prompt, own in zip(prompts, tokens.tolist(), strict=True)
    ]
    return np.stack(rows)


def perplexity(surprise: FloatArray, rng: np.random.Generator) -> Estimate:
    """exp of the mean surprise (n, T), with a bootstrap error over sequences."""
    mean = math.exp(float(surprise.mean()))
    if len(surprise) == 1:
        return Estimate(mean, math.nan)
    clusters = np.repeat(np.arange(len(surprise)), surprise.shape[1])
    return Estimate(mean, float(np.exp(cluster_bootstrap(surprise.ravel(), clusters, rng)).std(ddof=1)))


def perplexity_ratio(surprise: FloatArray, reference: FloatArray, rng: np.random.Generator) -> Estimate:
    """Perplexity ÷ that of a reference of equal length, sequence by sequence on the same prompts: both (n, T)."""
    if surprise.shape != reference.shape:
        raise InvalidInput(f"A reference must match in sequences and length: {reference.shape}, not {surprise.shape}.")
    return perplexity(surprise - reference, rng)


def measure_text(tokens: IntArray, surprise: FloatArray, reference: FloatArray | None, rng: np.random.Generator) -> Row:
    """Every figure of n texts of equal length (n, T), with errors; the ratio where there is a reference."""
    rows = tokens.tolist()
    clusters = np.arange(len(rows))
    found = {
        "rep3": clustered_mean([repetition(row) for row in rows], clusters, rng),
        "distinct1": clustered_mean([diversity(row) for row in rows], clusters, rng),
        "perplexity": perplexity(surprise, rng),
        "ratio": None if reference is None else perplexity_ratio(surprise, reference, rng),
    }
    row: Row = {"sequences": len(rows)}
    for name, estimate in found.items():
        row[name], row[f"{name}_stderr"] = (None, None) if estimate is None else estimate
    return row
