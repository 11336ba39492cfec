"""The forward pass of all worlds in plain torch: the CPU's path, and the reference for every faster one.

    x (W, rows, d) ── norm ── one base product for W·rows rows ── + B_w (A_w x) per world ── attention ── …

Rows are world-major, sequences inside a world in slot order. Knows tokens and positions only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from paclm.engine.kv_cache import KVCache
from paclm.engine.weights import Block, Norm, Product, Weights


def normalise(x: Tensor, norm: Norm) -> Tensor:
    if norm.bias is None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon)
        return norm.weight * wide.to(x.dtype)
    return functional.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.epsilon)


def apply_product(x: Tensor, product: Product) -> Tensor:
    """x (W, rows, in) → (W, rows, out)."""
    worlds, rows, size = x.shape
    flat = x.reshape(worlds * rows, size)
    y = flat @ product.weight if product.bias is None else torch.addmm(product.bias, flat, product.weight)
    y = y.view(worlds, rows, -1)
    if product.A is None or product.B is None:
        return y
    inner = torch.bmm(x, product.A.transpose(1, 2))  # (W, rows, parts·r)
    rank, start = product.B.shape[1], 0
    for part, width in enumerate(product.parts):
        columns = slice(start, start + width)
        y[:, :, columns].baddbmm_(inner[:, :, part * rank : (part + 1) * rank], product.B[:, :, columns])
        start += width
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves convention: x (…, head size), cos and sin broadcast to it."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class StackedModel:
    """All worlds and the public model over one cache. `prefill` takes blocks of positions, `decode` single ones."""

    def __init__(self, weights: Weights, num_slots: int) -> None:
        w = self.weights = weights
        shape = (num_slots, w.num_worlds, w.num_kv_heads, w.context, w.head_size)
        self.cache = KVCache(len(w.blocks), shape, w.dtype, w.device)
        self.move = self.cache.move
        self.num_worlds, self.num_slots, self.context, self.head = w.num_worlds, num_slots, w.context, w.head

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, start: int, slot: int) -> Tensor:
        """Tokens (c,) of one sequence at positions start … start+c; hidden states (W, c, d)."""
        w, c = self.weights, tokens.shape[0]
        positions = torch.arange(start, start + c, device=tokens.device)  # (c,)
        mask = None
        if start:
            mask = torch.arange(start + c, device=tokens.device) <= positions.unsqueeze(1)  # (c, start+c)
        x = self._embed(tokens, positions)
        for layer, block in enumerate(w.blocks):
            q, k, v = (part.transpose(1, 2) for part in self._queries(x, block, positions))  # (W, heads, c, size)
            keys, values = self.cache.write_block(layer, slot, start, k, v)  # (W, kv heads, start+c, size)
            out = functional.scaled_dot_product_attention(
                q, keys, values, mask, is_causal=mask is None, enable_gqa=w.num_heads != w.num_kv_heads
            )
            x = self._finish(x, out.transpose(1, 2).flatten(2), block)
        return normalise(x, w.norm)

    @torch.inference_mode()
    def prefill_many(self, tokens: Tensor, slot: int) -> Tensor:
        """Tokens (s, c) of s sequences from their start, in the slots from `slot` on; hidden states (W, s, c, d)."""
        w, (s, c) = self.weights, tokens.shape
        positions = torch.arange(c, device=tokens.device).repeat(s)  # (s·c,)
        x = self._embed(tokens.flatten(), positions)
        for layer, block in enumerate(w.blocks):
            q, k, v = (
                part.reshape(w.num_worlds * s, c, -1, w.head_size).transpose(1, 2)  # (W·s, heads, c, size)
                for part in self._queries(x, block, positions)
            )
            for kept, new in ((self.cache.keys, k), (self.cache.values, v)):
                kept[layer][slot : slot + s, :, :, :c] = new.view(w.num_worlds, s, *new.shape[1:]).transpose(0, 1)
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=w.num_heads != w.num_kv_heads
            )
            x = self._finish(x, out.transpose(1, 2).reshape(w.num_worlds, s * c, -1), block)
        return normalise(x, w.norm).view(w.num_worlds, s, c, -1)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, reach: int) -> Tensor:
        """One token for each of the first n slots, at positions (n,) < reach; hidden states (W, n, d)."""
        w = self.weights
        n = tokens.shape[0]
        late = torch.arange(reach, device=tokens.device) > positions.unsqueeze(1)  # (n, reach)
        bias = torch.zeros(n, reach, device=tokens.device).masked_fill_(late, float("-inf"))
        bias = bias.repeat_interleave(w.num_worlds * w.num_kv_heads, 0).unsqueeze(1)  # (n·W·kv, 1, reach)
        x = self._embed(tokens, positions)
        for layer, block in enumerate(w.blocks):
            q, k, v = (part.transpose(0, 1) for part in self._queries(x, block, positions))  # (n, W, heads, size)
            keys, values = self.cache.write_step(layer, positions, reach, k, v)  # (n·W·kv, reach, size), views
            q = q.reshape(keys.shape[0], -1, w.head_size) * w.head_size**-0.5  # (n·W·kv, heads per kv, size)
            scores = torch.bmm(q, keys.transpose(1, 2)).float() + bias
            out = torch.bmm(torch.softmax(scores, -1).to(values.dtype), values)
            out = out.view(n, w.num_worlds, -1).transpose(0, 1)
            x = self._finish(x, out, block)
        return normalise(x, w.norm)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        w = self.weights
        x = w.embed[tokens]  # (rows, d)
        if w.position is not None:
            x = x + w.position[positions]
        return x.unsqueeze(0).repeat(w.num_worlds, 1, 1)

    def _queries(self, x: Tensor, block: Block, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (W, rows, heads, size); positions (rows,)."""
        w = self.weights
        joined = apply_product(normalise(x, block.norm_attention), block.attention_in)
        joined = joined.view(*joined.shape[:2], w.num_heads + 2 * w.num_kv_heads, w.head_size)
        q, k, v = torch.split(joined, [w.num_heads, w.num_kv_heads, w.num_kv_heads], 2)
        if block.norm_query is not None and block.norm_key is not None:
            q, k = normalise(q, block.norm_query), normalise(k, block.norm_key)
        if w.rotary is not None:
            cos, sin = (table[positions].unsqueeze(1) for table in w.rotary)  # (rows, 1, size)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def _finish(self, x: Tensor, attended: Tensor, block: Block) -> Tensor:
        """Add the attention output (W, rows, heads·size) and the MLP to the residual stream."""
        x = x + apply_product(attended, block.attention_out)
        inner = apply_product(normalise(x, block.norm_mlp), block.mlp_in)
        if self.weights.is_gated:
            gate, up = inner.chunk(2, -1)
            inner = self.weights.activation(gate) * up
        else:
            inner = self.weights.activation(inner)
        return x + apply_product(inner, block.mlp_out)
