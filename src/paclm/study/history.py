"""Long streams against one secret: query after query with the belief carried on, and how much they leak.

Every number about a session is over the history up to a horizon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paclm.config import format_budget
from paclm.errors import InvalidInput
from paclm.privacy.accounting import UNITS_PER_NAT, units_up
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import leak_by_entropy, leak_by_truth, leak_samples_by_entropy, mean_and_stderr
from paclm.study.attacks.belief import attack_beliefs
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.results import Row
from paclm.study.serving import EngineStreams, Played, Prompts, play

Arrays = dict[str, npt.NDArray[Any]]


def play_queries(
    streams: EngineStreams,
    sessions_at: Callable[[int, FloatArray], ResearchSessions],
    prompts: Sequence[Prompts],
    beliefs: FloatArray,
    first_query: int,
    length: int,
) -> Arrays:
    """Several queries of n sessions, from the beliefs (n, m) before the first: prompts by query, then by session.

    `sessions_at` gives the sessions of a query from the beliefs before it (see `carry_on`). Returns the columns of
    `Played` over all queries, (n, queries · length), and `beliefs` (queries, n, m).
    """
    played: list[Arrays] = []
    for query, some in enumerate(prompts, start=first_query):
        played.append(play(streams, some, sessions_at(query, beliefs), length).arrays())
        beliefs = played[-1]["beliefs"][-1]
    return join_queries(played)


def join_queries(parts: Sequence[Arrays]) -> Arrays:
    """Queries one after another: columns of tokens (n, T) grow in length, beliefs (queries, n, m) in number."""
    return {name: np.concatenate([part[name] for part in parts], axis=int(name != "beliefs")) for name in parts[0]}


def join_sessions(parts: Sequence[Arrays]) -> Arrays:
    """Sessions side by side: all columns grow along the axis of sessions."""
    return {name: np.concatenate([part[name] for part in parts], axis=int(name == "beliefs")) for name in parts[0]}


def tokens_per_query(played: Played) -> int:
    """Of sessions whose beliefs were kept after every query."""
    return int(played.tokens.shape[1] // len(played.beliefs))


def measure(played: Played, per_token: float, secrets: IntArray, horizon: int, membership: BoolArray) -> Row:
    """The leak of the first `horizon` tokens by both estimators, the charge at per_token nats each, and dissent.

    The gap is leaked ÷ charged minus the dissent fraction, session by session: what the matched pairs leave open.
    """
    step = tokens_per_query(played)
    if horizon % step or not 0 < horizon <= step * len(played.beliefs):
        raise InvalidInput(
            f"A horizon must be one of {len(played.beliefs)} whole queries of {step} tokens, not {horizon} tokens."
        )
    beliefs: FloatArray = played.beliefs[horizon // step - 1]  # (n, m)
    num_worlds = beliefs.shape[1]
    charged = horizon * units_up(per_token) / UNITS_PER_NAT
    leaked = leak_samples_by_entropy(beliefs)
    is_dissent = played.distinct[:, :horizon] > 1
    by_truth = np.log(num_worlds) + beliefs[np.arange(len(secrets)), secrets]
    attack = attack_beliefs(beliefs, secrets, membership)
    depth = played.distinct[:, :horizon][is_dissent]
    row: Row = {"budget": format_budget(per_token), "per_token_nats": per_token, "horizon": horizon}
    row |= {"sessions": len(secrets), "charged_nats": charged}
    row["leaked_nats"], row["leaked_stderr"] = leak_by_entropy(beliefs)
    row["leaked_by_truth_nats"], row["leaked_by_truth_stderr"] = leak_by_truth(beliefs, secrets)
    row["estimators_parting"], row["estimators_parting_stderr"] = mean_and_stderr(leaked - by_truth)
    row["step_information_nats"] = float(played.information[:, :horizon].sum(axis=1).mean())
    row["leaked_over_charged"] = row["leaked_nats"] / charged
    row["leaked_over_charged_stderr"] = row["leaked_stderr"] / charged
    row["dissent"], row["dissent_stderr"] = mean_and_stderr(is_dissent.mean(axis=1))
    row["gap"], row["gap_stderr"] = mean_and_stderr(leaked / charged - is_dissent.mean(axis=1))
    row["distinct_given_dissent"] = float(depth.mean()) if depth.size else None
    row["membership_rate"], row["membership_stderr"] = attack.membership
    row["membership_bound"] = success_bound(charged, 0.5)
    row["world_rate"], row["world_stderr"] = attack.world
    row["world_bound"] = success_bound(charged, 1.0 / num_worlds)
    return row


def follow_up(played: Played, truth: IntArray, start: int, end: int) -> Row:
    """How good the tokens from `start` to `end` are, whole queries; truth (n, queries): the token after each prompt.

    Accuracy is that of each query's first token, the only one whose context is the text's own. Agreement is over all
    tokens: with the realized world's vote, the full-corpus adapter's and the public model's on the same context.
    """
    step = tokens_per_query(played)
    queries, stretch = slice(start // step, end // step), slice(start, end)
    voters = {"released": played.tokens, "realized": played.realized, "public": played.public, "full": played.full}
    row: Row = {}
    for name, votes in voters.items():
        if votes is None:
            continue
        right = votes[:, ::step][:, queries] == truth[:, queries]
        row[f"accuracy_{name}"], row[f"accuracy_{name}_stderr"] = mean_and_stderr(right.mean(axis=1))
        if name != "released":
            same = (votes == played.tokens)[:, stretch]
            row[f"agreement_{name}"], row[f"agreement_{name}_stderr"] = mean_and_stderr(same.mean(axis=1))
    return row
