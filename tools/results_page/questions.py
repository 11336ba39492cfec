"""What docs/research/results.md asks of the result files beyond single rows: gaps in standard errors, p-values, shares.

Used by the template of tools/make_results.py, which gets all of `QUESTIONS`. Holds no text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from scipy.stats import binom, chi2, norm, spearmanr

import paper_options
from paclm.privacy.bounds import success_bound
from paclm.study.baselines.accountants import success_at_half
from paclm.study.leak_tests import excess_in_errors
from paclm.study.regimes import regime_named
from paclm.study.results import Row, plain
from results_page.evaluation import Evaluation

SPEED_ONLY = ("together", "queries_per_part", "universe.sequences")
"""Sizes that a regime's numbers do not depend on: of any, or of the one before the dot."""


def largest_gap(rows: Sequence[Row]) -> float:
    """By how many standard errors leak ÷ charged and dissent differ, at most."""
    return max(float(abs(row["gap"]) / row["gap_stderr"]) for row in rows)


def largest_disagreement(rows: Sequence[Row]) -> float:
    """By how many standard errors the two estimators of the leak differ, at most."""
    return max(float(abs(row["estimators_parting"]) / row["estimators_parting_stderr"]) for row in rows)


def largest_excess(rows: Sequence[Row]) -> float:
    """By how many standard errors an attack beats its bound, at most; negative where none does."""
    return max(excess_in_errors(row, attack) for row in rows for attack in ("membership", "world"))


def leak_gap(row: Row) -> float:
    """By how many standard errors the leak and the charge of dissenting tokens differ, in sessions on recorded votes.

    For the paper's release, whose steps can leak exactly the charge of dissent. If sessions leak their own charge on
    average, leak and charge covary as much as the charge varies, so the gap's variance is the difference of the two.
    Infinite where that difference is not positive.
    """
    charged = row["charged_dissent_nats"] if "charged_dissent_nats" in row else row["charged_dissent"]
    left = row["leaked_stderr"] ** 2 - row["can_tell_stderr"] ** 2
    return float(abs(row["leaked_nats"] - charged) / math.sqrt(left)) if left > 0.0 else math.inf


def share_leaked(row: Row) -> str:
    """Leaked ÷ charged with its error."""
    return " ± ".join(f"{row[name] / row['charged_every_token']:.1%}" for name in ("leaked_nats", "leaked_stderr"))


def gain_gap(row: Row, theirs: float, their_error: float = 0.0) -> float:
    """By how many standard errors a retained gain differs from another."""
    return float(abs(row["retained_gain"] - theirs) / math.hypot(row["retained_gain_stderr"], their_error))


def times_dissent(unanimity: float, theirs: float) -> float:
    """Ratio of two dissent rates, from the unanimities."""
    return (1.0 - unanimity) / (1.0 - theirs)


def training_gap(study: Evaluation, other: Evaluation) -> float:
    """By how many standard errors another training of the same worlds keeps more or less of the gain, at most."""
    pairs = [[one.row("accuracy", decoder=d, budget="2^-32") for one in (study, other)] for d in ("greedy", "gumbel")]
    return max(gain_gap(ours, theirs["retained_gain"]) for ours, theirs in pairs)


def agrees_less(row: Row) -> float:
    """By how many standard errors worlds agree less often in bfloat16."""
    return float(-row["unanimity_difference"] / row["unanimity_stderr"])


def largest_fall(study: Evaluation) -> float:
    """By how many standard errors agreement with the realized world falls from start to end of sessions.

    At the budget with the largest fall; negative where it rises at all of them.
    """
    horizons = study.results["sessions"].scale["horizons"]
    starts, ends = (study.rows("sessions", horizon=choose(horizons)) for choose in (min, max))
    falls = []
    for start, end in zip(starts, ends, strict=True):
        error = math.hypot(*(row["agreement_realized_stderr"] for row in (start, end)))
        falls.append(float(start["agreement_realized"] - end["agreement_realized"]) / error)
    return max(falls)


