"""From the engine's hidden states to distributions, digests and the search."""

import itertools

import numpy as np
import pytest
import torch

from paclm.errors import InvalidInput
from paclm.study.baselines.distributions import text_distributions
from paclm.study.baselines.play import PMixedPlayer, expected_truth, play
from paclm.study.baselines.pmixed import PMixedSettings, release_distribution
from paclm.study.baselines.search import DpTarget, choose, digest_blocks, make_digest

ORDERS = (2, 8)


@pytest.fixture
def engine(lab):
    return lab.engine("shards-4", context=64)


@pytest.fixture
def digest(lab, engine):
    return make_digest(text_distributions(engine, lab.passages(60), support_size=40), ORDERS)


def test_distributions_are_normalised_in_order_and_agree_with_the_votes(lab, engine):
    passages = lab.passages(40)
    parts = list(text_distributions(engine, passages, support_size=engine.support_size))
    truth = torch.cat([part.truth for part in parts]).tolist()
    scored = [token for p in passages for token, counts in zip(p.tokens[1:], p.is_scored[1:], strict=True) if counts]
    assert truth == scored
    for part in parts:
        assert part.log_shards.dtype == torch.float64
        assert torch.allclose(part.log_shards.exp().sum(-1), torch.ones((), dtype=torch.float64))
    (ballot, *_) = engine.teacher_forced(passages[0].tokens, len(passages[0].tokens))
    inside = parts[0].log_shards.gather(-1, parts[0].support.unsqueeze(1).expand(-1, 4, -1)).argmax(-1)
    favourite = parts[0].support.gather(-1, inside).numpy()
    assert np.array_equal(favourite, ballot.votes[: len(favourite)])


def test_small_parts_and_large_ones_give_the_same_digest(lab, engine, digest, monkeypatch):
    monkeypatch.setitem(__import__("paclm.study.baselines.distributions", fromlist=["x"])._NUMBERS_AT_ONCE, "cpu", 1)
    again = make_digest(text_distributions(engine, lab.passages(60), support_size=40), ORDERS)
    assert np.allclose(again.truth_shards, digest.truth_shards, rtol=1e-4)
    assert np.allclose(again.tables[8].values, digest.tables[8].values, rtol=1e-2, atol=1e-9)


def test_a_played_position_is_the_release_distribution_at_the_true_token(lab, engine, digest):
    settings = PMixedSettings(num_shards=4, order=8, queries=50, epsilon=6.0)
    played = play(digest, settings, np.random.default_rng(0))
    exact = []
    for part in text_distributions(engine, lab.passages(60), support_size=40):
        for i in range(part.num_positions):
            shards, public = part.log_shards[i].numpy(), part.log_public[i].numpy()
            released, _ = release_distribution(shards, public, np.ones(4, dtype=bool), settings)
            exact.append(np.exp(released[int(part.truth[i])]))
    assert played.truth == pytest.approx(np.array(exact), rel=0.02)
    assert played.empty == 0.0
    assert 0.0 < played.mean_weight <= 1.0


def test_the_expected_gain_of_the_search_is_the_mean_of_what_is_played(digest):
    targets = [DpTarget(100, 2.0, 1e-5, reading) for reading in ("rigorous", "generous", "strict")]
    for choice in choose(digest, targets, ORDERS, (0.5,)):
        draws = [play(digest, choice.settings, np.random.default_rng(seed)).truth.mean() for seed in range(200)]
        gain, error = np.mean(draws) - float(digest.truth_public.mean()), np.std(draws) / np.sqrt(200)
        assert abs(gain - choice.gain) < 4 * error + 0.01 * abs(choice.gain) + 1e-12  # seeded; false alarm < 1e-4


@pytest.mark.parametrize(
    ("reading", "rate"), [("rigorous", 1.0), ("rigorous", 0.3), ("generous", 0.02), ("strict", 1.0), ("strict", 0.3)]
)
def test_the_expected_truth_is_the_mean_over_every_sample_of_shard_models(digest, reading, rate):
    settings = DpTarget(50, 6.0, 1e-5, reading).settings(4, 8, rate)
    public, excess = digest.truth_public.numpy(), digest.excess.numpy()
    by_hand = np.zeros(digest.num_positions)
    for sample in itertools.product([False, True], repeat=4):
        size = sum(sample)
        radius = float(settings.radii[size])
        is_strict = settings.ball == "strict"
        weights = digest.strict_weights(radius) if is_strict else digest.table(8).weight(radius)  # (n, N)
        gain = (weights.numpy() * excess)[:, list(sample)].sum(axis=1) / max(1, size)
        by_hand += rate**size * (1 - rate) ** (4 - size) * (public + gain)
    assert expected_truth(digest, settings) == pytest.approx(by_hand, rel=1e-9)
    assert (expected_truth(digest, settings) != public).any()


def test_blocks_of_any_size_give_the_figures_of_the_whole_text(lab, engine, digest):
    """What is played draws the same samples; another seed, the twin, draws others."""
    settings = [DpTarget(50, 6.0, 1e-5, reading).settings(4, 8, 0.3) for reading in ("rigorous", "strict")]

    def figures(block, seed=0):
        player = PMixedPlayer([(one, [np.random.default_rng(seed)]) for one in settings])
        for some in digest_blocks(text_distributions(engine, lab.passages(60), support_size=40), [8], block):
            player.see(some)
        return player.text(), player.figures()

    text, found = figures(10**6)
    assert [one.expected for one in found] == [pytest.approx(expected_truth(digest, one)) for one in settings]
    for block in (1, 7):
        other_text, other = figures(block)
        assert [list(column) for column in text] == [pytest.approx(list(column)) for column in other_text]
        for one, same in zip(found, other, strict=True):
            assert np.array_equal(one.passes[0].members, same.passes[0].members)
            for column, again in zip(one.passes[0], same.passes[0], strict=True):
                assert column == pytest.approx(again, rel=1e-12)
    assert not np.array_equal(found[0].passes[0].members, figures(7, seed=1)[1][0].passes[0].members)


def test_the_search_takes_the_best_of_what_it_may_take(digest):
    target = DpTarget(1000, 2.0, 1e-5, "generous")
    (best,) = choose(digest, [target], ORDERS, (1.0, 0.5, 0.1))
    alone = [choose(digest, [target], (order,), (rate,))[0].gain for order in ORDERS for rate in (1.0, 0.5, 0.1)]
    assert best.gain == max(alone)


def test_samples_come_up_empty_as_often_as_they_should(digest):
    settings = PMixedSettings(num_shards=4, order=8, rate=0.3, queries=100, epsilon=4.0)
    empty = [play(digest, settings, np.random.default_rng(seed)).empty for seed in range(100)]
    expected = 0.7**4
    error = np.sqrt(expected * (1 - expected) / (100 * digest.num_positions))
    assert abs(np.mean(empty) - expected) < 4 * error  # seeded; for a fresh seed, false alarm < 1e-4


def test_a_release_cut_to_the_support_gives_nothing_outside_and_more_inside(digest):
    assert (digest.public_inside()[~digest.is_inside] == 0.0).all()
    assert (digest.public_inside()[digest.is_inside] >= digest.truth_public[digest.is_inside]).all()
    with pytest.raises(InvalidInput, match="order 3"):
        expected_truth(digest, PMixedSettings(num_shards=4, order=3, queries=10, epsilon=8.0))
