"""What docs/research/results.md claims, and whether a result bears it out: the paper's claims, then what is new.

    for claim in CLAIMS:
        found = claim.check(study)      None where the evaluation lacks the result
        found.holds, found.evidence     decided and written from its rows alone

A claim is a sentence without figures, so no sentence can contradict the data: its verdict is computed. Tests of several
cells allow false alarms with probability `ALARM` over all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy.stats import binom, chi2, norm, spearmanr

from paclm.privacy.bounds import success_bound
from paclm.study.leak_tests import excess_in_errors
from paclm.study.paper_numbers import PAPER
from paclm.study.results import Row
from results_page.evaluation import Evaluation

ALARM = 0.01
"""Probability of a false alarm over all cells of a claim together."""
TIGHT = 2.0
"""Nats: a charge far below log m, where the leak is not limited by the entropy of the secret."""
CLEAR = 3.0
"""Standard errors from which a single difference counts."""


class Finding(NamedTuple):
    """What a result says of a claim."""

    holds: bool
    evidence: str


Check = Callable[[Evaluation], Finding | None]


@dataclass(frozen=True)
class Claim:
    """A sentence, where it is from, the regimes it needs, and how it is checked."""

    text: str
    is_new: bool  # ours, not the paper's
    regimes: tuple[str, ...]
    find: Callable[[Evaluation], Finding]

    def check(self, study: Evaluation) -> Finding | None:
        """None where a result is missing."""
        return self.find(study) if all(name in study.results for name in self.regimes) else None


CLAIMS: list[Claim] = []


def claim(text: str, *regimes: str, is_new: bool = False) -> Callable[[Callable[[Evaluation], Finding]], Check]:
    """Add a check to the list of claims."""

    def add(find: Callable[[Evaluation], Finding]) -> Check:
        CLAIMS.append(Claim(text, is_new, regimes, find))
        return CLAIMS[-1].check

    return add


def most_errors(cells: int) -> float:
    """Standard errors that the largest of so many deviations exceeds by chance with probability ALARM, at most."""
    return float(norm.isf(ALARM / (2 * cells)))


def leak_gap(row: Row) -> float:
    """By how many standard errors the leak and the charge of dissenting tokens differ, in sessions on recorded votes.

    For the paper's release, whose steps can leak exactly the charge of dissent. If sessions leak their own charge on
    average, leak and charge covary as much as the charge varies, so the gap's variance is the difference of the two.
    Infinite where that difference is not positive.
    """
    left = row["leaked_stderr"] ** 2 - row["can_tell_stderr"] ** 2
    return float(abs(row["leaked_nats"] - row["charged_dissent_nats"]) / math.sqrt(left)) if left > 0.0 else math.inf


def apart(one: Row, other: Row, column: str) -> float:
    """By how many standard errors the first is above the second; shared variation counts as chance, too."""
    return float((one[column] - other[column]) / math.hypot(*(row[f"{column}_stderr"] for row in (one, other))))


def share(value: float, error: float | None = None, digits: int = 0) -> str:
    """A share in per cent, with its error."""
    return f"{value:.{digits}%}" + ("" if error is None else f" ± {error:.{digits}%}")


def points(value: float, error: float) -> str:
    """A difference of accuracies in percentage points, with its error."""
    return f"{100 * value:.2f} ± {100 * error:.2f}".replace("-", "−")


def _one(study: Evaluation, regime: str, **wanted: str | float | bool) -> Row:
    return study.results[regime].one(collection=1, **wanted)


def _both(study: Evaluation, budget: str) -> list[Row]:
    return [_one(study, "accuracy", decoder=decoder, budget=budget) for decoder in ("greedy", "gumbel")]


@claim("A dissenting token leaks its charge, a unanimous one nothing, while little has leaked in all.", "sessions")
def _leak_is_charge(study: Evaluation) -> Finding:
    cells = study.rows("sessions")
    gap = max(abs(row["gap"]) / row["gap_stderr"] for row in cells)
    parting = max(abs(row["estimators_parting"]) / row["estimators_parting_stderr"] for row in cells)
    recorded = [row for row in study.rows("forgetting", curator="tracking") if row["charged_nats"] < TIGHT]
    also = max(map(leak_gap, recorded), default=0.0)
    holds = max(gap, parting) < most_errors(2 * len(cells)) and also < most_errors(max(1, len(recorded)))
    told = f"largest gap {gap:.1f} standard errors in {len(cells)} cells, of two estimators {parting:.1f}"
    return Finding(holds, f"{told}; {also:.1f} in {len(recorded)} sets of recorded sessions" if recorded else told)


@claim("No attack on tokens, beliefs or sequences beats its bound.", "sessions")
def _attacks_within_bounds(study: Evaluation) -> Finding:
    found = [*_attacks_on_tokens(study), *_attacks_on_sequences(study), *_attacks_on_sessions(study)]
    return Finding(min(found) > ALARM / len(found), f"smallest of {len(found)} p-values {min(found):.2g}")


def _attacks_on_tokens(study: Evaluation) -> list[float]:
    """One-sided p-values; left out are bounds of 1, and the channel's tokens, which are its history."""
    found = []
    for row in study.rows("tokens_only"):
        num_worlds = study.results["tokens_only"].provenance["worlds"]
        of_member, of_world = (success_bound(row["charged_nats"], prior) for prior in (1 / 2, 1 / num_worlds))
        for view in ("history", "tokens") if row["release"] == "gaussian" else ("history",):
            excess, error = row[f"membership_{view}"] - of_member, row[f"membership_{view}_stderr"]
            if of_member < 1.0:
                found.append(float(norm.sf(excess / error)) if error else float(excess <= 0.0))
            if of_world < 1.0:
                hits = round(row[f"world_{view}"] * row["sessions"])
                found.append(float(binom.sf(hits - 1, row["sessions"], of_world)))
    return found


