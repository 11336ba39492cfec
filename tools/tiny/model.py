"""GPT-2 as plain PyTorch, with the parameter names and layouts of Hugging Face's GPT2LMHeadModel.

Written again because training wants a compiled forward pass with the loss inside; `to_hugging_face` shows that the two
are the same function (`tests/tools/test_tiny.py`). Linear weights are stored (in, out), as GPT-2 stores them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """11,993,216 parameters by default: just under 12 M, 24 MB in half precision."""

    vocab_size: int = 8192
    context: int = 512
    width: int = 320
    num_layers: int = 8
    num_heads: int = 5
    """Heads of 64, which the flash attention kernels like."""
    hidden: int = 1152
    """Of the feed-forward layers: a little under the usual 4 × width, which buys the eighth layer."""
    dropout: float = 0.05


class Linear(nn.Module):
    """GPT-2's `Conv1D`: y = x W + b with W (in, out)."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * std)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.c_attn = Linear(shape.width, 3 * shape.width, 0.02)
        self.c_proj = Linear(shape.width, shape.width, 0.02 / (2 * shape.num_layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.c_attn(x).view(batch, length, 3, self.num_heads, -1)  # (B, T, 3, H, 64)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (B, H, T, 64) each
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = Linear(shape.width, shape.hidden, 0.02)
        self.c_proj = Linear(shape.hidden, shape.width, 0.02 / (2 * shape.num_layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = FeedForward(shape)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.ln_f = nn.LayerNorm(shape.width)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.01)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class TinyGPT2(nn.Module):
    """The language model; the output layer is the input embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.transformer = Transformer(shape)

    def logits(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        return linear(self.transformer(tokens), self.transformer.wte.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss in nats of predicting tokens[:, 1:]."""
        logits = self.logits(tokens[:, :-1])
        return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def to_hugging_face(model: TinyGPT2, end_of_text: int) -> GPT2LMHeadModel:
    """The same function as a GPT2LMHeadModel, in single precision on the CPU."""
    shape = model.shape
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_inner=shape.hidden,
        activation_function="gelu_new",
        resid_pdrop=0.0,  # dropout served the many epochs of pretraining; an adapter brings its own
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        tie_word_embeddings=True,
    )
    twin = GPT2LMHeadModel(config)
    weights = {name: value.detach().float().cpu() for name, value in model.state_dict().items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    twin.load_state_dict(weights)
    twin.tie_weights()
    return twin.eval()
