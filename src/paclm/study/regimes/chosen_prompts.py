"""Prompts chosen to find out whether one record was used, against the promised bound.

The attacker knows every world's vote on a pool of prompts, coins included, and which worlds hold the record. At each
step he asks the prompt that by his belief says most about the record (`attacks/chosen_prompts.py`). Every secret is
played equally often. Two attackers: one knows the curator's belief, which is more than anybody sees; the other sees
tokens, asks prompts whose votes need no coins, and follows the hidden beliefs with a particle filter.

Rows are averaged over records, with errors over records. The worst record is chosen on one half of the sessions and
measured on the other, so its figures are not biased upward by the choice. Broken mechanisms are attacked alike, to
show that the comparisons find them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.special import xlogy

from paclm.config import format_budget
from paclm.curator.research import ResearchSession
from paclm.privacy.accounting import charge_units, nats_up
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import leak_samples_by_entropy, mean_and_stderr
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import rule_named
from paclm.study.attacks.chosen_prompts import PromptPool, chase, forced_pool
from paclm.study.attacks.token_only import TokenFilter, leak_samples_by_tokens
from paclm.study.copied_records import CopiesScale, train_copies
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.eval_text import Passage
from paclm.study.history import Arrays
from paclm.study.lab import Lab
from paclm.study.leak_tests import FALSE_ALARMS, holm, p_of_excess, p_of_hits
from paclm.study.recorded_votes import collect_votes
from paclm.study.regime import Findings, Regime
from paclm.study.regimes.canaries import planted_canaries
from paclm.study.regimes.universe import choose_candidates
from paclm.study.results import Result, Row

OWN, ALL, HELD_OUT, FORCED = "own record", "all records", "held-out records", "forced votes"
WAYS = (*((pool, choice) for pool in (ALL, OWN, HELD_OUT) for choice in ("chosen", "random")), (FORCED, "chosen"))
PLAIN, FOURFOLD = "one world served plainly", "noise for four times the budget"
MANY_VISITS = 16
_FEWEST = 16  # tokens of a record that is attacked
PS = ("p_membership", "p_any_record", "p_worst_record", "p_leak")


class Budget(NamedTuple):
    """A budget per token, and the numbers of tokens after which the attacker guesses."""

    per_token: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChosenPromptsScale:
    records: int  # whose prefixes are prompts; as many held-out ones
    tokens: int  # of each record: every prefix up to this length is a prompt
    draws: int  # of coins per prefix, beside the greedy votes
    attacked: int  # records
    kept: int  # prompts of the pool among which the attacker chooses, the best for a record under a uniform belief
    repeats: int  # sessions per record and secret; even
    token_records: int  # attacked by who sees tokens only
    token_sessions: int  # against each of them
    copies: CopiesScale
    budgets: tuple[Budget, ...] = (
        Budget(2.0**-4, (1, 8)),
        Budget(2.0**-6, (8, 32)),
        Budget(2.0**-8, (32, 128)),
    )


class AttackedRecord(NamedTuple):
    """One record under attack."""

    is_member: BoolArray  # (m,)
    own: IntArray  # (n, m) votes on its own prefixes


class Attacked(NamedTuple):
    """Sessions against r records, at h numbers of tokens, n each."""

    record: FloatArray  # (r, h, n) nats about the membership
    secret: FloatArray  # (r, h, n) nats about the realized world
    hits: BoolArray  # (r, h, n) whether the membership was guessed
    expected: FloatArray  # (r, h, n) the curator's belief in what was guessed: the chance that the guess is right
    dissent: FloatArray  # (r, h, n) tokens on which worlds differed
    priors: FloatArray  # (r,) success of who sees nothing
    history: FloatArray  # (r, h, n) nats about the membership in the curator's belief

    @classmethod
    def of(cls, each: Sequence[Attacked]) -> Attacked:
        """Of several records."""
        return cls(*map(np.concatenate, zip(*each, strict=True)))


def run(lab: Lab, scale: ChosenPromptsScale) -> Findings:
    """Records of the workspace, its canaries, broken mechanisms, tokens alone, and copied records."""
    lab.need_all_worlds()
    parts = lab.parts("chosen_prompts", asdict(scale))
    found = parts.arrays("votes", partial(_record_votes, lab, scale))
    votes, passage, visits = found["votes"], found["passage"], found["visits"]
    is_inside = passage < len(visits)
    pools = {ALL: PromptPool.of(votes[is_inside]), HELD_OUT: PromptPool.of(votes[~is_inside])}
    attackable = [AttackedRecord(row, votes[passage == i]) for i, row in enumerate(found["membership"])]
    records = [attackable[i] for i in np.flatnonzero(found["is_attacked"])]
    canaries = {
        f"canary, less than {MANY_VISITS} visits": (visits > 0) & (visits < MANY_VISITS),
        f"canary, {MANY_VISITS} visits or more": visits >= MANY_VISITS,
    }
    last = scale.budgets[-1]
    cells = [
        *(("record", records, *how, None, each) for how in WAYS for each in scale.budgets),
        *(
            (kind, [attackable[i] for i in np.flatnonzero(chosen)], pool, "chosen", None, last)
            for kind, chosen in canaries.items()
            for pool in (ALL, OWN)
            if chosen.any()
        ),
        ("record", records, ALL, "chosen", PLAIN, last),
        ("record", records, FORCED, "chosen", FOURFOLD, last),
    ]
    advance = lab.start_task("attacks by chosen prompts", len(cells))
    rows: list[Row] = []
    for kind, targets, pool, choice, broken, budget in cells:
        key: Row = {"target": kind, "attacker": "belief", "pool": pool, "choice": choice, "broken": broken}
        name = "-".join(map(str, (kind, pool, choice, broken, format_budget(budget.per_token)))).replace(" ", "_")
        rows += parts.rows(name, partial(_by_belief, lab, scale, key, targets, pools, budget))
        advance(1)
    greedy = PromptPool.of(votes[found["is_greedy"] & is_inside])
    for budget in scale.budgets:
        make = partial(_by_tokens, lab, scale, records[: scale.token_records], greedy, budget)
        rows += parts.rows(f"tokens-{format_budget(budget.per_token)}", make)
    rows += parts.rows("copies", partial(_copies, lab, scale))
    return Findings(rows, _notes(scale, bool(visits.any())))


def _notes(scale: ChosenPromptsScale, has_canaries: bool) -> list[str]:
    notes = [
        "The attacker knows the votes of all worlds on every prompt before he asks, and chooses coins among those that "
        "were drawn, which no caller can. Rows of tokens are without coins and without the curator's belief.",
        f"Among all prompts of a pool he keeps the {scale.kept} that are best for a record under a uniform belief. "
        "Forced votes: exactly the worlds with the record vote for something, the best prompt there can be.",
        f"Copies are in a collection of {scale.copies.worlds} worlds of their own. The promise is about one record: a "
        "text whose copies are units of their own is in nearly every world, and that is no secret to keep.",
    ]
    return notes if has_canaries else [*notes, "The workspace has no canaries; planted records are among the copies."]


def _record_votes(lab: Lab, scale: ChosenPromptsScale) -> Arrays:
    """Votes on the prefixes of records, canaries and held-out records, and what is known about each of them."""
    candidates = choose_candidates(lab, scale.records, scale.tokens, _FEWEST)
    planted = planted_canaries(lab)
    inside = np.flatnonzero(candidates.is_member)
    _, firsts = np.unique(candidates.clusters[inside], return_index=True)  # one record of a unit
    is_attacked = np.isin(np.arange(len(inside)), np.sort(firsts)[: scale.attacked])
    tokens = [candidates.tokens[i] for i in inside]
    tokens += [[*one.canary.trigger_ids, *one.canary.payload_ids] for one in planted]
    tokens += [candidates.tokens[i] for i in np.flatnonzero(~candidates.is_member)]
    own = [lab.membership[candidates.places[inside]], *(one.is_member[None] for one in planted)]
    return {
        **_votes_on(lab, lab.engine(context=scale.tokens), tokens, scale.draws),
        "membership": np.concatenate(own),
        "is_attacked": np.concatenate([is_attacked, np.zeros(len(planted), dtype=np.bool_)]),
        "visits": np.array([0] * len(inside) + [one.canary.repetitions for one in planted]),
    }


def _votes_on(lab: Lab, engine: object, tokens: Sequence[Sequence[int]], draws: int) -> Arrays:
    """Votes on every prefix, greedy and then with coins: votes (n, m), passage (n,) and is_greedy (n,)."""
    passages = [replace(Passage.of(own), document=number) for number, own in enumerate(tokens)]
    decodings = [GREEDY, GUMBEL.times(draws)]
    seeds = [lab.seed_for("chosen_prompts", "coins", decoding.name) for decoding in decodings]
    advance = lab.start_task("votes on prompts", sum(passage.num_scored for passage in passages))
    found = collect_votes(engine, passages, decodings, seeds, False, advance).values()  # type: ignore[arg-type]
    return {
        "votes": np.concatenate([votes.votes for votes in found]),
        "passage": np.concatenate([votes.passage for votes in found]),
        "is_greedy": np.repeat([True, False], [votes.num_positions for votes in found]),
    }


def _by_belief(
    lab: Lab,
    scale: ChosenPromptsScale,
    key: Row,
    targets: Sequence[AttackedRecord],
    pools: dict[str, PromptPool],
    budget: Budget,
) -> list[Row]:
    """One way of asking, at one budget: every secret equally often against every record."""
    rng = lab.rng("chosen_prompts", *key.values(), budget)
    num_worlds = len(targets[0].is_member)
    secrets = np.tile(np.arange(num_worlds), scale.repeats)
    real = {PLAIN: math.inf, FOURFOLD: 4.0 * budget.per_token}.get(key["broken"], budget.per_token)
    is_adaptive, found = key["choice"] == "chosen", []
    for target in targets:
        pool = forced_pool(target.is_member) if key["pool"] == FORCED else pools.get(key["pool"])
        pool = PromptPool.of(target.own) if pool is None else pool
        if is_adaptive:
            pool = pool.best(target.is_member, scale.kept)
        beliefs, dissent = chase(pool, target.is_member, secrets, real, budget.tokens, rng, is_adaptive=is_adaptive)
        with np.errstate(divide="ignore"):
            leaked = np.stack([leak_samples_by_entropy(np.log(each)) for each in beliefs])
        found.append(_attacked(target, beliefs, beliefs, secrets, leaked, dissent, rng))
    return _rows(key, budget, Attacked.of(found))


def _by_tokens(
    lab: Lab, scale: ChosenPromptsScale, targets: Sequence[AttackedRecord], pool: PromptPool, budget: Budget
) -> list[Row]:
    """Who sees tokens only: he asks by the belief that they gave him, and never learns R."""
    names = ("chosen_prompts", "tokens", budget)
    rng, rule = lab.rng(*names), rule_named("gaussian")
    noises = iter(np.random.SeedSequence(lab.seed_for(*names, "noise")).spawn(len(targets) * scale.token_sessions))
    found, horizons = [], len(budget.tokens)
    for target in targets:
        kept, num_worlds = pool.best(target.is_member, scale.kept), len(target.is_member)
        unanimous = np.zeros(num_worlds, dtype=np.int64)  # asked where worlds differ on no prompt
        seen, real = np.empty((2, horizons, scale.token_sessions, num_worlds))
        secrets = np.empty(scale.token_sessions, dtype=np.int64)
        for i in range(scale.token_sessions):
            session = ResearchSession(num_worlds, rule, budget.per_token, ResearchNoise(next(noises)))
            attacker = TokenFilter(num_worlds, budget.per_token, rng)
            secrets[i], at = session.secret, 0
            for step in range(1, budget.tokens[-1] + 1):
                votes = unanimous
                if len(kept):
                    share = kept.shares(np.exp(attacker.log_belief())[None], target.is_member)[0]
                    votes = kept.votes[int(share.argmax())]
                attacker.see(votes, session.release(votes).token)
                if step == budget.tokens[at]:
                    seen[at, i], real[at, i] = attacker.log_belief(), session.belief
                    at += 1
        leaked = np.stack([leak_samples_by_tokens(*pair) for pair in zip(real, seen, strict=True)])
        dissent = np.tile(np.array(budget.tokens)[:, None], scale.token_sessions)
        found.append(_attacked(target, np.exp(real), np.exp(seen), secrets, leaked, dissent, rng))
    key: Row = {"target": "record", "attacker": "tokens", "pool": ALL, "choice": "chosen", "broken": None}
    return _rows(key, budget, Attacked.of(found))


def _copies(lab: Lab, scale: ChosenPromptsScale) -> list[Row]:
    """Records that occur once, several times, or were planted, in worlds of their own."""
    engine, asked = train_copies(lab, scale.copies)
    texts = list(dict.fromkeys(tuple(one.tokens) for one in asked))
    found = _votes_on(lab, engine, texts, scale.draws)
    lab.release_engine()
    pools, rows = {ALL: PromptPool.of(found["votes"])}, []
    for kind in dict.fromkeys(one.kind for one in asked):
        targets = [
            AttackedRecord(one.is_member, found["votes"][found["passage"] == texts.index(tuple(one.tokens))])
            for one in asked
            if one.kind == kind and not one.is_member.all()  # a text in every world is no question
        ]
        for pool in (ALL, OWN) if targets else ():
            key: Row = {"target": kind, "attacker": "belief", "pool": pool, "choice": "chosen", "broken": None}
            rows += _by_belief(lab, scale, key, targets, pools, scale.budgets[-1])
    return rows


def _attacked(
    target: AttackedRecord,
    beliefs: FloatArray,
    guesses: FloatArray,
    secrets: IntArray,
    leaked: FloatArray,
    dissent: FloatArray,
    rng: np.random.Generator,
) -> Attacked:
    """Figures of one record: the curator's beliefs and the attacker's (h, n, m), and his leak about the world."""
    is_member = target.is_member
    prior = float(is_member.mean())

    def about(guessed: FloatArray) -> FloatArray:
        """Log probability of the truth over that of the prior, in expectation over the curator's belief."""
        found: FloatArray = xlogy(real, guessed / prior) + xlogy(1.0 - real, (1.0 - guessed) / (1.0 - prior))
        return found

    real, guessed = (np.clip(table @ is_member, 0.0, 1.0) for table in (beliefs, guesses))  # (h, n)
    is_tie = np.abs(guessed - 0.5) < 1e-12
    guess = np.where(is_tie, rng.random(guessed.shape) < 0.5, guessed > 0.5)
    return Attacked(
        about(guessed)[None],
        leaked[None],
        (guess == is_member[secrets])[None],
        np.where(guess, real, 1.0 - real)[None],
        dissent[None],
        np.array([max(prior, 1.0 - prior)]),
        about(real)[None],
    )


