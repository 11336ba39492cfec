"""The tensors of a base model, with every world's adapter packed beside the product it corrects.

Covers the GPT-2 and Llama families; other models (`unsupported`) run by their own code (`generic`). Layers that share
an input (q, k, v; gate, up) become one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from paclm.engine.adapters import AdapterStack
from paclm.engine.base_model import changed_logits
from paclm.errors import ModelError

LLAMA_FAMILY = ("llama", "qwen2", "qwen3", "mistral")

_GPT2_PRODUCTS = (("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",))
_LLAMA_PRODUCTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Layers of each product of a decoder layer: attention in and out, MLP in and out."""


@dataclass(frozen=True, slots=True)
class Product:
    """y = x W + b, plus each world's adapter. Several layers with the same input are parts side by side."""

    weight: Tensor  # (in, out)
    bias: Tensor | None  # (out,)
    A: Tensor | None  # (W, parts·r, in), contiguous along the input
    B: Tensor | None  # (W, r, out), already scaled by α / r
    parts: tuple[int, ...]  # output sizes of the parts, in order
    names: tuple[str, ...]  # full names of the layers that are the parts


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer norm, or RMS norm where there is no bias."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer."""

    norm_attention: Norm
    attention_in: Product
    attention_out: Product
    norm_mlp: Norm
    mlp_in: Product
    mlp_out: Product
    norm_query: Norm | None = None
    norm_key: Norm | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything a forward pass of all worlds needs."""

    num_worlds: int  # W: all worlds and the public model, which is the last
    num_heads: int
    num_kv_heads: int
    head_size: int
    context: int
    embed: Tensor  # (V, d)
    position: Tensor | None  # (context, d), GPT-2
    rotary: tuple[Tensor, Tensor] | None  # cos, sin (context, head_size), Llama
    blocks: tuple[Block, ...]
    norm: Norm
    head: Tensor  # (V, d)
    activation: Callable[[Tensor], Tensor]
    activation_name: str
    is_gated: bool

    @property
    def hidden_size(self) -> int:
        return int(self.embed.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """The layer that turns hidden states into logits; refuses models whose logits are not a plain product.

    Training and voting both call it, so that no model is trained for hours that could not vote.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        raise ModelError(f"{type(model).__name__} has no plain output layer, so its worlds could not vote.")
    if setting := changed_logits(model.config):
        raise ModelError(f"{type(model).__name__} changes its logits ({setting}), so its worlds could not vote.")
    return head


def unsupported(model: PreTrainedModel) -> str | None:
    """Why this model is not covered here; None if it is."""
    config = model.config
    kind = config.model_type
    if kind == "gpt2":
        if config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn or not config.scale_attn_weights:
            return "it scales its attention in an unusual way"
        return None
    if kind not in LLAMA_FAMILY:
        return f"its type {kind!r} is neither gpt2 nor one of {', '.join(LLAMA_FAMILY)}"
    if getattr(config, "use_sliding_window", kind == "mistral") and getattr(config, "sliding_window", None):
        return "its attention uses a sliding window"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return "its rotary table changes with the length of the text"
    return None


def take_apart(model: PreTrainedModel, stack: AdapterStack, context: int) -> Weights:
    """Plain tensors of `model` with the worlds of `stack` and the public model; shares the model's memory."""
    model.requires_grad_(False)
    config, is_gpt2 = model.config, model.config.model_type == "gpt2"
    decoder: Any = model.transformer if is_gpt2 else model.model
    path, layers = ("transformer.h", decoder.h) if is_gpt2 else ("model.layers", decoder.layers)
    embed, heads = model.get_input_embeddings().weight, config.num_attention_heads
    rotary = None
    if not is_gpt2:
        places = torch.arange(context, device=model.device).unsqueeze(0)
        cos, sin = decoder.rotary_emb(embed[:1].unsqueeze(0), places)
        rotary = (cos[0].contiguous(), sin[0].contiguous())
    activation = config.activation_function if is_gpt2 else config.hidden_act
    is_tanh = activation in ("gelu_new", "gelu_pytorch_tanh")  # in one pass instead of Transformers' eight
    return Weights(
        num_worlds=stack.num_worlds + 1,
        num_heads=heads,
        num_kv_heads=heads if is_gpt2 else config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        context=context,
        embed=embed,
        position=decoder.wpe.weight[:context] if is_gpt2 else None,
        rotary=rotary,
        blocks=tuple(_block(layer, f"{path}.{i}.", is_gpt2, stack) for i, layer in enumerate(layers)),
        norm=_norm(decoder.ln_f if is_gpt2 else decoder.norm),
        head=model.get_output_embeddings().weight,
        activation=partial(functional.gelu, approximate="tanh") if is_tanh else ACT2FN[activation],
        activation_name=activation,
        is_gated=not is_gpt2,
    )


def _block(layer: Any, path: str, is_gpt2: bool, stack: AdapterStack) -> Block:
    names = _GPT2_PRODUCTS if is_gpt2 else _LLAMA_PRODUCTS
    products = [_product([(path + name, layer.get_submodule(name)) for name in group], stack) for group in names]
    attention_in, attention_out, mlp_in, mlp_out = products
    if is_gpt2:
        return Block(_norm(layer.ln_1), attention_in, attention_out, _norm(layer.ln_2), mlp_in, mlp_out)
    before, after, own = layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn
    norms = [_norm(getattr(own, name)) if hasattr(own, name) else None for name in ("q_norm", "k_norm")]
    return Block(_norm(before), attention_in, attention_out, _norm(after), mlp_in, mlp_out, *norms)


def _norm(module: Any) -> Norm:
    epsilon = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return Norm(module.weight, getattr(module, "bias", None), float(epsilon))


def _product(layers: list[tuple[str, Any]], stack: AdapterStack) -> Product:
    """One product for all layers that read the same input; a part without an adapter gets a zero one."""
    kernels: list[Tensor] = [
        module.weight if isinstance(module, Conv1D) else module.weight.T for _, module in layers
    ]  # (in, out)
    weight = kernels[0] if len(kernels) == 1 else torch.cat([kernel.T for kernel in kernels]).T
    biases = [module.bias for _, module in layers]
    given = [bias for bias in biases if isinstance(bias, Tensor)]
    bias = None
    if given:
        empty = [weight.new_zeros(kernel.shape[1]) for kernel in kernels]
        bias = torch.cat([b if isinstance(b, Tensor) else none for b, none in zip(biases, empty, strict=True)])
    sizes = tuple(int(kernel.shape[1]) for kernel in kernels)
    names = tuple(name for name, _ in layers)
    if not any(name in stack.A for name in names):
        return Product(weight, bias, None, None, sizes, names)
    worlds, rank, num_in = stack.num_worlds, stack.spec.rank, int(weight.shape[0])
    zeros = next(iter(stack.A.values())).new_zeros
    A = [stack.A[name] if name in stack.A else zeros(worlds, rank, num_in) for name in names]
    B = [
        stack.B[name].transpose(1, 2) if name in stack.B else zeros(worlds, rank, size)
        for name, size in zip(names, sizes, strict=True)
    ]
    return Product(weight, bias, _pack(A, 1, 1.0, weight), _pack(B, 2, stack.spec.scale, weight), sizes, names)


def _pack(parts: list[Tensor], dim: int, scale: float, like: Tensor) -> Tensor:
    """Parts side by side, scaled, with the public model's zero adapter as one more world at the end."""
    joined = torch.cat(parts, dim)
    packed = torch.zeros(joined.shape[0] + 1, *joined.shape[1:], dtype=like.dtype, device=like.device)
    packed[:-1] = (joined * scale).to(packed)
    return packed