def _attacks_on_sequences(study: Evaluation) -> list[float]:
    rows, attacks = study.rows("sweep"), ("membership", "world")
    return [float(row[f"{a}_p"]) for row in rows for a in attacks if row[f"{a}_bound"] < 1.0]


def _attacks_on_sessions(study: Evaluation) -> list[float]:
    found = []
    for row in study.rows("sessions"):
        found.append(float(norm.sf(excess_in_errors(row, "membership"))))
        found.append(
            float(binom.sf(round(row["world_rate"] * row["sessions"]) - 1, row["sessions"], row["world_bound"]))
        )
    return found


@claim("Most of the gain is kept at budgets that leak almost nothing (2^-32).", "accuracy")
def _gain_is_kept(study: Evaluation) -> Finding:
    rows = _both(study, "2^-32")
    kept = [share(row["retained_gain"], row["retained_gain_stderr"]) for row in rows]
    holds = all(row["retained_gain"] - 2.0 * row["retained_gain_stderr"] > 0.5 for row in rows)
    return Finding(holds, f"{kept[0]} greedy, {kept[1]} Gumbel")


@claim("The share kept is the paper's.", "accuracy")
def _same_share(study: Evaluation) -> Finding:
    rows = _both(study, "2^-32")
    theirs = [PAPER["tab:accuracy"].beside(row)["retained_gain"] for row in rows]
    gaps = [
        (row["retained_gain"] - their) / row["retained_gain_stderr"] for row, their in zip(rows, theirs, strict=True)
    ]
    words = " and ".join(f"{gap:+.1f}" for gap in gaps)
    return Finding(
        max(map(abs, gaps)) < most_errors(len(gaps)), f"{words} of our standard errors from it (greedy, Gumbel)"
    )


