"""Muon for the weight matrices, AdamW for everything else.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest semi-orthogonal matrix, found with five
Newton–Schulz steps. Updates are scaled to the size AdamW's have, so that one learning rate serves both (Liu et al.,
2025). Matrices of one shape are orthogonalized in one batch; the fused query, key and value are three matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, num_steps: int = 5) -> Tensor:
    """Push all singular values of each matrix to about 1."""  # (n, r, c) -> (n, r, c)
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT  # (n, r, r)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Parameters are matrices (in, out); those whose `out` is three times `in` are taken as three side by side."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["momentum"])
                direction = param.grad.lerp(momentum, group["momentum"])  # Nesterov
                num_parts = 3 if param.size(1) == 3 * param.size(0) else 1
                for target, update in zip(param.chunk(num_parts, 1), direction.chunk(num_parts, 1), strict=True):
                    by_shape[target.shape].append((target, update))
            for shape, pairs in by_shape.items():
                updates = orthogonalize(torch.stack([update for _, update in pairs])).float()
                scale = 0.2 * max(shape) ** 0.5
                targets = [target for target, _ in pairs]
                torch._foreach_mul_(targets, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(targets, list(updates.unbind()), alpha=-group["lr"] * scale)


def make_optimizers(model: nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Matrices inside the blocks to Muon; embeddings to AdamW with little decay, biases and norms with none."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    embeddings = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." not in name]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    on_gpu = matrices[0].is_cuda
    adamw = torch.optim.AdamW(
        [{"params": embeddings, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        eps=1e-10,
        fused=on_gpu,
    )
    return [Muon(matrices, lr, weight_decay), adamw]