def forgetting_losses(study: Evaluation) -> list[float]:
    """How much less often the forgetting curator is right than the tracking one at loose budgets, in long sessions."""
    longest = max(study.results["forgetting"].scale["horizons"])
    pairs = [
        [study.row("forgetting", curator=name, budget=budget, tokens=longest) for name in ("tracking", "forgetting")]
        for budget in ("2^-4", "2^-8")
    ]
    return [float(tracking["accuracy"] - forgetting["accuracy"]) for tracking, forgetting in pairs]


def emission_rates(study: Evaluation) -> list[float]:
    """How often a payload forced into half of the worlds is emitted at 2^-16, under both hypotheses."""
    rows = study.rows("canaries", part="forced", others="agree", budget="2^-16")
    return [float(row[name]) for row in rows for name in ("emitted_member", "emitted_other")]


def canary_deviations(study: Evaluation) -> list[float]:
    """By how many standard errors the advantage of a forced payload is above theory, cell by cell."""
    rows = [row for row in study.rows("canaries", part="forced", others="agree") if row["budget"] != "inf"]
    return [float((row["advantage"] - row["advantage_even_split"]) / row["advantage_stderr"]) for row in rows]


def canary_lean(study: Evaluation) -> float:
    """By how many standard errors all cells together lie above theory; negative below it."""
    found = canary_deviations(study)
    return sum(found) / math.sqrt(len(found))


def canary_p(study: Evaluation) -> float:
    """Probability of deviations at least this large by chance."""
    found = canary_deviations(study)
    return float(chi2.sf(sum(deviation**2 for deviation in found), len(found)))


def farthest_gap(study: Evaluation) -> Row:
    """The canary whose gap between the worlds that hold it and the others is largest."""
    return max(study.rows("canaries", part="organic"), key=lambda row: abs(row["gap_nats"]))


def clear_gaps(study: Evaluation) -> int:
    """How many of those gaps exceed three standard errors."""
    rows = study.rows("canaries", part="organic")
    return sum(abs(row["gap_nats"]) > 3.0 * row["gap_stderr"] for row in rows)


def largest_advantage(study: Evaluation) -> Row:
    """The forced canary whose membership shows most at 2^-16."""
    rows = study.rows("canaries", part="forced", others="agree", budget="2^-16")
    return max(rows, key=lambda row: (abs(row["advantage"]), row["advantage_stderr"]))


def repetition_trend(study: Evaluation, kind: str) -> float:
    """Rank correlation of a canary's repetitions with the gap between the worlds that hold it and the others."""
    rows = study.rows("canaries", part="organic", kind=kind)
    return float(spearmanr([row["repetitions"] for row in rows], [row["gap_nats"] for row in rows]).statistic)


def cuts(study: Evaluation) -> list[str]:
    """What was run at another size than the preset's, in words; how many run side by side is no size."""
    found = []
    for name, result in study.results.items():
        preset = plain(asdict(regime_named(name).presets["paper"]))
        sizes = [size for size in preset if size in result.scale and result.scale[size] != preset[size]]  # some are new
        sizes = [size for size in sizes if size not in SPEED_ONLY and f"{name}.{size}" not in SPEED_ONLY]
        if sizes:
            changes = [f"{size} {result.scale[size]} instead of {preset[size]}" for size in sizes]
            found.append(f"`{name}`: {', '.join(changes)}")
    return found


def apart(one: Row, other: Row, column: str) -> float:
    """By how many standard errors two rows differ; shared variation counts as chance, too."""
    return float(abs(one[column] - other[column]) / math.hypot(*(row[f"{column}_stderr"] for row in (one, other))))


def sweep_ps(study: Evaluation) -> list[float]:
    """One-sided p-values of both attacks on single sequences; bounds of 1 are not tested."""
    rows, attacks = study.rows("sweep"), ("membership", "world")
    return [float(row[f"{a}_p"]) for row in rows for a in attacks if row[f"{a}_bound"] < 1.0]


