"""Adaptive temperature: what a rule chooses, that it leaks nothing of its own, and the comparison at equal distance."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import mode

from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import leak_samples_by_entropy
from paclm.privacy.releases import rule_named
from paclm.study.attacks.belief import chance_to_name
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.leak_tests import Gap, LeakEvidence, broken_bounds, chances_by_agreement
from paclm.study.recorded_votes import RecordedVotes, TextVotes
from paclm.study.regimes import accuracy, temperature
from paclm.study.regimes.temperature import (
    ADAPTIVE,
    REGIME,
    TemperatureRule,
    TemperatureScale,
    at_distance,
    choose_temperatures,
    pick_votes,
    plurality_share,
)
from paclm.study.run import run_regime

SCALE = TemperatureScale(60, 2, (1.0, 0.5, 0.0))


def test_the_largest_temperature_with_little_enough_dissent_is_taken():
    hot = np.array([[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 2], [1, 2, 3, 4]])
    warm = np.array([[1, 1, 1, 2], [1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 2]])
    cold = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 2]])
    chosen = {
        (most, falls): choose_temperatures([hot, warm, cold], TemperatureRule("", most, falls)).tolist()
        for most, falls in ((0.0, False), (0.0, True), (0.25, True), (0.5, True))
    }
    assert chosen[0.0, False] == [0, 1, 2, 0]
    assert chosen[0.0, True] == [0, 1, 2, 2]
    assert chosen[0.25, True] == [0, 0, 1, 2]
    assert chosen[0.5, True] == [0, 0, 0, 1]


def test_the_share_of_the_plurality_is_that_of_a_count():
    votes = np.random.default_rng(0).geometric(0.4, size=(200, 14))
    expected = [max(Counter(row.tolist()).values()) / 14 for row in votes]
    assert plurality_share(votes).tolist() == expected


@pytest.mark.parametrize("rule", ADAPTIVE, ids=lambda rule: rule.name)
def test_the_choice_does_not_depend_on_which_world_is_which(rule):
    rng = np.random.default_rng(1)
    ladder = [rng.geometric(p, size=(300, 16)) for p in (0.7, 0.9, 0.99)]
    order = rng.permutation(16)
    chosen = choose_temperatures(ladder, rule)
    assert (chosen == choose_temperatures([votes[:, order] for votes in ladder], rule)).all()
    assert len(set(chosen.tolist())) > 1


def play(release, chosen_for, ladder, sessions, seed):
    """Sessions of all positions, whose temperatures `chosen_for(secret)` may depend on the secret; what was broken."""
    n, m = ladder.shape[1:]
    played = ResearchSessions.seeded(m, rule_named(release), 2.0**-6, seed, sessions)
    votes = np.stack([ladder[chosen_for(secret), np.arange(n)] for secret in played.secrets.tolist()])  # (s, n, m)
    steps = [played.release(votes[:, t]) for t in range(n)]
    leading = mode(votes, axis=2).mode  # (s, n) the attacker knows all worlds and sees the temperatures
    declared = np.sum([step.information for step in steps], axis=0)
    cost = 2.0**-6 if release == "gaussian" else 0.0
    evidence = LeakEvidence(
        leaked=leak_samples_by_entropy(played.beliefs),
        gap=Gap.between(played.beliefs, played.secrets),
        declared=declared,
        budget=cost * np.sum([step.is_dissent for step in steps], axis=0),
        named=chance_to_name(played.beliefs, played.secrets),
        agreeing=chances_by_agreement(votes.reshape(-1, m), leading.ravel(), played.secrets),
        known=np.exp(played.beliefs.max(axis=1)),
        world_id_bound=success_bound(n * cost, 1 / m),
    )
    return broken_bounds(evidence)


@pytest.mark.parametrize("release", ["gaussian", "plurality"])
def test_a_rule_leaks_nothing_of_its_own_and_one_that_reads_the_realized_world_is_found(release):
    """False alarm below 1e-4 for each sound rule, whatever the seed."""
    rng = np.random.default_rng(2)
    hot = 1 + (rng.random((64, 16)) < 0.3)  # two camps
    ladder = np.stack([hot, np.where(rng.random((64, 1)) < 0.5, 1, hot), np.ones_like(hot)])
    for rule in ADAPTIVE:
        chosen = choose_temperatures(list(ladder), rule)
        assert play(release, lambda _, chosen=chosen: chosen, ladder, 256, 3) == []

    def of_the_realized(secret):
        """Lower where the realized world is in the minority."""
        in_minority = (hot == hot[:, secret][:, None]).mean(axis=1) < 0.5
        return np.where(in_minority, 2, 0)

    assert "belief" in play(release, of_the_realized, ladder, 256, 3)


@pytest.fixture(scope="module")
def result_and_rows(study_template, tmp_path_factory):
    from study.small_lab import open_lab

    lab = open_lab(study_template, tmp_path_factory.mktemp("temperature") / "workspace")
    return lab, run_regime(lab, REGIME, "quick", scale=SCALE)


def test_the_ladder_has_the_coins_of_accuracy_and_ends_in_greedy_votes(result_and_rows):
    lab, result = result_and_rows
    known = run_regime(lab, accuracy.REGIME, "quick", scale=accuracy.AccuracyScale(60, 2))
    first, last = (result.one(kind="fixed", temperature=tau) for tau in (1.0, 0.0))
    for row, decoder in ((first, "gumbel"), (last, "greedy")):
        same = known.one(decoder=decoder, budget="2^-32")
        assert row["accuracy_at_32"] == pytest.approx(same["accuracy_private"])
        assert row["retained_gain_at_32"] == pytest.approx(same["retained_gain"])
    assert first["distance"] == 0.0
    decodings = [GUMBEL.times(2), temperature.decoding_at(0.5).times(2), temperature.decoding_at(0.999999).times(2)]
    one, other, close = lab.text_votes(60, decodings).values()
    assert (
        0.0
        < (one.votes != other.votes).mean()
        < (one.votes != lab.text_votes(60, (GREEDY.times(2),))["greedy"].votes).mean()
    )
    assert (one.votes == close.votes).mean() > 0.99  # the same coins: others would agree much less often


def test_rules_dissent_no_more_than_the_first_temperature_and_say_where_they_lower_it(result_and_rows):
    _, result = result_and_rows
    first = result.one(kind="fixed", temperature=1.0)
    agree = result.one(rule="agree, else first")
    assert agree["dissent"] <= min(row["dissent"] for row in result.select(kind="fixed"))
    assert agree["lowered"] == pytest.approx(first["dissent"] - agree["dissent"])
    assert len(REGIME.in_short(result)) == len(ADAPTIVE)


def test_fixed_temperatures_at_an_equal_distance_are_mixed_in_proportion():
    def measured(distance, dissent, hits):
        columns = [np.full(8, value) for value in (dissent, distance, 0.2, 0.6)]
        return temperature.Measured(*columns, dict.fromkeys(temperature.ENDS, np.full(8, hits)))

    fixed = [measured(0.0, 0.4, 0.5), measured(0.2, 0.3, 0.6), measured(0.1, 0.3, 0.6), measured(0.4, 0.2, 0.4)]
    mixed = at_distance(fixed[:2], 0.05)
    found = [mixed.dissent.mean(), mixed.distance.mean(), mixed.public.mean(), mixed.hits["at_32"].mean()]
    assert found == pytest.approx([0.375, 0.05, 0.2, 0.525])
    assert at_distance(fixed, 0.3).distance.mean() == pytest.approx(0.3)
    assert at_distance(fixed, 0.5) is None
    share, influence = temperature._share(mixed, "at_32")
    assert (share, influence.mean()) == pytest.approx((0.8125, 0.0))


def test_a_rule_that_tosses_a_public_coin_is_no_better_than_fixed_temperatures(small_lab, vote_files):
    """Greedy and Gumbel votes mixed at random: differences are within four errors, false alarm 1e-4 each.

    A rule that takes greedy where its worlds agree, and so is no toss, differs by more.
    """
    ladder = []
    for name in ("gumbel", "greedy"):
        votes = RecordedVotes.load(vote_files[name])
        position = np.arange(votes.num_positions)
        ladder.append(TextVotes(**votes.columns(), passage=position // 256, position=position))
    fixed = [temperature._measure(votes, ladder[0]) for votes in ladder]

    def compare(chosen):
        votes = pick_votes(ladder, chosen)
        return temperature._against_fixed(small_lab, votes, temperature._measure(votes, ladder[0]), fixed)

    toss = compare((np.random.default_rng(4).random(len(position)) < 0.5).astype(int))
    chosen = compare(choose_temperatures([votes.votes for votes in ladder], ADAPTIVE[0]))
    for name in ("dissent_change", "lead_change_at_32", "kept_change_at_32"):
        assert abs(toss[name]) < 4 * toss[f"{name}_stderr"]
    assert chosen["dissent_change"] < -20 * chosen["dissent_change_stderr"]
    assert not math.isnan(chosen["kept_change_at_32_stderr"])


def test_without_a_gain_no_share_is_given(small_lab, vote_files):
    votes = RecordedVotes.load(vote_files["gumbel"])
    few = {name: column[:400] for name, column in votes.columns().items()}
    recorded = TextVotes(**few, passage=np.arange(400) // 20, position=np.arange(400))
    same = replace(recorded, full=recorded.public)
    row = temperature._row(small_lab, same, temperature._measure(same, same))
    assert row["retained_gain_at_32"] is None
    assert temperature._share(temperature._measure(same, same), "at_32") is None