@claim("Noise at 2^-32 costs no measurable accuracy.", "accuracy")
def _noise_is_free(study: Evaluation) -> Finding:
    rows = _both(study, "2^-32")
    costs = [points(-row["noise_points"], row["noise_stderr"]) for row in rows]
    holds = max(abs(row["noise_points"]) / row["noise_stderr"] for row in rows) < 2.0
    return Finding(holds, f"costs {costs[0]} points greedy, {costs[1]} Gumbel")


@claim("Most of that cost is reached early: a budget below 2^-12 is nearly free.", "releases", is_new=True)
def _cost_comes_early(study: Evaluation) -> Finding:
    loose, middle = (_one(study, "releases", release="gaussian", budget=budget) for budget in ("2^-4", "2^-12"))
    leads = [points(row["lead_points"], row["lead_stderr"]) for row in (loose, middle)]
    return Finding(
        middle["lead_points"] < loose["lead_points"] / 3, f"over 2^-32: 2^-4 {leads[0]} points, 2^-12 {leads[1]}"
    )


@claim("Unanimous positions never flip; flips elsewhere level off below 1 − 1/ā.", "flatness")
def _flips_level_off(study: Evaluation) -> Finding:
    loose, tight = (_one(study, "flatness", decoder="gumbel", budget=budget) for budget in ("2^-4", "2^-32"))
    unanimous = max(row["flip_unanimous"] for row in study.rows("flatness"))
    holds = unanimous == 0.0 and loose["flip_dissent"] < tight["flip_dissent"] < tight["flip_limit"]
    flips = f"{share(loose['flip_dissent'])} to {share(tight['flip_dissent'])}"
    return Finding(holds, f"{flips} of dissent, limit {share(tight['flip_limit'])}; unanimous {share(unanimous)}")


@claim("Where worlds differ, mostly no world votes for the true token.", "flatness")
def _truth_is_not_voted(study: Evaluation) -> Finding:
    row = _one(study, "flatness", decoder="gumbel", budget="2^-32")
    return Finding(row["truth_not_voted_given_dissent"] > 0.5, share(row["truth_not_voted_given_dissent"]))


@claim("At tight budgets the release is almost a uniform choice among tokens that got a vote.", "flatness", is_new=True)
def _uniform_choice(study: Evaluation) -> Finding:
    row = _one(study, "flatness", decoder="gumbel", budget="2^-32")
    flips, uniform = row["flip_dissent"], row["flip_limit_per_position"]
    return Finding(
        abs(flips - uniform) < 0.05,
        f"flips {share(flips, digits=1)} of dissent, a uniform choice {share(uniform, digits=1)}",
    )


@claim("Worlds agree at as many positions as in the paper.", "census")
def _agreement(study: Evaluation) -> Finding:
    row = _one(study, "census", support_size=200)
    theirs = PAPER["tab:census"].beside(row)["unanimity"]
    times = (1.0 - row["unanimity"]) / (1.0 - theirs)
    holds = abs(row["unanimity"] - theirs) < 2.0 * row["unanimity_stderr"]
    agree = share(row["unanimity"], row["unanimity_stderr"], 1)
    return Finding(holds, f"{agree} against {share(theirs, digits=1)}: {times:.1f} times the dissent")


@claim("The support of 200 tokens contains nearly every first choice of a world.", "census")
def _support_is_enough(study: Evaluation) -> Finding:
    row = _one(study, "census", support_size=200)
    first, mass = share(row["argmax_coverage"], digits=2), share(row["mass_coverage"], digits=1)
    return Finding(row["argmax_coverage"] > 0.98, f"{first} of first choices, {mass} of probability")


@claim("A long session at a tight budget does not degrade.", "sessions")
def _no_fall(study: Evaluation) -> Finding:
    rows = study.rows("sessions")
    ends = [[row for row in rows if row["horizon"] == pick(r["horizon"] for r in rows)] for pick in (min, max)]
    falls = [apart(first, last, "agreement_realized") for first, last in zip(*ends, strict=True)]
    first, last = (row["agreement_realized"] for row in (ends[0][0], ends[1][0]))
    agree = (
        f"tokens are the realized world's choice: {share(first, digits=1)} at first, {share(last, digits=1)} at the end"
    )
    return Finding(max(falls) < most_errors(len(falls)), f"{agree}; largest fall {max(falls):.1f} standard errors")


