"""What the engine asks of a forward pass. `stacked` answers it for the GPT-2 and Llama families, `patched` for any.

`fused` is `stacked` with the decode step by kernels, on CUDA.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WorldsModel(Protocol):
    """All worlds and the public model, which is the last of W, over running sequences in slots."""

    @property
    def num_worlds(self) -> int:
        """W: the worlds and the public model."""

    @property
    def num_slots(self) -> int:
        """How many sequences can run at once."""

    @property
    def context(self) -> int:
        """Positions per sequence."""

    @property
    def head(self) -> Tensor:
        """Output embedding (V, d); a logit is its product with a hidden state."""

    def prefill(self, tokens: Tensor, start: int, slot: int) -> Tensor:
        """Tokens (c,) of one sequence at positions start … start+c; hidden states (W, c, d)."""

    def prefill_many(self, tokens: Tensor, slot: int) -> Tensor:
        """Tokens (s, c) of s sequences from their start, in the slots from `slot` on; hidden states (W, s, c, d)."""

    def decode(self, tokens: Tensor, positions: Tensor, reach: int) -> Tensor:
        """One token for each of the first n slots, at positions (n,), all below reach; hidden states (W, n, d).

        Running the same token at the same position again changes nothing.
        """

    def move(self, source: int, target: int, length: int) -> None:
        """Let slot `target` continue the first `length` positions of slot `source`."""
