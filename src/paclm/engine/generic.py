"""Any Hugging Face decoder by its own code, with adapted layers: one base product, one small product per world.

    batch, world-major:  | world 0: rows … | world 1: rows … | … | world G-1: rows … |
    y = base(x)                                   once, flattened
    y[w] += scale · (x[w] A_wᵀ) B_wᵀ              G products at once (bmm, baddbmm)

    inference:  input ids (1, c) ── layers of the trunk ── repeated ── first adapted layer … last (W, c, d)

Adapted layers are differentiable in A and B, so training uses them too. Inference is slower than `stacked` (its cache
grows by copying, and sequences run one after another), and equal up to rounding.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from paclm.engine.adapters import AdapterSpec, AdapterStack, decoder_layer, linear_layers
from paclm.engine.decode_step import PromptChunk
from paclm.engine.weights import output_layer
from paclm.errors import EngineError

_TRIAL = ((0, 3), (3, 5), (5, 6))  # a prompt in two parts, and one more token
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # of hidden states, relative


class StackedLinear(nn.Module):
    """A frozen linear layer (or Conv1D) with one adapter per world."""

    A: Tensor
    B: Tensor

    def __init__(self, base: nn.Module, A: Tensor, B: Tensor, spec: AdapterSpec) -> None:
        super().__init__()
        self.base = base
        self.scale = spec.scale
        self.register_buffer("A", A, persistent=False)  # (G, r, in)
        self.register_buffer("B", B, persistent=False)  # (G, out, r)

    def forward(self, x: Tensor) -> Tensor:
        worlds = len(self.A)
        if x.shape[0] % worlds:
            raise EngineError(
                f"A batch of {x.shape[0]} rows cannot be divided evenly among {worlds} worlds. Give each world as many "
                "rows."
            )
        y = self.base(x)
        grouped = x.reshape(worlds, -1, x.shape[-1])  # (G, rows, in)
        inner = torch.bmm(grouped, self.A.to(x.dtype).transpose(1, 2))  # (G, rows, r)
        wide = y.reshape(worlds, -1, y.shape[-1])  # (G, rows, out)
        adapted = torch.baddbmm(wide, inner, self.B.to(x.dtype).transpose(1, 2), alpha=self.scale)
        return adapted.reshape(y.shape)


def attach(model: nn.Module, stack: AdapterStack) -> dict[str, StackedLinear]:
    """Replace the stack's layers inside `model` by adapted ones and freeze everything else; returns them by name.

    The stack's tensors are not copied if device and type match. Every later batch must be laid out world by world.
    """
    stack.check_fits(linear_layers(model))
    model.requires_grad_(False)
    attached = {}
    for layer, A in stack.A.items():
        parent, leaf = _parent(model, layer)
        base = getattr(parent, leaf)
        device = next(base.parameters()).device
        adapted = StackedLinear(base, A.to(device), stack.B[layer].to(device), stack.spec)
        adapted.train(base.training)
        setattr(parent, leaf, adapted)
        attached[layer] = adapted
    return attached


def detach(model: nn.Module) -> None:
    """Restore the base layers."""
    for name, adapted in attached_layers(model).items():
        parent, leaf = _parent(model, name)
        setattr(parent, leaf, adapted.base)


def attached_layers(model: nn.Module) -> dict[str, StackedLinear]:
    """The adapted layers of `model`, by the name of the layer they replaced."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StackedLinear)}


def _parent(model: nn.Module, layer: str) -> tuple[nn.Module, str]:
    path, _, leaf = layer.rpartition(".")
    return model.get_submodule(path), leaf


def first_adapted(model: nn.Module, stack: AdapterStack) -> nn.Module | None:
    """The first decoder layer with adapters; None if some are outside the list of decoder layers."""
    parts = min(stack.layers, key=decoder_layer).split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    layers = ".".join(parts[:place])
    if not all(name.startswith(f"{layers}.") and decoder_layer(name) >= 0 for name in stack.layers):
        return None
    return model.get_submodule(".".join(parts[: place + 1]))


