"""AdamW for many worlds: one row per world, every operation elementwise, so worlds do not affect each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paclm.engine.adapters import AdapterStack

BETA_FIRST, BETA_SECOND = 0.9, 0.999
EPSILON = 1e-8


def flatten(stack: AdapterStack) -> Tensor:
    """Copy a stack into one float32 row per world, (G, p)."""
    pieces = [tensors[layer] for layer in stack.layers for tensors in (stack.A, stack.B)]
    return torch.cat([piece.detach().float().flatten(1) for piece in pieces], 1)


def unflatten(rows: Tensor, like: AdapterStack) -> AdapterStack:
    """A stack of G worlds with the layers of `like`, as views of rows (G, p)."""
    A: dict[str, Tensor] = {}
    B: dict[str, Tensor] = {}
    start = 0
    for layer in like.layers:
        for views, tensor in ((A, like.A[layer]), (B, like.B[layer])):
            size = tensor[0].numel()
            views[layer] = rows[:, start : start + size].view(len(rows), *tensor.shape[1:])
            start += size
    return AdapterStack(like.spec, like.base, A, B)


class StackedAdamW:
    """AdamW with decoupled weight decay, as `torch.optim.AdamW` computes it, on the first k worlds of a group.

    All worlds start together and finish from the end, so the unfinished ones are the first k and have taken the same
    number of steps. The parameters and moments of a finished world never change again.
    """

    def __init__(self, rows: Tensor, learning_rate: float, weight_decay: float) -> None:
        self.rows = rows  # (G, p)
        self.learning_rate: float | Tensor = learning_rate  # of all worlds, or (k, 1) of each
        self.weight_decay = weight_decay
        self.first = torch.zeros_like(rows)
        self.second = torch.zeros_like(rows)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Update as many worlds as `gradient` (k, p) has rows."""
        k = len(gradient)
        rows, first, second = self.rows[:k], self.first[:k], self.second[:k]
        self.num_steps += 1  # first, so that an interruption below can be detected
        first_bias = 1.0 - BETA_FIRST**self.num_steps
        second_bias = 1.0 - BETA_SECOND**self.num_steps
        rows.mul_(1.0 - self.learning_rate * self.weight_decay)
        first.lerp_(gradient, 1.0 - BETA_FIRST)
        second.mul_(BETA_SECOND).addcmul_(gradient, gradient, value=1.0 - BETA_SECOND)
        spread = second.sqrt().div_(math.sqrt(second_bias)).add_(EPSILON)
        if isinstance(self.learning_rate, Tensor):
            rows.sub_(first / spread * (self.learning_rate / first_bias))
        else:
            rows.addcdiv_(first, spread, value=-self.learning_rate / first_bias)