def headrooms(study: Evaluation, **method: Any) -> list[Row]:
    """A method at matched bounds, from few queries to many; for PMixED the points its reading selects."""
    rows = study.rows("pmixed", **method)
    chosen = [row for row in rows if row.get("is_selected", True)]
    return sorted(chosen, key=lambda row: int(row["queries"]))


def falls(rows: Sequence[Row]) -> bool:
    """Whether the headroom is less at every step to more queries."""
    shares = [row["headroom"] for row in rows]
    return all(later < earlier for earlier, later in itertools.pairwise(shares))


def over_public(row: Row) -> float:
    """What a method gains over its own public model."""
    return float(row["accuracy"] - row["accuracy_public"])


def other_votes(row: Row) -> float:
    """The share of single votes that are another token in the other arithmetic."""
    return 1.0 - float(row["equal_votes"])


def excesses(rows: Sequence[Row]) -> list[float]:
    """By how many standard errors attacks lie above their bounds, or below (negative); bounds of 1 are left out."""
    attacks = ("membership", "world")
    return [excess_in_errors(row, attack) for row in rows for attack in attacks if row[f"{attack}_bound"] < 1.0]


def broken_promises(study: Evaluation) -> list[float]:
    """δ that an example reaches where the rigorous reading of PMixED promises less, at the points it selects."""
    rows = study.rows("pmixed", kind="matched", reading="rigorous", is_selected=True)
    return [float(row["delta_of_example"]) for row in rows if row["delta_of_example"] > row["delta"]]


def above_chance(row: Row) -> float:
    """By how many standard errors an attack separates members from others better than chance."""
    return float((row["auc"] - 0.5) / row["auc_stderr"])


def first_argmax(study: Evaluation, kind: str, rank: int) -> float:
    """Repetitions from which every token of the payload is the adapter's first choice; infinitely many if never."""
    rows = study.rows("capacity", kind=kind, rank=rank)
    return min((row["repetitions"] for row in rows if row["argmax_share"] == 1.0), default=math.inf)


def leads(study: Evaluation) -> bool:
    """Whether plurality and mixture leak nothing and are ahead of the paper's release at 2^-32 on the text."""
    both = [study.row("releases", release=name) for name in ("plurality", "mixture")]
    return all(abs(row["leaked_nats"]) < 1e-9 and row["lead_points"] > 2.0 * row["lead_stderr"] for row in both)


def noiseless_share(study: Evaluation) -> float:
    """The share of the gain that the realized world itself keeps, in the sessions of the releases."""
    row = study.row("releases", release="plurality")
    return float((row["accuracy_noiseless"] - row["accuracy_public"]) / (row["accuracy_full"] - row["accuracy_public"]))


def tokens_over_charged(study: Evaluation) -> float:
    """The tokens' leak as a share of the charge, at 2^-16."""
    row = study.row("tokens_only", release="gaussian", budget="2^-16")
    return float(row["leaked_tokens_nats"] / row["charged_nats"])


def tokens_share_low(study: Evaluation) -> float:
    """The smallest share of the history's leak that the tokens carry, two standard errors below the estimate."""
    rows = study.rows("tokens_only", release="gaussian")
    return min(float(row["tokens_over_history"] - 2.0 * row["tokens_over_history_stderr"]) for row in rows)


def attack_ps(study: Evaluation) -> list[float]:
    """One-sided p-values of the attacks on the sessions of `tokens_only` against their bounds.

    Left out are tests that could find nothing: bounds of 1, and the channel's tokens, which are its history.
    """
    found = []
    for row in study.rows("tokens_only"):
        of_member, of_world = (success_bound(row["charged_nats"], p) for p in (1 / 2, 1 / paper_options.PAPER.worlds))
        for view in ("history", "tokens") if row["release"] == "gaussian" else ("history",):
            excess, error = row[f"membership_{view}"] - of_member, row[f"membership_{view}_stderr"]
            if of_member < 1.0:
                found.append(float(norm.sf(excess / error)) if error else float(excess <= 0.0))
            if of_world < 1.0:
                hits = round(row[f"world_{view}"] * row["sessions"])
                found.append(float(binom.sf(hits - 1, row["sessions"], of_world)))
    return found


