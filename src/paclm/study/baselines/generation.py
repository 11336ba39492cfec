"""PMixED as a session of at most T queries, each sampled from its release distribution. Research mode: NOT PRIVATE.

The published code relies on its caller to stop after T queries; this one stops by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from paclm.curator.research import STAMP
from paclm.errors import BudgetExceeded
from paclm.privacy.belief import FloatArray
from paclm.study.baselines.distributions import next_distributions
from paclm.study.baselines.pmixed import PMixedSettings, release_distribution

if TYPE_CHECKING:
    from paclm.engine.engine import Engine


class PMixedAnswer(NamedTuple):
    """One query."""

    token: int
    members: int  # shard models that took part; 0: the public model answered
    is_charged: bool  # whether it counted as one of the T queries; an empty sample does


class PMixedSession:
    """T queries against one ensemble, then the public model or a refusal for all later ones."""

    stamp = STAMP

    def __init__(
        self, settings: PMixedSettings, seed: int, on_exhausted: Literal["public", "refuse"] = "public"
    ) -> None:
        self.settings = settings
        self.remaining = settings.queries
        self._rng = np.random.default_rng(seed)
        self._on_exhausted = on_exhausted

    def answer(self, log_shards: FloatArray, log_public: FloatArray) -> PMixedAnswer:
        """Sample one token: (N, V), (V,). The query is counted before anything is drawn."""
        if self.remaining <= 0:
            if self._on_exhausted == "refuse":
                raise BudgetExceeded(
                    f"All {self.settings.queries:,} queries that the guarantee covers have been answered. "
                    "Make a session with a larger T, or let the public model answer."
                )
            return PMixedAnswer(self._draw(log_public), 0, is_charged=False)
        self.remaining -= 1
        chosen = self._rng.random(self.settings.num_shards) < self.settings.rate
        released, weights = release_distribution(log_shards, log_public, chosen, self.settings)
        return PMixedAnswer(self._draw(released), len(weights), is_charged=True)

    def _draw(self, log_release: FloatArray) -> int:
        steps = np.cumsum(np.exp(log_release))
        return int(min(np.searchsorted(steps, self._rng.random() * steps[-1], side="right"), len(steps) - 1))


def generate(engine: Engine, prompt: Sequence[int], max_new_tokens: int, session: PMixedSession) -> list[PMixedAnswer]:
    """Continue a prompt; the engine's worlds are the shard models. Stops early where the context is full."""
    tokens = list(prompt)
    answers: list[PMixedAnswer] = []
    while len(answers) < max_new_tokens and len(tokens) < engine.context:
        log_shards, log_public = next_distributions(engine, tokens)
        answers.append(session.answer(log_shards.cpu().numpy(), log_public.cpu().numpy()))
        tokens.append(answers[-1].token)
    return answers
