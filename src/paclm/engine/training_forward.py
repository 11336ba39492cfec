"""The forward pass of training in plain tensors, for the GPT-2 and Llama families.

    embed ── norm ─┬─ q k v ── attention ── out ─ + norm ── mlp in ── activation ── mlp out ─ + norm ── … ── hidden
                   └ one product; adapters inside (`lora_product`); everything between products is elementwise

Computes what the model's own code does, faster for many worlds: layers that share an input are one product, adapters
have a hand-written gradient, and on a GPU elementwise operations are compiled into one kernel. Other models are trained
by their own code with adapted layers (`generic`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.causal_attention import attend
from paclm.engine.generic import StackedLinear, attach, detach
from paclm.engine.lora_product import Dropout, FrozenProduct, prepare_adapters
from paclm.engine.stacked import rotate
from paclm.engine.weights import Norm, take_apart, unsupported

Rotary = tuple[Tensor, Tensor]
NormParts = tuple[Tensor, Tensor | None, float]


@dataclass(frozen=True, slots=True)
class _Between:
    """The operations between products."""

    split_heads: Callable[..., tuple[Tensor, Tensor, Tensor]]
    add_and_norm: Callable[..., tuple[Tensor, Tensor]]
    activate: Callable[[Tensor], Tensor]

    def compiled(self) -> _Between:
        return _Between(torch.compile(self.split_heads), torch.compile(self.add_and_norm), torch.compile(self.activate))


class ResidualStream(NamedTuple):
    """The residual stream where it enters a decoder layer."""

    layer: int
    states: Tensor  # (rows · length, d)


class Forward(Protocol):
    """Hidden states of a batch laid out world by world, differentiable in the adapters."""

    is_recordable: bool  # whether a pass never waits for the GPU, so that a CUDA graph can hold it

    def __call__(
        self,
        ids: Tensor,
        A: Mapping[str, Tensor],
        B: Mapping[str, Tensor],
        scale: float,
        stream: ResidualStream | None = None,
    ) -> Tensor:
        """Token ids (rows, length) → hidden states (rows · length, d), ready for the output layer.

        A (G, r, in) and B (G, out, r) are by layer; no layers at all is the public model. With a `stream` the pass
        begins at its layer, and only the shape of the ids is used.
        """

    def close(self) -> None:
        """Restore the model."""


def make_forward(model: PreTrainedModel) -> Forward:
    """The fastest forward pass for this model."""
    if unsupported(model) is None:
        return PlainForward(model, compiled=model.device.type == "cuda" and _has_compiler())
    return OwnForward(model)


class OwnForward:
    """The model's own code with adapted layers: any decoder."""

    is_recordable = False  # unknown code

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers: dict[str, StackedLinear] = {}

    def __call__(
        self,
        ids: Tensor,
        A: Mapping[str, Tensor],
        B: Mapping[str, Tensor],
        scale: float,
        stream: ResidualStream | None = None,
    ) -> Tensor:
        assert stream is None
        if set(A) != set(self._layers):
            self.close()
            if A:
                rank = next(iter(A.values())).shape[1]
                spec = AdapterSpec(rank=rank, alpha=scale * rank)
                self._layers = attach(self._model, AdapterStack(spec, "", dict(A), dict(B)))
        for name, layer in self._layers.items():
            layer.A, layer.B = A[name], B[name]
        hidden: Tensor = self._model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1])

    def close(self) -> None:
        detach(self._model)
        self._layers = {}