def _rows(key: Row, budget: Budget, found: Attacked) -> list[Row]:
    """One row for each number of tokens."""
    return [{**key, **_figures(key, budget, found, h, tokens)} for h, tokens in enumerate(budget.tokens)]


def _figures(key: Row, budget: Budget, found: Attacked, h: int, tokens: int) -> Row:
    charged = tokens * nats_up(charge_units("every-token", budget.per_token, reads_secret=True, is_dissent=True))
    bounds = np.array([success_bound(charged, prior) for prior in found.priors.tolist()])  # (r,)
    record, hits = found.record[:, h], found.hits[:, h]  # (r, n)
    half = hits.shape[1] // 2
    worst = int(record[:, :half].mean(axis=1).argmax())
    row: Row = {
        "budget": format_budget(budget.per_token),
        "per_token_nats": budget.per_token,
        "tokens": tokens,
        "is_last": tokens == budget.tokens[-1],
        "charged_nats": charged,
        "records": len(record),
        "sessions": hits.shape[1],
        "dissent": float(found.dissent[:, h].mean() / tokens),
    }

    def note(name: str, values: FloatArray) -> None:
        row[name], row[f"{name}_stderr"] = mean_and_stderr(values)

    note("leaked_record_nats", record.mean(axis=1))
    note("record_over_charged", record.mean(axis=1) / charged)
    note("secret_over_charged", found.secret[:, h].mean(axis=1) / charged)
    note("membership_rate", hits.mean(axis=1))
    note("membership_expected", found.expected[:, h].mean(axis=1))
    row["membership_prior"], row["membership_bound"] = float(found.priors.mean()), float(bounds.mean())
    note("worst_over_charged", record[worst, half:] / charged)
    note("worst_membership_rate", hits[worst, half:].astype(np.float64))
    row["worst_bound"] = float(bounds[worst])
    row |= dict.fromkeys(PS)
    if bounds.max() < 1.0:
        each = [p_of_hits(int(own.sum()), own.size, bound) for own, bound in zip(hits, bounds.tolist(), strict=True)]
        row["p_membership"] = p_of_hits(int(hits.sum()), hits.size, float(bounds.mean()))
        row["p_any_record"] = min(1.0, min(each) * len(each))
        row["p_worst_record"] = p_of_hits(int(hits[worst, half:].sum()), hits.shape[1] - half, row["worst_bound"])
    if key["attacker"] == "tokens":
        note("history_over_charged", found.history[:, h].mean(axis=1) / charged)
    else:
        row["p_leak"] = p_of_excess((found.secret[:, h] - charged).ravel(), charged)
    return row


