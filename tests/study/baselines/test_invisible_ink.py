"""InvisibleInk: its accountant against exact values, its sensitivity and support by brute force."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paclm.errors import InvalidInput
from paclm.study.baselines.accountants import renyi_divergence, symmetric_divergence, zcdp_epsilon, zcdp_for
from paclm.study.baselines.distributions import Distributions
from paclm.study.baselines.invisible_ink import (
    InkSettings,
    clip_ratio_for,
    differences,
    log_release,
    moved_scores,
    release_distribution,
    sample,
    support,
)

EXAMPLE = InkSettings(num_shards=32, clip=1.0, temperature=1.0)
ORDERS = (1.01, 1.5, 2.0, 4.0, 16.0, 64.0, 512.0)


def released(public, moves, settings):
    """ln of the release distribution (V,) for public logits (V,) and differences (B, V)."""
    logits = torch.from_numpy(public)[None]
    scores = moved_scores(logits, torch.from_numpy(moves)[None], settings.clip)
    return log_release(scores, support(logits, settings), settings.temperature)[0].numpy()


def corners(num_shards, vocabulary, clip):
    """Every ensemble whose differences lie far outside of the clip, on either side."""
    for signs in itertools.product([-9.0, 9.0], repeat=num_shards * vocabulary):
        yield clip * np.array(signs).reshape(num_shards, vocabulary)


def neighbours(moves, clip, adjacency):
    """Every ensemble that differs in the last shard model: at all corners, or equal to the public model."""
    if adjacency == "public":
        yield np.concatenate([moves[:-1], np.zeros_like(moves[:1])])
        return
    for last in corners(1, moves.shape[1], clip):
        yield np.concatenate([moves[:-1], last])


def worst_divergence(settings, public, adjacency):
    """The largest max-divergence over all corner ensembles of two shards and their neighbours."""
    return max(
        float(symmetric_divergence(released(public, one, settings), released(public, other, settings), math.inf))
        for one in corners(settings.num_shards, len(public), settings.clip)
        for other in neighbours(one, settings.clip, adjacency)
    )


def test_the_example_of_the_specification():
    assert EXAMPLE.sensitivity == 2 / 32
    assert EXAMPLE.log_ratio_range == 4 / 32
    assert EXAMPLE.rho == pytest.approx(0.001953125)
    total = 1000 * EXAMPLE.rho
    usual = total + 2 * math.sqrt(total * math.log(1e5))
    assert usual == pytest.approx(11.4, abs=0.05)
    assert EXAMPLE.epsilon(1000, 1e-5) == pytest.approx(10.570820, abs=1e-6)  # the tight conversion
    theirs = InkSettings(num_shards=32, clip=1.0, adjacency="public")
    assert (theirs.sensitivity, theirs.rho) == (1 / 32, EXAMPLE.rho / 4)
    assert theirs.epsilon(1000, 1e-5) < 0.5 * EXAMPLE.epsilon(1000, 1e-5)


@pytest.mark.parametrize("rho", [1e-9, 1e-4, 0.02, 0.5, 1.953125, 30.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_the_conversion_of_zcdp_is_the_tight_one_to_many_digits(rho, delta):
    """δ = inf_α e^((α−1)(αρ−ε) + α ln(1−1/α))/(α−1) at the ε found, by high-precision minimisation."""
    epsilon = zcdp_epsilon(rho, delta)
    with mpmath.workdps(40):

        def log_delta(x):
            a = 1 + mpmath.e**x
            return (a - 1) * (a * mpmath.mpf(rho) - epsilon) + a * mpmath.log1p(-1 / a) - x

        if epsilon == 0.0:
            assert min(log_delta(x) for x in mpmath.linspace(-20, 30, 400)) <= mpmath.log(delta)
            return
        best = min(mpmath.linspace(-20, 30, 4001), key=log_delta)
        root = mpmath.findroot(lambda x: mpmath.diff(log_delta, x), best)
        assert float(log_delta(root)) == pytest.approx(math.log(delta), abs=1e-5)
    assert epsilon <= rho + 2 * math.sqrt(rho * math.log(1 / delta))


@given(epsilon=st.floats(0.05, 20.0), delta=st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_the_largest_rho_spends_at_most_epsilon_and_nearly_all_of_it(epsilon, delta):
    rho = zcdp_for(epsilon, delta)
    assert epsilon * (1 - 1e-6) <= zcdp_epsilon(rho, delta) <= epsilon
    assert zcdp_epsilon(1.001 * rho, delta) > epsilon


@pytest.mark.parametrize("adjacency", ["any", "public"])
@pytest.mark.parametrize("queries", [1, 1000, 10**6])
def test_a_budget_fixes_clip_over_temperature(adjacency, queries):
    ratio = clip_ratio_for(2.0, 1e-5, queries, 16, adjacency)
    for temperature in (0.5, 1.0, 1.3):
        settings = InkSettings(num_shards=16, clip=ratio * temperature, temperature=temperature, adjacency=adjacency)
        assert 2.0 * (1 - 1e-6) <= settings.epsilon(queries, 1e-5) <= 2.0
    assert clip_ratio_for(2.0, 1e-5, queries, 16, "public") == pytest.approx(
        2 * clip_ratio_for(2.0, 1e-5, queries, 16, "any")
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_no_neighbour_exceeds_the_range_and_half_the_sensitivity_would_be_caught(temperature):
    """All corners of two shard models over three tokens; a rare token makes the bound nearly tight."""
    public = np.array([-12.0 * temperature, 0.0, 1.0])
    settings = InkSettings(num_shards=2, clip=0.4, temperature=temperature)
    worst = worst_divergence(settings, public, "any")
    assert 0.99 * settings.log_ratio_range < worst <= settings.log_ratio_range * (1 + 1e-12)
    theirs = InkSettings(num_shards=2, clip=0.4, temperature=temperature, adjacency="public")
    assert worst > 1.9 * theirs.log_ratio_range  # Δ = C/B is not enough if a record may change its model in any way
    assert 0.99 * theirs.log_ratio_range < worst_divergence(theirs, public, "public")
    assert worst_divergence(theirs, public, "public") <= theirs.log_ratio_range * (1 + 1e-12)


@given(
    seed=st.integers(0, 10**6),
    adjacency=st.sampled_from(["any", "public"]),
    top_k=st.sampled_from([None, 3]),
    clip=st.floats(0.01, 3.0),
    temperature=st.floats(0.3, 3.0),
)
def test_the_renyi_loss_of_random_neighbours_is_within_the_zcdp(seed, adjacency, top_k, clip, temperature):
    rng = np.random.default_rng(seed)
    settings = InkSettings(num_shards=3, clip=clip, temperature=temperature, adjacency=adjacency, top_k=top_k)
    public, moves = rng.normal(0.0, 2.0, 8), rng.normal(0.0, 2.0 * clip, (3, 8))
    last = np.zeros(8) if adjacency == "public" else rng.normal(0.0, 4.0 * clip, 8)
    one, other = (released(public, some, settings) for some in (moves, np.concatenate([moves[:-1], last[None]])))
    for order in ORDERS:
        assert symmetric_divergence(one, other, order) <= order * settings.rho * (1 + 1e-9) + 1e-12
    assert symmetric_divergence(one, other, math.inf) <= settings.log_ratio_range * (1 + 1e-12)


def test_the_zcdp_of_the_wrong_neighbours_is_exceeded():
    """Two halves of the mass, moved apart by one shard model: nearly αρ, four times what Δ = C/B charges."""
    settings = InkSettings(num_shards=8, clip=0.4)
    ends = np.array([9.0, 9.0, -9.0, -9.0])
    others = np.zeros((7, 4))
    one, other = (released(np.zeros(4), np.concatenate([others, s * ends[None]]), settings) for s in (1, -1))
    theirs = InkSettings(num_shards=8, clip=0.4, adjacency="public")
    for order in (1.5, 2.0, 8.0):
        loss = float(renyi_divergence(one, other, order))
        assert 0.9 * order * settings.rho < loss <= order * settings.rho
        assert loss > 3.5 * order * theirs.rho


def test_the_wide_margin_covers_the_private_top_k_and_the_authors_margin_may_miss_it():
    """Every corner of two shard models over four tokens, for every k.

    With 2C the tokens that may be drawn include the k largest private scores, whatever the shard models say. With 2C/B
    they do not where both shard models agree: public logits 1 and 0, C = 1, both shards prefer the second.
    """
    rng = np.random.default_rng(0)
    missed = 0
    for public, k in itertools.product(rng.normal(0.0, 1.0, (6, 4)), (1, 2, 3)):
        supports = {
            margin: support(
                torch.from_numpy(public)[None], InkSettings(num_shards=2, clip=0.5, top_k=k, margin=margin)
            )[0].numpy()
            for margin in ("one shard", "all shards")
        }
        for moves in corners(2, 4, 0.5):
            scores = public + np.clip(moves, -0.5, 0.5).mean(0)
            top = np.argsort(-scores)[:k]
            assert supports["all shards"][top].all()
            missed += not supports["one shard"][top].all()
    assert missed > 0
    agreed = InkSettings(num_shards=4, clip=1.0, top_k=1)
    public = np.array([1.0, 0.0])
    scores = public + np.array([-1.0, 1.0])  # every shard model prefers the second by 2
    assert scores.argmax() == 1
    assert support(torch.from_numpy(public)[None], agreed).tolist() == [[True, False]]


def test_the_support_does_not_depend_on_the_records_and_holds_ties():
    public = torch.tensor([[0.0, 3.0, 3.0, 1.0, 2.9]], dtype=torch.float64)
    settings = InkSettings(num_shards=4, clip=0.1, top_k=1)
    assert support(public, settings).tolist() == [[False, True, True, False, False]]
    wide = InkSettings(num_shards=4, clip=0.3, top_k=1)
    assert support(public, wide).tolist() == [[False, True, True, False, True]]
    assert support(public, InkSettings(num_shards=4, clip=0.1, top_k=5)) is None


def made_part(seed, positions=3, shards=4, vocabulary=7):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(positions, shards + 1, vocabulary, dtype=torch.float64, generator=draw)
    norms = torch.logsumexp(logits, -1)
    logs = logits - norms.unsqueeze(-1)
    truth = torch.zeros(positions, dtype=torch.long)
    where = np.zeros(positions, dtype=np.int64)
    return Distributions(logs[:, :-1], logs[:, -1], truth.reshape(-1, 1), truth, norms, where), logits


def test_logits_and_log_probabilities_differ_by_a_shift_that_only_clipping_sees():
    part, logits = made_part(1)
    raw = differences(part, "logits")
    assert torch.allclose(raw, logits[:, :-1] - logits[:, -1:])
    shift = raw - differences(part, "log probabilities")
    assert torch.allclose(shift, shift[..., :1].expand_as(shift))
    for clip, is_same in ((1e6, True), (0.2, False)):
        both = [
            release_distribution(part, InkSettings(num_shards=4, clip=clip, score=score))
            for score in ("logits", "log probabilities")
        ]
        assert torch.allclose(*both) is is_same
    unclipped = torch.log_softmax(logits[:, :-1].mean(1), -1)
    assert torch.allclose(release_distribution(part, InkSettings(num_shards=4, clip=1e6)), unclipped)


def test_tokens_are_drawn_as_often_as_the_distribution_says_and_another_temperature_is_caught():
    part, _ = made_part(2, positions=1)
    settings = InkSettings(num_shards=4, clip=0.5, temperature=0.8, top_k=5)
    exact = release_distribution(part, settings)
    draws = 20000
    rng = np.random.default_rng(0)
    counts = np.bincount(sample(exact.expand(draws, -1), rng), minlength=7)
    errors = {}
    for temperature in (0.8, 1.0):
        expected = release_distribution(part, InkSettings(num_shards=4, clip=0.5, temperature=temperature, top_k=5))
        p = expected[0].exp().numpy()
        has_mass = p > 0
        assert counts[~has_mass].sum() == 0
        errors[temperature] = np.abs(counts - draws * p)[has_mass] / np.sqrt(draws * p * (1 - p))[has_mass]
    assert errors[0.8].max() < 5.0  # seeded; for a fresh seed, false alarm < 1e-5
    assert errors[1.0].max() > 5.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0.0},
        {"clip": math.inf},
        {"temperature": -1.0},
        {"num_shards": 1},
        {"top_k": 0},
        {"adjacency": "some"},
        {"score": "votes"},
        {"margin": "none"},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidInput):
        InkSettings(**{"num_shards": 8, "clip": 1.0} | wrong)
    with pytest.raises(InvalidInput):
        clip_ratio_for(1.0, 1e-5, 0, 8, "any")
    with pytest.raises(InvalidInput):
        zcdp_epsilon(-1.0, 1e-5)
    with pytest.raises(InvalidInput):
        zcdp_for(0.0, 1e-5)
