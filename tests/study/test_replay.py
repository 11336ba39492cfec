"""Replays of real votes agree with exact values computed independently, for every release and both protocols."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from paclm.errors import InvalidInput
from paclm.privacy.belief import uniform_belief
from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import leak_by_entropy, leak_by_truth
from paclm.privacy.releases import RULES
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.replay import ReplaySettings, planned_tokens, replay
from paclm.study.streams import play_fresh

KEYS = {
    *("positions", "worlds", "unanimity", "dissent", "mean_distinct_given_dissent", "tokens", "seconds"),
    *("accuracy", "accuracy_stderr", "accuracy_public", "accuracy_full", "accuracy_noiseless", "retained_gain"),
    *("flip_given_dissent", "sigma_median", "sigma_max", "charged_nats", "leaked_nats", "leaked_stderr"),
    *("leaked_over_charged", "mia_bound", "world_id_bound", "world_id_rate"),
}


@pytest.fixture(params=["greedy", "gumbel"])
def recorded(request, vote_files):
    return RecordedVotes.load(vote_files[request.param])


def expected_hits(recorded):
    """Exact mean accuracies under a uniform belief: any realized world, the plurality, the public and full models."""
    truth = recorded.truth[:, None]
    tops = np.array([np.bincount(row).argmax() for row in recorded.votes])
    hits = {
        "noiseless": float((recorded.votes == truth).mean()),
        "plurality": float((tops == recorded.truth).mean()),
        "public": float((recorded.public == recorded.truth).mean()),
        "full": float((recorded.full == recorded.truth).mean()),
    }
    gain = hits["full"] - hits["public"]
    return hits | {f"{name} share": (hits[name] - hits["public"]) / gain for name in ("noiseless", "plurality")}


def test_the_error_of_an_accuracy_is_over_sessions_since_their_tokens_share_a_text():
    votes = np.zeros((4096, 4), dtype=np.int64)
    recorded = RecordedVotes(votes, truth=(np.arange(4096) >= 2048).astype(np.int64))  # right in the first half alone
    figures = replay(recorded, ReplaySettings(release="plurality", sessions=100, tokens=64))
    assert figures["accuracy_stderr"] == pytest.approx(0.5 / math.sqrt(100), rel=0.1)


@pytest.mark.parametrize(
    ("recorded", "dissent", "figures"),
    [("greedy", 0.2384, (0.4418, 0.4772, 0.900, 0.914)), ("gumbel", 0.2440, (0.3265, 0.3620, 0.873, 0.890))],
    indirect=["recorded"],
)
def test_exact_figures_of_the_recorded_votes_are_the_published_ones(recorded, dissent, figures):
    exact = expected_hits(recorded)
    assert recorded.is_dissent.mean() == pytest.approx(dissent, abs=5e-5)
    assert (exact["public"], exact["full"]) == pytest.approx(figures[:2], abs=5e-5)
    assert (exact["noiseless share"], exact["plurality share"]) == pytest.approx(figures[2:], abs=6e-4)


@pytest.mark.parametrize(("release", "exact_name"), [("plurality", "plurality"), ("mixture", "noiseless")])
def test_secret_free_releases_reach_their_exact_accuracy_and_charge_nothing(recorded, release, exact_name):
    figures = replay(recorded, ReplaySettings(release=release, per_token=2.0**-16, protocol="fresh", sessions=3))
    exact = expected_hits(recorded)[exact_name]
    # Mixture: four standard errors over dissenting tokens only, where the draw matters; false alarm under 1e-4.
    slack = 0 if release == "plurality" else 4 * math.sqrt(0.25 * figures["dissent"] / figures["tokens"])
    assert abs(figures["accuracy"] - exact) <= slack + 1e-12
    assert figures["charged_nats"] == 0.0
    assert figures["leaked_over_charged"] is None
    assert figures["sigma_max"] is None
    assert figures["accuracy_stderr"] > 0
    assert figures["leaked_nats"] == pytest.approx(0.0, abs=1e-14)
    assert (figures["mia_bound"], figures["world_id_bound"]) == (0.5, 1 / 128)


def test_gaussian_flips_match_the_closed_form_on_two_sided_votes(recorded):
    """At two distinct votes P(flip) = Φ(−1/(√2·σ)): exact, position by position."""
    two = np.array([len(set(row.tolist())) == 2 for row in recorded.votes])
    subset = RecordedVotes(recorded.votes[two])
    share = np.array([(row == row[0]).mean() for row in subset.votes])
    for exponent in (-4, -16):
        sigma = np.sqrt(2 * share * (1 - share) / (2 * 2.0**exponent))
        exact = float(ndtr(-1 / (math.sqrt(2) * sigma)).mean())
        figures = replay(subset, ReplaySettings(per_token=2.0**exponent, protocol="fresh", sessions=2))
        error = math.sqrt(exact * (1 - exact) / figures["tokens"])
        assert abs(figures["flip_given_dissent"] - exact) < 4 * error  # false alarm under 1e-4
        wrong = float(ndtr(-1 / (math.sqrt(2) * sigma / math.sqrt(2))).mean())  # noise for twice the budget
        assert exponent == -16 or abs(figures["flip_given_dissent"] - wrong) > 4 * error
        assert figures["sigma_median"] == pytest.approx(float(np.median(sigma)), rel=1e-6)
        assert figures["sigma_max"] == pytest.approx(float(sigma.max()), rel=1e-6)


def test_noiseless_fresh_replay_is_the_realized_vote_itself(recorded):
    figures = replay(recorded, ReplaySettings(per_token=math.inf, protocol="fresh"))
    assert figures["flip_given_dissent"] == 0.0
    assert figures["accuracy"] == figures["accuracy_noiseless"]
    assert figures["mia_bound"] == 1.0
    assert figures["leaked_over_charged"] is None


def test_sessions_of_the_channel_leak_budget_times_dissent(recorded):
    """It leaks in rare events: the conditional sum is the steadier figure. The paper's: test_real_votes."""
    figures = replay(recorded, ReplaySettings(release="channel", per_token=2.0**-14, sessions=24, tokens=1024))
    assert figures["tokens"] == 24 * 1024
    assert figures["charged_nats"] == pytest.approx(1024 * 2.0**-14)
    leaked = figures["conditional_information_nats"] / figures["charged_nats"]
    assert figures["dissent"] * 0.98 <= leaked <= figures["dissent"]