def headrooms(study: Evaluation, epsilon: float, **method: str) -> list[Row]:
    """A method at matched bounds, from few queries to many; for PMixED the points its reading selects."""
    rows = [row for row in study.rows("pmixed", epsilon=epsilon, **method) if row.get("is_selected", True)]
    return sorted(rows, key=lambda row: int(row["queries"]))


@claim("At one bound PMixED loses its headroom with the number of queries, the release does not.", "pmixed")
def _pmixed_falls(study: Evaluation) -> Finding:
    ours, theirs = (
        headrooms(study, 1.0, kind="pac", release="gaussian"),
        headrooms(study, 1.0, reading="generous"),
    )
    kept, left = ([row["headroom"] for row in rows] for rows in (ours, theirs))
    falls = all(later < earlier for earlier, later in itertools.pairwise(left))
    words = [f"{share(shares[0])} to {share(shares[-1])}" for shares in (kept, left)]
    return Finding(falls and max(kept) - min(kept) < 0.05 and kept[-1] > left[-1], f"{words[0]}; PMixED {words[1]}")


def broken_promises(study: Evaluation) -> list[float]:
    """δ that an example reaches where the rigorous reading of PMixED promises less, at the points it selects."""
    rows = study.rows("pmixed", kind="matched", reading="rigorous", is_selected=True)
    return [float(row["delta_of_example"]) for row in rows if row["delta_of_example"] > row["delta"]]


@claim("Shared coins make sampled worlds agree nearly as often as greedy ones; own coins do not.", "ablation")
def _coupling_of_coins(study: Evaluation) -> Finding:
    names = ("greedy", "Gumbel, τ = 1.0", "independent")
    greedy, shared, own = (_one(study, "ablation", variant=name, budget="2^-16")["unanimity"] for name in names)
    words = f"greedy {share(greedy)}, shared {share(shared)}, own {share(own, digits=1)}"
    return Finding(own < shared / 10 and greedy - shared < 0.1, words)


@claim("The hybrid rule scatters votes where worlds differ.", "ablation")
def _hybrid_scatters(study: Evaluation) -> Finding:
    hybrid = _one(study, "ablation", variant="hybrid, β ≥ 0.9", budget="2^-16")
    shared = _one(study, "ablation", variant="Gumbel, τ = 1.0", budget="2^-16")
    theirs = PAPER["tab:ablation"].beside(hybrid)["distinct_given_dissent"]
    errors = apart(hybrid, shared, "distinct_given_dissent")
    counts = [f"{row['distinct_given_dissent']:.2f}" for row in (hybrid, shared)]
    return Finding(errors > CLEAR, f"{counts[0]} distinct votes against {counts[1]}; {theirs:.2f} in the paper")


@claim("Loops come with greedy decoding, not with the mechanism.", "generation")
def _loops(study: Evaluation) -> Finding:
    longest = max(row["length"] for row in study.rows("generation"))
    rows = study.rows("generation", length=longest)
    found = {(row["source"], row["decoder"]): row for row in rows if row["budget"] in (None, "2^-16")}
    private, full, human = (found[key] for key in (("private", "greedy"), ("full", "greedy"), ("human", None)))
    sampled = found["private", "gumbel"]
    holds = apart(private, full, "rep3") < 2.0 and apart(sampled, human, "rep3") < 2.0
    greedy = f"rep-3 greedy: private {private['rep3']:.2f}, full corpus {full['rep3']:.2f}"
    return Finding(holds, f"{greedy}; sampled {sampled['rep3']:.3f}, human {human['rep3']:.3f}")


