"""Attacks of your own on the same sessions, beside the best one there is and the proven bounds.

Sessions on recorded coupled-Gumbel votes of the test text, a persistent secret each. Every attack scores the worlds of
every session; the best-scored world and every record's membership follow from the scores. Attacks come from plugins
(`paclm.attacks`); the built-in one reads the curator's belief.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from paclm.config import format_budget
from paclm.privacy.accounting import charge_units, nats_up
from paclm.privacy.belief import IntArray
from paclm.privacy.bounds import success_bound
from paclm.privacy.releases import Rule
from paclm.study.attacks.attack import BELIEF, Attack, PlayedSession
from paclm.study.attacks.belief import attack_beliefs
from paclm.study.lab import Lab
from paclm.study.leak_tests import describe_excess
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Result, Row
from paclm.study.streams import play_sessions

_GUESS = 1e-12  # the error of rates that are the same in every session, up to rounding


@dataclass(frozen=True, slots=True)
class AttacksScale:
    positions: int
    gumbel_draws: int
    sessions: int
    tokens: int  # of each session
    budgets: tuple[float, ...] = (2.0**-4, 2.0**-8, 2.0**-16)


def run(lab: Lab, scale: AttacksScale) -> Findings:
    """Every attack on every release at every budget; releases that never read the secret have none."""
    lab.need_all_worlds()
    votes = lab.gumbel_votes(scale.positions, scale.gumbel_draws)
    parts = lab.parts("attacks", [asdict(scale), votes.digest])
    cells = [(rule, b) for rule in lab.rules.values() for b in (scale.budgets if rule.reads_secret else (math.inf,))]
    advance = lab.start_task("attacks", len(cells))
    rows: list[Row] = []
    for rule, per_token in cells:
        name = f"attacks-{rule.name}-{format_budget(per_token)}"
        rows += parts.rows(name, partial(_rows, lab, scale, votes, rule, per_token))
        advance(1)
    return Findings(rows, [])


def _rows(lab: Lab, scale: AttacksScale, votes: TextVotes, rule: Rule, per_token: float) -> list[Row]:
    streams = list(play_sessions(votes, rule, per_token, scale.sessions, scale.tokens, lab.seed_for("attacks")))
    secrets = np.concatenate([stream.secrets for stream in streams])
    sessions = [
        PlayedSession(votes.votes[s.positions], s.released, s.beliefs[0], rule.name, per_token) for s in streams
    ]
    charged = 0.0
    if rule.reads_secret:
        charged = scale.tokens * nats_up(charge_units("every-token", per_token, reads_secret=True, is_dissent=True))
    return [
        {
            "attack": attack.name,
            "sees": attack.sees,
            "package": package,
            "release": rule.name,
            "budget": format_budget(per_token) if rule.reads_secret else None,
            "sessions": scale.sessions,
            "horizon": scale.tokens,
            "membership_bound": success_bound(charged, 0.5),
            "world_bound": success_bound(charged, 1.0 / votes.num_worlds),
            **_rates(lab, attack, sessions, secrets),
        }
        for package, attack in ((None, BELIEF), *((p.origin, own) for p, own in lab.plugged("attacks")))
    ]


def _rates(lab: Lab, attack: Attack, sessions: list[PlayedSession], secrets: IntArray) -> Row:
    rng = lab.rng("attacks", attack.name)
    beliefs = np.stack([attack.belief(session, rng) for session in sessions])
    found, row = attack_beliefs(beliefs, secrets, lab.membership), Row()
    row["membership_rate"], row["membership_stderr"] = found.membership
    row["world_rate"], row["world_stderr"] = found.world
    return row


def verdicts(result: Result) -> list[str]:
    """The largest excess over a bound; an attack above it by more than chance has found a bug.

    An attack that only guesses, as on a belief that never moves, has no error and is not tested.
    """
    rows = [row | {"budget": row["budget"] or "no budget"} for row in result.select(collection=1)]
    errors = ("membership_stderr", "world_stderr")
    tested = [row for row in rows if any((row[name] or 0.0) > _GUESS for name in errors)]
    return [describe_excess(tested)] if tested else []


REGIME = Regime(
    name="attacks",
    title="Attacks",
    question="How often is each attack right, and does any beat its bound?",
    presets={"quick": AttacksScale(4096, 2, 60, 512), "paper": AttacksScale(65_408, 1, 400, 4096)},
    run=run,
    headlines=(headline("{attack} finds the world, {release}, {budget}", "world_rate ± world_stderr", ".1%"),),
    verdicts=verdicts,
)
