"""Adapted layers for any Hugging Face decoder: one base product for the whole batch, one small product per world.

    batch, world-major:  | world 0: rows … | world 1: rows … | … | world G-1: rows … |
    y = base(x)                                   once, flattened
    y[w] += scale · (x[w] A_wᵀ) B_wᵀ              G products at once (bmm, baddbmm)

Differentiable in A and B, so training and inference share it. Does not know what the rows mean.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from paclm.engine.adapters import AdapterSpec, AdapterStack, linear_layers
from paclm.errors import EngineError


class StackedLinear(nn.Module):
    """A frozen linear layer (or Conv1D) with one adapter per world."""

    A: Tensor
    B: Tensor

    def __init__(self, base: nn.Module, A: Tensor, B: Tensor, spec: AdapterSpec, trainable: bool) -> None:
        super().__init__()
        self.base = base
        self.scale = spec.scale
        self.dropout = spec.dropout
        if trainable:
            self.A = nn.Parameter(A)  # (G, r, in)
            self.B = nn.Parameter(B)  # (G, out, r)
        else:
            self.register_buffer("A", A, persistent=False)
            self.register_buffer("B", B, persistent=False)

    @property
    def num_worlds(self) -> int:
        return int(self.A.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        worlds = self.num_worlds
        if x.shape[0] % worlds:
            raise EngineError(
                f"A batch of {x.shape[0]} rows cannot be shared evenly by {worlds} worlds; "
                "lay it out world by world with the same number of rows each."
            )
        y = self.base(x)
        grouped = x.reshape(worlds, -1, x.shape[-1])  # (G, rows, in)
        if self.dropout and self.training:
            grouped = functional.dropout(grouped, self.dropout)
        inner = torch.bmm(grouped, self.A.to(x.dtype).transpose(1, 2))  # (G, rows, r)
        wide = y.reshape(worlds, -1, y.shape[-1])  # (G, rows, out)
        adapted = torch.baddbmm(wide, inner, self.B.to(x.dtype).transpose(1, 2), alpha=self.scale)
        return adapted.reshape(y.shape)


def attach(
    model: nn.Module, stack: AdapterStack, trainable: bool = False, fingerprint: str | None = None
) -> dict[str, StackedLinear]:
    """Replace the stack's layers inside `model` by adapted ones and freeze everything else; by layer name.

    The stack's tensors are used as they are (no copy when device and type already match); trainable ones become
    parameters. Every later batch must be laid out world by world.
    """
    stack.check_fits(linear_layers(model), fingerprint)
    model.requires_grad_(False)
    attached = {}
    for layer, A in stack.A.items():
        parent, leaf = _parent(model, layer)
        base = getattr(parent, leaf)
        device = next(base.parameters()).device
        adapted = StackedLinear(base, A.to(device), stack.B[layer].to(device), stack.spec, trainable)
        adapted.train(base.training)
        setattr(parent, leaf, adapted)
        attached[layer] = adapted
    return attached


def detach(model: nn.Module) -> None:
    """Put the base layers back."""
    for name, adapted in attached_layers(model).items():
        parent, leaf = _parent(model, name)
        setattr(parent, leaf, adapted.base)


def attached_layers(model: nn.Module) -> dict[str, StackedLinear]:
    """The adapted layers of `model`, by the name of the layer they replaced."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StackedLinear)}


def _parent(model: nn.Module, layer: str) -> tuple[nn.Module, str]:
    path, _, leaf = layer.rpartition(".")
    return model.get_submodule(path), leaf
