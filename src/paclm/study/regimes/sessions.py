"""Persistent-secret sessions (`tab:session`): the leak of a long stream against one secret, measured and charged.

One secret per session, many queries with a fresh prompt each, one belief throughout. The leak is that of the whole
history, an upper bound on that of the tokens, beside the dissent of the same sessions. Cells of one budget share
sessions; budgets share nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray, uniform_belief
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import rule_named
from paclm.study.decoding import GUMBEL
from paclm.study.history import Arrays, follow_up, join_queries, join_sessions, measure, play_queries
from paclm.study.lab import Advance, Lab
from paclm.study.leak_tests import describe_excess
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Result, Row
from paclm.study.serving import EngineStreams, Played, carry_on, draw_secrets, engine_for

if TYPE_CHECKING:
    from paclm.engine.engine import Engine

NOTES = [
    "The leak is that of the internal history, an upper bound on that of the released tokens; both estimates have "
    "sampling error.",
    "The attacks read the curator's belief, which no user sees: they are an upper envelope.",
    "Horizons of one budget share sessions, so only budgets are independent of each other.",
    "Accuracy: the first token of each query against the text the prompt was cut from. Agreement: all tokens. Both are "
    "over the tokens since the previous horizon.",
]


@dataclass(frozen=True, slots=True)
class SessionScale:
    sessions: int  # per budget
    queries: int
    tokens: int  # released per query
    horizons: tuple[int, ...]  # tokens after which a session is measured: whole queries
    budgets: tuple[float, ...] = (2.0**-16, 2.0**-20, 2.0**-24)
    prompt: int = 32
    queries_per_part: int = 4  # a stopped run resumes after the last whole part

    def __post_init__(self) -> None:
        if any(h % self.tokens or not 0 < h <= self.queries * self.tokens for h in self.horizons):
            raise InvalidInput(f"Horizons must be whole queries of {self.tokens} tokens, not {self.horizons}.")


class Sessions:
    """The sessions of one budget. A session's prompts, secret, noise and coins do not depend on its batch."""

    def __init__(self, lab: Lab, scale: SessionScale, per_token: float) -> None:
        self.lab, self.scale, self.per_token = lab, scale, per_token
        drawn = lab.prompts(scale.sessions * scale.queries, scale.prompt + 1, "sessions", per_token)
        shape = (scale.sessions, scale.queries, scale.prompt + 1)  # the token after the prompt is its truth
        self.texts: IntArray = np.array(drawn, dtype=np.int64).reshape(shape)
        self._seed = lab.seed_for("sessions", "noise", per_token)
        self.secrets = draw_secrets(lab.num_worlds, self._seed, scale.sessions)

    def play(self, engine: Engine, together: int, advance: Advance = lambda _: None) -> Played:
        """Every query of every session, `together` at a time; finished parts are read."""
        scale, digest = self.scale, hashlib.sha256(self.texts.tobytes()).hexdigest()
        parts = self.lab.parts("sessions", [asdict(scale), self.per_token, digest, together])
        batches: list[Arrays] = []
        for start in range(0, scale.sessions, together):
            rows = range(start, min(start + together, scale.sessions))
            beliefs: FloatArray = np.tile(uniform_belief(self.lab.num_worlds), (len(rows), 1))
            found: list[Arrays] = []
            for first in range(0, scale.queries, scale.queries_per_part):
                queries = range(first, min(first + scale.queries_per_part, scale.queries))
                make = partial(self._play_queries, engine, rows, queries, beliefs)
                found.append(parts.arrays(f"sessions-{start}-{first}", make))
                beliefs = found[-1]["beliefs"][-1]
                advance(len(rows) * len(queries) * scale.tokens)
            batches.append(join_queries(found))
        return Played(**join_sessions(batches))

    def _play_queries(self, engine: Engine, rows: range, queries: range, beliefs: FloatArray) -> Arrays:
        length = self.scale.tokens
        seeds = [self.lab.seed_for("sessions", "coins", self.per_token, row) for row in rows]
        coins = [Coins(seed, step=queries.start * length) for seed in seeds]
        streams = EngineStreams(engine, GUMBEL, coins, with_full=True)
        prompts = [self.texts[rows.start : rows.stop, query, :-1].tolist() for query in queries]
        rule, secrets = rule_named("gaussian"), self.secrets[rows.start : rows.stop]
        sessions_at = partial(carry_on, rule, self.per_token, self._seed, rows.start, secrets)
        return play_queries(streams, sessions_at, prompts, beliefs, queries.start, length)


def run(lab: Lab, scale: SessionScale) -> Findings:
    """Every budget and horizon."""
    lab.need_all_worlds()
    context, count = scale.prompt + scale.tokens, scale.sessions * scale.queries * scale.tokens
    engine, together = engine_for(lab, lab.worlds_name, "full", sequences=scale.sessions, context=context)
    advance = lab.start_task("sessions", len(scale.budgets) * count)
    rows: list[Row] = []
    for per_token in scale.budgets:
        sessions = Sessions(lab, scale, per_token)
        played = sessions.play(engine, together, advance)
        for before, horizon in zip((0, *scale.horizons), scale.horizons, strict=False):
            leak = measure(played, per_token, sessions.secrets, horizon, lab.membership)
            rows.append(leak | follow_up(played, sessions.texts[:, :, -1], before, horizon))
    return Findings(rows, NOTES)


def spread_of_ratio(rows: list[Row]) -> float | None:
    """Standard deviation of leaked ÷ charged across budgets at the longest horizon: independent estimates."""
    longest = max(row["horizon"] for row in rows)
    ratios = [row["leaked_over_charged"] for row in rows if row["horizon"] == longest]
    return float(np.std(ratios, ddof=1)) if len(ratios) > 1 else None


def verdicts(result: Result) -> list[str]:
    """Whether the two estimates of the leak agree, and whether an attack is above its bound."""
    rows = result.select(collection=1)
    parted = max(abs(row["estimators_parting"]) / row["estimators_parting_stderr"] for row in rows)
    alarm = "" if parted < 4.0 else "ALARM: "
    return [
        f"{alarm}largest difference of the two leak estimates: {parted:.1f} standard errors in {len(rows)} cells "
        "(alarm from 4: the belief would not be the true posterior)",
        describe_excess(rows),
    ]


REGIME = Regime(
    name="sessions",
    title="Persistent-secret sessions",
    question="How much of its charge does a long session really leak about its secret?",
    presets={
        "quick": SessionScale(sessions=16, queries=4, tokens=64, horizons=(64, 128, 192, 256), prompt=16),
        "paper": SessionScale(sessions=100, queries=64, tokens=64, horizons=(64, 256, 1024, 2048, 4096)),
    },
    run=run,
    headlines=(
        headline("leak ÷ charge at {budget}", "leaked_over_charged ±", ".2%", largest="horizon"),
        headline("dissent at {budget}", "dissent ±", ".2%", largest="horizon"),
    ),
    verdicts=verdicts,
)
