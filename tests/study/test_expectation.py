"""Releases in expectation: the reference values of real votes, and the mean of many draws of the release itself."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from paclm.errors import InvalidInput
from paclm.privacy import gaussian
from paclm.privacy.belief import uniform_belief
from paclm.privacy.calibration import calibrate_noise
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import RULES, Rule
from paclm.study import expectation
from paclm.study.depth_points import values_at
from paclm.study.expectation import ExpectedReleases
from paclm.study.lab import Lab
from paclm.study.recorded_votes import RecordedVotes, TextVotes
from paclm.study.regimes import accuracy, coupling, flatness, pmixed, releases
from paclm.study.streams import play_fresh

FOLDER = Path(__file__).parent.parent / "fixtures" / "votes"
KNOWN = {  # dissent, public, full; retained: noiseless, plurality, gaussian b → 0; flips there and at 2^-4
    "greedy": (0.2384, 0.4418, 0.4772, 0.900, 0.914, 0.750, 0.538, 0.277),
    "gumbel": (0.2440, 0.3265, 0.3620, 0.873, 0.890, 0.798, 0.536, 0.277),
}
CASES = [(name, b) for name in ("gaussian", "channel") for b in (2.0**-1, 2.0**-4, 2.0**-16)]
CASES += [("plurality", 1.0), ("mixture", 1.0), ("gaussian", math.inf), ("channel", math.inf)]


def wikipedia(decoder):
    return RecordedVotes.load(FOLDER / f"wikipedia-{decoder}.npz")


def retained(votes, hits):
    public, full = (votes.public == votes.truth).mean(), (votes.full == votes.truth).mean()
    return (hits.mean() - public) / (full - public)


@pytest.mark.parametrize("decoder", KNOWN)
def test_real_votes_give_the_reference_values(decoder):
    votes = wikipedia(decoder)
    expected = ExpectedReleases(votes)
    known, limit, loose = (expected.under(RULES["gaussian"], b) for b in (math.inf, 0.0, 2.0**-4))
    plurality = expected.under(RULES["plurality"], 1.0)
    apart = votes.is_dissent
    found = [
        *(apart.mean(), (votes.public == votes.truth).mean(), (votes.full == votes.truth).mean()),
        *(retained(votes, one.hits) for one in (known, plurality, limit)),
        *(one.flips[apart].mean() for one in (limit, loose)),
    ]
    assert found[:3] == pytest.approx(KNOWN[decoder][:3], abs=0.00005)
    assert found[3:] == pytest.approx(KNOWN[decoder][3:], abs=0.0005)
    assert limit.hits_error < 2e-6  # of an accuracy: 6e-5 of the gain
    tiny = expected.under(RULES["gaussian"], 2.0**-48)
    assert abs(tiny.hits.mean() - limit.hits.mean()) < 1e-6


@pytest.mark.parametrize("decoder", KNOWN)
def test_in_the_limit_the_release_is_not_uniform_over_the_votes(decoder):
    """Noise is calibrated to the masses: with three votes or more the heaviest is released more often than 1/a."""
    votes = wikipedia(decoder)
    limit = ExpectedReleases(votes).under(RULES["gaussian"], 0.0)
    distinct = np.array([len(set(row)) for row in votes.votes.tolist()])
    uniform = (votes.votes == votes.truth[:, None]).any(axis=1) / distinct
    assert retained(votes, limit.hits) - retained(votes, uniform) > 0.003
    np.testing.assert_allclose(limit.hits[distinct == 2], uniform[distinct == 2], atol=1e-12)


def test_without_noise_every_release_that_reads_the_secret_is_the_realized_world():
    votes = wikipedia("gumbel")
    expected = ExpectedReleases(votes)
    world = (votes.votes == votes.truth[:, None]).mean(axis=1)
    for name in ("gaussian", "channel"):
        found = expected.under(RULES[name], math.inf)
        np.testing.assert_array_equal(found.hits, found.noiseless)
        np.testing.assert_allclose(found.hits, world, atol=1e-12)
        assert not found.flips.any()
    np.testing.assert_array_equal(expected.under(RULES["mixture"], 1.0).hits, found.noiseless)


def some_votes():
    """Positions with two to nine distinct votes, the first 60 of real text that has so many; each with a truth."""
    votes = wikipedia("greedy")
    distinct = np.array([len(set(row)) for row in votes.votes.tolist()])
    rows = np.concatenate([np.flatnonzero(distinct == a)[:60] for a in range(2, 10)])
    own = votes.votes[rows].astype(np.int64)
    return RecordedVotes(own, truth=own[:, 0].copy())


def distance(votes, rule, per_token, expected_budget, passes=60):
    """How many standard errors drawn hits and flips are from the expected ones, the larger of both."""
    found = ExpectedReleases(votes).under(rule, expected_budget)
    streams = list(play_fresh(votes, rule, per_token, passes, votes.num_positions, 11))
    pairs = (
        ([s.released == votes.truth for s in streams], found.hits),
        ([s.released != s.realized for s in streams], found.flips),
    )
    errors = [math.sqrt(max((mean * (1 - mean)).sum() / passes, 1e-12)) for _, mean in pairs]
    gaps = [abs(np.mean(drawn, axis=0).sum() - mean.sum()) for drawn, mean in pairs]
    return max(gap / error for gap, error in zip(gaps, errors, strict=True))


@pytest.mark.parametrize(("name", "per_token"), CASES)
def test_draws_of_the_release_average_to_the_expectation(name, per_token):
    """Seeded. For a fresh seed: two normal tests beyond 4 standard errors, false alarm under 2e-4 each case."""
    assert distance(some_votes(), RULES[name], per_token, per_token) < 4.0


@pytest.mark.parametrize(("name", "per_token"), [("gaussian", 2.0**-4), ("channel", 2.0**-4)])
def test_draws_of_another_calibration_do_not(name, per_token):
    assert distance(some_votes(), RULES[name], 2 * per_token, per_token) > 6.0


def test_two_and_three_votes_agree_with_distribution_functions_of_the_normal():
    for counts in ((120, 8), (64, 64), (100, 20, 8), (60, 60, 8), (43, 43, 42), (126, 1, 1)):
        for per_token in (2.0**-24, 2.0**-4, 1.0, 16.0):
            (released,), (kept,) = expectation._gaussian(counts, per_token)
            table = orthants(np.array(counts) / 128, per_token, within=1e-9)  # (vote, token)
            mass = np.array(counts) / 128
            np.testing.assert_allclose(released, mass @ table, atol=1e-7)
            assert kept == pytest.approx(mass @ table.diagonal(), abs=1e-7)
    even = expectation._gaussian((64, 64), 2.0**-4).kept
    assert even == pytest.approx(norm.cdf(math.sqrt(2 * 2.0**-4)), abs=1e-12)


def orthants(mass, per_token, within=1e-5):
    """P(token | vote) as probabilities that all differences of the noised vote to the others are positive."""
    axes, variances = calibrate_noise(mass, per_token)
    covariance = (axes * variances) @ axes.T
    size = mass.size
    table = np.empty((size, size))
    for vote in range(size):
        for token in range(size):
            against = np.delete(np.eye(size), token, axis=0) - np.eye(size)[token]  # (a-1, a)
            spread = against @ covariance @ against.T
            table[vote, token] = multivariate_normal.cdf(-against[:, vote], cov=spread, abseps=within, releps=within)
    return table


@pytest.mark.parametrize("counts", [(90, 20, 10, 8), (32, 32, 32, 32), (100, 10, 8, 5, 5), (60, 40, 10, 10, 6, 2)])
def test_the_stated_error_of_more_votes_is_kept(counts):
    """Against an independent integration, itself good to 1e-5. Six standard errors of 16 shifts: t with 15 degrees of
    freedom, false alarm under 3e-5 a value."""
    mass = np.array(counts) / 128
    for per_token in (2.0**-16, 2.0**-4):
        released, kept = expectation._gaussian(counts, per_token)
        table = orthants(mass, per_token)
        error = released.std(axis=0, ddof=1) / math.sqrt(expectation.SHIFTS)
        assert (error < 0.005).all()
        assert (abs(released.mean(axis=0) - mass @ table) < 6 * error + 1e-4).all()
        stated = 6 * kept.std(ddof=1) / math.sqrt(expectation.SHIFTS) + 1e-4
        assert abs(kept.mean() - mass @ table.diagonal()) < stated
        np.testing.assert_allclose(released.sum(axis=1), 1.0, atol=1e-12)
        if per_token == 2.0**-4:  # another calibration is told apart
            assert abs(kept.mean() - mass @ orthants(mass, 2 * per_token).diagonal()) > stated


def test_a_release_without_a_closed_form_is_drawn_and_says_how_far_off_it_may_be():
    votes = some_votes()

    def disguised(*given):
        return gaussian.release(*given)

    rule = Rule("disguised", disguised, reads_secret=True)
    drawn, known = (ExpectedReleases(votes).under(one, 2.0**-4) for one in (rule, RULES["gaussian"]))
    assert 0.0 < drawn.hits_error < 0.02
    # 16 draws: t with 15 degrees of freedom beyond 6, false alarm under 1e-4 over both
    assert abs(drawn.hits.mean() - known.hits.mean()) < 6 * drawn.hits_error
    assert abs(drawn.flips.mean() - known.flips.mean()) < 6 * drawn.flips_error
    np.testing.assert_array_equal(drawn.noiseless, known.noiseless)


def test_votes_without_a_truth_still_flip():
    votes = some_votes()
    found = ExpectedReleases(RecordedVotes(votes.votes)).under(RULES["gaussian"], 2.0**-4)
    np.testing.assert_array_equal(found.flips, ExpectedReleases(votes).under(RULES["gaussian"], 2.0**-4).flips)
    assert np.isnan(found.hits).all()


def test_unanimous_votes_are_released_as_they_are():
    votes = RecordedVotes(np.full((3, 4), 7), truth=np.array([7, 8, 7]))
    for rule in RULES.values():
        found = ExpectedReleases(votes).under(rule, 2.0**-8)
        assert found.hits.tolist() == [1.0, 0.0, 1.0]
        assert not found.flips.any()


def test_the_scale_of_the_noise_is_that_of_the_release():
    votes = some_votes()
    scales = ExpectedReleases(votes).noise_scales(2.0**-8)
    noise, belief = ResearchNoise(0), uniform_belief(128)
    drawn = [gaussian.release(row, belief, 0, 2.0**-8, noise).noise_scale for row in votes.votes]
    np.testing.assert_allclose(scales, drawn, rtol=1e-9)


@pytest.mark.parametrize(("name", "per_token"), [("channel", 0.0), ("gaussian", -1.0), ("gaussian", math.nan)])
def test_budgets_that_mean_nothing_are_refused(name, per_token):
    with pytest.raises(InvalidInput):
        ExpectedReleases(some_votes()).under(RULES[name], per_token)


def real_text(decoder):
    """Votes of 128 worlds with a gain, in passages of 256 positions."""
    votes = RecordedVotes.load(FOLDER / f"smollm2-wiki-{decoder}.npz")
    position = np.arange(votes.num_positions)
    return TextVotes(**votes.columns(), passage=position // 256, position=position)


def test_all_regimes_give_one_number_for_one_quantity(small_lab, monkeypatch):
    votes = {decoder: real_text(decoder) for decoder in ("greedy", "gumbel")}
    monkeypatch.setattr(Lab, "text_votes", lambda *_, **__: votes)
    rows = accuracy.run(small_lab, accuracy.AccuracyScale(4096, 1)).rows
    of_releases = releases.run(small_lab, releases.ReleasesScale(4096, 1, 2, 64)).rows
    of_flatness = flatness.run(small_lab, flatness.FlatnessScale(4096, 1)).rows
    names = ("accuracy", "accuracy_stderr", "retained_gain", "retained_gain_stderr")
    own = ("accuracy_private", "stderr_private", "retained_gain", "retained_gain_stderr")

    def accuracy_at(decoder, budget):
        (row,) = (row for row in rows if (row["decoder"], row["budget"]) == (decoder, budget))
        return row

    for budget in ("2^-4", "2^-16", "2^-32"):
        (row,) = (row for row in of_releases if (row["release"], row["budget"]) == ("gaussian", budget))
        assert [row[name] for name in names] == [accuracy_at("gumbel", budget)[name] for name in own]
    for decoder, text in votes.items():
        tight, none = accuracy_at(decoder, "2^-32"), accuracy_at(decoder, "inf")
        tied, *_ = coupling._rows_of(small_lab, decoder, text, text)
        for name in ("accuracy_private", "retained_gain", "retained_gain_stderr"):
            assert tied[name] == tight[name]
        assert tied["accuracy_world"] == none["accuracy_private"] == none["accuracy_noiseless"]
        assert none["noise_points"] == none["noise_stderr"] == 0.0
        (flat,) = (row for row in of_flatness if (row["decoder"], row["budget"]) == (decoder, "2^-32"))
        assert (flat["accuracy"], flat["flip_dissent"]) == (tight["accuracy_private"], tight["flip_dissent"])
        assert tight["accuracy_private"] - tight["accuracy_noiseless"] == pytest.approx(tight["noise_points"])
    theirs = pmixed._pac_figures(small_lab, votes["gumbel"], 4096, RULES["gaussian"], 2.0**-32, 1)
    assert theirs["accuracy"] == accuracy_at("gumbel", "2^-32")["accuracy_private"]
    assert values_at(votes["gumbel"])["private"].mean() == theirs["accuracy"]
    # mixture and noiseless agree in expectation, and neither is the paper's release
    (mixture,) = (row for row in of_releases if row["release"] == "mixture")
    assert mixture["retained_gain"] == accuracy_at("gumbel", "inf")["retained_gain"]
    assert mixture["retained_gain"] != accuracy_at("gumbel", "2^-32")["retained_gain"]
