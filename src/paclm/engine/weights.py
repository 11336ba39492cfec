"""The tensors of a base model, with every world's adapter packed beside the product it corrects.

Covers the GPT-2 and Llama families; other models (`unsupported`) run by their own code (`generic`). Layers that share
an input (q, k, v; gate, up) become one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from paclm.engine.adapters import AdapterStack
from paclm.engine.base_model import changed_logits
from paclm.engine.stored_model import StoredModel
from paclm.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    trunk: int  # layers below the first adapted one: the same for all worlds, so computed and cached once

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


def unsupported(model: PreTrainedModel | StoredModel) -> str | None:
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


def take_apart(model: PreTrainedModel | StoredModel, stack: AdapterStack, context: int) -> Weights:
    """Plain tensors of `model` with the rows of `stack`, the public model last; shares the model's memory.

    Uses a stored model up: layers that become one product are not kept beside it.
    """
    stored = model if isinstance(model, StoredModel) else StoredModel.of(model)
    config, tensors = stored.config, stored.tensors
    is_gpt2, heads = config.model_type == "gpt2", config.num_attention_heads
    decoder, layers = ("transformer", "h") if is_gpt2 else ("model", "layers")
    embed = tensors[f"{decoder}.wte.weight" if is_gpt2 else f"{decoder}.embed_tokens.weight"]
    epsilon = config.layer_norm_epsilon if is_gpt2 else config.rms_norm_eps
    activation = config.activation_function if is_gpt2 else config.hidden_act
    return Weights(
        num_worlds=stack.num_rows,
        num_heads=heads,
        num_kv_heads=heads if is_gpt2 else config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        context=context,
        embed=embed,
        position=tensors[f"{decoder}.wpe.weight"][:context] if is_gpt2 else None,
        rotary=_rotary(stored, context, embed),
        blocks=tuple(
            _block(tensors, f"{decoder}.{layers}.{i}.", is_gpt2, epsilon, stack)
            for i in range(config.num_hidden_layers)
        ),
        norm=_norm(tensors, f"{decoder}.ln_f" if is_gpt2 else f"{decoder}.norm", epsilon),
        head=tensors["lm_head.weight"],
        activation=_activation(activation),
        activation_name=activation,
        is_gated=not is_gpt2,
        trunk=stack.trunk,
    )


def _rotary(stored: StoredModel, context: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines (context, head size) in the type of `like`, from float32 angles."""
    if stored.frequencies is None:
        return None
    places = torch.arange(context, device=like.device)
    angles = places.unsqueeze(1).float() * stored.frequencies.to(like.device)  # (context, head size / 2)
    angles = torch.cat((angles, angles), -1)
    cos, sin = (table * stored.rotary_scale for table in (angles.cos(), angles.sin()))
    return cos.to(like.dtype), sin.to(like.dtype)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name in ("gelu_new", "gelu_pytorch_tanh"):  # in one pass instead of Transformers' eight
        return partial(functional.gelu, approximate="tanh")
    if name == "silu":
        return functional.silu
    from transformers.activations import ACT2FN

    activation: Callable[[Tensor], Tensor] = ACT2FN[name]
    return activation


def _block(tensors: dict[str, Tensor], path: str, is_gpt2: bool, epsilon: float, stack: AdapterStack) -> Block:
    names = _GPT2_PRODUCTS if is_gpt2 else _LLAMA_PRODUCTS
    products = [_product(tensors, [path + name for name in group], is_gpt2, stack) for group in names]
    attention_in, attention_out, mlp_in, mlp_out = products
    before, after = ("ln_1", "ln_2") if is_gpt2 else ("input_layernorm", "post_attention_layernorm")
    norms = [_norm(tensors, path + name, epsilon) for name in (before, after)]
    own = [path + "self_attn.q_norm", path + "self_attn.k_norm"]
    extra = [_norm(tensors, name, epsilon) if f"{name}.weight" in tensors else None for name in own]
    return Block(norms[0], attention_in, attention_out, norms[1], mlp_in, mlp_out, *extra)


def _norm(tensors: dict[str, Tensor], name: str, epsilon: float) -> Norm:
    return Norm(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), float(epsilon))


def _product(tensors: dict[str, Tensor], names: list[str], is_gpt2: bool, stack: AdapterStack) -> Product:
    """One product for all layers that read the same input; a part without an adapter gets a zero one."""
    stored = [tensors.pop(f"{name}.weight") for name in names]
    kernels = stored if is_gpt2 else [weight.T for weight in stored]  # (in, out)
    weight = kernels[0] if len(kernels) == 1 else torch.cat([kernel.T for kernel in kernels]).T
    biases = [tensors.get(f"{name}.bias") for name in names]
    bias = None
    if any(isinstance(b, Tensor) for b in biases):
        empty = [weight.new_zeros(kernel.shape[1]) for kernel in kernels]
        bias = torch.cat([none if b is None else b for b, none in zip(biases, empty, strict=True)])
    sizes = tuple(int(kernel.shape[1]) for kernel in kernels)
    if not any(name in stack.A for name in names):
        return Product(weight, bias, None, None, sizes, tuple(names))
    worlds, rank, num_in = stack.num_worlds, stack.spec.rank, int(weight.shape[0])
    zeros = next(iter(stack.A.values())).new_zeros
    A = [stack.A[name] if name in stack.A else zeros(worlds, rank, num_in) for name in names]
    B = [
        stack.B[name].transpose(1, 2) if name in stack.B else zeros(worlds, rank, size)
        for name, size in zip(names, sizes, strict=True)
    ]
    packed = _pack(A, 1, 1.0, stack.num_rows, weight), _pack(B, 2, stack.spec.scale, stack.num_rows, weight)
    return Product(weight, bias, *packed, sizes, tuple(names))


def _pack(parts: list[Tensor], dim: int, scale: float, num_rows: int, like: Tensor) -> Tensor:
    """Parts side by side, scaled; a row beyond them is the public model's zero adapter."""
    joined = torch.cat(parts, dim)
    packed = torch.zeros(num_rows, *joined.shape[1:], dtype=like.dtype, device=like.device)
    packed[: len(joined)] = (joined * scale).to(packed)
    return packed