def verdicts(result: Result) -> list[str]:
    """Whether an attack beats a bound by more than chance (Holm), and whether attacks on broken mechanisms do."""
    sound = [
        (row[p], p[2:].replace("_", " "), row) for row in result.select(broken=None) for p in PS if row[p] is not None
    ]
    exceeded = sum(holm([p for p, _, _ in sound]))
    smallest, what, row = min(sound, key=lambda test: test[0])
    lines = [
        f"{'ALARM: ' if exceeded else ''}comparisons with a bound: {exceeded} of {len(sound)} exceed it. The smallest "
        f"p is {smallest:.2g} ({what}, {_name(row)}). By Holm, a sound release raises an alarm in at most "
        f"{FALSE_ALARMS:.0%} of runs."
    ]
    for broken in (PLAIN, FOURFOLD):
        ps = [row[p] for row in result.select(broken=broken) for p in PS if row[p] is not None]
        is_found = min(ps) < FALSE_ALARMS / len(sound)
        lines.append(
            f"{'' if is_found else 'ALARM: '}control, {broken}: {'found' if is_found else 'not found'}, "
            f"p = {min(ps):.2g}, to be below {FALSE_ALARMS / len(sound):.2g}"
        )
    return lines


def _name(row: Row) -> str:
    return (
        f"{row['target']}, {row['attacker']}, {row['pool']}, {row['choice']}, {row['budget']}, {row['tokens']} tokens"
    )


