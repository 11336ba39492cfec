"""Run a release on recorded votes and measure accuracy, charge and leak. Needs no model."""

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
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import Estimate, leak_samples_by_entropy, leak_samples_by_truth, mean_and_stderr
from paclm.privacy.releases import Rule, rule_named
from paclm.study.attacks.belief import chance_to_name
from paclm.study.leak_tests import Gap, LeakEvidence, broken_bounds, chances_by_agreement, describe_broken_bounds
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.streams import RecordedStream, play_fresh, play_sessions

Protocol = Literal["session", "fresh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """What to replay. Defaults follow the paper's sessions; `fresh` covers every position once."""

    release: str | Rule = "gaussian"  # built in by name, or a rule of your own
    per_token: float | None = None  # b; not needed by a rule that never reads the secret
    charge: ChargeName = "every-token"
    protocol: Protocol = "session"
    sessions: int | None = None
    """How many secrets (`session`, default 100) or passes over the positions (`fresh`, default 1)."""
    tokens: int | None = None  # tokens per session (default 4,096) or positions per pass (default all of them)
    seed: int = 0

    def __post_init__(self) -> None:
        rule = self.rule
        if self.per_token is not None:
            check_per_token(self.per_token)
        elif rule.reads_secret:
            raise InvalidInput(
                f"The release {rule.name} reads the secret and needs a budget. Set one, for example "
                "--per-token 2^-16, or inf for no noise."
            )
        if self.protocol not in ("session", "fresh"):
            raise InvalidInput(f"Unknown protocol {self.protocol!r}. Choose session or fresh.")
        for name in ("sessions", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name} must be at least 1, not {value!r}.")
        if self.seed < 0:
            raise InvalidInput(f"The seed must be an integer ≥ 0, not {self.seed!r}.")

    @property
    def rule(self) -> Rule:
        return self.release if isinstance(self.release, Rule) else rule_named(self.release)


class _Kept(NamedTuple):
    """What is kept of a stream. Its beliefs, (secrets, m), would fill the memory."""

    positions: IntArray  # (t,)
    released: IntArray  # (t,)
    realized: IntArray  # (t,)
    scales: FloatArray  # (dissenting tokens,)
    declared: FloatArray  # (secrets,) Σ of the conditional information of its tokens
    leaked: FloatArray  # (secrets,) by the belief's entropy
    by_truth: FloatArray  # (secrets,) the other estimate of the leak
    named: FloatArray  # (secrets,) probability that the most likely world is the secret
    agreeing: FloatArray  # (secrets,) the same for the world that agreed most often with the released tokens
    known: FloatArray  # (secrets,) belief in the most likely world
    gap: Gap

    @classmethod
    def of(cls, stream: RecordedStream, recorded: RecordedVotes) -> _Kept:
        """Reduce one stream. Where the belief is still uniform, nothing leaked and naming a world is a guess."""
        count, moved = len(stream.secrets), stream.moved
        leaked, by_truth, named = np.zeros(count), np.zeros(count), np.full(count, 1.0 / recorded.num_worlds)
        known = named.copy()
        leaked[moved] = leak_samples_by_entropy(stream.beliefs)
        by_truth[moved] = leak_samples_by_truth(stream.beliefs, stream.secrets[moved])
        named[moved] = chance_to_name(stream.beliefs, stream.secrets[moved])
        known[moved] = np.exp(stream.beliefs.max(axis=1))
        return cls(
            *(stream.positions, stream.released, stream.realized, stream.scales),
            declared=stream.information,
            leaked=leaked,
            by_truth=by_truth,
            named=named,
            agreeing=chances_by_agreement(recorded.votes[stream.positions], stream.released, stream.secrets),
            known=known,
            gap=Gap.between(stream.beliefs, stream.secrets[moved]),
        )

    @classmethod
    def of_all(cls, streams: list[_Kept]) -> _Kept:
        """All streams as one."""
        columns = {name: np.concatenate([getattr(one, name) for one in streams]) for name in cls._fields[:-1]}
        return cls(**columns, gap=Gap.of_all([one.gap for one in streams]))


def replay(
    recorded: RecordedVotes, settings: ReplaySettings, advance: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Run the release and return the figures of `paclm replay --json`; `advance` gets the number of tokens done."""
    started = time.perf_counter()
    rule = settings.rule
    play = play_sessions if settings.protocol == "session" else play_fresh
    per_token = math.inf if settings.per_token is None else settings.per_token
    streams = []
    for stream in play(recorded, rule, per_token, *_shape(recorded, settings), settings.seed):
        streams.append(_Kept.of(stream, recorded))
        advance(stream.positions.size)
    kept = _Kept.of_all(streams)
    streams.clear()  # all of them exist twice here
    return {**_summary(recorded, rule, settings, kept), "seconds": time.perf_counter() - started}


def unit_of(figures: dict[str, Any]) -> str:
    """What nats of a replay are counted by."""
    return "per session" if figures["protocol"] == "session" else "per position"


def describe_leak(figures: dict[str, Any]) -> str:
    """Which bounds the release of a replay breaks, with the figures."""
    return describe_broken_bounds(
        figures["release"],
        figures["tells_more_than"],
        leaked=figures["leaked_nats"],
        stderr=figures["leaked_stderr"],
        by_truth=figures["leaked_nats_by_truth"],
        declared=figures["conditional_information_nats"],
        budget=figures["budget_nats"],
        rate=max(figures["world_id_rate"], figures["world_id_rate_by_agreement"]),
        bound=figures["world_id_bound"],
        unit=unit_of(figures),
    )


def planned_tokens(recorded: RecordedVotes, settings: ReplaySettings) -> int:
    """How many tokens a replay will release: the total of a progress bar."""
    return math.prod(_shape(recorded, settings))


def _shape(recorded: RecordedVotes, settings: ReplaySettings) -> tuple[int, int]:
    if settings.protocol == "session":
        return settings.sessions or 100, settings.tokens or 4096
    return settings.sessions or 1, min(settings.tokens or recorded.num_positions, recorded.num_positions)


def _summary(recorded: RecordedVotes, rule: Rule, settings: ReplaySettings, kept: _Kept) -> dict[str, Any]:
    num_secrets = kept.named.size
    per_secret = kept.positions.size // num_secrets  # tokens against one secret: T in a session, 1 when fresh
    is_dissent = recorded.is_dissent[kept.positions]  # (tokens,)
    charged, committed = _charged(rule, settings, is_dissent, num_secrets, per_secret)
    num_dissent = is_dissent.reshape(num_secrets, per_secret).sum(axis=1)  # (secrets,)
    evidence = LeakEvidence(
        leaked=kept.leaked,
        gap=kept.gap,
        declared=kept.declared,
        budget=num_dissent * (committed / per_secret) if committed < math.inf else np.full(num_secrets, math.inf),
        named=kept.named,
        agreeing=kept.agreeing,
        known=kept.known,
        world_id_bound=success_bound(committed, 1.0 / recorded.num_worlds),
    )
    by_entropy, by_truth = mean_and_stderr(kept.leaked), mean_and_stderr(kept.by_truth)
    information = Estimate(math.inf, math.nan)  # without noise a step declares no limit
    if np.isfinite(kept.declared).all():
        information = mean_and_stderr(_samples(recorded, settings, kept.declared))
    distinct = [len(set(row.tolist())) for row in recorded.votes[np.unique(kept.positions[is_dissent])]]
    is_flip = (kept.released != kept.realized)[is_dissent]
    has_noise = kept.scales.any()
    return {
        "positions": recorded.num_positions,
        "worlds": recorded.num_worlds,
        "unanimity": 1.0 - float(recorded.is_dissent.mean()),
        "dissent": float(is_dissent.mean()),
        "mean_distinct_given_dissent": float(np.mean(distinct)) if distinct else None,
        **_accuracies(recorded, settings, kept),
        "flip_given_dissent": float(is_flip.mean()) if is_flip.size else None,
        "sigma_median": float(np.median(kept.scales)) if has_noise else None,
        "sigma_max": float(kept.scales.max()) if has_noise else None,
        "tokens": int(kept.positions.size),
        "charged_nats": charged,
        "leaked_nats": by_entropy.mean,
        "leaked_stderr": by_entropy.stderr,
        "leaked_over_charged": by_entropy.mean / charged if 0.0 < charged < math.inf else None,
        "mia_bound": success_bound(committed, 0.5),
        "world_id_bound": evidence.world_id_bound,
        "world_id_rate": float(kept.named.mean()),
        "world_id_rate_by_agreement": float(kept.agreeing.mean()),
        "leaked_nats_by_truth": by_truth.mean,
        "leaked_stderr_by_truth": by_truth.stderr,
        "conditional_information_nats": information.mean,
        "conditional_information_stderr": information.stderr,
        "budget_nats": float(evidence.budget.mean()),
        "tells_more_than": broken_bounds(evidence),
        "secrets": num_secrets,
        "tokens_per_secret": per_secret,
        "release": rule.name,
        "charge": settings.charge,
        "protocol": settings.protocol,
        "per_token_nats": settings.per_token,
        "seed": settings.seed,
        "stamp": STAMP,
    }


def _charged(
    rule: Rule, settings: ReplaySettings, is_dissent: BoolArray, num_secrets: int, per_secret: int
) -> tuple[float, float]:
    """Nats charged per secret on average, and at most: the bounds are stated at the latter."""
    if not rule.reads_secret:
        return 0.0, 0.0
    if settings.per_token is None or settings.per_token == math.inf:
        return math.inf, math.inf
    agreed, dissent = (
        charge_units(settings.charge, settings.per_token, reads_secret=True, is_dissent=differs)
        for differs in (False, True)
    )
    num_dissent = int(np.count_nonzero(is_dissent))
    units = dissent * num_dissent + agreed * (is_dissent.size - num_dissent)
    return units / num_secrets / UNITS_PER_NAT, per_secret * dissent / UNITS_PER_NAT


def _samples(recorded: RecordedVotes, settings: ReplaySettings, values: FloatArray | BoolArray) -> FloatArray:
    """The means whose spread is the error: of values per token or per secret, (streams · t,).

    Tokens of a session share a secret and a text, so sessions are the samples (tokens, if there is one session);
    passes share positions, so positions are.
    """
    by_stream = values.reshape(_shape(recorded, settings)[0], -1)  # (streams, t)
    samples: FloatArray = by_stream.mean(axis=1 if settings.protocol == "session" and len(by_stream) > 1 else 0)
    return samples


def _accuracies(recorded: RecordedVotes, settings: ReplaySettings, kept: _Kept) -> dict[str, float | None]:
    names = ("accuracy", "accuracy_stderr", "accuracy_public", "accuracy_full", "accuracy_noiseless", "retained_gain")
    scores: dict[str, float | None] = dict.fromkeys(names)
    if recorded.truth is None:
        return scores
    truth = recorded.truth[kept.positions]
    hits = kept.released == truth
    scores["accuracy"] = float(hits.mean())
    scores["accuracy_stderr"] = mean_and_stderr(_samples(recorded, settings, hits)).stderr
    scores["accuracy_noiseless"] = float((kept.realized == truth).mean())
    for name, column in (("accuracy_public", recorded.public), ("accuracy_full", recorded.full)):
        if column is not None:
            scores[name] = float((column[kept.positions] == truth).mean())
    public, full = scores["accuracy_public"], scores["accuracy_full"]
    if public is not None and full is not None and full > public:  # a share of a loss means nothing
        scores["retained_gain"] = (float(hits.mean()) - public) / (full - public)
    return scores
