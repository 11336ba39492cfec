"""Scores of text: log probabilities of its tokens in every world, and repetition, diversity and perplexity.

Log probabilities are over the whole vocabulary, which voting never needs. The three measures change with length for any
text, so only texts of equal length are compared; their errors are a bootstrap over whole sequences, because tokens
inside one are not independent. Knows no record and no secret.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.leak import Estimate
from paclm.study.results import Row
from paclm.study.statistics import cluster_bootstrap, clustered_mean

if TYPE_CHECKING:
    from paclm.engine.engine import Engine
    from paclm.study.serving import Prompts


_LOGIT_BYTES = {"cpu": 2**27, "cuda": 2**32}  # of float32 logits in memory


class TargetScores(NamedTuple):
    """How each world (rows; the public model is the last) scores the tokens of the text."""

    log_probability: FloatArray  # (W, n) nats
    rank: IntArray  # (W, n) how many tokens are likelier; 0 is the favourite


def score_targets(engine: Engine, tokens: Sequence[int], first: int = 1) -> TargetScores:
    """Score tokens[first:] given what comes before them; the text must fit the engine's context."""
    import torch

    if not 1 <= first < len(tokens):
        raise InvalidInput(f"The first scored token must lie between 1 and {len(tokens) - 1}, not {first}.")
    targets = torch.tensor(list(tokens[1:]), device=engine.head.device)
    limit = _LOGIT_BYTES.get(targets.device.type, 2**27)
    log_probabilities, ranks = [], []
    with torch.inference_mode():
        for start, hidden in engine.hidden_states(tokens[:-1]):
            size = max(1, limit // (4 * engine.vocabulary * len(hidden)))  # positions whose logits fit
            for at in range(max(first - 1 - start, 0), hidden.shape[1], size):
                part = hidden[:, at : at + size]
                own = targets[start + at : start + at + part.shape[1]]
                logits = engine.whole_logits(part)  # (W, c, V)
                chosen = logits.gather(2, own.expand(len(logits), -1).unsqueeze(2))  # (W, c, 1)
                log_probabilities.append((chosen.squeeze(2) - logits.logsumexp(2)).double().cpu().numpy())
                ranks.append((logits > chosen).sum(2).cpu().numpy())
    return TargetScores(np.concatenate(log_probabilities, axis=1), np.concatenate(ranks, axis=1))


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
