"""Prompts continued by the mechanism, by the full-corpus adapter or by the public model, for regimes that write text.

Prompt i has its own secret, noise and coins: they follow from seeds and i alone, whatever batch it runs in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paclm.config import format_budget
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import rule_named
from paclm.study.decoding import Decoding
from paclm.study.history import Arrays, join_sessions
from paclm.study.lab import Advance, Lab
from paclm.study.quality import public_surprise
from paclm.study.serving import EngineStreams, Prompts, begin, continue_by, draw_secrets, engine_for, play


class Continuations:
    """Continues prompts in batches of at most `together`, or as many as fit (speed only)."""

    def __init__(self, lab: Lab, regime: str, context: int, together: int) -> None:
        self.lab, self.regime, self.context, self.together = lab, regime, context, together

    def released(
        self,
        prompts: Prompts,
        decoding: Decoding,
        per_token: float,
        seed: int,
        length: int,
        *,
        first: int = 0,
        horizons: Sequence[int] | None = None,
        advance: Advance | None = None,
    ) -> Arrays:
        """The paper's release on prompts `first` … of the regime: the columns of `Played`, (n, T)."""
        lab = self.lab
        engine, self.together = engine_for(lab, sequences=self.together, context=self.context)
        secrets, rule = draw_secrets(lab.num_worlds, seed, first + len(prompts))[first:], rule_named("gaussian")
        name = f"{self.regime}, {decoding.name} at {format_budget(per_token)}"
        advance = advance or lab.start_task(name, len(prompts) * length)
        done = []
        for batch in self._batches(len(prompts), self.together):
            sessions = begin(lab.num_worlds, rule, per_token, seed, first + batch.start, secrets[batch])
            streams = EngineStreams(engine, decoding, self._coins(first, batch))
            done.append(play(streams, prompts[batch], sessions, length, horizons, advance).arrays())
        return join_sessions(done)

    def alone(self, prompts: Prompts, source: str, decoding: Decoding, length: int, *, first: int = 0) -> IntArray:
        """The same prompts and coins continued by `full` (not private) or `public`, nothing released: (n, T)."""
        engine, together = engine_for(self.lab, "full", sequences=self.together, context=self.context)
        done = []
        for batch in self._batches(len(prompts), together):
            streams = EngineStreams(engine, decoding, self._coins(first, batch))
            own = (lambda panel: panel.public) if source == "public" else (lambda panel: panel.worlds[:, 0])
            done.append(continue_by(streams, prompts[batch], length, own))
        return np.concatenate(done)

    def surprise(self, prompts: Prompts, tokens: IntArray) -> FloatArray:
        """−log probability of every token under the public model: (n, T)."""
        engine, _ = engine_for(self.lab, "full", sequences=self.together, context=self.context)
        return public_surprise(engine, prompts, tokens)

    def _coins(self, first: int, batch: slice) -> list[Coins]:
        rows = range(first + batch.start, first + batch.stop)
        return [Coins(self.lab.seed_for(self.regime, "coins", i)) for i in rows]

    @staticmethod
    def _batches(count: int, size: int) -> Iterator[slice]:
        return (slice(start, min(start + size, count)) for start in range(0, count, size))
