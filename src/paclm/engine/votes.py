"""From the last hidden states to votes: the support, the worlds' logits inside it, and the rules that pick a token.

    public row ──► logits over the whole vocabulary ──► support: top k, ties to the smaller token id
    every world ─► logits of those k tokens only ─────► vote: argmax of logit + τ · coin, ties to the smaller token id

Coins come in as arrays; nothing here draws randomness. A vote is always a member of the support.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paclm.errors import InvalidInput

_LARGEST_ID = 2**31 - 1


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest logits per row, largest first; equal logits in order of token id.

    `torch.topk` leaves the order of equal values open. Here value and id are packed into one integer key, so that no
    two keys are equal and the answer is the same on every device.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise InvalidInput(f"A support of {k} tokens cannot be taken from a vocabulary of {logits.shape[-1]}.")
    bits = (logits.float() + 0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0
    ordered = (bits ^ ((bits >> 31) & _LARGEST_ID)).to(torch.int64)  # integers in the order of the floats
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = (ordered << 32) | (_LARGEST_ID - ids)
    return tokens_of_keys(torch.topk(keys, k, dim=-1).values)


def tokens_of_keys(keys: Tensor) -> Tensor:
    """The token ids in the lower halves of packed keys."""
    return _LARGEST_ID - (keys & _LARGEST_ID)


def support_logits(hidden: Tensor, head: Tensor, support: Tensor) -> Tensor:
    """Every world's logits inside the support: hidden (W, n, d), head (V, d), support (n, k) → (n, W, k) float32."""
    rows = head[support].float()  # (n, k, d)
    return torch.bmm(hidden.transpose(0, 1).float(), rows.transpose(1, 2))


def pick(scores: Tensor, support: Tensor) -> Tensor:
    """The token with the best score in each row: scores (n, W, k), support (n, k) → (n, W); ties to the smaller id."""
    best = scores == scores.amax(-1, keepdim=True)
    return torch.where(best, support.unsqueeze(1), _LARGEST_ID).amin(-1)


def coupled_votes(logits: Tensor, support: Tensor, coins: Tensor | None, temperature: Tensor | float = 0.0) -> Tensor:
    """Coupled Gumbel votes: the same coins (n, k) for all worlds; temperature 0, or no coins, is greedy. (n, W) ids.

    argmax of logit + τ·coin is the argmax of logit/τ + coin, and stays finite as τ → 0. Coins are added in float32
    or wider, whatever the forward pass ran in.
    """
    if coins is None:
        return pick(logits, support)
    tau = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1, 1)
    return pick(logits.float() + tau * coins.unsqueeze(1).to(torch.promote_types(coins.dtype, torch.float32)), support)


def independent_votes(logits: Tensor, support: Tensor, coins: Tensor, temperature: float) -> Tensor:
    """Every world with its own coins (n, W, k): what coupling is compared with."""
    return pick(logits.float() + temperature * coins, support)


@dataclass(frozen=True, slots=True)
class HybridCoins:
    """Public coins of the hybrid rule."""

    switch: Tensor
    """(n,) uniform in [0, 1)"""
    common: Tensor
    """(n, k) Gumbel, shared by all worlds"""
    own: Tensor
    """(n, W, k) Gumbel, one set per world"""


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
    # A world whose whole mass is the common part has no residual; then β is 1 and this branch is never taken.
    apart = pick(rest.log() + coins.own, support)
    maximal = torch.where((coins.switch < beta).unsqueeze(1), together, apart)
    return torch.where(
        (beta >= threshold).unsqueeze(1), maximal, coupled_votes(logits, support, coins.common, temperature)
    )


def coupling_ceiling(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """β = Σ_v min_s p_s(v) over the renormalised support: no coupling agrees more often. (n, W, k) → (n,) float64."""
    return torch.softmax(logits.double() / temperature, dim=-1).amin(1).sum(-1)
