"""The regimes on teacher-forced votes, at a small scale: what must hold whatever the numbers are."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from paclm.errors import UnsoundState
from paclm.privacy.belief import Release
from paclm.privacy.leak import leak_by_entropy
from paclm.privacy.releases import RULES, Rule
from paclm.study import figures
from paclm.study.decoding import GREEDY
from paclm.study.figure import save_figure
from paclm.study.recorded_votes import TextVotes
from paclm.study.regimes import census, cost, flatness, forgetting, releases
from paclm.study.results import Result, plain
from paclm.study.run import run_regime
from paclm.study.streams import play_sessions
from study.small_lab import open_lab

SCALES = {
    census: census.CensusScale(60, (50, 200, 1000)),
    flatness: flatness.FlatnessScale(60, 2),
    releases: releases.ReleasesScale(60, 2, 6, 40),
    forgetting: forgetting.ForgettingScale(60, 2, 6, (10, 40), (2.0**-2, 2.0**-8)),
    cost: cost.CostScale(60, 2, 2, (1, 2), contexts=(9,), commits=3),
}


@pytest.fixture(scope="module")
def lab(study_template, tmp_path_factory):
    return open_lab(study_template, tmp_path_factory.mktemp("stability") / "workspace")


@pytest.fixture(scope="module")
def results(lab):
    return {module: run_regime(lab, module.REGIME, "quick", scale=scale) for module, scale in SCALES.items()}


@pytest.mark.parametrize("module", [census, flatness, releases, forgetting], ids=lambda module: module.REGIME.name)
def test_the_same_seed_gives_the_same_rows(module, lab, results):
    again = plain(run_regime(lab, module.REGIME, "quick", scale=SCALES[module]).rows)
    assert Result.load(lab.folder / "results" / f"{module.REGIME.name}.json").rows == again
    assert plain(results[module].rows) == again


def test_the_census_agrees_with_the_votes_and_leaves_out_what_the_vocabulary_cannot_hold(lab, results):
    result = results[census]
    assert [row["support_size"] for row in result.rows] == [50, 200]
    assert any("k = 1,000 is left out" in note for note in result.notes)
    votes = lab.text_votes(60, (GREEDY,), with_full=False)["greedy"]
    row = result.one(support_size=200)
    assert row["unanimity"] == pytest.approx(1.0 - votes.is_dissent.mean())
    assert row["median_distinct"] == np.median([len(set(v)) for v in votes.votes.tolist()])
    assert result.one(support_size=50)["mass_coverage"] < row["mass_coverage"] < 1.0
    assert 0.0 <= row["hybrid_scatter"] <= 0.1 * row["hybrid_share"] <= 0.1
    assert 0.0 < row["ceiling"] <= result.one(support_size=50)["ceiling"] <= 1.0


def scripted_votes(num_worlds=32, positions=3000):
    """A third of the positions unanimous, a third an even split with the truth in it, a third one without."""
    rng = np.random.default_rng(0)
    split = rng.permuted(np.tile(np.arange(num_worlds) % 2, (positions, 1)), axis=1)
    kind = np.arange(positions) % 3
    votes = np.where(kind[:, None] == 0, 5, 5 + split)
    truth = np.where(kind == 1, 5, 9)
    position = np.arange(positions)
    return TextVotes(votes, truth=truth, public=truth, full=truth, passage=position // 10, position=position)


def test_flatness_finds_what_was_put_into_scripted_votes(lab):
    rows = flatness.decoder_rows(lab, scripted_votes(), lambda _: None)
    tight = next(row for row in rows if row["budget"] == "2^-32")
    assert tight["flip_unanimous"] == 0.0
    assert tight["dissent_fraction"] == pytest.approx(2 / 3)
    assert tight["mean_distinct_given_dissent"] == 2.0
    assert tight["truth_not_voted_given_dissent"] == 0.5
    budget = 2.0**-32
    assert tight["flip_dissent"] == pytest.approx(norm.sf(math.sqrt(2 * budget)), abs=1e-9)  # an even split
    assert tight["accuracy_dissent"] == pytest.approx(0.25, abs=1e-12)
    loose = next(row for row in rows if row["budget"] == "2^-4")  # the twin: little noise is far from the limit
    assert loose["flip_dissent"] == pytest.approx(norm.sf(math.sqrt(2**-3)), abs=1e-9)
    assert loose["flip_limit"] - loose["flip_dissent"] > 0.1


def test_the_arithmetic_of_flatness_closes_exactly_and_noise_grows_as_one_over_the_root_of_the_budget(results):
    for row in results[flatness].rows:
        assert row["change_by_arithmetic"] == pytest.approx(row["change"], abs=1e-12)
        assert row["flip"] == pytest.approx(row["flip_dissent"] * row["dissent_fraction"], abs=1e-12)
        if row["budget"] == "inf":
            assert row["flip"] == row["change"] == row["sigma_max"] == 0.0
        else:
            assert row["flip_dissent"] > 0.0
    for decoder in ("greedy", "gumbel"):
        rows = results[flatness].select(decoder=decoder)
        assert len({round(row["accuracy"] - row["change"], 12) for row in rows}) == 1  # the noiseless release is shared
        loose, tight = (results[flatness].one(decoder=decoder, budget=budget) for budget in ("2^-4", "2^-32"))
        for name in ("sigma_median", "sigma_max"):
            assert tight[name] / loose[name] == pytest.approx(2.0**14)


def test_a_release_that_was_added_is_drawn_and_described(lab, results, tmp_path, monkeypatch):
    def first(votes, belief, *_):
        return Release(int(votes[0]), belief, True)

    monkeypatch.setitem(RULES, "first", Rule("first", first, reads_secret=False))
    monkeypatch.setitem(RULES, "other", RULES["gaussian"]._replace(name="other"))
    result = run_regime(lab, releases.REGIME, "quick", scale=SCALES[releases])
    drawn = replace(result, rows=[{**row, "retained_gain": 0.5} for row in result.rows])  # these worlds gain nothing
    for name in ("first", "other"):
        assert any(f"retained gain, {name}" in line for line in releases.REGIME.summary(drawn))
    svg = save_figure(figures.releases, {"releases": drawn}, tmp_path)[0].read_text()
    assert "first (leaks nothing)" in svg
    assert ">other<" in svg
    looks = figures.looks_of(["gaussian", *(f"added {i}" for i in range(30))])
    assert len({looks[f"added {i}"] for i in range(18)} | {looks["gaussian"]}) == 19, "told apart"


def test_a_rule_that_lies_about_reading_the_secret_is_refused_by_the_regime(lab, monkeypatch):
    def cheat(votes, belief, secret, *_):
        return Release(int(votes[secret]), belief, True)

    monkeypatch.setitem(RULES, "cheat", Rule("cheat", cheat, reads_secret=False))
    with pytest.raises(UnsoundState, match="cheat"):
        releases.run(lab, SCALES[releases])


def test_charging_dissent_only_makes_a_budget_last_longer_and_secret_free_releases_cost_nothing(results):
    for name in ("plurality", "mixture"):
        row = results[releases].one(release=name)
        assert row["leaked_nats"] == row["can_tell_nats"] == row["charged_every_token"] == row["charged_dissent"] == 0.0
        assert row["tokens_until_every_token"] is None
    row = results[releases].one(release="gaussian", budget="2^-32")
    assert row["tokens_until_dissent"] == pytest.approx(row["tokens_until_every_token"] / row["dissent"], rel=1e-3)
    assert row["charged_every_token"] == pytest.approx(40 * 2.0**-32)
    assert row["can_tell_nats"] == pytest.approx(row["charged_dissent"])
    assert results[releases].one(release="gaussian", budget="2^-4")["tokens_until_every_token"] == 0


def test_one_model_in_place_of_all_worlds_costs_zero_nats_under_every_release(lab, results):
    votes = lab.gumbel_votes(60, 2)
    for name, column in releases.MODELS.items():
        row = results[releases].one(release=name)
        assert row["leaked_nats"] == row["leaked_nats_by_truth"] == row["can_tell_nats"] == row["dissent"] == 0.0
        assert row["charged_every_token"] == row["charged_dissent"] == row["world_rate"] - row["world_bound"] == 0.0
        assert row["accuracy"] == (votes.column(column) == votes.truth).mean() == row[f"accuracy_{column}"]
        copies = replace(votes, votes=np.repeat(votes.column(column)[:, None], votes.num_worlds, axis=1))
        assert {leak_at(lab, copies, rule) for rule in RULES.values()} == {0.0}
        other = copies.votes.copy()
        other[:, 0] += 1  # a single world that differs
        assert leak_at(lab, replace(copies, votes=other), RULES["gaussian"]) > 0.0
    assert "every record is a member" in " ".join(results[releases].notes)


def leak_at(lab, votes, rule):
    """Nats that sessions at 2^-4 tell about the world, by the entropy of the beliefs."""
    return leak_by_entropy(np.concatenate([s.beliefs for s in play_sessions(votes, rule, 2.0**-4, 4, 20, 0)])).mean


def test_the_tracking_curator_tells_what_it_charges_and_the_forgetting_one_something_else(results):
    for row in results[forgetting].select(curator="tracking"):
        assert row["can_tell_over_charged_most"] == pytest.approx(1.0)
    loose = results[forgetting].one(curator="forgetting", budget="2^-2", tokens=40)
    assert not math.isclose(loose["can_tell_nats"], loose["charged_dissent_nats"], rel_tol=0.05)


def test_costs_are_positive_and_add_up_and_operation_counts_are_the_papers(results):
    row = cost.operations("the paper's sizes", 128, 50_257, 200, 2)
    assert (f"{row['dense']:.2e}", f"{row['collapsed']:.2e}") == ("3.35e+09", "2.59e+04")
    for row in (row for row in results[cost].rows if row["what"] == "serving"):
        step_ms = row["forward_ms"] + row["sequences"] * row["mechanism_ms"] + row["ledger_ms"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["sequences"] / step_ms)
        assert row["memory_bytes"] > 0
