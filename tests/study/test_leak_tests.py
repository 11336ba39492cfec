"""Releases that break their bounds are caught, each by the look that can see it, and sound ones on real votes are not.

Seeded. For a fresh seed each run of a sound release raises an alarm with probability 1e-4 at most.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import rel_entr

from paclm.privacy import gaussian
from paclm.privacy.belief import FloatArray, IntArray, Release, is_unanimous, tally, update_belief
from paclm.privacy.leak import leak_samples_by_entropy
from paclm.privacy.randomness import NoiseSource
from paclm.privacy.releases import RULES, Rule
from paclm.study.lab import Lab
from paclm.study.leak_tests import (
    LOOKS,
    RATE,
    Gap,
    Told,
    broken_bounds,
    chances_by_agreement,
    describe_overtelling,
)
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.regimes import releases
from paclm.study.replay import ReplaySettings, replay
from paclm.study.results import Result
from paclm.study.run import run_regime
from paclm.study.violations import is_violation
from study.small_lab import open_lab

FOLDER = Path(__file__).parent.parent / "fixtures" / "votes"
PROVEN = ("gaussian", "plurality", "mixture", "channel")


def warner(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Release:
    """The true vote in half of the cases, whatever the budget is; exact Bayes; declares its budget."""
    if is_unanimous(votes):
        return Release(votes.item(0), belief, False)
    candidates, choice, mass = tally(votes, belief)
    shares = mass / mass.sum()
    probabilities = 0.5 * shares
    probabilities[choice[secret]] += 0.5
    index = noise.choose(probabilities)
    likelihood = 0.5 * shares[index] + 0.5 * (np.arange(mass.size) == index)  # (a,)
    after = update_belief(belief, choice, np.log(np.maximum(likelihood, 1e-300)), mass)
    return Release(int(candidates[index]), after, True, per_token)


def honest(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Release:
    """Twice the budget, and says so."""
    return gaussian.release(votes, belief, secret, 2.0 * per_token, noise)


def modest(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Release:
    """Keeps to its budget and declares a quarter of it."""
    step = gaussian.release(votes, belief, secret, per_token, noise)
    return step._replace(information=0.25 * step.information)


def forgetful(votes: IntArray, belief: FloatArray, secret: int, per_token: float, _: NoiseSource) -> Release:
    """The true vote, and a belief that never hears of it."""
    return Release(int(votes[secret]), belief, not is_unanimous(votes), 0.0 if is_unanimous(votes) else per_token)


class Quiet:
    """A noise source that draws normals a quarter as wide."""

    def __init__(self, noise: NoiseSource) -> None:
        self.noise = noise

    def standard_normal(self, count: int) -> FloatArray:
        return 0.25 * self.noise.standard_normal(count)


def quiet(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Release:
    """A sixteenth of the variance that its belief assumes."""
    return gaussian.release(votes, belief, secret, per_token, Quiet(noise))  # type: ignore[arg-type]


def seldom(votes: IntArray, belief: FloatArray, secret: int, _: float, noise: NoiseSource) -> Release:
    """Sound, for two worlds: a plain answer first, then rare tokens. All is exact, and what it declares is skewed."""
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
    "warner": (warner, {"budget", "declared", "world_id_bound"}),
    "honest": (honest, {"budget"}),
    "modest": (modest, {"declared"}),
    "forgetful": (forgetful, {"belief", "world_id_bound"}),
}


def votes_of(name: str) -> RecordedVotes:
    return RecordedVotes.load(FOLDER / f"smollm2-{name}.npz")


@pytest.mark.parametrize("name", ["wiki-greedy", "wiki-gumbel", "cables-greedy", "cables-gumbel"])
@pytest.mark.parametrize("release", PROVEN)
def test_no_proven_release_is_accused_on_real_votes(name: str, release: str) -> None:
    recorded = votes_of(name)
    for seed, per_token in enumerate((1.0, 2.0**-4, 2.0**-16, 2.0**-32)):
        sessions = ReplaySettings(release=release, per_token=per_token, sessions=40, tokens=120, seed=seed)
        for settings in (
            sessions,
            replace(sessions, sessions=5, charge="dissent"),
            replace(sessions, protocol="fresh", sessions=1, tokens=600),
        ):
            assert replay(recorded, settings)["tells_more_than"] == [], settings


@pytest.mark.parametrize("name", BROKEN)
def test_a_release_that_breaks_a_bound_is_caught_by_the_look_that_can_see_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, expected = BROKEN[name]
    monkeypatch.setitem(RULES, name, Rule(name, release, reads_secret=True))
    figures = replay(votes_of("wiki-gumbel"), ReplaySettings(release=name, per_token=2.0**-16, sessions=40, tokens=300))
    assert set(figures["tells_more_than"]) == expected
    assert figures["budget_nats"] == pytest.approx(figures["dissent"] * 300 * 2.0**-16)


def test_noise_that_the_belief_does_not_know_of_is_caught_by_the_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """By entropy it tells a ninth of its budget; its twin with the right noise stays silent."""
    monkeypatch.setitem(RULES, "quiet", Rule("quiet", quiet, reads_secret=True))
    settings = ReplaySettings(release="quiet", per_token=2.0**-8, sessions=40, tokens=300)
    figures = replay(votes_of("wiki-gumbel"), settings)
    assert figures["tells_more_than"] == ["belief"]
    assert figures["leaked_nats"] < figures["budget_nats"] < figures["leaked_nats_by_truth"]
    assert replay(votes_of("wiki-gumbel"), replace(settings, release="gaussian"))["tells_more_than"] == []
    fresh = replace(settings, protocol="fresh", sessions=4, tokens=2000, per_token=0.5)
    assert replay(votes_of("wiki-gumbel"), fresh)["tells_more_than"] == ["belief"]


def test_a_belief_that_hears_of_nothing_is_caught_by_the_tokens_where_the_bound_is_certainty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its charge allows everything, its belief stays uniform; its twins that tell as much and know it stay silent."""
    monkeypatch.setitem(RULES, "forgetful", Rule("forgetful", forgetful, reads_secret=True))
    settings = ReplaySettings(release="forgetful", per_token=1.0, sessions=20, tokens=300)
    figures = replay(votes_of("wiki-gumbel"), settings)
    assert figures["world_id_bound"] == 1.0
    assert figures["leaked_nats"] == 0.0
    assert figures["tells_more_than"] == ["belief"]
    for release in ("gaussian", "channel"):
        assert replay(votes_of("wiki-gumbel"), replace(settings, release=release))["tells_more_than"] == []