def by_guessing(num_worlds: int) -> float:
    """How often a world is named by chance."""
    return 1.0 / num_worlds


def half(records: int) -> int:
    """Half of the records: what a world sees."""
    return records // 2


def per_token_ms(serving: Row) -> float:
    """Milliseconds per token of one stream, with the ledger."""
    return 1e3 / float(serving["tokens_per_second"])


def rises(rows: Sequence[Row]) -> bool:
    """Whether what DP adapters keep of the gain rises with ε."""
    kept = [row["retained_gain"] for row in sorted(rows, key=lambda row: float(row["epsilon"]))]
    return kept == sorted(kept) and kept[0] < kept[-1]


def by_epsilon(row: Row) -> float:
    """The bound on membership inference that follows from (ε, δ) alone."""
    return float(success_at_half(row["epsilon"], row["delta"]))


def reproduced(study: Evaluation) -> list[float]:
    """By how much the public and full-corpus accuracy of `dp` differ from those of `accuracy`, both decoders."""
    found = []
    for decoder in ("greedy", "gumbel"):
        now, before = study.rows("dp", decoder=decoder)[0], study.row("accuracy", decoder=decoder, budget="2^-32")
        found += [abs(float(now[name] - before[name])) for name in ("accuracy_public", "accuracy_full")]
    return found


def trials(search: Row, epsilon: float, compute: float | None = None) -> list[Row]:
    """Runs of the search at one ε, and with so many expected passes over the records; lowest loss first."""
    rows = [row for row in search["rows"] if row["epsilon"] == epsilon]
    if compute is not None:
        rows = [row for row in rows if row["sampling_rate"] * row["steps"] == compute]
    return sorted(rows, key=lambda row: float(row["loss"]))


def both_over_b(search: Row, epsilon: float) -> list[float]:
    """Loss of training both factors less that of B alone, where all other settings were equal."""
    fields = ("sampling_rate", "steps", "clip_norm", "learning_rate")
    rows = {(row["factors"], *(row[name] for name in fields)): row for row in trials(search, epsilon)}
    return [row["loss"] - rows["B", *key[1:]]["loss"] for key, row in rows.items() if key[0] == "both"]


def rates_tried(search: Row, epsilon: float, factors: str) -> int:
    """Learning rates that were tried with the number of steps that the search began with."""
    begun = search["rows"][0]["steps"]
    rows = [row for row in trials(search, epsilon) if row["steps"] == begun and row["factors"] == factors]
    return len({row["learning_rate"] for row in rows})


QUESTIONS: dict[str, Callable[..., Any]] = {
    question.__name__: question
    for question in (
        largest_gap,
        largest_disagreement,
        largest_excess,
        leak_gap,
        share_leaked,
        gain_gap,
        times_dissent,
        training_gap,
        agrees_less,
        largest_fall,
        forgetting_losses,
        emission_rates,
        canary_deviations,
        canary_lean,
        canary_p,
        farthest_gap,
        clear_gaps,
        largest_advantage,
        repetition_trend,
        cuts,
        apart,
        sweep_ps,
        headrooms,
        falls,
        over_public,
        other_votes,
        excesses,
        broken_promises,
        above_chance,
        first_argmax,
        leads,
        noiseless_share,
        tokens_over_charged,
        tokens_share_low,
        attack_ps,
        by_guessing,
        half,
        per_token_ms,
        rises,
        by_epsilon,
        reproduced,
        trials,
        both_over_b,
        rates_tried,
    )
}
