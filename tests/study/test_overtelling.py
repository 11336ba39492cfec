"""Releases that break their bounds are caught, each by the look that can see it, and sound ones on real votes are not.

Seeded. For a fresh seed each run of a sound release raises an alarm with probability 1e-4 at most.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paclm.privacy import gaussian
from paclm.privacy.arrays import FloatArray, IntArray
from paclm.privacy.belief import update_belief
from paclm.privacy.randomness import NoiseSource
from paclm.privacy.releases import RULES, Rule
from paclm.privacy.step import Step, is_unanimous, tally
from paclm.study.lab import Lab
from paclm.study.overtelling import LOOKS, RATE, Told, broken_bounds, chance_by_agreement, describe_overtelling
from paclm.study.regimes import releases
from paclm.study.replay import ReplaySettings, replay
from paclm.study.results import Result
from paclm.study.run import run_regime
from paclm.study.violations import is_violation
from paclm.study.votes import RecordedVotes
from study.small_lab import open_lab

FOLDER = Path(__file__).parent.parent / "fixtures" / "votes"
PROVEN = ("gaussian", "plurality", "mixture", "channel")


def warner(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Step:
    """The true vote in half of the cases, whatever the budget is; exact Bayes; declares its budget."""
    if is_unanimous(votes):
        return Step(votes.item(0), belief, False)
    candidates, choice, mass = tally(votes, belief)
    shares = mass / mass.sum()
    probabilities = 0.5 * shares
    probabilities[choice[secret]] += 0.5
    index = noise.choose(probabilities)
    likelihood = 0.5 * shares[index] + 0.5 * (np.arange(mass.size) == index)  # (a,)
    after = update_belief(belief, choice, np.log(np.maximum(likelihood, 1e-300)), mass)
    return Step(int(candidates[index]), after, True, per_token)


def honest(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Step:
    """Twice the budget, and says so."""
    return gaussian.release(votes, belief, secret, 2.0 * per_token, noise)


def modest(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Step:
    """Keeps to its budget and declares a quarter of it."""
    step = gaussian.release(votes, belief, secret, per_token, noise)
    return step._replace(information=0.25 * step.information)


def forgetful(votes: IntArray, belief: FloatArray, secret: int, per_token: float, _: NoiseSource) -> Step:
    """The true vote, and a belief that never hears of it."""
    return Step(int(votes[secret]), belief, not is_unanimous(votes), 0.0 if is_unanimous(votes) else per_token)


BROKEN = {
    "warner": (warner, {"budget", "declared", "world_id_bound"}),
    "honest": (honest, {"budget"}),
    "modest": (modest, {"declared"}),
    "forgetful": (forgetful, {"world_id_bound"}),
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


def some_told(rng: np.random.Generator, excess: float = 0.0) -> Told:
    """Sixty secrets that leak exactly what is allowed, skewed as a leak is, and a world named at its bound."""
    budget = np.full(60, 0.01)
    named = (rng.random(60) < 0.1).astype(np.float64)
    return Told(0.01 * rng.chisquare(1, 60) + excess, budget, budget, named, named, 16, 0.1)


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
        some = (Told((rng.random(20) < chance) * math.log(16), few, few, few, few, 16, 0.9) for _ in range(2000))
        return sum(bool(broken_bounds(told)) for told in some)

    assert alarms(0.01) <= 3
    assert alarms(0.8) == 2000


def test_the_world_that_agrees_most_often_is_named_and_ties_are_fair_guesses() -> None:
    votes = np.array([[1, 2, 1], [3, 3, 4]])
    assert [chance_by_agreement(votes, np.array([1, 3]), world) for world in range(3)] == [1.0, 0.0, 0.0]
    assert [chance_by_agreement(votes, np.array([9, 9]), world) for world in range(3)] == [1 / 3] * 3


def test_the_sentence_names_everything_that_is_broken() -> None:
    numbers = {"leaked": 2.079, "declared": 0.001, "budget": 0.001, "rate": 1.0, "bound": 0.02}
    said = describe_overtelling("mine", ["budget", "declared"], stderr=0.01, unit="a session", **numbers)
    assert said.startswith(
        "The release mine tells more than it was charged for and tells more than its steps declare: an estimated 2.079 "
        "± 0.01 nats a session, where its budget allows 0.001"
    )
    assert "±" not in describe_overtelling("mine", ["budget"], stderr=math.nan, unit="a session", **numbers)


@pytest.fixture(scope="module")
def lab(study_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return open_lab(study_template, tmp_path_factory.mktemp("overtelling") / "workspace")


def regime_with(lab: Lab, name: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setitem(RULES, name, Rule(name, BROKEN[name][0], reads_secret=True))
    return run_regime(lab, releases.REGIME, "quick", scale=releases.ReleasesScale(120, 2, 40, 240))


def test_the_regime_warns_of_an_added_release_and_of_no_other(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    result = regime_with(lab, "warner", monkeypatch)
    accused = {row["release"] for row in result.rows if row["tells_more_than"]}
    assert accused == {"warner"}
    (said,) = [sentence for sentence in releases.describe(result) if "The release warner keeps" in sentence]
    assert "budgets: The release warner tells more than it was charged for" in said
    assert "at 2^-32" in said
    earlier = [{key: value for key, value in row.items() if key != "tells_more_than"} for row in result.rows]
    assert "WARNING" not in " ".join(releases.describe(replace(result, rows=earlier)))
