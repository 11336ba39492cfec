"""A user's view: the leak of the tokens alone, beside that of the whole history, which every other table measures.

Other tables estimate I(S; R-history), because the curator's belief is exact about it. A user never sees R. Here an
attacker who knows all adapters, coins and votes, but not R, averages over the possible R; the leak of this attack is a
lower bound on I(S; tokens), as the history's is an upper one. For `channel` the tokens are the history.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from paclm.config import format_budget
from paclm.privacy.belief import FloatArray
from paclm.privacy.leak import leak_by_entropy, leak_by_truth, leak_samples_by_entropy, mean_and_stderr
from paclm.privacy.releases import rule_named
from paclm.study.attacks.belief import attack_beliefs
from paclm.study.attacks.token_only import leak_samples_by_tokens, token_belief
from paclm.study.lab import Advance, Lab
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.streams import RecordedStream, play_sessions

BUDGETS = tuple(2.0**-n for n in (4, 8, 12, 16))


@dataclass(frozen=True, slots=True)
class TokensOnlyScale:
    positions: int
    gumbel_draws: int  # of the recorded votes, as in the accuracy regime, which shares them
    sessions: int
    tokens: int  # per session
    particles: int  # histories that the attacker follows


def run(lab: Lab, scale: TokensOnlyScale) -> Findings:
    """Both releases that read the secret, every budget, on recorded Gumbel votes."""
    lab.need_all_worlds()
    recorded = lab.gumbel_votes(scale.positions, scale.gumbel_draws)
    parts = lab.parts("tokens_only", asdict(scale))
    rows: list[Row] = []
    for release in ("gaussian", "channel"):
        for per_token in BUDGETS:
            advance = lab.start_task(f"tokens only, {release} {format_budget(per_token)}", scale.sessions)
            make = partial(_rows, lab, recorded, scale, release, per_token, advance)
            rows += parts.rows(f"{release}-{format_budget(per_token)}", make)
    return Findings(rows, [])


def _rows(
    lab: Lab, recorded: RecordedVotes, scale: TokensOnlyScale, release: str, per_token: float, advance: Advance
) -> list[Row]:
    seed = lab.seed_for("tokens_only", "sessions", release, per_token)
    rng = lab.rng("tokens_only", "particles", release, per_token)
    streams, seen = [], []
    for stream in play_sessions(recorded, rule_named(release), per_token, scale.sessions, scale.tokens, seed):
        streams.append(stream)
        if release == "gaussian":
            votes = recorded.votes[stream.positions]
            seen.append(token_belief(votes, stream.released, per_token, rng, scale.particles))
        else:
            seen.append(stream.beliefs[0])  # its belief is about tokens alone
        advance(1)
    row: Row = {
        "release": release,
        "per_token_nats": per_token,
        "budget": format_budget(per_token),
        "sessions": scale.sessions,
        "tokens": scale.tokens,
        "charged_nats": scale.tokens * per_token,
        "dissent": float(recorded.is_dissent[np.concatenate([s.positions for s in streams])].mean()),
        "is_exact": release == "channel",
    }
    return [row | _figures(lab, streams, np.stack(seen))]


def _figures(lab: Lab, streams: list[RecordedStream], seen: FloatArray) -> Row:
    beliefs = np.concatenate([stream.beliefs for stream in streams])  # (sessions, m)
    secrets = np.concatenate([stream.secrets for stream in streams])
    row: Row = {}
    row["leaked_history_nats"], row["leaked_history_stderr"] = leak_by_entropy(beliefs)
    row["leaked_tokens_nats"], row["leaked_tokens_stderr"] = mean_and_stderr(leak_samples_by_tokens(beliefs, seen))
    row["leaked_tokens_by_truth_nats"], row["leaked_tokens_by_truth_stderr"] = leak_by_truth(seen, secrets)
    row["leaked_tokens_by_entropy_nats"] = leak_by_entropy(seen).mean
    row["tokens_over_history"], row["tokens_over_history_stderr"] = _ratio(beliefs, seen)
    for name, table in (("history", beliefs), ("tokens", seen)):
        attack = attack_beliefs(table, secrets, lab.membership)
        row[f"membership_{name}"], row[f"membership_{name}_stderr"] = attack.membership
        row[f"world_{name}"], row[f"world_{name}_stderr"] = attack.world
    return row


def _ratio(beliefs: FloatArray, seen: FloatArray) -> tuple[float | None, float | None]:
    """Tokens ÷ history, with the first-order error of a ratio of paired means."""
    history = leak_samples_by_entropy(beliefs)
    tokens = leak_samples_by_tokens(beliefs, seen)
    if not history.mean() > 0.0:
        return None, None
    ratio = float(tokens.mean() / history.mean())
    spread = (tokens - ratio * history).std(ddof=1) / np.sqrt(len(history)) if len(history) > 1 else np.nan
    return ratio, float(spread / history.mean())


REGIME = Regime(
    name="tokens_only",
    title="A user who sees tokens only",
    question="How much of the leak of the history do the tokens alone leak?",
    presets={
        "quick": TokensOnlyScale(4096, 2, sessions=60, tokens=192, particles=32),
        "paper": TokensOnlyScale(65_408, 1, sessions=100, tokens=1024, particles=64),
    },
    run=run,
    headlines=(
        headline("leak of tokens ÷ leak of history, {budget}", "tokens_over_history ±", ".0%", release="gaussian"),
    ),
)