def test_guesses_as_good_as_the_belief_allows_raise_no_alarm_and_better_ones_do() -> None:
    """500 runs of 40, more than one alarm with 1.2e-3; the twin is always right."""
    rng = np.random.default_rng(4)
    never, much = np.zeros(40), np.full(40, 99.0)

    def alarms(times: float, runs: int) -> int:
        some = [rng.uniform(0.1, 0.5, 40) for _ in range(runs)]
        right = [(rng.random(40) < times * known).astype(np.float64) for known in some]
        told = [Told(never, NO_GAP, much, much, never, *one, 1.0) for one in zip(right, some, strict=True)]
        return sum(broken_bounds(one) == ["belief"] for one in told)

    assert alarms(1.0, 500) <= 1
    assert alarms(10.0, 20) == 20


def test_a_sound_release_whose_declarations_are_skewed_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "seldom", Rule("seldom", seldom, reads_secret=True))
    two_worlds = RecordedVotes(votes=np.tile([[3, 4]], (50, 1)))
    for seed in range(5):
        settings = ReplaySettings(release="seldom", per_token=0.4, sessions=40, tokens=50, seed=seed)
        assert replay(two_worlds, settings)["tells_more_than"] == []


@pytest.mark.parametrize("settings", [{"sessions": 6, "tokens": 300}, {"protocol": "fresh", "tokens": 2000}])
def test_a_few_sessions_and_single_positions_are_enough_to_catch_a_gross_one(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "warner", Rule("warner", warner, reads_secret=True))
    figures = replay(votes_of("wiki-gumbel"), ReplaySettings(release="warner", per_token=2.0**-16, **settings))  # type: ignore[arg-type]
    assert "budget" in figures["tells_more_than"]


