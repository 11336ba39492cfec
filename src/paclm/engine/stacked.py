"""The forward pass of all worlds in plain torch: the CPU's path, and the reference for every faster one.

    trunk     x (1, rows, d) ── layers without adapters, once for all worlds ── repeated for W worlds
    above it  x (W, rows, d) ── norm ── one base product for W·rows rows ── + B_w (A_w x) per world ── attention ── …

Rows are world-major, sequences inside a world in the order given. Knows tokens and positions only.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paclm.engine.decode_step import PromptChunk
from paclm.engine.determinism import IntArray
from paclm.engine.kv_cache import PAGES, KVCache, Run
from paclm.engine.weights import Block, Norm, Product, Weights

_COPIED = 2**21  # elements of keys that a pass over a long prompt copies at a time: about what caches hold

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values), each (W, n, heads, size), → (W, n, heads · size)."""


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


def _runs(blocks: IntArray, places: IntArray) -> list[Run]:
    """Rows (T,) that go to these places of these blocks, as runs of consecutive places."""
    is_next = (blocks[1:] == blocks[:-1]) & (places[1:] == places[:-1] + 1)
    firsts = [0, *(np.flatnonzero(~is_next) + 1).tolist(), len(blocks)]
    return [Run(int(blocks[row]), int(places[row]), row, end - row) for row, end in pairwise(firsts)]


