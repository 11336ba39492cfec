"""All releases and both charges: the share of the gain that each keeps, its leak, and how long a budget lasts.

Accuracy and retained gain are teacher-forced, on recorded coupled-Gumbel votes of the test text, in expectation over
secret and noise, as in `accuracy`. The leak is of sessions on the same votes, a persistent secret each. A charge
changes the ledger and never what is released, so each release is played once and charged both ways.

Beside the releases stand two models that are the same for every secret, as m copies of one world: the public model and
the adapter on all records. Copies never dissent, so the accounting finds zero nats for both.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from paclm.config import ChargeName, format_budget
from paclm.privacy.accounting import charge_units, nats_up, units_down, units_up
from paclm.privacy.belief import FloatArray
from paclm.privacy.bounds import nats_for, success_bound
from paclm.privacy.leak import leak_by_entropy, leak_by_truth, leak_samples_by_entropy, mean_and_stderr
from paclm.privacy.planner import plan
from paclm.privacy.releases import RULES, Rule
from paclm.study.attacks.belief import chance_to_name
from paclm.study.expectation import IN_EXPECTATION, ExpectedReleases, score_hits
from paclm.study.lab import Lab
from paclm.study.leak_tests import Gap, LeakEvidence, broken_bounds, chances_by_agreement, describe_broken_bounds
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Result, Row
from paclm.study.statistics import clustered_mean
from paclm.study.streams import RecordedStream, play_sessions

BUDGETS = tuple(2.0**-n for n in (4, 8, 12, 16, 24, 32))
TARGET = 0.51  # the bound on membership inference up to which tokens are counted
RARE = (
    "The channel leaks in rare events. A few dozen sessions seldom contain one, so both estimates of its leak are "
    "rough and their errors too small. Each term of Σ I is computed; its mean over these sessions is a sample mean, "
    "with the error shown."
)
MODELS = {"public model": "public", "full corpus": "full"}
"""What is the same for every secret, and the column of its votes."""
SAME_FOR_ALL = (
    "Public model and full corpus are one model in place of every world. No worlds differ, so no token says anything "
    "about the secret, which costs zero nats. Of the public model that is all: it reads no record. Of the full corpus "
    "it is a property of the accounting and no privacy of the records: what is promised is about which half of them is "
    "the secret one, and here every record is a member."
)


@dataclass(frozen=True, slots=True)
class ReleasesScale:
    positions: int
    gumbel_draws: int
    sessions: int
    tokens: int  # of each session


def run(lab: Lab, scale: ReleasesScale) -> Findings:
    """Every release at every budget; those that never read the secret have none."""
    votes = lab.gumbel_votes(scale.positions, scale.gumbel_draws)
    parts = lab.parts("releases", [asdict(scale), votes.digest])
    cells = [(rule, b) for rule in lab.rules.values() for b in (BUDGETS if rule.reads_secret else BUDGETS[:1])]
    expected = ExpectedReleases(votes)
    paper = expected.under(RULES["gaussian"], BUDGETS[-1]).hits
    advance = lab.start_task("releases", len(cells))
    rows: list[Row] = []
    for rule, per_token in cells:
        name = f"releases-{rule.name}-{format_budget(per_token)}"
        rows += parts.rows(name, partial(_rows, lab, scale, votes, expected, paper, rule, per_token))
        advance(1)
    for model in MODELS:
        name = f"releases-{model.replace(' ', '-')}"
        rows += parts.rows(name, partial(_one_model, lab, scale, votes, paper, model))
    return Findings(rows, [IN_EXPECTATION, RARE, SAME_FOR_ALL])


def _one_model(lab: Lab, scale: ReleasesScale, votes: TextVotes, paper: FloatArray, model: str) -> list[Row]:
    """One model in place of every world. Where all agree, every release gives their vote; none of them is charged."""
    column = votes.column(MODELS[model])
    copies = replace(votes, votes=np.repeat(column[:, None], votes.num_worlds, axis=1))
    rows = _rows(lab, scale, copies, ExpectedReleases(copies), paper, RULES["plurality"], BUDGETS[0])
    return [{**row, "release": model} for row in rows]


def _play(lab: Lab, scale: ReleasesScale, votes: TextVotes, rule: Rule, per_token: float) -> list[RecordedStream]:
    seed = lab.seed_for("releases")  # the same starts and secrets for all releases
    return list(play_sessions(votes, rule, per_token, scale.sessions, scale.tokens, seed))


def _rows(
    lab: Lab,
    scale: ReleasesScale,
    votes: TextVotes,
    expected: ExpectedReleases,
    paper: FloatArray,
    rule: Rule,
    per_token: float,
) -> list[Row]:
    streams = _play(lab, scale, votes, rule, per_token)
    beliefs, secrets = (np.concatenate([getattr(s, name) for s in streams]) for name in ("beliefs", "secrets"))
    dissent = float(np.mean([votes.is_dissent[stream.positions].mean() for stream in streams]))
    row: Row = {
        "release": rule.name,
        "package": lab.origin_of(rule.name),
        "reads_secret": rule.reads_secret,
        "budget": format_budget(per_token) if rule.reads_secret else None,
        "per_token_nats": per_token if rule.reads_secret else None,
        "sessions": scale.sessions,
        "tokens_per_session": scale.tokens,
        "dissent": dissent,
        **_scores(lab, votes, expected, paper, rule, per_token),
        **_in_sessions(lab, votes, streams),
    }
    row["leaked_nats"], row["leaked_stderr"] = leak_by_entropy(beliefs)
    row["leaked_nats_by_truth"], row["leaked_stderr_by_truth"] = leak_by_truth(beliefs, secrets)
    declared = np.concatenate([stream.information for stream in streams])  # (sessions,)
    row["can_tell_nats"], row["can_tell_stderr"] = mean_and_stderr(declared)
    charges: tuple[tuple[ChargeName, float], ...] = (("every-token", 1.0), ("dissent", dissent))
    for charge, share in charges:
        name = charge.replace("-", "_")
        units = charge_units(charge, per_token, reads_secret=rule.reads_secret, is_dissent=True)
        row[f"charged_{name}"] = scale.tokens * share * nats_up(units)
        row[f"tokens_until_{name}"] = _tokens_until(lab, per_token, share) if rule.reads_secret else None
    cost = nats_up(charge_units("dissent", per_token, reads_secret=rule.reads_secret, is_dissent=True))
    agreeing = [chances_by_agreement(votes.votes[s.positions], s.released, s.secrets) for s in streams]
    evidence = LeakEvidence(
        leaked=leak_samples_by_entropy(beliefs),
        gap=Gap.between(beliefs, secrets),
        declared=declared,
        budget=cost * np.array([votes.is_dissent[stream.positions].sum() for stream in streams]),
        named=chance_to_name(beliefs, secrets),
        agreeing=np.concatenate(agreeing),
        known=np.exp(beliefs.max(axis=1)),
        world_id_bound=success_bound(scale.tokens * cost, 1.0 / votes.num_worlds),
    )
    row["budget_nats"] = evidence.budget.mean()
    row["world_rate"], row["world_bound"] = evidence.world_id_rate, evidence.world_id_bound
    runs = len(BUDGETS) if rule.reads_secret else 1  # one alarm for all of them
    row["tells_more_than"] = ", ".join(broken_bounds(evidence, runs)) or None
    return [row]


def _scores(
    lab: Lab, votes: TextVotes, expected: ExpectedReleases, paper: FloatArray, rule: Rule, per_token: float
) -> Row:
    """Expected accuracy, retained gain and the lead over the paper's release, with errors over passages."""
    found = expected.under(rule, per_token, seed=lab.seed_for("releases", "draws"))
    row: Row = {
        "passages": len(np.unique(votes.passage)),
        "accuracy_public": float((votes.public == votes.truth).mean()),
        "accuracy_full": float((votes.column("full") == votes.truth).mean()),
        "accuracy_noiseless": float(found.noiseless.mean()),
        **score_hits(lab, votes, found.hits),
    }
    lead = clustered_mean(found.hits - paper, votes.passage, lab.rng("hits", "bootstrap"))
    row["lead_points"], row["lead_stderr"] = lead
    return row