def test_large_budget_finds_the_world_within_a_session_and_stops_flipping(recorded):
    figures = replay(recorded, ReplaySettings(per_token=2.0**-4, sessions=6, tokens=2048))
    assert figures["flip_given_dissent"] < 0.12
    assert figures["world_id_rate"] == 1.0


def test_charging_by_dissent_charges_the_dissenting_tokens_and_states_the_same_bound(vote_files):
    recorded = RecordedVotes.load(vote_files["greedy"])
    every = replay(recorded, ReplaySettings(per_token=2.0**-16, sessions=3, tokens=256))
    assert every["mia_bound"] == success_bound(256 * 2.0**-16, 1 / 2)
    assert every["world_id_bound"] == success_bound(256 * 2.0**-16, 1 / 128)
    figures = replay(recorded, ReplaySettings(per_token=2.0**-16, charge="dissent", sessions=3, tokens=256))
    assert figures["charged_nats"] == pytest.approx(2.0**-16 * 256 * figures["dissent"])
    assert figures["mia_bound"] == every["mia_bound"]  # the committed total covers the worst case either way


def test_all_contract_keys_are_there_and_the_same_seed_gives_the_same_figures(recorded):
    settings = ReplaySettings(per_token=2.0**-8, sessions=2, tokens=100, seed=5)
    first, second = replay(recorded, settings), replay(recorded, settings)
    assert set(first) >= KEYS
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    other = replay(recorded, ReplaySettings(per_token=2.0**-8, sessions=2, tokens=100, seed=6))
    assert other["leaked_nats"] != first["leaked_nats"]


def test_sessions_wrap_round_and_progress_counts_every_token(vote_files):
    recorded = RecordedVotes(RecordedVotes.load(vote_files["greedy"]).votes[:50])
    settings = ReplaySettings(per_token=0.1, sessions=3, tokens=120)
    seen = []
    figures = replay(recorded, settings, seen.append)
    assert sum(seen) == planned_tokens(recorded, settings) == figures["tokens"] == 360
    assert figures["accuracy"] is None
    assert figures["retained_gain"] is None


def test_the_retained_share_is_given_for_a_gain_and_not_for_a_loss():
    truth, wrong = np.ones(40, dtype=int), np.r_[np.ones(20, dtype=int), np.zeros(20, dtype=int)]
    settings = ReplaySettings(release="plurality", protocol="fresh", sessions=1)
    votes = np.tile(truth[:, None], (1, 4))
    gain = replay(RecordedVotes(votes, truth, public=wrong, full=truth), settings)
    assert gain["retained_gain"] == 1.0
    for public, full in ((truth, wrong), (wrong, wrong)):
        assert replay(RecordedVotes(votes, truth, public=public, full=full), settings)["retained_gain"] is None


