"""Releases and attacks that break their bounds are caught, each by the test that can see it, and sound ones are not.

Seeded. For a fresh seed each run of a sound release raises an alarm with probability 1e-4 at most; tests of attacks
state their rate.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import rel_entr

from paclm.privacy import gaussian
from paclm.privacy.belief import Release, is_unanimous, tally, update_belief
from paclm.privacy.leak import leak_samples_by_entropy
from paclm.privacy.releases import RULES, Rule
from paclm.study.leak_tests import (
    FALSE_ALARMS,
    RELEASE_FALSE_ALARMS,
    RELEASE_TESTS,
    Gap,
    LeakEvidence,
    break_ties,
    broken_bounds,
    chances_by_agreement,
    describe_broken_bounds,
    describe_excess,
    excess_in_errors,
    is_violation,
    p_of_hits,
    p_of_mean,
)
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.regimes import releases
from paclm.study.replay import ReplaySettings, replay
from paclm.study.run import run_regime
from study.small_lab import HalfNoise

FOLDER = Path(__file__).parent.parent / "fixtures" / "votes"
PROVEN = ("gaussian", "plurality", "mixture", "channel")


def warner(votes, belief, secret, per_token, noise):
    """The true vote in half of the cases, whatever the budget is; exact Bayes; declares its budget."""
    candidates, choice, mass = tally(votes, belief)
    shares = mass / mass.sum()
    probabilities = 0.5 * shares
    probabilities[choice[secret]] += 0.5
    index = noise.choose(probabilities)
    likelihood = 0.5 * shares[index] + 0.5 * (np.arange(mass.size) == index)  # (a,)
    after = update_belief(belief, choice, np.log(np.maximum(likelihood, 1e-300)), mass)
    return Release(int(candidates[index]), after, True, per_token)


def honest(votes, belief, secret, per_token, noise):
    """Noise for twice the budget, and declares it."""
    return gaussian.release(votes, belief, secret, 2.0 * per_token, noise)


def modest(votes, belief, secret, per_token, noise):
    """Keeps within its budget and declares a quarter of it."""
    step = gaussian.release(votes, belief, secret, per_token, noise)
    return step._replace(information=0.25 * step.information)


def forgetful(votes, belief, secret, per_token, _):
    """The true vote, and a belief that is never updated."""
    return Release(int(votes[secret]), belief, not is_unanimous(votes), 0.0 if is_unanimous(votes) else per_token)


def quiet(votes, belief, secret, per_token, noise):
    """A sixteenth of the variance that its belief assumes."""
    return gaussian.release(votes, belief, secret, per_token, HalfNoise(HalfNoise(noise)))


def seldom(votes, belief, secret, _, noise):
    """Sound, for two worlds: an informative token first, then rare ones. Exact; its declared information is skewed."""
    candidates, choice, mass = tally(votes, belief)
    shares = mass / mass.sum()
    if abs(shares[0] - 0.5) < 1e-9:
        table = np.array([[0.9, 0.1], [0.1 + 1e-7, 0.9 - 1e-7]])
    else:
        rare = 2e-6 * (1.0 + (np.arange(2) == shares.argmin()))
        table = np.stack([1.0 - rare, rare], axis=1)
    index = noise.choose(table[choice[secret]])
    information = float(shares @ rel_entr(table, shares @ table).sum(axis=1))
    after = update_belief(belief, choice, np.log(table[:, index]), mass)
    return Release(int(candidates[index]), after, True, information)


BROKEN = {
    warner: {"budget", "declared", "world_id_bound"},
    honest: {"budget"},
    modest: {"declared"},
    forgetful: {"belief", "world_id_bound"},
}


def register(monkeypatch, release):
    name = release.__name__
    monkeypatch.setitem(RULES, name, Rule(name, release, reads_secret=True))
    return name


def votes_of(name):
    return RecordedVotes.load(FOLDER / f"smollm2-{name}.npz")


@pytest.mark.parametrize("name", ["wiki-greedy", "cables-gumbel"])
@pytest.mark.parametrize("release", PROVEN)
def test_no_proven_release_is_accused_on_real_votes(name, release):
    recorded = votes_of(name)
    for seed, per_token in enumerate((1.0, 2.0**-4, 2.0**-16, 2.0**-32)):
        sessions = ReplaySettings(release=release, per_token=per_token, sessions=40, tokens=120, seed=seed)
        for settings in (
            sessions,
            replace(sessions, sessions=5, charge="dissent"),
            replace(sessions, protocol="fresh", sessions=1, tokens=600),
        ):
            assert replay(recorded, settings)["tells_more_than"] == [], settings


@pytest.mark.parametrize("release", BROKEN)
def test_a_release_that_breaks_a_bound_is_caught_by_the_test_that_can_see_it(release, monkeypatch):
    name = register(monkeypatch, release)
    figures = replay(votes_of("wiki-gumbel"), ReplaySettings(release=name, per_token=2.0**-16, sessions=40, tokens=300))
    assert set(figures["tells_more_than"]) == BROKEN[release]
    assert figures["budget_nats"] == pytest.approx(figures["dissent"] * 300 * 2.0**-16)


def test_noise_smaller_than_the_belief_assumes_is_caught_by_the_secrets(monkeypatch):
    """By entropy it leaks a ninth of its budget; the twin with the right noise raises no alarm."""
    register(monkeypatch, quiet)
    settings = ReplaySettings(release="quiet", per_token=2.0**-8, sessions=40, tokens=300)
    figures = replay(votes_of("wiki-gumbel"), settings)
    assert figures["tells_more_than"] == ["belief"]
    assert figures["leaked_nats"] < figures["budget_nats"] < figures["leaked_nats_by_truth"]
    assert replay(votes_of("wiki-gumbel"), replace(settings, release="gaussian"))["tells_more_than"] == []
    fresh = replace(settings, protocol="fresh", sessions=4, tokens=2000, per_token=0.5)
    assert replay(votes_of("wiki-gumbel"), fresh)["tells_more_than"] == ["belief"]


def test_a_belief_that_is_never_updated_is_caught_by_the_tokens_where_the_bound_is_one(monkeypatch):
    """Its charge allows any leak and its belief stays uniform; twins with an exact belief raise no alarm."""
    register(monkeypatch, forgetful)
    settings = ReplaySettings(release="forgetful", per_token=1.0, sessions=20, tokens=300)
    figures = replay(votes_of("wiki-gumbel"), settings)
    assert figures["world_id_bound"] == 1.0
    assert figures["leaked_nats"] == 0.0
    assert figures["tells_more_than"] == ["belief"]
    for release in ("gaussian", "channel"):
        assert replay(votes_of("wiki-gumbel"), replace(settings, release=release))["tells_more_than"] == []


def test_guesses_as_good_as_the_belief_allows_raise_no_alarm_and_better_ones_do():
    """500 runs of 40, more than one alarm with 1.2e-3; the twin is always right."""
    rng = np.random.default_rng(4)
    never, much = np.zeros(40), np.full(40, 99.0)

    def alarms(times, runs):
        found = 0
        for known in rng.uniform(0.1, 0.5, (runs, 40)):
            right = (rng.random(40) < times * known).astype(np.float64)
            found += broken_bounds(LeakEvidence(never, NO_GAP, much, much, never, right, known, 1.0)) == ["belief"]
        return found

    assert alarms(1.0, 500) <= 1
    assert alarms(10.0, 20) == 20


def test_a_sound_release_whose_declarations_are_skewed_is_not_accused(monkeypatch):
    register(monkeypatch, seldom)
    two_worlds = RecordedVotes(votes=np.tile([[3, 4]], (50, 1)))
    for seed in range(5):
        settings = ReplaySettings(release="seldom", per_token=0.4, sessions=40, tokens=50, seed=seed)
        assert replay(two_worlds, settings)["tells_more_than"] == []


@pytest.mark.parametrize("settings", [{"sessions": 6, "tokens": 300}, {"protocol": "fresh", "tokens": 2000}])
def test_a_few_sessions_and_single_positions_are_enough_to_catch_a_gross_one(settings, monkeypatch):
    register(monkeypatch, warner)
    figures = replay(votes_of("wiki-gumbel"), ReplaySettings(release="warner", per_token=2.0**-16, **settings))
    assert "budget" in figures["tells_more_than"]


def test_without_noise_there_is_no_bound_to_break(monkeypatch):
    register(monkeypatch, warner)
    for release in ("gaussian", "warner"):
        settings = ReplaySettings(release=release, per_token=math.inf, sessions=40, tokens=100)
        assert replay(votes_of("wiki-gumbel"), settings)["tells_more_than"] == []


NO_GAP = Gap.between(np.log(np.full((1, 16), 1 / 16)), np.array([3]))


def evidence_of(leaked, declared, budget, named, bound):
    return LeakEvidence(leaked, NO_GAP, declared, budget, named, named, np.ones_like(named), bound)


def some_evidence(rng, excess=0.0):
    """Sixty secrets that leak exactly what is allowed, skewed as a leak is, and a world named at its bound."""
    budget = np.full(60, 0.01)
    named = (rng.random(60) < 0.1).astype(np.float64)
    return evidence_of(0.01 * rng.chisquare(1, 60) + excess, budget, budget, named, 0.1)


def test_at_the_bound_there_is_no_alarm_and_well_above_it_always_one():
    """500 runs at 1e-4: more than one alarm has probability 1.2e-3; the twin leaks six standard errors more."""
    rng = np.random.default_rng(0)
    assert sum(bool(broken_bounds(some_evidence(rng))) for _ in range(500)) <= 1
    assert all("budget" in broken_bounds(some_evidence(rng, excess=0.015)) for _ in range(50))
    assert is_violation(1e-3, RELEASE_TESTS)
    assert not is_violation(1e-3, RELEASE_TESTS, RELEASE_FALSE_ALARMS)


def test_few_secrets_at_the_bound_and_rare_leaks_within_it_raise_no_alarm():
    """A whole secret leaked once in a hundred is a mean of a hundredth; 2,000 runs of 20, more than 3 with 1e-4."""
    rng = np.random.default_rng(1)

    def alarms(chance):
        few = np.full(20, 0.01 * math.log(16))
        some = (evidence_of((rng.random(20) < chance) * math.log(16), few, few, few, 0.9) for _ in range(2000))
        return sum(bool(broken_bounds(evidence)) for evidence in some)

    assert alarms(0.01) <= 3
    assert alarms(0.8) == 2000


def test_information_declared_in_rare_and_large_parts_counts():
    """About half a nat leaked each, declared as 20 by one in forty; 500 runs, more than one alarm with 1.2e-3."""
    rng = np.random.default_rng(2)
    half, budget, never = np.linspace(0.49, 0.51, 40), np.full(40, 20.0), np.zeros(40)
    skewed = [evidence_of(half, 20.0 * (rng.random(40) < 0.025), budget, never, 1.0) for _ in range(500)]
    assert sum(bool(broken_bounds(evidence)) for evidence in skewed) <= 1
    assert broken_bounds(evidence_of(20.0 * half, never, budget, never, 1.0)) == ["declared"]


def test_secrets_drawn_from_their_beliefs_raise_no_alarm_and_those_of_sharper_ones_do():
    """500 runs of 40, more than one alarm with 1.2e-3; the twin's secrets follow the fourth powers of the beliefs."""
    rng = np.random.default_rng(3)
    never, much = np.zeros(40), np.full(40, 99.0)

    def alarms(power, runs):
        found = 0
        for _ in range(runs):
            beliefs = rng.dirichlet(np.full(16, 0.5), 40)
            sharper = beliefs**power / (beliefs**power).sum(axis=1, keepdims=True)
            secrets = (rng.random((40, 1)) < sharper.cumsum(axis=1)).argmax(axis=1)
            table = np.log(beliefs)
            evidence = LeakEvidence(
                leak_samples_by_entropy(table), Gap.between(table, secrets), much, much, never, never, never, 1.0
            )
            found += broken_bounds(evidence) == ["belief"]
        return found

    assert alarms(1.0, 500) <= 1
    assert alarms(4.0, 20) == 20