def canary_deviations(study: Evaluation) -> list[float]:
    """By how many standard errors the advantage of a forced payload is above theory, cell by cell."""
    rows = [row for row in study.rows("canaries", part="forced", others="agree") if row["budget"] != "inf"]
    return [float((row["advantage"] - row["advantage_even_split"]) / row["advantage_stderr"]) for row in rows]


@claim("A forced canary shows membership as theory predicts.", "canaries")
def _forced_canary(study: Evaluation) -> Finding:
    found = canary_deviations(study)
    p = float(chi2.sf(sum(deviation**2 for deviation in found), len(found)))
    lean = sum(found) / math.sqrt(len(found))
    words = f"{len(found)} cells deviate with p = {p:.2g}; all together {lean:+.1f} standard errors"
    return Finding(p > ALARM / 2 and abs(lean) < most_errors(2), words)


@claim("Canaries are not memorized without being forced.", "canaries")
def _organic_canary(study: Evaluation) -> Finding:
    rows = study.rows("canaries", part="organic")
    clear = [row for row in rows if abs(row["gap_nats"]) > most_errors(len(rows)) * row["gap_stderr"]]
    most = max(rows, key=lambda row: abs(row["gap_nats"]))
    gap = f"{most['gap_nats']:.1f} ± {most['gap_stderr']:.1f} nats after {most['repetitions']} repetitions"
    return Finding(not clear, f"{len(clear)} of {len(rows)} gaps are clear, the largest {gap}")


@claim("Gaps of canaries grow with repetition.", "canaries", is_new=True)
def _repetition(study: Evaluation) -> Finding:
    trends = {kind: _trend(study.rows("canaries", part="organic", kind=kind)) for kind in ("C-OOD", "C-COMMON")}
    words = " and ".join(f"{trend:.2f} ({kind})" for kind, trend in trends.items())
    return Finding(min(trends.values()) > 0.6, f"rank correlation {words}")


def _trend(rows: Sequence[Row]) -> float:
    """Rank correlation of repetitions and gaps; of equal gaps none."""
    gaps = [row["gap_nats"] for row in rows]
    return float(spearmanr([row["repetitions"] for row in rows], gaps).statistic) if len(set(gaps)) > 1 else 0.0


@claim("No number of repetitions makes a payload an adapter's first choice.", "capacity")
def _capacity(study: Evaluation) -> Finding:
    rows = study.rows("capacity")
    first = [row for row in rows if row["argmax_share"] == 1.0]
    most = max(row["repetitions"] for row in rows)
    if not first:
        return Finding(True, f"not all tokens up to {most:,}")
    fewest = min(first, key=lambda row: int(row["repetitions"]))
    how = f"rank {fewest['rank']}, {fewest['epochs']} epochs, {fewest['kind']}"
    return Finding(False, f"all tokens from {fewest['repetitions']} an epoch ({how})")


@claim("The release itself costs little beside the forward pass of one stream (below one part in a hundred).", "cost")
def _mechanism_is_cheap(study: Evaluation) -> Finding:
    rows = study.rows("cost", what="serving", sequences=1)
    most = max(row["mechanism_share"] for row in rows)
    return Finding(most < 0.01, share(most, digits=2))


@claim("Releases that never read the secret keep more of the gain, and leak nothing.", "releases", is_new=True)
def _leaders(study: Evaluation) -> Finding:
    rows = [_one(study, "releases", release=name) for name in ("plurality", "mixture")]
    holds = all(abs(row["leaked_nats"]) < 1e-9 and row["lead_points"] > 2.0 * row["lead_stderr"] for row in rows)
    leads = [points(row["lead_points"], row["lead_stderr"]) for row in rows]
    return Finding(holds, f"plurality leads by {leads[0]} points, mixture by {leads[1]}")