def test_without_noise_there_is_no_bound_to_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "warner", Rule("warner", warner, reads_secret=True))
    for release in ("gaussian", "warner"):
        settings = ReplaySettings(release=release, per_token=math.inf, sessions=40, tokens=100)
        assert replay(votes_of("wiki-gumbel"), settings)["tells_more_than"] == []


NO_GAP = Gap.between(np.log(np.full((1, 16), 1 / 16)), np.array([3]))


def told_of(leaked: FloatArray, declared: FloatArray, budget: FloatArray, named: FloatArray, bound: float) -> Told:
    return Told(leaked, NO_GAP, declared, budget, named, named, np.ones_like(named), bound)


def some_told(rng: np.random.Generator, excess: float = 0.0) -> Told:
    """Sixty secrets that leak exactly what is allowed, skewed as a leak is, and a world named at its bound."""
    budget = np.full(60, 0.01)
    named = (rng.random(60) < 0.1).astype(np.float64)
    return told_of(0.01 * rng.chisquare(1, 60) + excess, budget, budget, named, 0.1)


def test_at_the_very_bound_there_is_no_alarm_and_well_above_it_always_one() -> None:
    """500 runs at 1e-4: more than one alarm has probability 1.2e-3; the twin leaks six errors more."""
    rng = np.random.default_rng(0)
    assert sum(bool(broken_bounds(some_told(rng))) for _ in range(500)) <= 1
    assert all("budget" in broken_bounds(some_told(rng, excess=0.015)) for _ in range(50))
    assert is_violation(1e-3, LOOKS)
    assert not is_violation(1e-3, LOOKS, RATE)


def test_few_secrets_at_the_very_bound_raise_no_alarm_and_the_rare_leak_that_it_allows_none_either() -> None:
    """A whole secret told once in a hundred is a mean of a hundredth; 2,000 runs of 20, more than 3 with 1e-4."""
    rng = np.random.default_rng(1)

    def alarms(chance: float) -> int:
        few = np.full(20, 0.01 * math.log(16))
        some = (told_of((rng.random(20) < chance) * math.log(16), few, few, few, 0.9) for _ in range(2000))
        return sum(bool(broken_bounds(told)) for told in some)

    assert alarms(0.01) <= 3
    assert alarms(0.8) == 2000


def test_what_is_declared_in_rare_and_large_parts_counts_as_declared() -> None:
    """About half a nat told each, declared as 20 by one secret in forty; 500 runs, more than one alarm with 1.2e-3."""
    rng = np.random.default_rng(2)
    half, budget, never = np.linspace(0.49, 0.51, 40), np.full(40, 20.0), np.zeros(40)
    skewed = [told_of(half, 20.0 * (rng.random(40) < 0.025), budget, never, 1.0) for _ in range(500)]
    assert sum(bool(broken_bounds(told)) for told in skewed) <= 1
    assert broken_bounds(told_of(20.0 * half, never, budget, never, 1.0)) == ["declared"]