def test_runs_that_are_reported_together_share_the_rate():
    budget, never = np.full(4, 1.0), np.zeros(4)
    evidence = evidence_of(np.full(4, 30.0), budget, budget, never, 1.0)  # p = 8 ÷ Σ (1 + 29·2^-k)^4, about 9e-6
    assert "budget" in broken_bounds(evidence)
    assert "budget" not in broken_bounds(evidence, runs=6)


def test_the_world_that_agrees_most_often_is_named_and_ties_are_fair_guesses():
    votes = np.array([[1, 2, 1], [3, 3, 4]])
    for tokens, expected in (([1, 3], [1.0, 0.0, 0.0]), ([9, 9], [1 / 3] * 3)):
        found = chances_by_agreement(np.tile(votes, (3, 1)), np.tile(tokens, 3), np.arange(3))  # three secrets
        assert found.tolist() == expected


def test_the_description_names_the_broken_bounds_and_an_error_only_if_there_is_one():
    numbers = {"leaked": 2.079, "by_truth": 1.9, "declared": 0.001, "budget": 0.001, "rate": 1.0, "bound": 0.02}
    for stderr, shown in ((0.01, "2.079 ± 0.01"), (math.nan, "2.079")):
        text = describe_broken_bounds("mine", ["budget", "declared"], stderr=stderr, unit="per session", **numbers)
        assert all(part in text for part in ("mine", "budget, declared", shown, "1.9"))
        assert ("±" in text) == ("±" in shown)