def _in_sessions(lab: Lab, votes: TextVotes, streams: list[RecordedStream]) -> Row:
    """Accuracy of the tokens that were played, whose belief moves; with an error over passages, not over sessions."""
    positions = np.concatenate([stream.positions for stream in streams])
    right = np.concatenate([stream.released for stream in streams]) == votes.truth[positions]
    found = clustered_mean(right, votes.passage[positions], lab.rng("releases", "bootstrap"))
    return {"accuracy_sessions": found.mean, "accuracy_sessions_stderr": found.stderr}


def _tokens_until(lab: Lab, per_token: float, share: float) -> int | None:
    """Tokens until a committed total of TARGET is used up, when this share of them is charged; 0: not one."""
    if share <= 0.0:
        return None
    if units_up(per_token) > units_down(nats_for(TARGET, 0.5)):
        return 0
    return plan(mia=TARGET, per_token=per_token, num_worlds=lab.num_worlds, charge="dissent", dissent_rate=share).tokens


def verdicts(result: Result) -> list[str]:
    """Releases that leak more than they may, and whether the two estimates of the leak agree for the paper's."""
    own = result.select(collection=1)
    names = dict.fromkeys(row["release"] for row in own)
    alarms = (_alarm([row for row in own if row["release"] == name]) for name in names)
    gaussian = [row for row in own if row["release"] == "gaussian"]
    errors = [math.hypot(row["leaked_stderr"] or 0.0, row["leaked_stderr_by_truth"] or 0.0) for row in gaussian]
    gaps = [abs(row["leaked_nats"] - row["leaked_nats_by_truth"]) for row in gaussian]
    distance = max(gap / (error or math.inf) for gap, error in zip(gaps, errors, strict=True))
    alarm = "" if distance < 4.0 else "ALARM: "
    return [
        *filter(None, alarms),
        f"{alarm}largest difference of the two leak estimates, gaussian: {distance:.1f} standard errors in "
        f"{len(gaussian)} budgets (alarm from 4: the belief would not be the true posterior)",
    ]