def in_short(result: Result) -> list[str]:
    """How near each way of asking comes to what is promised, at the end of the smallest budget."""
    rows = [row for row in result.select(broken=None, collection=1) if row["is_last"]]
    least = min(row["per_token_nats"] for row in rows)
    return [
        f"{_name(row)}: {row['record_over_charged']:.2%} of the charge is about the record (worst record "
        f"{row['worst_over_charged']:.2%}), membership guessed {row['membership_rate']:.2%}, bound "
        f"{row['membership_bound']:.2%}"
        for row in rows
        if row["per_token_nats"] == least
    ]


REGIME = Regime(
    name="chosen_prompts",
    title="Chosen prompts",
    question="How near does an attacker who chooses his prompts come to the promised bound on one record?",
    presets={
        "quick": ChosenPromptsScale(
            records=12,
            tokens=48,
            draws=1,
            attacked=8,
            kept=24,
            repeats=8,
            token_records=4,
            token_sessions=8,
            copies=CopiesScale(8, 16, 4, 4, 4, 64, 48),
        ),
        "paper": ChosenPromptsScale(
            records=96,
            tokens=96,
            draws=2,
            attacked=64,
            kept=48,
            repeats=2,
            token_records=16,
            token_sessions=16,
            copies=CopiesScale(32, 192, 16, 4, 16, 64, 96),
        ),
    },
    run=run,
    in_short=in_short,
    verdicts=verdicts,
)