def test_the_regime_warns_of_an_added_release_and_of_no_other(small_lab, monkeypatch):
    shared = []
    monkeypatch.setattr(
        releases, "broken_bounds", lambda evidence, runs: shared.append(runs) or broken_bounds(evidence, runs)
    )
    register(monkeypatch, warner)
    result = run_regime(small_lab, releases.REGIME, "quick", scale=releases.ReleasesScale(120, 2, 40, 240))
    alone = 2 + len(releases.MODELS)  # two releases never read the secret, and a model is the same for every secret
    assert sorted(shared) == [1] * alone + [len(releases.BUDGETS)] * 3 * len(releases.BUDGETS)
    accused = {row["release"] for row in result.rows if row["tells_more_than"]}
    assert accused == {"warner"}
    (line,) = [line for line in releases.verdicts(result) if "warner" in line]
    assert line.startswith("ALARM")
    assert "at 2^-32" in line
    earlier = [{key: value for key, value in row.items() if key != "tells_more_than"} for row in result.rows]
    assert not any(line.startswith("ALARM") for line in releases.verdicts(replace(result, rows=earlier)))
    for row in earlier:  # a broken release of ours is named
        row["tells_more_than"] = "belief" if row["release"] in ("gaussian", "plurality") else None
    alarms = [line for line in releases.verdicts(replace(result, rows=earlier)) if line.startswith("ALARM")]
    named = [[word in line for word in ("gaussian", "6 of 6", "plurality")] for line in alarms]
    assert named == [[True, True, False], [False, False, True]]