def _alarm(rows: list[Row]) -> str:
    """The alarm of a release that breaks a bound, at the tightest budget at which it does; empty if it breaks none."""
    broken = [row for row in rows if row.get("tells_more_than")]  # recorded results may lack the column
    if not broken:
        return ""
    row = broken[-1]
    found = describe_broken_bounds(
        row["release"],
        row["tells_more_than"].split(", "),
        leaked=row["leaked_nats"],
        stderr=row["leaked_stderr"],
        by_truth=row["leaked_nats_by_truth"],
        declared=row["can_tell_nats"],
        budget=row["budget_nats"],
        rate=row["world_rate"],
        bound=row["world_bound"],
        unit="a session" + (f" at {row['budget']}" if row["reads_secret"] else ""),
    )
    where = f", at {len(broken)} of {len(rows)} budgets" if row["reads_secret"] else ""
    return f"ALARM{where}: {found}"


REGIME = Regime(
    name="releases",
    title="All releases and both charges",
    question="What does each release keep of the gain, and what does it leak?",
    presets={"quick": ReleasesScale(4096, 2, 24, 512), "paper": ReleasesScale(65_408, 1, 100, 4096)},
    run=run,
    headlines=(
        headline("retained gain, {release}, {budget}", "retained_gain ±", ".0%"),
        headline("dissent", "dissent", ".1%", release="plurality"),
    ),
    verdicts=verdicts,
)
