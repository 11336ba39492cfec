"""What docs/research/results.md claims, and whether a result bears it out: the paper's claims, then what is new.

    for claim in CLAIMS:
        found = claim.check(study)      None where the evaluation lacks the result
        found.verdict, found.evidence   decided and written from its rows alone

A claim is a sentence without figures, so no sentence can contradict the data: its verdict is computed. It holds where
the figures show it, beyond their errors; it does not hold where they contradict it; and it is not refuted where they do
neither, as where a test finds nothing. Over all cells of a claim, chance gives a wrong verdict with probability
`ALARM` at most. Student's t has as many degrees of freedom as there are passages, sessions or collections, less one. A
claim of "to five points" is refuted only beyond five points.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from scipy.stats import binom, chi2, norm, spearmanr
from scipy.stats import t as student_t

from paclm.privacy.bounds import success_bound
from paclm.study.leak_tests import excess_in_errors, holm
from paclm.study.paper_numbers import PAPER
from paclm.study.regimes.chosen_prompts import PS
from paclm.study.results import Row
from results_page.evaluation import Evaluation

ALARM = 0.01
"""Probability of a false alarm over all cells of a claim together."""
TIGHT = 2.0
"""Nats: a charge far below log m, where the leak is not limited by the entropy of the secret."""
HOLDS, FAILS, OPEN = "holds", "does not hold", "not refuted"


class Finding(NamedTuple):
    """What a result says of a claim."""

    verdict: str
    evidence: str


def decide(holds: bool, fails: bool | None = None) -> str:
    """The verdict; without `fails`, what does not hold is refuted."""
    return HOLDS if holds else FAILS if fails or fails is None else OPEN


def above(excesses: Sequence[float], most: float) -> str:
    """Whether all these numbers of standard errors are above zero, or one below it, by more than chance allows."""
    return decide(min(excesses) > most, min(excesses) < -most)


def within(differences: Sequence[float], errors: Sequence[float], margin: float, most: float) -> str:
    """Whether no difference exceeds a margin: all are below it with their errors, or one is above it with its error."""
    pairs = list(zip(differences, errors, strict=True))
    return decide(
        all(gap + most * error < margin for gap, error in pairs),
        any(gap - most * error > margin for gap, error in pairs),
    )


Check = Callable[[Evaluation], Finding | None]


@dataclass(frozen=True)
class Claim:
    """A sentence, where it is from, the regimes it needs, and how it is checked."""

    text: str
    is_new: bool  # ours, not the paper's
    regimes: tuple[str, ...]
    find: Check

    def check(self, study: Evaluation) -> Finding | None:
        """None where a result is missing, or the rows that decide."""
        return self.find(study) if all(name in study.results for name in self.regimes) else None


CLAIMS: list[Claim] = []


def claim(text: str, *regimes: str, is_new: bool = False) -> Callable[[Check], Check]:
    """Add a check to the list of claims."""

    def add(find: Check) -> Check:
        CLAIMS.append(Claim(text, is_new, regimes, find))
        return CLAIMS[-1].check

    return add


def most_errors(cells: int, rows: Sequence[Row] = (), *, sides: int = 2) -> float:
    """Standard errors that the largest of so many deviations exceeds by chance with probability ALARM, at most.

    `rows` say how many passages, sessions, sequences or collections their errors are over; the fewest count.
    """
    sizes = ("passages", "sessions", "sequences", "collections")
    counts = [row[name] for row in rows for name in sizes if row.get(name)]
    return float(student_t.isf(ALARM / (sides * cells), min(counts) - 1 if counts else math.inf))


def leak_gap(row: Row) -> float:
    """By how many standard errors the leak and the charge of dissenting tokens differ, in sessions on recorded votes.

    For the paper's release, whose steps can leak exactly the charge of dissent. If sessions leak their own charge on
    average, leak and charge covary as much as the charge varies, so the gap's variance is the difference of the two.
    Infinite where that difference is not positive.
    """
    left = row["leaked_stderr"] ** 2 - row["can_tell_stderr"] ** 2
    return float(abs(row["leaked_nats"] - row["charged_dissent_nats"]) / math.sqrt(left)) if left > 0.0 else math.inf


def apart(one: Row, other: Row, column: str, margin: float = 0.0) -> float:
    """By how many standard errors the first is above the second less a margin; shared variation counts as chance, too.

    Without errors infinite, or zero if there is no difference.
    """
    gap, error = one[column] - other[column] + margin, math.hypot(*(row[f"{column}_stderr"] for row in (one, other)))
    return float(gap / error) if error else math.copysign(math.inf, gap) if gap else 0.0


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
    fails = max(gap, parting, also) > most_errors(2 * len(cells) + len(recorded), [*cells, *recorded])
    told = f"at most {gap:.1f} standard errors apart in {len(cells)} cells, two estimators of the leak {parting:.1f}"
    replayed = f"; {also:.1f} in {len(recorded)} sets of replayed sessions" if recorded else ""
    return Finding(decide(False, fails), told + replayed)


@claim("No attack on tokens, beliefs or sequences beats its bound.", "sessions")
def _attacks_within_bounds(study: Evaluation) -> Finding:
    found = [*_attacks_on_tokens(study), *_attacks_on_sequences(study), *_attacks_on_sessions(study)]
    return Finding(
        decide(False, min(found) <= ALARM / len(found)), f"smallest of {len(found)} p-values {min(found):.2g}"
    )


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
        hits = round(row["world_rate"] * row["sessions"])
        found.append(float(binom.sf(hits - 1, row["sessions"], row["world_bound"])))
    return found


@claim("Most of the gain is kept at budgets that leak almost nothing (2^-32).", "accuracy")
def _gain_is_kept(study: Evaluation) -> Finding:
    rows = _both(study, "2^-32")
    kept = [share(row["retained_gain"], row["retained_gain_stderr"]) for row in rows]
    excesses = [(row["retained_gain"] - 0.5) / row["retained_gain_stderr"] for row in rows]
    return Finding(above(excesses, most_errors(2, rows, sides=1)), f"{kept[0]} greedy, {kept[1]} Gumbel")


@claim("The share kept is the paper's.", "accuracy")
def _same_share(study: Evaluation) -> Finding:
    rows = _both(study, "2^-32")
    theirs = [PAPER["tab:accuracy"].beside(row)["retained_gain"] for row in rows]
    gaps = [row["retained_gain"] - their for row, their in zip(rows, theirs, strict=True)]
    errors = [row["retained_gain_stderr"] for row in rows]
    words = [f"{100 * gap:+.0f} ± {100 * error:.0f}" for gap, error in zip(gaps, errors, strict=True)]
    fails = max(abs(gap) / error for gap, error in zip(gaps, errors, strict=True)) > most_errors(2, rows)
    return Finding(decide(False, fails), f"{words[0]} points greedy, {words[1]} Gumbel".replace("-", "−"))


@claim("Noise at 2^-32 costs no measurable accuracy.", "accuracy")
def _noise_is_free(study: Evaluation) -> Finding:
    rows = _both(study, "2^-32")
    costs = [points(-row["noise_points"], row["noise_stderr"]) for row in rows]
    fails = max(-row["noise_points"] / row["noise_stderr"] for row in rows) > most_errors(2, rows, sides=1)
    return Finding(decide(False, fails), f"costs {costs[0]} points greedy, {costs[1]} Gumbel")


@claim("Most of the cost of noise is reached by 2^-12: a tighter budget is nearly free.", "accuracy", is_new=True)
def _cost_comes_early(study: Evaluation) -> Finding:
    middle, tight = (_one(study, "accuracy", decoder="gumbel", budget=budget) for budget in ("2^-12", "2^-32"))
    costs = [points(-row["noise_points"], row["noise_stderr"]) for row in (middle, tight)]
    most = most_errors(1, [tight], sides=1)
    gap = tight["noise_points"] * 2 / 3 - middle["noise_points"]
    error = middle["noise_stderr"] + tight["noise_stderr"] * 2 / 3  # the gap's is at most this, however they covary
    is_clear = -tight["noise_points"] > most * tight["noise_stderr"]
    verdict = above([gap / error], most) if is_clear else OPEN
    return Finding(verdict, f"{costs[0]} points at 2^-12, {costs[1]} at 2^-32")


@claim("Where worlds differ, flips level off below 1 − 1/ā (elsewhere there are none by construction).", "flatness")
def _flips_level_off(study: Evaluation) -> Finding:
    loose, tight = (_one(study, "flatness", decoder="gumbel", budget=budget) for budget in ("2^-4", "2^-32"))
    unanimous = max(row["flip_unanimous"] for row in study.rows("flatness"))
    room = (tight["flip_limit"] - tight["flip_dissent"]) / tight["flip_dissent_stderr"]
    verdict = above([apart(tight, loose, "flip_dissent"), room], most_errors(2, [tight], sides=1))
    flips = f"{share(loose['flip_dissent'])} to {share(tight['flip_dissent'])}"
    words = f"{flips} of dissent, limit {share(tight['flip_limit'])}; unanimous {share(unanimous)}"
    return Finding(FAILS if unanimous else verdict, words)


@claim("Where worlds differ, mostly no world votes for the true token.", "flatness")
def _truth_is_not_voted(study: Evaluation) -> Finding:
    row = _one(study, "flatness", decoder="gumbel", budget="2^-32")
    missed, draws = row["truth_not_voted_given_dissent"], study.results["flatness"].scale["draws"]
    error = 0.5 / math.sqrt(row["dissent_fraction"] * row["positions"] / draws)  # binomial; a position is one
    return Finding(above([(missed - 0.5) / error], most_errors(1, [row], sides=1)), share(missed, error))


@claim(
    "At tight budgets the release is a uniform choice among tokens that got a vote, to five points.",
    "flatness",
    is_new=True,
)
def _uniform_choice(study: Evaluation) -> Finding:
    row = _one(study, "flatness", decoder="gumbel", budget="2^-32")
    flips, uniform = row["flip_dissent"], row["flip_limit_per_position"]
    verdict = within([abs(flips - uniform)], [row["flip_dissent_stderr"]], 0.05, most_errors(1, [row]))
    return Finding(verdict, f"flips {share(flips, digits=1)} of dissent, a uniform choice {share(uniform, digits=1)}")


@claim("Worlds agree at as many positions as in the paper.", "census")
def _agreement(study: Evaluation) -> Finding:
    row = _one(study, "census", support_size=200)
    theirs = PAPER["tab:census"].beside(row)["unanimity"]
    times = (1.0 - row["unanimity"]) / (1.0 - theirs)
    fails = abs(row["unanimity"] - theirs) / row["unanimity_stderr"] > most_errors(1, [row])
    agree = share(row["unanimity"], row["unanimity_stderr"], 1)
    return Finding(decide(False, fails), f"{agree} against {share(theirs, digits=1)}: {times:.1f} times the dissent")


@claim("The support of 200 tokens contains nearly every first choice of a world.", "census")
def _support_is_enough(study: Evaluation) -> Finding:
    row = _one(study, "census", support_size=200)
    first, mass = share(row["argmax_coverage"], digits=2), share(row["mass_coverage"], digits=1)
    excess = (row["argmax_coverage"] - 0.98) / row["argmax_coverage_stderr"]
    return Finding(above([excess], most_errors(1, [row])), f"{first} of first choices, {mass} of probability")


@claim("A long session at a tight budget does not degrade, to five points.", "sessions")
def _no_fall(study: Evaluation) -> Finding:
    rows = study.rows("sessions")
    ends = [[row for row in rows if row["horizon"] == pick(r["horizon"] for r in rows)] for pick in (min, max)]
    pairs = list(zip(*ends, strict=True))  # of the same sessions: errors are too large, if anything
    room = [apart(last, first, "agreement_realized", 0.05) for first, last in pairs]
    verdict = above(room, most_errors(len(room), rows, sides=1))
    worst = max(pairs, key=lambda pair: float(pair[0]["agreement_realized"] - pair[1]["agreement_realized"]))
    first, last = (share(row["agreement_realized"], digits=1) for row in worst)
    words = f"the realized world's choice: {first} at first, {last} at the end"
    return Finding(verdict, f"{words} ({worst[0]['budget']}, the largest fall)")


def headrooms(study: Evaluation, **method: str) -> list[Row]:
    """A method at matched bounds, from few queries to many; for PMixED the points its reading selects."""
    rows = [row for row in study.rows("pmixed", epsilon=1.0, **method) if row.get("is_selected", True)]
    return sorted(rows, key=lambda row: int(row["queries"]))


@claim("At one bound PMixED loses its headroom with more queries, the release does not, to five points.", "pmixed")
def _pmixed_falls(study: Evaluation) -> Finding:
    ours = headrooms(study, kind="pac", release="gaussian")
    theirs = headrooms(study, reading="generous")
    found = [apart(earlier, later, "headroom") for earlier, later in itertools.pairwise(theirs)]
    found += [apart(ours[-1], theirs[-1], "headroom"), apart(ours[-1], ours[0], "headroom", 0.05)]
    verdict = above(found, most_errors(len(found), study.rows("accuracy"), sides=1))  # as many passages
    ends = [share(row["headroom"], row["headroom_stderr"]) for rows in (ours, theirs) for row in (rows[0], rows[-1])]
    return Finding(verdict, f"{ends[0]} to {ends[1]}; PMixED {ends[2]} to {ends[3]}")


def broken_promises(study: Evaluation) -> list[float]:
    """δ that an example reaches where the rigorous reading of PMixED promises less, at the points it selects."""
    rows = study.rows("pmixed", kind="matched", reading="rigorous", is_selected=True)
    return [float(row["delta_of_example"]) for row in rows if row["delta_of_example"] > row["delta"]]


@claim("Shared coins make sampled worlds agree nearly as often as greedy ones; own coins do not.", "ablation")
def _coupling_of_coins(study: Evaluation) -> Finding:
    names = ("greedy", "Gumbel, τ = 1.0", "independent")
    rows = [_one(study, "ablation", variant=name, budget="2^-16") for name in names]
    greedy, shared, own = rows
    tenth = {name: shared[name] / 10 for name in ("unanimity", "unanimity_stderr")}
    found = [apart(tenth, own, "unanimity"), apart(shared, greedy, "unanimity", 0.1)]
    words = [share(row["unanimity"], row["unanimity_stderr"], 1) for row in rows]
    verdict = above(found, most_errors(2, rows, sides=1))
    return Finding(verdict, f"greedy {words[0]}, shared {words[1]}, own {words[2]}")


@claim("The hybrid rule scatters votes where worlds differ.", "ablation")
def _hybrid_scatters(study: Evaluation) -> Finding:
    hybrid = _one(study, "ablation", variant="hybrid, β ≥ 0.9", budget="2^-16")
    shared = _one(study, "ablation", variant="Gumbel, τ = 1.0", budget="2^-16")
    theirs = PAPER["tab:ablation"].beside(hybrid)["distinct_given_dissent"]
    verdict = above([apart(hybrid, shared, "distinct_given_dissent")], most_errors(1, [hybrid, shared], sides=1))
    counts = [f"{row['distinct_given_dissent']:.2f}" for row in (hybrid, shared)]
    return Finding(verdict, f"{counts[0]} distinct votes against {counts[1]}; {theirs:.2f} in the paper")


@claim("Loops come with greedy decoding, not with the mechanism (rep-3, to a tenth).", "generation")
def _loops(study: Evaluation) -> Finding:
    longest = max(row["length"] for row in study.rows("generation"))
    rows = study.rows("generation", length=longest)
    found = {(row["source"], row["decoder"]): row for row in rows if row["budget"] in (None, "2^-16")}
    private, full, human = (found[key] for key in (("private", "greedy"), ("full", "greedy"), ("human", None)))
    sampled = found["private", "gumbel"]
    room = [apart(full, private, "rep3", 0.1), apart(human, sampled, "rep3", 0.1)]
    verdict = above(room, most_errors(2, rows, sides=1))
    greedy = f"rep-3 greedy: private {private['rep3']:.2f}, full corpus {full['rep3']:.2f}"
    return Finding(verdict, f"{greedy}; sampled {sampled['rep3']:.3f}, human {human['rep3']:.3f}")


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
    return Finding(decide(False, p <= ALARM / 2 or abs(lean) >= most_errors(2)), words)


@claim("Canaries are not memorized without being forced.", "canaries")
def _organic_canary(study: Evaluation) -> Finding:
    rows = study.rows("canaries", part="organic")
    clear = [row for row in rows if abs(row["gap_nats"]) > most_errors(len(rows)) * row["gap_stderr"]]
    most = max(rows, key=lambda row: abs(row["gap_nats"]))
    gap = f"{most['gap_nats']:.1f} ± {most['gap_stderr']:.1f} nats after {most['repetitions']} repetitions"
    return Finding(decide(False, bool(clear)), f"{len(clear)} of {len(rows)} gaps are clear, the largest {gap}")


@claim("Gaps of canaries grow with repetition.", "canaries", is_new=True)
def _repetition(study: Evaluation) -> Finding:
    trends = {kind: _trend(study.rows("canaries", part="organic", kind=kind)) for kind in ("C-OOD", "C-COMMON")}
    words = " and ".join(f"{trend:.2f} ({kind}, p = {p:.1g})" for kind, (trend, p) in trends.items())
    largest = max(p for _, p in trends.values())
    verdict = decide(largest < ALARM / 2, largest > 1.0 - ALARM / 2)
    return Finding(verdict, f"rank correlation {words}")


def _trend(rows: Sequence[Row]) -> tuple[float, float]:
    """Rank correlation of repetitions and gaps, and how often chance gives as much; of equal gaps none."""
    gaps = [row["gap_nats"] for row in rows]
    if len(set(gaps)) < 2:
        return 0.0, 0.5
    found = spearmanr([row["repetitions"] for row in rows], gaps, alternative="greater")
    return float(found.statistic), float(found.pvalue)


@claim("No number of repetitions makes a payload an adapter's first choice.", "capacity")
def _capacity(study: Evaluation) -> Finding:
    rows = study.rows("capacity")
    first = [row for row in rows if row["argmax_share"] == 1.0]
    most = max(row["repetitions"] for row in rows)
    if not first:
        return Finding(OPEN, f"not all tokens up to {most:,}")
    fewest = min(first, key=lambda row: int(row["repetitions"]))
    how = f"rank {fewest['rank']}, {fewest['epochs']} epochs, {fewest['kind']}"
    return Finding(FAILS, f"all tokens from {fewest['repetitions']} an epoch ({how})")


@claim("The release itself costs little beside the forward pass of one stream (below one part in a hundred).", "cost")
def _mechanism_is_cheap(study: Evaluation) -> Finding:
    rows = study.rows("cost", what="serving", sequences=1)
    most = max(row["mechanism_share"] for row in rows)
    worst = max(rows, key=lambda row: float(row["mechanism_share"]))
    return Finding(decide(most < 0.01), f"{share(most, digits=2)} (context {worst['context']})")


@claim(
    "Releases that never read the secret keep more than the paper's at 2^-32, and leak nothing about it.",
    "releases",
    is_new=True,
)
def _leaders(study: Evaluation) -> Finding:
    rows = [_one(study, "releases", release=name) for name in ("plurality", "mixture")]
    most = most_errors(2, [*rows, *study.rows("accuracy")], sides=1)
    leaks = any(abs(row["leaked_nats"]) > 1e-9 for row in rows)
    ahead = [row["lead_points"] / row["lead_stderr"] if row["lead_stderr"] else 0.0 for row in rows]
    leads = [points(row["lead_points"], row["lead_stderr"]) for row in rows]
    return Finding(
        FAILS if leaks else above(ahead, most), f"plurality leads by {leads[0]} points, mixture by {leads[1]}"
    )


@claim("An adapter that hides corpus membership keeps more with a weaker promise (DP-SGD).", "dp", is_new=True)
def _dp(study: Evaluation) -> Finding:
    errors, words = [], []
    for decoder in ("greedy", "gumbel"):
        rows = sorted(study.rows("dp", decoder=decoder), key=lambda row: float(row["epsilon"]))
        errors.append(apart(rows[-1], rows[0], "retained_gain"))
        kept = [f"{share(row['retained_gain'], row['retained_gain_stderr'])}" for row in (rows[0], rows[-1])]
        words.append(f"{kept[0]} at ε = {rows[0]['epsilon']:g}, {kept[1]} at {rows[-1]['epsilon']:g}")
    verdict = above(errors, most_errors(len(errors), study.rows("dp"), sides=1))
    return Finding(verdict, f"greedy {words[0]}; Gumbel {words[1]}")


@claim(
    "An attacker who holds the adapters can tell whether a record is in the corpus (AUC above nine tenths).",
    "universe",
    is_new=True,
)
def _holder(study: Evaluation) -> Finding:
    row = _one(study, "universe", part="score", attack="spread")
    verdict = above([(row["auc"] - 0.9) / row["auc_stderr"]], most_errors(1, sides=1))
    return Finding(verdict, f"AUC {row['auc']:.3f} ± {row['auc_stderr']:.3f}; a guess has one half")


@claim("Two simple attacks on released text cannot tell.", "universe", is_new=True)
def _reader(study: Evaluation) -> Finding:
    rows = study.rows("universe", part="score", attacker="black-box")
    released = [row for row in rows if row["source"] == "released"]
    fails = max((row["auc"] - 0.5) / row["auc_stderr"] for row in released) >= norm.isf(ALARM / len(released))
    best = {row["source"]: row for row in sorted(rows, key=lambda row: float(row["auc"]))}
    words = f"AUC {best['released']['auc']:.2f} ± {best['released']['auc_stderr']:.2f}"
    verdict = decide(False, bool(fails))
    return Finding(verdict, f"{words}; of the full-corpus adapter's own text {best['full']['auc']:.2f}")


@claim("The tokens alone carry more than half of the history's leak.", "tokens_only", is_new=True)
def _tokens(study: Evaluation) -> Finding:
    rows = study.rows("tokens_only", release="gaussian")
    least = min(rows, key=lambda row: float(row["tokens_over_history"]))
    most = most_errors(len(rows), rows, sides=1)
    excesses = [(row["tokens_over_history"] - 0.5) / row["tokens_over_history_stderr"] for row in rows]
    kept = share(least["tokens_over_history"], least["tokens_over_history_stderr"])
    return Finding(decide(min(excesses) > most, False), f"at least {kept}, at {least['budget']}")  # a lower bound


@claim("Training all worlds from one start in one order makes them agree more often.", "coupling", is_new=True)
def _coupled_training(study: Evaluation) -> Finding:
    coupled, own = (_one(study, "coupling", training=t, decoder="gumbel") for t in ("coupled", "uncoupled"))
    words = f"{share(coupled['unanimity'], digits=1)} against {share(own['unanimity'], digits=1)}"
    most = most_errors(1, study.rows("accuracy"), sides=1)  # as many passages
    return Finding(above([apart(coupled, own, "unanimity")], most), words)


@claim("Rounding to bfloat16 makes worlds differ where float32 does not.", "precision", is_new=True)
def _rounding(study: Evaluation) -> Finding:
    rows = study.rows("precision")
    errors = [-row["unanimity_difference"] / row["unanimity_stderr"] for row in rows]
    verdict = above(errors, most_errors(len(rows), rows, sides=1))
    words = " and ".join(points(-row["unanimity_difference"], row["unanimity_stderr"]) for row in rows)
    return Finding(verdict, f"{words} points more dissent (greedy, Gumbel)")


@claim(
    "A curator that forgets its belief leaks no more than the charge of its dissenting tokens in these sessions.",
    "forgetting",
    is_new=True,
)
def _forgetting(study: Evaluation) -> Finding:
    rows = study.rows("forgetting", curator="forgetting")
    gaps = [row["leaked_nats"] - row["charged_dissent_nats"] for row in rows]
    errors = [row["leaked_stderr"] for row in rows]  # leaks that grow with their charge: too large, if anything
    verdict = within(gaps, errors, 0.0, most_errors(len(rows), rows, sides=1))
    most = max((gap / error for gap, error in zip(gaps, errors, strict=True) if error), default=0.0)
    return Finding(verdict, f"at most {most:.1f} standard errors above it in {len(rows)} cells")


@claim("Fewer worlds keep more of the gain (2^-32, Gumbel).", "worlds", is_new=True)
def _worlds(study: Evaluation) -> Finding | None:
    rows = [row for row in study.rows("worlds", decoder="gumbel") if row["retained_gain_at_32"] is not None]
    if not rows:
        return None
    few, many = (pick(rows, key=lambda row: int(row["worlds"])) for pick in (min, max))
    more, error = few["kept_change_at_32"], few["kept_change_at_32_stderr"]
    words = f"{points(more, error)} points more with {few['worlds']} worlds than with {many['worlds']}"
    return Finding(above([more / error], most_errors(1, [few], sides=1)), words)


@claim(
    "A temperature lowered where worlds differ leads over fixed ones that change as many votes (best rule, 2^-32).",
    "temperature",
    is_new=True,
)
def _temperature(study: Evaluation) -> Finding | None:
    rows = [row for row in study.rows("temperature") if row.get("lead_change_at_32_stderr")]
    if not rows:
        return None
    best = max(rows, key=lambda row: float(row["lead_change_at_32"] / row["lead_change_at_32_stderr"]))
    most = most_errors(len(rows), study.rows("accuracy"), sides=1)
    lead = points(best["lead_change_at_32"], best["lead_change_at_32_stderr"])
    verdict = above([best["lead_change_at_32"] / best["lead_change_at_32_stderr"]], most)
    return Finding(verdict, f"{lead} points ({best['rule']})")


@claim("A quorum raises the accuracy of the paper's release at 2^-32.", "content", is_new=True)
def _quorum_helps(study: Evaluation) -> Finding | None:
    rows = [row for row in study.rows("content", part="text") if row["quorum"] and row["change_at_32_stderr"]]
    if not rows:
        return None
    gaps = [row["change_at_32"] / row["change_at_32_stderr"] for row in rows]
    most = most_errors(len(rows), study.rows("accuracy"), sides=1)
    least = min(rows, key=lambda row: row["change_at_32"])
    change = points(least["change_at_32"], least["change_at_32_stderr"])
    return Finding(
        decide(min(gaps) > most, min(gaps) < -most),
        f"by at least {change} points (quorum {least['quorum']}, {least['decoder']})",
    )


@claim("No payload that lacks the quorum is emitted.", "content", is_new=True)
def _quorum_holds(study: Evaluation) -> Finding | None:
    rows = study.rows("content", part="forced")
    guarded, control = ([row for row in rows if bool(row["quorum"]) == is_on] for is_on in (True, False))
    (emitted, trials), (free, of) = (
        [sum(row[name] for row in part) for name in ("emitted_lacking", "lacking")] for part in (guarded, control)
    )
    words = f"{emitted} in {trials:,} trials; {free:,} in {of:,} without a quorum"
    is_tested = trials and free  # a control that emits nothing tests nothing
    return Finding(decide(False, emitted > 0), words) if emitted or is_tested else None


@claim("No attack by chosen prompts exceeds its bound.", "chosen_prompts", is_new=True)
def _chosen_prompts_stay_below(study: Evaluation) -> Finding | None:
    ps: dict[str | None, list[float]] = {}
    for row in study.rows("chosen_prompts"):
        ps.setdefault(row["broken"], []).extend(row[p] for p in PS if row[p] is not None)
    sound = ps.pop(None)
    found = sum(min(each) < ALARM / len(sound) for each in ps.values())
    words = f"smallest of {len(sound)} p-values {min(sound):.2g}; {found} of {len(ps)} broken mechanisms found"
    fails, has_power = any(holm(sound)), 0 < found == len(ps)
    return Finding(decide(False, fails), words) if fails or has_power else None


@claim(
    "Prompts chosen among real ones leak less than half of their charge about one record, on average over records.",
    "chosen_prompts",
    is_new=True,
)
def _chosen_prompts_say_little(study: Evaluation) -> Finding:
    best = {"target": "record", "attacker": "belief", "pool": "all records", "choice": "chosen"}
    rows = study.rows("chosen_prompts", **best, broken=None, is_last=True)
    shares, errors = ([row[f"record_over_charged{end}"] for row in rows] for end in ("", "_stderr"))
    most = most_errors(len(rows), [{"passages": row["records"]} for row in rows], sides=1)
    tops = [(name, max(rows, key=itemgetter(name))) for name in ("record_over_charged", "worst_over_charged")]
    words = [f"{share(row[name], row[f'{name}_stderr'])} at {row['budget']}" for name, row in tops]
    return Finding(within(shares, errors, 0.5, most), f"{words[0]} on average; the worst record {words[1]}")


@claim("Other text gives less than half of the gain.", "controls", is_new=True)
def _other_text(study: Evaluation) -> Finding | None:
    rows = [row for row in study.rows("controls", trained_on="other text") if row["share_stderr"]]
    if not rows:
        return None
    values, errors = ([row[name] for row in rows] for name in ("share", "share_stderr"))
    verdict = within(values, errors, 0.5, most_errors(len(rows), rows, sides=1))
    spare = [row for row in study.rows("controls", trained_on="spare records") if row["share_stderr"]]
    words = [
        " and ".join(f"{share(row['share'], row['share_stderr'])} {row['decoder']}" for row in each)
        for each in (rows, spare)
    ]
    return Finding(verdict, words[0] + (f"; spare records of the source {words[1]}" if spare else ""))