def test_secrets_drawn_from_their_beliefs_raise_no_alarm_and_those_of_sharper_ones_do() -> None:
    """500 runs of 40, more than one alarm with 1.2e-3; the twin's secrets follow the fourth powers of the beliefs."""
    rng = np.random.default_rng(3)
    never, much = np.zeros(40), np.full(40, 99.0)

    def alarms(power: float, runs: int) -> int:
        found = 0
        for _ in range(runs):
            beliefs = rng.dirichlet(np.full(16, 0.5), 40)
            sharper = beliefs**power / (beliefs**power).sum(axis=1, keepdims=True)
            secrets = (rng.random((40, 1)) < sharper.cumsum(axis=1)).argmax(axis=1)
            table = np.log(beliefs)
            told = Told(
                leak_samples_by_entropy(table), Gap.between(table, secrets), much, much, never, never, never, 1.0
            )
            found += broken_bounds(told) == ["belief"]
        return found

    assert alarms(1.0, 500) <= 1
    assert alarms(4.0, 20) == 20


def test_runs_that_are_told_of_together_share_the_rate() -> None:
    budget, never = np.full(4, 1.0), np.zeros(4)
    told = told_of(np.full(4, 30.0), budget, budget, never, 1.0)  # p = 8 ÷ Σ (1 + 29·2^-k)^4, about 9e-6
    assert "budget" in broken_bounds(told)
    assert "budget" not in broken_bounds(told, runs=6)


def test_the_world_that_agrees_most_often_is_named_and_ties_are_fair_guesses() -> None:
    votes = np.array([[1, 2, 1], [3, 3, 4]])
    for tokens, expected in (([1, 3], [1.0, 0.0, 0.0]), ([9, 9], [1 / 3] * 3)):
        found = chances_by_agreement(
            np.tile(votes, (3, 1)), np.tile(tokens, 3), np.arange(3)
        )  # three secrets, one each
        assert found.tolist() == expected


def test_the_sentence_names_everything_that_is_broken() -> None:
    numbers = {"leaked": 2.079, "by_truth": 1.9, "declared": 0.001, "budget": 0.001, "rate": 1.0, "bound": 0.02}
    said = describe_overtelling("mine", ["budget", "declared"], stderr=0.01, unit="a session", **numbers)
    assert said.startswith(
        "The release mine tells more than it was charged for and tells more than its steps declare: an estimated 2.079 "
        "± 0.01 nats a session by its belief and 1.9 by its secrets, where its budget allows 0.001"
    )
    assert "±" not in describe_overtelling("mine", ["budget"], stderr=math.nan, unit="a session", **numbers)


@pytest.fixture(scope="module")
def lab(study_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return open_lab(study_template, tmp_path_factory.mktemp("overtelling") / "workspace")


def regime_with(lab: Lab, name: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setitem(RULES, name, Rule(name, BROKEN[name][0], reads_secret=True))
    return run_regime(lab, releases.REGIME, "quick", scale=releases.ReleasesScale(120, 2, 40, 240))


def test_the_regime_warns_of_an_added_release_and_of_no_other(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = []
    monkeypatch.setattr(releases, "broken_bounds", lambda told, runs: shared.append(runs) or broken_bounds(told, runs))
    result = regime_with(lab, "warner", monkeypatch)
    assert sorted(shared) == [1] * 2 + [len(releases.BUDGETS)] * 3 * len(releases.BUDGETS)
    accused = {row["release"] for row in result.rows if row["tells_more_than"]}
    assert accused == {"warner"}
    (said,) = [line for line in releases.verdicts(result) if "warner" in line]
    assert said.startswith("ALARM")
    assert "at 2^-32" in said
    earlier = [{key: value for key, value in row.items() if key != "tells_more_than"} for row in result.rows]
    assert not any(line.startswith("ALARM") for line in releases.verdicts(replace(result, rows=earlier)))
    for row in earlier:  # were one of ours broken, an alarm would name it
        row["tells_more_than"] = "belief" if row["release"] in ("gaussian", "plurality") else None
    alarms = [line for line in releases.verdicts(replace(result, rows=earlier)) if line.startswith("ALARM")]
    assert [("gaussian" in line, "6 of 6" in line, "plurality" in line) for line in alarms] == [
        (True, True, False),
        (False, False, True),
    ]
