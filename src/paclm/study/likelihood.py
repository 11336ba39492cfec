"""Log probabilities of a text's tokens in every world, over the whole vocabulary: for canaries and membership scores.

Voting never needs this: it looks inside the support only. Knows no record and no secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray

if TYPE_CHECKING:
    from paclm.engine.engine import Engine

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
