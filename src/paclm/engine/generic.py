"""The forward pass of all worlds by the model's own code, with adapted layers put in: works for any decoder.

Slower than `stacked` (its cache grows by copying, and sequences run one after another), and the same to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from paclm.engine.adapters import AdapterStack
from paclm.engine.layers import attach
from paclm.engine.weights import output_layer


class GenericModel:
    """A Hugging Face decoder whose batch is all worlds and the public model."""

    def __init__(self, model: PreTrainedModel, stack: AdapterStack, num_slots: int, context: int) -> None:
        self._head = output_layer(model).weight
        attach(model, stack.with_public().to(model.device, model.dtype))
        self._decoder: Any = model.get_decoder()
        self._caches = [DynamicCache(config=model.config) for _ in range(num_slots)]
        self._num_worlds = stack.num_worlds + 1
        self._context = context

    @property
    def num_worlds(self) -> int:
        return self._num_worlds

    @property
    def num_slots(self) -> int:
        return len(self._caches)

    @property
    def context(self) -> int:
        return self._context

    @property
    def head(self) -> Tensor:
        return self._head

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, start: int, slot: int) -> Tensor:
        """Tokens (c,) of one sequence at positions start … start+c; hidden states (W, c, d)."""
        if start == 0:
            self._caches[slot] = DynamicCache(config=self._decoder.config)
        cache = self._caches[slot]
        if cache.get_seq_length() > start:
            cache.crop(start - cache.get_seq_length())
        rows = tokens.unsqueeze(0).repeat(self._num_worlds, 1)  # (W, c)
        hidden: Tensor = self._decoder(input_ids=rows, past_key_values=cache, use_cache=True).last_hidden_state
        return hidden

    def prefill_many(self, tokens: Tensor, slot: int) -> Tensor:
        """Tokens (s, c) of s sequences in the slots from `slot` on, one after another; hidden states (W, s, c, d)."""
        return torch.stack([self.prefill(row, 0, slot + i) for i, row in enumerate(tokens)], 1)

    def decode(self, tokens: Tensor, positions: Tensor, reach: int) -> Tensor:
        """One token for each of the first n slots; hidden states (W, n, d)."""
        steps = [self.prefill(tokens[i : i + 1], int(positions[i]), i) for i in range(tokens.shape[0])]
        return torch.cat(steps, 1)

    def move(self, source: int, target: int, length: int) -> None:
        self._caches[target], self._caches[source] = self._caches[source], self._caches[target]
