"""Run a release on recorded votes: what it costs, what it tells, how accurate it is. No model is needed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from paclm.config import ChargeName
from paclm.curator.research import STAMP
from paclm.errors import InvalidInput
from paclm.privacy.accounting import UNITS_PER_NAT, charge_units, check_per_token
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import leak_samples_by_entropy, leak_samples_by_truth, mean_and_stderr
from paclm.privacy.releases import Rule, rule_named
from paclm.study.attacks.belief import chance_to_name
from paclm.study.leak_tests import Gap, Told, broken_bounds, chances_by_agreement
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.streams import RecordedStream, play_fresh, play_sessions

Protocol = Literal["session", "fresh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """What to replay. Defaults follow the paper's sessions; `fresh` runs over every position once."""

    release: str = "gaussian"
    """Any rule that is registered, also one that may not be deployed."""
    per_token: float | None = None
    """b; a rule that never reads the secret needs none."""
    charge: ChargeName = "every-token"
    protocol: Protocol = "session"
    sessions: int | None = None
    """How many secrets (`session`, default 100) or passes over the positions (`fresh`, default 1)."""
    tokens: int | None = None
    """Tokens per session (default 4,096) or positions per pass (default all of them)."""
    seed: int = 0

    def __post_init__(self) -> None:
        rule = rule_named(self.release)
        if self.per_token is not None:
            check_per_token(self.per_token)
        elif rule.reads_secret:
            raise InvalidInput(
                f"The release {self.release} reads the secret and needs a budget. Give one, for example "
                "--per-token 2^-16; inf is no noise at all."
            )
        if self.protocol not in ("session", "fresh"):
            raise InvalidInput(f"There is no protocol {self.protocol!r}. Choose session or fresh.")
        for name in ("sessions", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name} must be at least 1, not {value!r}.")
        if self.seed < 0:
            raise InvalidInput(f"The seed must be an integer ≥ 0, not {self.seed!r}.")


class _Kept(NamedTuple):
    """What is kept of a stream: its beliefs, (secrets, m) of them, would fill the memory."""

    positions: IntArray  # (t,)
    released: IntArray  # (t,)
    realized: IntArray  # (t,)
    scales: FloatArray  # (dissenting tokens,)
    information: float
    by_entropy: FloatArray  # (secrets,) nats told about each, by either estimator
    by_truth: FloatArray  # (secrets,)
    gap: Gap
    named: FloatArray  # (secrets,) the chance that naming the most likely world names the secret
    agreeing: FloatArray  # (secrets,) the same of naming the world that agreed most often with the released tokens
    known: FloatArray  # (secrets,) what the belief gives to its most likely world


