"""Coins and noise: distributions, seeds only where allowed, and refusal of one in place of the other."""

import copy
import pickle
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paclm.errors import InvalidInput, RandomnessMisuse, UnsoundState
from paclm.privacy.randomness import Coins, DpRandomness, Noise, NoiseSource, ResearchNoise, next_gumbel

ALARM = 1e-7  # false-alarm rate of each distribution test below, for a fresh seed


def test_normals_are_standard_normal_and_the_test_rejects_two_thirds_and_three_halves():
    for source in (Noise(), ResearchNoise(1)):
        sample = source.standard_normal(20_000)
        assert stats.kstest(sample, "norm").pvalue > ALARM
        assert stats.kstest(sample * 2 / 3, "norm").pvalue < ALARM
        assert stats.kstest(sample * 3 / 2, "norm").pvalue < ALARM


def test_short_and_long_draws_are_the_same_normals():
    words = ResearchNoise(5).words(4)
    np.testing.assert_array_equal(
        ResearchNoise(5).standard_normal(4), stats.norm.ppf((words >> 12) * 2.0**-52 + 2.0**-53)
    )
    np.testing.assert_array_equal(ResearchNoise(5).standard_normal(9)[:4], ResearchNoise(5).standard_normal(4))


def rejects_rate(taken, rate):
    return stats.binomtest(int(taken.sum()), len(taken), rate).pvalue < ALARM


@pytest.mark.parametrize("rate", [0.5, 0.01, 1 / 3])
def test_units_are_sampled_at_their_rate_and_the_test_rejects_other_rates(rate):
    taken = DpRandomness().sample(2_000_000, rate)  # ten per cent away: seven standard errors past the limit
    assert not rejects_rate(taken, rate)
    assert rejects_rate(taken, rate * 1.1)
    assert rejects_rate(taken, rate / 1.1)


def test_units_are_sampled_independently_so_that_the_size_of_a_batch_varies():
    """Poisson sampling: binomial sizes. False alarm: ALARM. Batches of a fixed size or half the variance are caught."""
    sizes = np.array([DpRandomness().sample(400, 0.25).sum() for _ in range(3000)])
    variance = 400 * 0.25 * 0.75

    def is_binomial(sizes):
        return ALARM / 2 < stats.chi2.cdf(((sizes - 100) ** 2).sum() / variance, len(sizes)) < 1 - ALARM / 2

    assert is_binomial(sizes)
    assert not is_binomial(np.full(3000, 100))
    assert not is_binomial(100 + (sizes - 100) * 0.5**0.5)


def test_units_at_the_ends_of_the_rate():
    draws = DpRandomness()
    assert draws.sample(1000, 1.0).all()
    assert not draws.sample(1000, 0.0).any()
    assert draws.sample(1000, 1 - 2**-53).all()  # 64-bit integers do not wrap round
    assert draws.sample(0, 0.5).shape == (0,)
    for rate in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidInput):
            draws.sample(3, rate)


def test_normals_of_dp_training_are_standard_and_the_test_rejects_two_thirds_and_three_halves():
    sample = DpRandomness().normals(20_000)
    assert stats.kstest(sample, "norm").pvalue > ALARM
    assert stats.kstest(sample * 2 / 3, "norm").pvalue < ALARM
    assert stats.kstest(sample * 3 / 2, "norm").pvalue < ALARM
    assert stats.kstest(sample[:10_000] + sample[10_000:], "norm").pvalue < ALARM  # a sum that was not halved
    assert len(np.unique(sample)) == len(sample)


def test_randomness_of_dp_training_has_no_seed_and_is_neither_coins_nor_noise():
    with pytest.raises(TypeError):
        DpRandomness(7)
    assert not isinstance(DpRandomness(), Coins | NoiseSource)
    for copied in (copy.copy, pickle.dumps):
        with pytest.raises(RandomnessMisuse):
            copied(DpRandomness())
    with pytest.raises(RandomnessMisuse):
        type("Seeded", (DpRandomness,), {})


class Fixed(NoiseSource):
    def __init__(self, *words):
        self.fixed = words

    def words(self, size):
        return np.resize(np.array(self.fixed, dtype=np.uint64), size)


def test_the_most_extreme_words_give_finite_normals():
    for size in (2, 8):
        drawn = Fixed(0, 2**64 - 1).standard_normal(size)
        assert np.isfinite(drawn).all()
        assert np.abs(drawn).max() > 8


def test_coins_are_standard_gumbel_and_the_test_rejects_a_wrong_temperature():
    sample = Coins(3).gumbel(20_000)
    assert stats.kstest(sample, "gumbel_r").pvalue > ALARM
    assert stats.kstest(sample * 1.1, "gumbel_r").pvalue < ALARM


def test_coins_are_recorded_by_seed_and_step():
    coins = Coins(42)
    draws = [coins.gumbel(200) for _ in range(3)]
    assert coins.step == 3
    np.testing.assert_array_equal(Coins(42, step=2).gumbel(200), draws[2])
    assert not set(draws[0].tolist()) & set(draws[1].tolist())
    assert not np.array_equal(Coins(43).gumbel(200), draws[0])
    assert repr(coins) == "Coins(seed=42, step=3)"


