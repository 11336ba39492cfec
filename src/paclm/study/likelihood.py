"""How likely every world finds the tokens of a text, over the whole vocabulary: for canaries and membership scores.

Voting never needs this: it looks inside the support only. Knows no record and no secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor

    from paclm.engine.engine import Engine

_LOGIT_BYTES = {"cpu": 2**27, "cuda": 2**32}
"""Of the float32 logits held at once."""


class TargetScores(NamedTuple):
    """What each world (rows; the public model is the last) gives to the tokens that really come, tokens[1:]."""

    log_probability: FloatArray  # (W, n) nats
    rank: IntArray  # (W, n) how many tokens are likelier; 0 is the favourite


def score_targets(engine: Engine, tokens: Sequence[int], first: int = 1) -> TargetScores:
    """Score tokens[first:] given what comes before them; the text must fit the engine's context."""
    import torch

    if not 1 <= first < len(tokens):
        raise InvalidInput(f"The first scored token must lie between 1 and {len(tokens) - 1}, not {first}.")
    targets = torch.tensor(list(tokens[1:]), device=engine.head.device)
    log_probabilities, ranks = [], []
    with torch.inference_mode():
        for start, hidden in engine.hidden_states(tokens[:-1]):
            skip = min(max(first - 1 - start, 0), hidden.shape[1])
            wanted = targets[start + skip : start + hidden.shape[1]]
            for part, own in _parts(hidden[:, skip:], wanted, engine.vocabulary):
                logits = engine.whole_logits(part)  # (W, c, V)
                chosen = logits.gather(2, own.expand(len(logits), -1).unsqueeze(2))  # (W, c, 1)
                log_probabilities.append((chosen.squeeze(2) - logits.logsumexp(2)).double().cpu().numpy())
                ranks.append((logits > chosen).sum(2).cpu().numpy())
    return TargetScores(np.concatenate(log_probabilities, axis=1), np.concatenate(ranks, axis=1))


def _parts(hidden: Tensor, targets: Tensor, vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    """Hidden states (W, c, d) and targets (c,) in parts whose logits fit into memory."""
    limit = _LOGIT_BYTES.get(hidden.device.type, 2**27)
    size = max(1, limit // (4 * vocabulary * hidden.shape[0]))
    starts = range(0, len(targets), size)
    return [(hidden[:, start : start + size], targets[start : start + size]) for start in starts]
