"""A base model taken apart into plain tensors, with every world's adapter packed beside the product it corrects.

Covers the GPT-2 and Llama families; `unsupported` says why a model is not among them, and the engine then runs the
model's own code with adapted layers instead. Layers that share an input (q, k, v; gate, up) become one product.
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
from paclm.engine.base import changed_logits
from paclm.errors import ModelError

LLAMA_FAMILY = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True, slots=True)
class Product:
    """y = x W + b, plus each world's adapter. Several layers with the same input are parts side by side."""

    weight: Tensor
    """(in, out)"""
    bias: Tensor | None
    """(out,)"""
    A: Tensor | None
    """(W, parts·r, in), contiguous along the input"""
    B: Tensor | None
    """(W, r, out), already scaled by α / r"""
    parts: tuple[int, ...]
    """Output sizes of the parts, in order."""


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

    num_worlds: int
    """W: all worlds and the public model, which is the last."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    context: int
    embed: Tensor
    """(V, d)"""
    position: Tensor | None
    """(context, d), GPT-2"""
    rotary: tuple[Tensor, Tensor] | None
    """cos, sin (context, head_size), Llama"""
    blocks: tuple[Block, ...]
    norm: Norm
    head: Tensor
    """(V, d)"""
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
    """The layer that turns hidden states into logits by a product alone: training and voting know no other kind.

    Both refuse the same models, so that nothing is trained for hours that could not vote.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        raise ModelError(f"{type(model).__name__} has no plain output layer, so its worlds could not vote.")
    if setting := changed_logits(model.config):
        raise ModelError(f"{type(model).__name__} changes its logits ({setting}), so its worlds could not vote.")
    return head


def unsupported(model: PreTrainedModel) -> str | None:
    """Why this model cannot be taken apart here; None when it can."""
    config = model.config
    kind = config.model_type
    if kind == "gpt2":
        if config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn or not config.scale_attn_weights:
            return "it scales its attention in an unusual way"
        return None
    if kind not in LLAMA_FAMILY:
        return f"its type {kind!r} is neither gpt2 nor one of {', '.join(LLAMA_FAMILY)}"
    if getattr(config, "use_sliding_window", kind == "mistral") and getattr(config, "sliding_window", None):
        return "its attention slides over a window"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return "its rotary table changes with the length of the text"
    return None


def take_apart(model: PreTrainedModel, stack: AdapterStack, context: int) -> Weights:
    """Plain tensors of `model` with the worlds of `stack` and the public model; shares the model's memory."""
    build = _gpt2 if model.config.model_type == "gpt2" else _llama
    model.requires_grad_(False)
    return build(model, stack, context)


def _gpt2(model: Any, stack: AdapterStack, context: int) -> Weights:
    config = model.config
    blocks = []
    for i, block in enumerate(model.transformer.h):
        path = f"transformer.h.{i}."
        blocks.append(
            Block(
                norm_attention=_norm(block.ln_1),
                attention_in=_product([(path + "attn.c_attn", block.attn.c_attn)], stack),
                attention_out=_product([(path + "attn.c_proj", block.attn.c_proj)], stack),
                norm_mlp=_norm(block.ln_2),
                mlp_in=_product([(path + "mlp.c_fc", block.mlp.c_fc)], stack),
                mlp_out=_product([(path + "mlp.c_proj", block.mlp.c_proj)], stack),
            )
        )
    return Weights(
        num_worlds=stack.num_worlds + 1,
        num_heads=config.n_head,
        num_kv_heads=config.n_head,
        head_size=config.n_embd // config.n_head,
        context=context,
        embed=model.transformer.wte.weight,
        position=model.transformer.wpe.weight[:context],
        rotary=None,
        blocks=tuple(blocks),
        norm=_norm(model.transformer.ln_f),
        head=model.lm_head.weight,
        activation=_activation(config.activation_function),
        activation_name=config.activation_function,
        is_gated=False,
    )


def _llama(model: Any, stack: AdapterStack, context: int) -> Weights:
    config = model.config
    blocks = []
    for i, layer in enumerate(model.model.layers):
        path = f"model.layers.{i}."
        attention, mlp = layer.self_attn, layer.mlp
        blocks.append(
            Block(
                norm_attention=_norm(layer.input_layernorm),
                attention_in=_product(
                    [(f"{path}self_attn.{name}", getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")],
                    stack,
                ),
                attention_out=_product([(path + "self_attn.o_proj", attention.o_proj)], stack),
                norm_mlp=_norm(layer.post_attention_layernorm),
                mlp_in=_product(
                    [(f"{path}mlp.{name}", getattr(mlp, name)) for name in ("gate_proj", "up_proj")], stack
                ),
                mlp_out=_product([(path + "mlp.down_proj", mlp.down_proj)], stack),
                norm_query=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
                norm_key=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
            )
        )
    places = torch.arange(context, device=model.device).unsqueeze(0)
    cos, sin = model.model.rotary_emb(model.model.embed_tokens.weight[:1].unsqueeze(0), places)
    return Weights(
        num_worlds=stack.num_worlds + 1,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        context=context,
        embed=model.model.embed_tokens.weight,
        position=None,
        rotary=(cos[0].contiguous(), sin[0].contiguous()),
        blocks=tuple(blocks),
        norm=_norm(model.model.norm),
        head=model.lm_head.weight,
        activation=_activation(config.hidden_act),
        activation_name=config.hidden_act,
        is_gated=True,
    )


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    """By its name in Transformers, which spells GELU's tanh form out in eight passes; here it is one."""
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return partial(functional.gelu, approximate="tanh")
    function: Callable[[Tensor], Tensor] = ACT2FN[name]
    return function


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
    names = [name for name, _ in layers]
    if not any(name in stack.A for name in names):
        return Product(weight, bias, None, None, sizes)
    worlds, rank, num_in = stack.num_worlds, stack.spec.rank, int(weight.shape[0])
    zeros = next(iter(stack.A.values())).new_zeros
    A = [stack.A[name] if name in stack.A else zeros(worlds, rank, num_in) for name in names]
    B = [
        stack.B[name].transpose(1, 2) if name in stack.B else zeros(worlds, rank, size)
        for name, size in zip(names, sizes, strict=True)
    ]
    return Product(weight, bias, _pack(A, 1, 1.0, weight), _pack(B, 2, stack.spec.scale, weight), sizes)


def _pack(parts: list[Tensor], dim: int, scale: float, like: Tensor) -> Tensor:
    """Parts side by side, scaled, with the public model's zero adapter as one more world at the end."""
    joined = torch.cat(parts, dim)
    packed = torch.zeros(joined.shape[0] + 1, *joined.shape[1:], dtype=like.dtype, device=like.device)
    packed[:-1] = (joined * scale).to(packed)
    return packed