CELLS, TRIALS = 24, 400


def any_alarm(success, bound, rng):
    """Both attacks in 24 cells, one round."""
    hits = rng.binomial(TRIALS, success, CELLS)
    samples = rng.normal(success, 0.1, (CELLS, TRIALS))
    p_values = [p_of_hits(int(h), TRIALS, bound) for h in hits] + [p_of_mean(row, bound) for row in samples]
    return any(is_violation(p, 2 * CELLS) for p in p_values)


def test_attacks_at_the_bound_raise_alarms_at_the_stated_rate_and_those_above_it_always():
    rng = np.random.default_rng(0)
    alarms = sum(any_alarm(0.1, 0.1, rng) for _ in range(200))
    assert alarms <= 8  # 2 expected at 1 %; more than 8 with probability 2e-4
    assert all(any_alarm(0.2, 0.1, rng) for _ in range(20))


def test_without_the_correction_for_many_tests_false_alarms_are_common():
    rng = np.random.default_rng(2)
    p_values = [p_of_hits(int(h), TRIALS, 0.1) for h in rng.binomial(TRIALS, 0.1, 1000)]
    assert sum(p < FALSE_ALARMS for p in p_values) > 0
    assert not any(is_violation(p, 48 * 20) for p in p_values)


def test_p_values_of_known_cases():
    assert p_of_hits(0, 10, 0.5) == 1.0
    assert p_of_hits(10, 10, 0.5) == pytest.approx(2.0**-10)
    assert p_of_mean(np.tile([0.4, 0.6], 20), 0.5) == pytest.approx(0.5)
    assert p_of_mean(np.full(50, 0.5), 0.5) == 1.0
    assert p_of_mean(np.full(50, 0.9), 0.5) == pytest.approx(np.exp(-2 * 50 * 0.16))
    for count in (1, 2, 5):  # a few equal samples prove nothing
        assert not is_violation(p_of_mean(np.full(count, 0.7), 0.5), 48)
        assert p_of_mean(np.full(count, 0.3), 0.5) == 1.0