class GenericModel:
    """A Hugging Face decoder whose batch is all worlds and the public model. A block holds a whole sequence.

    Layers below the first adapted one run once for all worlds, and cache once, where the model's code lets a batch grow
    on its way: tried with a short text.
    """

    def __init__(self, model: PreTrainedModel, stack: AdapterStack, num_blocks: int, context: int) -> None:
        self.head = output_layer(model).weight
        attach(model, stack.with_public().to(model.device, model.dtype))
        self._decoder: Any = model.get_decoder()
        self._caches = [DynamicCache(config=model.config) for _ in range(num_blocks)]
        self.num_worlds, self.num_blocks, self.context, self.page = stack.num_rows, num_blocks, context, context
        self.trunk = 0  # layers that run once for all worlds
        self._first = first_adapted(model, stack)
        if self._first is not None and stack.trunk and self.num_worlds > 1 and context >= _TRIAL[-1][1]:
            self._share(stack.trunk)

    @torch.inference_mode()
    def prefill(self, chunk: PromptChunk) -> Tensor:
        """Parts of prompts one after another, T tokens in all; hidden states (W, T, d)."""
        ids = torch.from_numpy(chunk.tokens).to(self.head.device)
        parts = zip(
            torch.split(ids, chunk.lengths.tolist()), chunk.starts.tolist(), chunk.table[:, 0].tolist(), strict=True
        )
        return torch.cat([self._read(*part) for part in parts], 1)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, table: Tensor, reach: int) -> Tensor:
        """One token for each of n sequences, one after another; hidden states (W, n, d)."""
        rows = zip(torch.split(tokens, 1), positions.tolist(), table[:, 0].tolist(), strict=True)
        return torch.cat([self._read(*row) for row in rows], 1)

    def _read(self, tokens: Tensor, start: int, block: int) -> Tensor:
        """Tokens (c,) of one sequence at positions start … start+c; hidden states (W, c, d)."""
        if start == 0:
            self._caches[block] = DynamicCache(config=self._decoder.config)
        cache = self._caches[block]
        if cache.get_seq_length() > start:
            cache.crop(start - cache.get_seq_length())
        rows = tokens.unsqueeze(0).repeat(1 if self.trunk else self.num_worlds, 1)
        with self._repeating():
            hidden: Tensor = self._decoder(input_ids=rows, past_key_values=cache, use_cache=True).last_hidden_state
        return hidden

    def _repeating(self) -> AbstractContextManager[Any]:
        """While it lasts, the first adapted layer gets a row for each world; nothing where no trunk is shared."""
        if self._first is None or not self.trunk:
            return nullcontext()
        return self._first.register_forward_pre_hook(self._repeat, with_kwargs=True)

    def _share(self, trunk: int) -> None:
        """Run the layers below this one once for all worlds if that changes nothing but rounding."""
        expected = self._try()
        self.trunk = trunk
        try:
            problem = _difference(self._try(), expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # unknown code
            problem = type(error).__name__
        if problem is None:
            return
        self.trunk = 0
        warnings.warn(
            f"The code of {type(self._decoder).__name__} needs all worlds from its first layer on ({problem}), so "
            f"the {trunk} layers without adapters run once for each world: slower, with the same votes.",
            stacklevel=2,
        )

    @torch.inference_mode()
    def _try(self) -> Tensor:
        """Hidden states of a short text that is read in parts."""
        length = _TRIAL[-1][1]
        text = torch.arange(1, length + 1, device=self.head.device) * (len(self.head) // (length + 1))
        hidden = torch.cat([self._read(text[start:end], start, 0) for start, end in _TRIAL], 1)
        self._caches[0] = DynamicCache(config=self._decoder.config)
        return hidden

    def _repeat(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """One row of hidden states, the first argument of a decoder layer, as a row for each world."""
        if args:
            return (args[0].repeat(self.num_worlds, 1, 1), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": kwargs["hidden_states"].repeat(self.num_worlds, 1, 1)}


def _difference(hidden: Tensor, expected: Tensor) -> str | None:
    """How hidden states (W, c, d) differ by more than rounding; None if they do not."""
    if hidden.shape != expected.shape:
        return f"{len(hidden)} rows instead of {len(expected)}"
    lengths = expected.float().norm(dim=-1)  # (W, c)
    furthest = float(((hidden.float() - expected.float()).norm(dim=-1) / lengths).max())
    return None if furthest <= _ROUNDING[hidden.dtype] else f"hidden states {furthest:.0%} off"
