"""For studies: stability of the worlds on a text, coverage of the support, and other voting rules than coupled Gumbel.

A census needs every world's logits over the whole vocabulary, unlike voting. They are computed once for all support
sizes, a few positions at a time; figures stay on the device until the end. Coins come in as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paclm.engine.decode_step import coupled_votes, pick, top_tokens
from paclm.engine.determinism import FloatArray, IntArray
from paclm.engine.engine import Engine

_LOGITS_AT_ONCE = {"cuda": 2**28, "cpu": 2**24}
"""Most logits in memory: 1 GiB on a GPU; on a CPU few, to stay near its caches."""


@dataclass(frozen=True, slots=True)
class Census:
    """Figures per position of a text at one support size; coverage is averaged over worlds."""

    num_distinct: IntArray  # (n,) different tokens that the worlds vote for, greedily
    ceiling: FloatArray  # (n,) β of the worlds' votes, see `coupling_ceiling`
    argmax_coverage: FloatArray  # (n,) fraction of worlds whose most likely token is in the support
    mass_coverage: FloatArray  # (n,) mean probability of the support


def take_census(
    engine: Engine,
    texts: Iterable[tuple[Sequence[int], Sequence[bool]]],
    support_sizes: Sequence[int],
    temperature: float = 1.0,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[int, Census]:
    """Census of texts, each within the engine's context: tokens, and which of them count as targets, in order."""
    figures: dict[int, list[Tensor]] = {size: [] for size in support_sizes}
    for tokens, is_scored in texts:
        targets = torch.tensor(is_scored[1:])
        for hidden in engine.windows(tokens, max(2, len(tokens))):  # (W, c, d)
            scored, targets = targets[: hidden.shape[1]], targets[hidden.shape[1] :]
            for few in _few_positions(engine, hidden[:, scored.to(hidden.device)]):
                logits = engine.whole_logits(few)  # (W, n, V)
                for size, found in census_of(logits, support_sizes, temperature).items():
                    figures[size].append(found)
            advance(hidden.shape[1])
    columns = {size: torch.cat(found).T.cpu().numpy() for size, found in figures.items()}  # waits for the device
    return {size: Census(each[0].astype(np.int64), *each[1:]) for size, each in columns.items()}


@torch.inference_mode()
def census_of(logits: Tensor, support_sizes: Sequence[int], temperature: float = 1.0) -> dict[int, Tensor]:
    """From all logits (W, n, V), the public model's last: per support size (n, 4), the columns of a `Census`.

    Supports are nested: each is the beginning of the largest.
    """
    worlds, public = logits[:-1], logits[-1]
    support = top_tokens(public, max(support_sizes))  # (n, K)
    inside = worlds.gather(2, support.expand(len(worlds), -1, -1))  # (m, n, K)
    log_total = torch.logsumexp(worlds, -1)  # (m, n)
    is_argmax = worlds.argmax(-1, keepdim=True) == support  # (m, n, K), ties to the smaller token
    found = {}
    for size in support_sizes:
        own = inside[..., :size].transpose(0, 1)  # (n, m, k)
        votes = pick(own, support[:, :size]).sort(1).values  # (n, m)
        distinct = 1 + (votes[:, 1:] != votes[:, :-1]).sum(1)
        covered = is_argmax[..., :size].any(-1).double().mean(0)
        mass = (torch.logsumexp(own, -1).T - log_total).double().exp().mean(0)
        found[size] = torch.stack([distinct.double(), coupling_ceiling(own, temperature), covered, mass], 1)
    return found


def _few_positions(engine: Engine, hidden: Tensor) -> Iterable[Tensor]:
    """Hidden states (W, c, d) in pieces whose logits fit into the memory set aside for them."""
    room = _LOGITS_AT_ONCE["cuda" if hidden.is_cuda else "cpu"]
    size = max(1, room // (hidden.shape[0] * engine.vocabulary))
    return (hidden[:, start : start + size] for start in range(0, hidden.shape[1], size))


def independent_votes(logits: Tensor, support: Tensor, coins: Tensor, temperature: float) -> Tensor:
    """Every world with its own coins (n, W, k)."""
    return pick(logits.float() + temperature * coins, support)


@dataclass(frozen=True, slots=True)
class HybridCoins:
    """Public coins of the hybrid rule."""

    switch: Tensor  # (n,) uniform in [0, 1)
    common: Tensor  # (n, k) Gumbel, shared by all worlds
    own: Tensor  # (n, W, k) Gumbel, one set per world


def hybrid_votes(
    logits: Tensor, support: Tensor, coins: HybridCoins, temperature: float, threshold: float = 0.9
) -> Tensor:
    """Maximal agreement where the coupling ceiling β reaches the threshold, coupled Gumbel elsewhere; (n, W) ids.

    With probability β all worlds take one common sample of min_s p_s / β; otherwise each world samples what is left
    of its own distribution, (p_s - min) / (1 - β). Each world's marginal stays its own conditional.
    """
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)  # (n, W, k)
    log_least = log_p.amin(1)  # (n, k)
    beta = log_least.exp().sum(-1)  # (n,)
    together = pick((log_least + coins.common).unsqueeze(1), support).expand(-1, logits.shape[1])
    rest = (log_p.exp() - log_least.exp().unsqueeze(1)).clamp_min(0.0)
    # A world whose whole mass is common has no residual; then β is 1 and this branch is never taken.
    apart = pick(rest.log() + coins.own, support)
    maximal = torch.where((coins.switch < beta).unsqueeze(1), together, apart)
    return torch.where(
        (beta >= threshold).unsqueeze(1), maximal, coupled_votes(logits, support, coins.common, temperature)
    )


def coupling_ceiling(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """β = Σ_v min_s p_s(v) over the renormalised support: no coupling agrees more often. (n, W, k) → (n,) float64."""
    return torch.softmax(logits.double() / temperature, dim=-1).amin(1).sum(-1)