def test_means_of_left_skewed_samples_raise_false_alarms():
    """The stated rate does not hold for every distribution: 0.52 mostly, 0.02 in 4 of 100, and 0.5 on average."""
    rng = np.random.default_rng(4)
    samples = np.where(rng.random((400, 100)) < 0.04, 0.02, 0.52) + rng.normal(0.0, 1e-3, (400, 100))
    alarms = sum(is_violation(p_of_mean(row, 0.5), 2 * CELLS) for row in samples)
    assert 1 <= alarms <= 20  # 7 expected; 0.1 if Student's t were right


def test_ties_are_broken_by_their_share():
    rng = np.random.default_rng(3)
    assert break_ties(np.array([1.0, 0.0, 1.0]), rng) == 2
    assert 140 < break_ties(np.full(1000, 0.2), rng) < 260


def cell(membership, world=0.01, sessions=8, error=0.02):
    attacks = {"membership_rate": membership, "membership_stderr": error, "membership_bound": 0.5}
    attacks |= {"world_rate": world, "world_stderr": 0.0, "world_bound": 0.02}
    return {"budget": "2^-16", "horizon": 384, "sessions": sessions, **attacks}


@pytest.mark.parametrize(
    ("cells", "is_alarm", "figures"),
    [
        ([cell(0.49), cell(0.48)], False, ("-0.5 standard errors", "0 violations in 4 tests")),
        ([cell(0.53), cell(0.51), cell(0.49)], False, ("1.5 standard errors", "membership at 2^-16 and 384 tokens")),
        ([cell(0.49), cell(0.6, sessions=100)], True, ("5.0 standard errors", "100 sessions", "1 violations")),
        ([cell(0.6, sessions=4)], False, ("5.0 standard errors", "too few")),  # five errors of so few mean little
        ([cell(0.49, world=1.0)], True, ("inf standard errors", "world at")),  # always succeeds: no variance
        ([cell(0.49, world=1.0, sessions=1)], False, ("too few",)),
        ([cell(0.9, sessions=20, error=0.0)], True, ("inf standard errors",)),
    ],
)
def test_the_largest_excess_is_described_and_is_an_alarm_only_if_chance_does_not_explain_it(cells, is_alarm, figures):
    assert excess_in_errors(cell(0.5, world=0.0), "world") == -math.inf  # no variance
    text = describe_excess(cells)
    assert text.startswith("ALARM") == is_alarm
    assert [part for part in figures if part not in text] == []
