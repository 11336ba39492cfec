"""Statistical tests for leakage above a bound: of a release, and of an attack over many cells.

*Releases.* `broken_bounds` tests for leakage above charge, declared information or belief, and for a world identified
more often than its bound allows. It is meant for releases under development: deployed ones are proven. P-values are
bounds for any number of secrets and any distribution of their leaks, so small excesses over few secrets are missed. It
sees beliefs and tokens, not code: leakage that the belief does not follow is found only if tokens agree with the
realized world more often than with others.

*Attacks.* A cell is a violation if its p-value is below FALSE_ALARMS ÷ number of tests (Bonferroni, so cells may be
dependent). Exact for counts; for means it uses Student's t, which is anti-conservative under left skew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import logsumexp, rel_entr

from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.leak import leak_samples_by_entropy
from paclm.study.attacks.belief import chance_to_name
from paclm.study.results import Row

FALSE_ALARMS = 0.01  # probability of any false alarm over all cells of an attack
RELEASE_FALSE_ALARMS = 1e-4  # probability of any false alarm about a sound release
RELEASE_TESTS = 6
MIN_SAMPLES = 30  # samples from which their own variance is used

_ROUNDING = 1e-9
_STAKES = 2.0 ** -np.arange(8)  # shares of the wealth that a bet risks
_MAX_BELIEFS = 512  # tested per stream
_TILTS = 2.0 ** np.arange(-4, 17)  # for leaks from nats down to 2^-32 at a thousand secrets


class Gap(NamedTuple):
    """The difference of the two leak estimates, and its cumulants if the beliefs are exact. Both add over streams."""

    nats: float
    cumulants: FloatArray  # (tilts,) Σ over beliefs of log E exp(tilt · gap)

    @classmethod
    def between(cls, beliefs: FloatArray, secrets: IntArray) -> Gap:
        """Of beliefs (n, m) about secrets (n,); the first ones only, for speed.

        If a belief is exact, the secret is distributed by it, whatever was released: the law of the gap is known.
        """
        beliefs, secrets = beliefs[:_MAX_BELIEFS], secrets[:_MAX_BELIEFS]
        by_entropy = leak_samples_by_entropy(beliefs)
        gaps = beliefs + math.log(beliefs.shape[1]) - by_entropy[:, None]  # (n, m), for each world as the secret
        found = float(gaps[np.arange(len(secrets)), secrets].sum())
        return cls(found, np.array([logsumexp(beliefs + tilt * gaps, axis=1).sum() for tilt in _TILTS]))

    @classmethod
    def of_all(cls, gaps: Sequence[Gap]) -> Gap:
        """Of all streams."""
        return cls(sum(gap.nats for gap in gaps), np.sum([gap.cumulants for gap in gaps], axis=0))


class LeakEvidence(NamedTuple):
    """Observations of n secrets; nats are per secret."""

    leaked: FloatArray  # (n,) by the belief's entropy
    gap: Gap
    declared: FloatArray  # (n,) Σ of the declared information of the tokens
    budget: FloatArray  # (n,) b for every dissenting token: nothing can leak without dissent
    named: FloatArray  # (n,) probability that the belief's most likely world is the secret
    agreeing: FloatArray  # (n,) the same for the world that agreed most often with the released tokens
    known: FloatArray  # (n,) belief in its most likely world: if exact, no guess succeeds more often
    world_id_bound: float

    @property
    def world_id_rate(self) -> float:
        """Success rate of the better of the two attacks."""
        return float(max(self.named.mean(), self.agreeing.mean()))


def broken_bounds(evidence: LeakEvidence, runs: int = 1) -> list[str]:
    """Which of `budget`, `declared`, `belief` and `world_id_bound` the release exceeds by more than chance.

    RELEASE_FALSE_ALARMS is shared among all runs that are reported together.
    """
    if not np.isfinite(evidence.budget).all():  # without noise there is no bound to break
        return []

    def is_alarm(p: float) -> bool:
        return is_violation(p, RELEASE_TESTS * runs, RELEASE_FALSE_ALARMS)

    leaked, gap, declared, budget, named, agreeing, known, world_id_bound = evidence
    most = float(budget.max()) + _ROUNDING
    declares_more = float(declared.mean()) > float(budget.mean()) * (1.0 + _ROUNDING) or float(declared.max()) > most
    found = {
        "budget": declares_more or is_alarm(p_of_excess(leaked - budget, most)),
        "declared": not declares_more and is_alarm(p_of_excess(leaked - declared, most)),
        "belief": is_alarm(_p_of_gap(gap)) or is_alarm(p_of_excess(agreeing - known, 1.0)),
        "world_id_bound": any(is_alarm(_p_of_chances(chances, world_id_bound)) for chances in (named, agreeing)),
    }
    return [name for name, is_broken in found.items() if is_broken]


def _p_of_gap(gap: Gap) -> float:
    """Chernoff bound on the probability that secrets are this much more likely than their beliefs say."""
    return 1.0 if gap.nats <= 0.0 else math.exp(min(0.0, float((gap.cumulants - _TILTS * gap.nats).min())))


def p_of_excess(excess: FloatArray, most: float) -> float:
    """Bound on the probability of such excesses (n,), each at least −most, if none is expected above 0.

    Betting e-value: the wealth is multiplied by 1 + share · excess ÷ most for each secret, averaged over shares; by
    Markov p ≤ 1 / wealth. No assumption on variance or on rare, large leaks.
    """
    factors = 1.0 + _STAKES[:, None] * (excess / most)  # (stakes, n)
    with np.errstate(divide="ignore"):  # all of a stake may be lost
        log_wealth = np.log(np.maximum(factors, 0.0)).sum(axis=1)  # (stakes,)
    return math.exp(min(0.0, math.log(_STAKES.size) - float(logsumexp(log_wealth))))


def _p_of_chances(chances: FloatArray, bound: float) -> float:
    """Hoeffding's exp(−n·KL(mean ‖ bound)) for chances (n,) in [0, 1]."""
    mean = min(1.0, float(chances.mean()))
    if mean <= bound:
        return 1.0
    return math.exp(-chances.size * float(rel_entr(mean, bound) + rel_entr(1.0 - mean, 1.0 - bound)))