def test_passes_keep_no_beliefs_so_that_more_of_them_need_little_more_memory(recorded):
    def peak(passes):
        tracemalloc.start()
        try:
            replay(recorded, ReplaySettings(release="plurality", protocol="fresh", sessions=passes, tokens=2048))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)  # warms caches up
    beliefs = 2048 * recorded.num_worlds * 8  # bytes, of one pass
    assert peak(9) - peak(1) < beliefs


def test_a_pass_keeps_beliefs_of_dissenting_positions_only(recorded):
    (stream,) = play_fresh(recorded, RULES["gaussian"], 2.0**-8, 1, 300, 0)
    np.testing.assert_array_equal(stream.moved, np.flatnonzero(recorded.is_dissent[:300]))
    assert stream.beliefs.shape == (stream.moved.size, recorded.num_worlds)
    assert (np.ptp(stream.beliefs, axis=1) > 0).all()
    assert stream.secrets.shape == (300,)


def test_figures_of_a_fresh_replay_equal_those_of_all_positions_written_out(recorded):
    """The slow twin: a belief for each position, the uniform ones included, and every estimate from all of them."""
    (stream,) = play_fresh(recorded, RULES["gaussian"], 2.0**-6, 1, 400, 3)
    beliefs = np.tile(uniform_belief(128), (400, 1))
    beliefs[stream.moved] = stream.beliefs
    figures = replay(recorded, ReplaySettings(per_token=2.0**-6, protocol="fresh", tokens=400, seed=3))
    by_entropy, by_truth = leak_by_entropy(beliefs), leak_by_truth(beliefs, stream.secrets)
    assert (figures["leaked_nats"], figures["leaked_stderr"]) == pytest.approx(by_entropy, rel=1e-12)
    assert (figures["leaked_nats_by_truth"], figures["leaked_stderr_by_truth"]) == pytest.approx(by_truth, rel=1e-12)
    tops = [np.flatnonzero(belief == belief.max()) for belief in beliefs]
    rate = np.mean([(secret in top) / top.size for top, secret in zip(tops, stream.secrets, strict=True)])
    assert figures["world_id_rate"] == pytest.approx(rate, rel=1e-12)
    assert leak_by_entropy(stream.beliefs).mean > 2 * figures["leaked_nats"]  # unanimous positions count


@given(
    votes=st.integers(1, 12).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=n, max_size=n)
    ),
    release=st.sampled_from(["gaussian", "plurality", "mixture", "channel"]),
    protocol=st.sampled_from(["session", "fresh"]),
)
def test_any_small_matrix_replays(votes, release, protocol):
    settings = ReplaySettings(release=release, per_token=0.01, protocol=protocol, sessions=2, tokens=5)
    figures = replay(RecordedVotes(np.array(votes), truth=np.full(len(votes), -1)), settings)
    assert figures["accuracy"] == 0.0  # no truth is in the support
    assert 0 <= figures["dissent"] <= 1
    assert 0.5 <= figures["mia_bound"] <= 1


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({"per_token": 0.0}, "0.0"),
        ({"per_token": 1.0, "protocol": "both"}, "both"),
        ({"per_token": 1.0, "sessions": 0}, "sessions .* 0"),
        ({"per_token": 1.0, "tokens": -3}, "tokens .* -3"),
        ({"per_token": 1.0, "seed": -1}, "-1"),
    ],
)
def test_impossible_settings_are_refused(arguments, value):
    with pytest.raises(InvalidInput, match=value):
        ReplaySettings(**arguments)


def test_the_error_of_the_information_is_that_of_a_mean_over_sessions_or_positions():
    """The gaussian release declares b for each dissenting token: their number, by position and by where one starts."""
    rng = np.random.default_rng(0)
    camps = rng.permuted(np.tile(np.arange(8) % 2, (2000, 1)), axis=1)
    recorded = RecordedVotes(camps * (rng.random(2000) < 0.5)[:, None])
    share, b = float(recorded.is_dissent.mean()), 2.0**-8
    fresh = replay(recorded, ReplaySettings(per_token=b, protocol="fresh", sessions=2))
    assert fresh["conditional_information_nats"] == pytest.approx(share * b)
    assert fresh["conditional_information_stderr"] == pytest.approx(b * math.sqrt(share * (1 - share) / 1999))
    played = replay(recorded, ReplaySettings(per_token=b, sessions=200, tokens=50))
    counts = [np.roll(recorded.is_dissent, -start)[:50].sum() for start in range(2000)]
    wanted = b * np.std(counts) / math.sqrt(200)
    assert played["conditional_information_stderr"] == pytest.approx(wanted, rel=0.25)  # seeded; 1e-4 for a fresh seed
    alone = replay(recorded, ReplaySettings(per_token=b, release="channel", sessions=1, tokens=50))
    assert math.isnan(alone["conditional_information_stderr"])