class PlainForward:
    """Plain tensors of the model's weights: the GPT-2 and Llama families."""

    is_recordable = True

    def __init__(self, model: PreTrainedModel, compiled: bool) -> None:
        self.dropout: Dropout | None = None  # of adapters, in passes with gradients
        spec = AdapterSpec(rank=1)  # only the base tensors are used; adapters are passed to each call
        stack = AdapterStack.initial(find_targets(model, spec), spec, 1, 0, "")
        self.weights = take_apart(model, stack, model.config.max_position_embeddings)
        self._products = [
            tuple(
                FrozenProduct(product.names, product.weight, product.bias, product.parts)
                for product in (block.attention_in, block.attention_out, block.mlp_in, block.mlp_out)
            )
            for block in self.weights.blocks
        ]
        activation = _gated(self.weights.activation) if self.weights.is_gated else self.weights.activation
        self._plain = _Between(_heads, _add_and_norm, activation)
        self._training = self._plain.compiled() if compiled else self._plain

    def __call__(
        self,
        ids: Tensor,
        A: Mapping[str, Tensor],
        B: Mapping[str, Tensor],
        scale: float,
        stream: ResidualStream | None = None,
    ) -> Tensor:
        _, hidden = self._decode(ids, stream or self._embed(ids), len(self.weights.blocks), A, B, scale)
        return hidden

    @torch.no_grad()
    def stream(self, ids: Tensor, layer: int) -> ResidualStream:
        """The stream of the public model at a decoder layer, without gradient."""
        states, _ = self._decode(ids, self._embed(ids), layer, {}, {}, 1.0)
        return ResidualStream(layer, states)

    def _embed(self, ids: Tensor) -> ResidualStream:
        w = self.weights
        x = w.embed[ids]  # (rows, length, d)
        if w.position is not None:
            x = x + w.position[: ids.shape[1]]
        return ResidualStream(0, x.view(ids.numel(), -1))

    def _decode(
        self,
        ids: Tensor,
        stream: ResidualStream,
        last: int,
        A: Mapping[str, Tensor],
        B: Mapping[str, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """The stream where it enters layer `last`, and the same normalised for that layer or the output layer."""
        w = self.weights
        between = self._training if torch.is_grad_enabled() else self._plain
        dropout = self.dropout if torch.is_grad_enabled() else None
        rows, length = ids.shape
        first, x = stream
        rotary = None if w.rotary is None else _upto(length, w.rotary)
        shape = (rows, length, w.num_heads, w.num_kv_heads, w.head_size)
        blocks, own = w.blocks[first:last], self._products[first:last]
        norms = [block.norm_attention for block in w.blocks] + [w.norm]
        hidden = _norm(x, *_parts(norms[first]))
        adapters = [prepare_adapters(same, A, B, scale) for same in zip(*own, strict=True)]
        by_block = zip(blocks, own, zip(*adapters, strict=True), norms[first + 1 : last + 1], strict=True)
        for block, products, (of_in, of_out, of_mlp_in, of_mlp_out), next_norm in by_block:
            attention_in, attention_out, mlp_in, mlp_out = products
            joined = attention_in(hidden, of_in, dropout)
            queries = None if block.norm_query is None else _parts(block.norm_query)
            keys = None if block.norm_key is None else _parts(block.norm_key)
            q, k, v = between.split_heads(joined, shape, rotary, queries, keys)  # (rows, length, heads, size)
            mixed = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # (rows, heads, length, size)
            mixed = mixed.transpose(1, 2).reshape(rows * length, -1)
            x, hidden = between.add_and_norm(x, attention_out(mixed, of_out, dropout), *_parts(block.norm_mlp))
            inner = between.activate(mlp_in(hidden, of_mlp_in, dropout))
            x, hidden = between.add_and_norm(x, mlp_out(inner, of_mlp_out, dropout), *_parts(next_norm))
        return x, hidden

    def close(self) -> None:
        """The model was not changed."""


def _upto(length: int, rotary: Rotary) -> Rotary:
    cos, sin = rotary
    return cos[:length].unsqueeze(1), sin[:length].unsqueeze(1)  # (length, 1, size)


def _parts(norm: Norm) -> NormParts:
    return norm.weight, norm.bias, norm.epsilon


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    if bias is not None:
        return functional.layer_norm(x, weight.shape, weight, bias, epsilon)
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def _add_and_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, _norm(total, weight, bias, epsilon)


def _heads(
    joined: Tensor,
    shape: tuple[int, int, int, int, int],
    rotary: Rotary | None,
    queries: NormParts | None,
    keys: NormParts | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (rows, length, heads, size) from one product's output (places, all heads · size)."""
    rows, length, num_heads, num_kv_heads, size = shape
    heads = joined.view(rows, length, num_heads + 2 * num_kv_heads, size)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 2)
    if queries is not None and keys is not None:
        q, k = _norm(q, *queries), _norm(k, *keys)
    if rotary is not None:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
    return q, k, v


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def activate(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, -1)
        return activation(gate) * up

    return activate


def _has_compiler() -> bool:
    """Whether there is a C compiler, which Triton needs for each kernel."""
    return any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang"))