class StackedModel:
    """All worlds and the public model over one cache. `prefill` takes parts of prompts, `decode` single tokens."""

    def __init__(self, weights: Weights, num_blocks: int, page: int | None = None) -> None:
        w = self.weights = weights
        self.page = page or PAGES[w.device.type]
        rows = [1 if layer < w.trunk else w.num_worlds for layer in range(len(w.blocks))]
        self.cache = KVCache(rows, (num_blocks, w.num_kv_heads, self.page, w.head_size), w.dtype, w.device)
        self.num_worlds, self.num_blocks, self.context, self.head = w.num_worlds, num_blocks, w.context, w.head

    @torch.inference_mode()
    def prefill(self, chunk: PromptChunk) -> Tensor:
        """Parts of prompts, T tokens in all; hidden states (W, T, d)."""
        w, device = self.weights, self.head.device
        offsets = np.concatenate([np.arange(n) for n in chunk.lengths])  # (T,) places in the parts
        positions = np.repeat(chunk.starts, chunk.lengths) + offsets
        blocks = np.repeat(chunk.table, chunk.lengths, 0)[np.arange(len(positions)), positions // self.page]
        at = torch.from_numpy(positions).to(device)
        runs = _runs(blocks, positions % self.page)
        targets = torch.from_numpy(blocks).long().to(device), at % self.page
        x = self._embed(torch.from_numpy(chunk.tokens).to(device), at)
        for layer, block in enumerate(w.blocks):
            x = self._spread(x, layer)
            q, k, v = self._queries(x, block, at)  # (W, T, heads, size)
            if device.type == "cuda":
                self.cache.scatter(layer, *targets, k, v)
            else:
                self.cache.write(layer, runs, k, v)
            x = self._finish(x, self._attend_parts(layer, chunk, q, k, v), block)
        return normalise(x, w.norm)

    def _attend_parts(self, layer: int, chunk: PromptChunk, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of every part to all of its sequence before it: (W, T, heads · size)."""
        w, (worlds, T) = self.weights, q.shape[:2]
        is_alike = not chunk.starts.any() and (chunk.lengths == chunk.lengths[0]).all()
        if is_alike and len(chunk.lengths) * worlds < 2**16:  # attention kernels count these in 16 bits
            q, k, v = (part.reshape(-1, int(chunk.lengths[0]), *part.shape[2:]).transpose(1, 2) for part in (q, k, v))
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=w.num_heads != w.num_kv_heads
            )  # (W·s, heads, c, size)
            return out.transpose(1, 2).reshape(worlds, T, -1)
        out, row = torch.empty_like(q), 0
        for start, length, blocks in zip(
            chunk.starts.tolist(), chunk.lengths.tolist(), chunk.table.tolist(), strict=True
        ):
            rows, end = slice(row, row + length), start + length
            row += length
            if start == 0:
                self._attend(q[:, rows], k[:, rows].transpose(1, 2), v[:, rows].transpose(1, 2), None, out[:, rows])
                continue
            places = torch.arange(end, device=q.device)
            mask = places <= places[start:].unsqueeze(1)  # (length, end)
            together = max(1, _COPIED // (end * w.num_kv_heads * w.head_size))
            for first in range(0, worlds, together):
                some = slice(first, first + together)
                keys, values = self.cache.copy(layer, blocks[: -(-end // self.page)], some)
                self._attend(q[some, rows], keys[:, :, :end], values[:, :, :end], mask, out[some, rows])
        return out.flatten(2)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Queries (W, c, heads, size) over keys and values (W, kv heads, end, size), into `out`, shaped as `q`."""
        out.copy_(
            functional.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, mask, is_causal=mask is None, enable_gqa=q.shape[2] != keys.shape[1]
            ).transpose(1, 2)
        )

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, table: Tensor, reach: int) -> Tensor:
        """One token for each of n sequences, at positions (n,) < reach; hidden states (W, n, d)."""
        attend = self._attend_gathered if tokens.is_cuda else self._attend_pages
        prepared = attend(positions, table, reach)
        x = self._embed(tokens, positions)
        for layer, block in enumerate(self.weights.blocks):
            x = self._spread(x, layer)
            q, k, v = self._queries(x, block, positions)  # (W, n, heads, size)
            q = q * self.weights.head_size**-0.5
            x = self._finish(x, prepared(layer, q, k, v), block)
        return normalise(x, self.weights.norm)

    def _attend_pages(self, positions: Tensor, table: Tensor, reach: int) -> Attention:
        """Attention of a decode step on views of the cache, block by block."""
        w, page = self.weights, self.page
        pages = [
            [(block, min(page, position + 1 - page * i)) for i, block in enumerate(row[: position // page + 1])]
            for row, position in zip(table.tolist(), positions.tolist(), strict=True)
        ]  # per sequence: its blocks, and how many positions of each are in use
        runs = [Run(row[-1][0], row[-1][1] - 1, i, 1) for i, row in enumerate(pages)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, runs, k, v)
            all_keys, all_values = self.cache.keys[layer], self.cache.values[layer]
            worlds = len(q)
            out = q.new_empty(worlds, len(pages), w.num_heads * w.head_size)
            for i, row in enumerate(pages):
                own = q[:, i].reshape(worlds * w.num_kv_heads, -1, w.head_size)  # (W·kv, heads per kv, size)
                keys = [all_keys[block, :, :, :count].flatten(0, 1).transpose(1, 2) for block, count in row]
                values = [all_values[block, :, :, :count].flatten(0, 1) for block, count in row]
                scores = torch.cat([torch.bmm(own, each) for each in keys], -1).float()
                shares = torch.split(torch.softmax(scores, -1).to(v.dtype), page, -1)
                total = torch.bmm(shares[0], values[0])
                for share, each in zip(shares[1:], values[1:], strict=True):
                    total.baddbmm_(share, each)
                out[:, i] = total.view(worlds, -1)
            return out

        return attend

    def _attend_gathered(self, positions: Tensor, table: Tensor, reach: int) -> Attention:
        """As `_attend_pages` in fixed shapes, for CUDA graphs: copies the first `reach` positions of all sequences."""
        w, n = self.weights, positions.shape[0]
        table = table[:, : -(-reach // self.page)].long()
        late = torch.arange(table.shape[1] * self.page, device=table.device) > positions.unsqueeze(1)  # (n, end)
        late = late[:, None, None, None]
        blocks, places = table.gather(1, (positions // self.page).unsqueeze(1))[:, 0], positions % self.page

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.scatter(layer, blocks, places, k, v)
            keys, values = self.cache.gather(layer, table)  # (n, W, kv, end, size)
            worlds = len(q)
            own = q.transpose(0, 1).reshape(n, worlds, w.num_kv_heads, -1, w.head_size)  # (n, W, kv, per kv, size)
            scores = (own @ keys.transpose(3, 4)).float().masked_fill(late, float("-inf"))
            values = values.masked_fill(late.transpose(3, 4), 0.0)  # blocks may hold anything past the end
            return (torch.softmax(scores, -1).to(values.dtype) @ values).transpose(0, 1).reshape(worlds, n, -1)

        return attend

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        w = self.weights
        x = w.embed[tokens]  # (rows, d)
        if w.position is not None:
            x = x + w.position[positions]
        return x.unsqueeze(0)  # (1, rows, d)

    def _spread(self, x: Tensor, layer: int) -> Tensor:
        """Before the first layer above the trunk, the same stream for every world."""
        return x.repeat(self.weights.num_worlds, 1, 1) if layer == self.weights.trunk else x

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