@given(st.lists(st.tuples(st.integers(0, 2**128 - 1), st.integers(0, 2**70)), max_size=5), st.integers(1, 9))
def test_many_coins_drawn_at_once_are_bit_for_bit_those_drawn_one_by_one(seeds_and_steps, size):
    coins = [Coins(seed, step) for seed, step in seeds_and_steps]
    together = next_gumbel(coins, size)
    assert together.shape == (len(coins), size)
    assert [coin.step for coin in coins] == [step for _, step in seeds_and_steps]  # looked at, not taken
    assert [row.tobytes() for row in together] == [coin.gumbel(size).tobytes() for coin in coins]


def test_unseeded_coins_differ_and_can_still_be_replayed():
    coins = Coins()
    assert coins.seed != Coins().seed
    np.testing.assert_array_equal(coins.gumbel(5), Coins(coins.seed).gumbel(5))


def test_choose_follows_the_probabilities_down_to_rare_ones():
    noise, n = ResearchNoise(8), 40_000
    shares = np.array([0.7, 0.25, 0.0499, 0.0001, 0.0])
    counts = np.bincount([noise.choose(shares) for _ in range(n)], minlength=5)
    assert counts[4] == 0
    assert stats.chisquare(counts[:4], shares[:4] * n).pvalue > ALARM
    assert stats.chisquare(counts[:4], np.array([0.68, 0.27, 0.0499, 0.0001]) * n).pvalue < ALARM


def test_choose_takes_weights_of_any_size_and_refuses_negative_and_all_zero_ones():
    noise = ResearchNoise(0)
    assert {noise.choose(np.array([0.0, 1e-20, 0.0])) for _ in range(50)} == {1}
    assert noise.choose(np.array([1.0])) == 0
    for probabilities in ([0.0, 0.0], [-0.5, 1.5]):
        with pytest.raises(UnsoundState):
            noise.choose(np.array(probabilities))


def test_choose_takes_the_extreme_words_to_the_first_and_the_last_choice():
    for probabilities in ([0.5, 0.5], [0.25, 0.5, 0.25], [1e-20, 1.0, 1e-20]):
        assert Fixed(0).choose(np.array(probabilities)) == 0
        assert Fixed(2**64 - 1).choose(np.array(probabilities)) == len(probabilities) - 1
    assert Fixed(2**63).choose(np.array([0.5, 0.5])) == 1


def test_below_is_uniform_and_refuses_an_empty_range():
    noise = ResearchNoise(2)
    counts = np.bincount([noise.below(6) for _ in range(12_000)], minlength=6)
    assert stats.chisquare(counts).pvalue > ALARM
    with pytest.raises(InvalidInput):
        noise.below(0)


def test_serving_noise_has_no_seed_and_no_subclass_and_cannot_be_copied():
    with pytest.raises(TypeError):
        Noise(1)
    with pytest.raises(RandomnessMisuse, match="NoiseSource"):
        type("Evil", (Noise,), {})
    with pytest.raises(RandomnessMisuse, match="NoiseSource"):
        NoiseSource().words(1)
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(RandomnessMisuse, match=r"paclm\.Noise"):
            duplicate(Noise())
    assert (Noise.is_private, ResearchNoise(1).is_private) == (True, False)
    for seed in (None, True, 1.5):
        with pytest.raises(InvalidInput, match=repr(seed)):
            ResearchNoise(seed)


@pytest.mark.parametrize("coin_seed", [1, 2])
@pytest.mark.parametrize("noise_seed", [1, 2])
@pytest.mark.parametrize("global_seed", [1, 2])
def test_every_combination_of_seeds_moves_only_what_it_names(coin_seed, noise_seed, global_seed):
    np.random.seed(global_seed)  # noqa: NPY002  the global state must not matter
    coins, noise = Coins(coin_seed).gumbel(4), ResearchNoise(noise_seed).standard_normal(4)
    np.testing.assert_array_equal(coins, Coins(coin_seed).gumbel(4))
    np.testing.assert_array_equal(noise, ResearchNoise(noise_seed).standard_normal(4))
    assert not np.array_equal(Noise().standard_normal(4), Noise().standard_normal(4))


def test_coins_passed_for_noise_are_refused_by_the_type_checker(tmp_path):
    source = tmp_path / "mixed_up.py"
    source.write_text(
        textwrap.dedent("""
        import numpy as np
        from paclm.privacy.releases import release_token
        from paclm.privacy.randomness import Coins, Noise

        release_token(np.array([1, 2]), np.zeros(2), 0, 0.1, Noise())
        release_token(np.array([1, 2]), np.zeros(2), 0, 0.1, Coins())
        """)
    )
    only_ours = tmp_path / "mypy.ini"  # reading numpy takes ten seconds
    only_ours.write_text("[mypy]\nfollow_imports = skip\n[mypy-paclm.*]\nfollow_imports = normal\n")
    options = ["--strict", "--config-file", str(only_ours), "--cache-dir", str(tmp_path / "cache")]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "mixed_up.py:7" in checked.stdout
    assert 'expected "NoiseSource"' in checked.stdout
    assert "mixed_up.py:6" not in checked.stdout


def test_impossible_seeds_steps_and_sizes_are_refused():
    for seed in (-1, 2**128, 1.5, True, "7"):
        with pytest.raises(InvalidInput, match=re.escape(repr(seed))):
            Coins(seed)
    with pytest.raises(InvalidInput, match="-1"):
        Coins(1, step=-1)
    with pytest.raises(InvalidInput, match="0"):
        Coins(1).gumbel(0)