def chances_by_agreement(votes: IntArray, released: IntArray, secrets: IntArray) -> FloatArray:
    """Whether the world that agreed most often is the realized one, (n,); ties count as a fair guess.

    Votes (n · t, m) and tokens (n · t,) of n secrets with t tokens each. Reads tokens alone, so it also finds leakage
    that is missing from the belief.
    """
    agrees = (votes == released[:, None]).reshape(len(secrets), -1, votes.shape[1])  # (n, t, m)
    return chance_to_name(agrees.sum(axis=1, dtype=np.float64), secrets)


def describe_broken_bounds(
    name: str,
    broken: Sequence[str],
    *,
    leaked: float,
    stderr: float | None,
    by_truth: float,
    declared: float,
    budget: float,
    rate: float,
    bound: float,
    unit: str,
) -> str:
    """Which bounds a release breaks, with the figures in nats per unit."""
    error = "" if stderr is None or math.isnan(stderr) else f" ± {stderr:.2g}"
    return (
        f"The release {name} exceeds: {', '.join(broken)}. Estimated leak {unit}: {leaked:.4g}{error} nats by belief, "
        f"{by_truth:.4g} by secrets; budget {budget:.4g}, declared {declared:.4g}. World identified: {rate:.4f}, bound "
        f"{bound:.4f}. A sound release fails at most once in {1.0 / RELEASE_FALSE_ALARMS:,.0f} runs: check noise, "
        "declared information and belief update, and do not trust its bounds."
    )


def is_violation(p: float, tests: int, false_alarms: float = FALSE_ALARMS) -> bool:
    """Whether a p-value is significant among so many tests."""
    return p < false_alarms / tests


def holm(p_values: Sequence[float], false_alarms: float = FALSE_ALARMS) -> list[bool]:
    """Which of several tests reject, by Holm's step-down: any false rejection has at most this probability.

    The tests may depend on one another.
    """
    order, rejected = np.argsort(p_values), [False] * len(p_values)
    for done, index in enumerate(order.tolist()):
        if p_values[index] > false_alarms / (len(p_values) - done):
            break
        rejected[index] = True
    return rejected


def p_of_hits(hits: int, trials: int, bound: float) -> float:
    """Probability of at least so many successes in independent trials that succeed with the bound's probability."""
    return float(stats.binom.sf(hits - 1, trials, bound))


def p_of_mean(samples: FloatArray, bound: float) -> float:
    """One-sided p-value of the mean of independent samples in [0, 1] against the bound.

    Student's t, or Hoeffding's inequality for fewer than 30 samples or equal ones.
    """
    excess, n = float(samples.mean()) - bound, len(samples)
    spread = float(samples.std(ddof=1)) if n >= MIN_SAMPLES else 0.0
    if spread < 1e-12:
        return math.exp(-2.0 * n * max(excess, 0.0) ** 2)
    return float(stats.t.sf(excess * math.sqrt(n) / spread, n - 1))


def break_ties(shares: FloatArray, rng: np.random.Generator) -> int:
    """Number of successes when each trial succeeds with its share: (n,) in [0, 1] → a count."""
    return int((rng.random(len(shares)) < shares).sum())


def excess_in_errors(row: Row, attack: str) -> float:
    """Standard errors by which an attack (`membership`, `world`) of a row is above its bound; negative below it."""
    excess, error = row[f"{attack}_rate"] - row[f"{attack}_bound"], row[f"{attack}_stderr"]
    return float(excess / error) if error else math.copysign(math.inf, excess)


def describe_excess(rows: Sequence[Row]) -> str:
    """The largest excess of an attack over its bound, in rows whose samples are sessions; ALARM if not chance."""
    cells = [(excess_in_errors(row, attack), attack, row) for row in rows for attack in ("membership", "world")]
    broken = [cell for cell in cells if cell[0] > 0.0 and is_violation(_p_of_row(cell[2], cell[1]), len(cells))]
    largest, attack, row = max(broken or cells, key=lambda cell: cell[0])
    few = "; too few sessions for a test" if row["sessions"] < MIN_SAMPLES else ""
    return (
        f"{'ALARM: ' if broken else ''}largest excess over a bound: {largest:.1f} standard errors, {attack} at "
        f"{row['budget']} and {row['horizon']:,} tokens, {row['sessions']:,} sessions ({len(broken)} violations in "
        f"{len(cells)} tests{few})"
    )


def _p_of_row(row: Row, attack: str) -> float:
    """One-sided, from a row's mean and error; identified worlds are counts."""
    n, bound = row["sessions"], row[f"{attack}_bound"]
    if attack == "world":
        return p_of_hits(math.floor(row["world_rate"] * n), n, bound)
    if not row["membership_stderr"]:
        return p_of_mean(np.full(n, row["membership_rate"]), bound)
    return float(stats.t.sf(excess_in_errors(row, attack), n - 1))