@claim("An adapter that hides corpus membership keeps more the weaker its promise (DP-SGD, Gumbel).", "dp", is_new=True)
def _dp(study: Evaluation) -> Finding:
    rows = sorted(study.rows("dp", decoder="gumbel"), key=lambda row: float(row["epsilon"]))
    kept = [row["retained_gain"] for row in rows]
    words = [f"{share(row['retained_gain'], row['retained_gain_stderr'])} at ε = {row['epsilon']:g}" for row in rows]
    return Finding(kept == sorted(kept) and kept[0] < kept[-1], f"{words[0]}, {words[-1]}")


@claim("Whoever holds the adapters can tell whether a record is in the corpus.", "universe", is_new=True)
def _holder(study: Evaluation) -> Finding:
    row = _one(study, "universe", part="score", attack="spread")
    return Finding(row["auc"] > 0.9, f"AUC {row['auc']:.3f} ± {row['auc_stderr']:.3f}; a guess has one half")


@claim("Two simple attacks on released text cannot.", "universe", is_new=True)
def _reader(study: Evaluation) -> Finding:
    rows = study.rows("universe", part="score", attacker="black-box")
    released = [row for row in rows if row["source"] == "released"]
    holds = max((row["auc"] - 0.5) / row["auc_stderr"] for row in released) < norm.isf(ALARM / len(released))
    best = {row["source"]: row for row in sorted(rows, key=lambda row: float(row["auc"]))}
    words = f"AUC {best['released']['auc']:.2f} ± {best['released']['auc_stderr']:.2f}"
    return Finding(holds, f"{words}; of the full-corpus adapter's own text {best['full']['auc']:.2f}")


@claim("The tokens alone carry more than half of the history's leak.", "tokens_only", is_new=True)
def _tokens(study: Evaluation) -> Finding:
    rows = study.rows("tokens_only", release="gaussian")
    least = min(rows, key=lambda row: float(row["tokens_over_history"]))
    low = min(row["tokens_over_history"] - 2.0 * row["tokens_over_history_stderr"] for row in rows)
    kept = share(least["tokens_over_history"], least["tokens_over_history_stderr"])
    return Finding(low > 0.5, f"at least {kept}, at {least['budget']}")


@claim("Training all worlds from one start in one order makes them agree more often.", "coupling", is_new=True)
def _coupled_training(study: Evaluation) -> Finding:
    coupled, own = (_one(study, "coupling", training=t, decoder="gumbel") for t in ("coupled", "uncoupled"))
    words = f"{share(coupled['unanimity'], digits=1)} against {share(own['unanimity'], digits=1)}"
    return Finding(apart(coupled, own, "unanimity") > CLEAR, words)


@claim("Rounding to bfloat16 makes worlds differ where float32 does not.", "precision", is_new=True)
def _rounding(study: Evaluation) -> Finding:
    rows = study.rows("precision")
    least = min(-row["unanimity_difference"] / row["unanimity_stderr"] for row in rows)
    words = " and ".join(points(-row["unanimity_difference"], row["unanimity_stderr"]) for row in rows)
    return Finding(least > 2.0, f"{words} points more dissent (greedy, Gumbel)")


@claim("A curator that forgets its belief can leak more than it charges.", "forgetting", is_new=True)
def _forgetting(study: Evaluation) -> Finding:
    most = max(row["can_tell_over_charged_most"] for row in study.rows("forgetting", curator="forgetting"))
    return Finding(most > 1.0, f"{most:.2f} times the charge of dissent in the worst session")


@claim("More worlds keep more of the gain (2^-32, Gumbel).", "worlds", is_new=True)
def _worlds(study: Evaluation) -> Finding:
    rows = [row for row in study.rows("worlds", decoder="gumbel") if row["retained_gain_at_32"] is not None]
    few, many = (pick(rows, key=lambda row: int(row["worlds"])) for pick in (min, max))
    words = [
        f"{share(row['retained_gain_at_32'], row['retained_gain_at_32_stderr'])} of {row['worlds']}"
        for row in (few, many)
    ]
    return Finding(apart(many, few, "retained_gain_at_32") > 2.0, f"{words[0]} worlds, {words[1]}")