def replay(
    recorded: RecordedVotes, settings: ReplaySettings, advance: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Run the release and return the figures of `paclm replay --json`; `advance` hears of tokens as they are done."""
    started = time.perf_counter()
    rule = rule_named(settings.release)
    play = play_sessions if settings.protocol == "session" else play_fresh
    count, length = _shape(recorded, settings)
    kept = []
    per_token = math.inf if settings.per_token is None else settings.per_token
    for stream in play(recorded, rule, per_token, count, length, settings.seed):
        kept.append(_reduce(stream, recorded))
        advance(stream.positions.size)
    figures = _summary(recorded, rule, settings, kept)
    return {**figures, "seconds": time.perf_counter() - started}


def planned_tokens(recorded: RecordedVotes, settings: ReplaySettings) -> int:
    """How many tokens a replay will release: what a progress bar counts to."""
    sessions, tokens = _shape(recorded, settings)
    return sessions * tokens


def _shape(recorded: RecordedVotes, settings: ReplaySettings) -> tuple[int, int]:
    if settings.protocol == "session":
        return settings.sessions or 100, settings.tokens or 4096
    return settings.sessions or 1, min(settings.tokens or recorded.num_positions, recorded.num_positions)


def _reduce(stream: RecordedStream, recorded: RecordedVotes) -> _Kept:
    """Where the belief is uniform still, nothing was told, and naming a world is a guess."""
    count, moved = len(stream.secrets), stream.moved
    by_entropy, by_truth, named = np.zeros(count), np.zeros(count), np.full(count, 1.0 / recorded.num_worlds)
    known = named.copy()
    by_entropy[moved] = leak_samples_by_entropy(stream.beliefs)
    by_truth[moved] = leak_samples_by_truth(stream.beliefs, stream.secrets[moved])
    named[moved] = chance_to_name(stream.beliefs, stream.secrets[moved])
    known[moved] = np.exp(stream.beliefs.max(axis=1))
    return _Kept(
        positions=stream.positions,
        released=stream.released,
        realized=stream.realized,
        scales=stream.scales,
        information=stream.information,
        by_entropy=by_entropy,
        by_truth=by_truth,
        gap=Gap.between(stream.beliefs, stream.secrets[moved]),
        named=named,
        agreeing=chances_by_agreement(recorded.votes[stream.positions], stream.released, stream.secrets),
        known=known,
    )


def _summary(recorded: RecordedVotes, rule: Rule, settings: ReplaySettings, streams: list[_Kept]) -> dict[str, Any]:
    is_dissent = recorded.is_dissent
    positions = np.concatenate([stream.positions for stream in streams])
    released = np.concatenate([stream.released for stream in streams])
    realized = np.concatenate([stream.realized for stream in streams])
    scales = np.concatenate([stream.scales for stream in streams])
    leaked = np.concatenate([stream.by_entropy for stream in streams])
    by_entropy = mean_and_stderr(leaked)
    by_truth = mean_and_stderr(np.concatenate([stream.by_truth for stream in streams]))
    named = np.concatenate([stream.named for stream in streams])
    dissenting = is_dissent[positions]
    per_secret = positions.size // named.size  # tokens against one secret: T in a session, 1 when fresh

    charged, committed = _charged(rule, settings, dissenting, named.size, per_secret)
    differing = dissenting.reshape(named.size, per_secret).sum(axis=1)  # (secrets,) tokens on which worlds differ
    told = Told(
        leaked,
        Gap.of_all([stream.gap for stream in streams]),
        np.concatenate([np.full(one.named.size, one.information / one.named.size) for one in streams]),
        differing * (committed / per_secret) if committed < math.inf else np.full(named.size, math.inf),
        named,
        np.concatenate([stream.agreeing for stream in streams]),
        np.concatenate([stream.known for stream in streams]),
        success_bound(committed, 1.0 / recorded.num_worlds),
    )
    scores = _accuracies(recorded, settings, streams, positions, released, realized)
    distinct = [len(set(row.tolist())) for row in recorded.votes[np.unique(positions[dissenting])]]
    return {
        "positions": recorded.num_positions,
        "worlds": recorded.num_worlds,
        "unanimity": 1.0 - float(is_dissent.mean()),
        "dissent": float(dissenting.mean()),
        "mean_distinct_given_dissent": float(np.mean(distinct)) if distinct else None,
        **scores,
        "flip_given_dissent": float((released != realized)[dissenting].mean()) if dissenting.any() else None,
        "sigma_median": float(np.median(scales)) if scales.any() else None,
        "sigma_max": float(scales.max()) if scales.any() else None,
        "tokens": int(positions.size),
        "charged_nats": charged,
        "leaked_nats": by_entropy.mean,
        "leaked_stderr": by_entropy.stderr,
        "leaked_over_charged": by_entropy.mean / charged if 0.0 < charged < math.inf else None,
        "mia_bound": success_bound(committed, 0.5),
        "world_id_bound": told.world_id_bound,
        "world_id_rate": float(named.mean()),
        "world_id_rate_by_agreement": float(told.agreeing.mean()),
        "leaked_nats_by_truth": by_truth.mean,
        "leaked_stderr_by_truth": by_truth.stderr,
        "conditional_information_nats": sum(stream.information for stream in streams) / named.size,
        "budget_nats": float(told.budget.mean()),
        "tells_more_than": broken_bounds(told),
        "secrets": named.size,
        "tokens_per_secret": per_secret,
        "release": rule.name,
        "charge": settings.charge,
        "protocol": settings.protocol,
        "per_token_nats": settings.per_token,
        "seed": settings.seed,
        "stamp": STAMP,
    }


def _charged(
    rule: Rule, settings: ReplaySettings, dissenting: np.ndarray[Any, Any], num_secrets: int, per_secret: int
) -> tuple[float, float]:
    """Nats charged per secret on average, and the most that could have been: what the bound is stated at."""
    if not rule.reads_secret:
        return 0.0, 0.0
    if settings.per_token is None or settings.per_token == math.inf:
        return math.inf, math.inf
    cost = {
        differs: charge_units(settings.charge, settings.per_token, reads_secret=True, is_dissent=differs)
        for differs in (False, True)
    }
    num_dissent = int(np.count_nonzero(dissenting))
    units = cost[True] * num_dissent + cost[False] * (dissenting.size - num_dissent)
    return units / num_secrets / UNITS_PER_NAT, per_secret * cost[True] / UNITS_PER_NAT


def _accuracies(
    recorded: RecordedVotes,
    settings: ReplaySettings,
    streams: list[_Kept],
    positions: IntArray,
    released: IntArray,
    realized: IntArray,
) -> dict[str, float | None]:
    names = ("accuracy", "accuracy_stderr", "accuracy_public", "accuracy_full", "accuracy_noiseless", "retained_gain")
    scores: dict[str, float | None] = dict.fromkeys(names)
    if recorded.truth is None:
        return scores
    truth = recorded.truth[positions]
    hits = released == truth
    # Tokens of a session share a secret and a text, so sessions are the samples; passes share positions, so those are.
    by_stream = [s.released == recorded.truth[s.positions] for s in streams]
    samples = np.mean(by_stream, axis=1 if settings.protocol == "session" and len(streams) > 1 else 0)
    scores["accuracy"] = float(hits.mean())
    scores["accuracy_stderr"] = mean_and_stderr(samples).stderr
    scores["accuracy_noiseless"] = float((realized == truth).mean())
    for name, column in (("accuracy_public", recorded.public), ("accuracy_full", recorded.full)):
        if column is not None:
            scores[name] = float((column[positions] == truth).mean())
    public, full = scores["accuracy_public"], scores["accuracy_full"]
    if public is not None and full is not None and full > public:  # a share of a loss says nothing
        scores["retained_gain"] = (float(hits.mean()) - public) / (full - public)
    return scores
