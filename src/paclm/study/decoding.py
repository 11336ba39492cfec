"""How worlds pick their votes, on a text and in generated sequences. Knows no engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from paclm.config import check_temperature
from paclm.errors import InvalidInput

Coupling = Literal["coupled", "hybrid", "independent"]


@dataclass(frozen=True, slots=True)
class Decoding:
    """Coupled Gumbel at τ, or greedy at τ = 0; other couplings are for the ablation that compares them."""

    name: str
    temperature: float
    draws: int = 1  # on a text: how often every position is voted on, with fresh coins
    coupling: Coupling = "coupled"
    threshold: float = 0.9  # β from which the hybrid rule takes the maximal coupling
    coins: str = ""  # on a text: the decoding whose coins it shares; its own where empty

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.draws < 1:
            raise InvalidInput(f"draws must be at least 1, not {self.draws}.")

    def times(self, draws: int) -> Decoding:
        """The same with this many draws of coins on a text."""
        return dataclasses.replace(self, draws=draws)


GREEDY = Decoding("greedy", 0.0)
GUMBEL = Decoding("gumbel", 1.0)
