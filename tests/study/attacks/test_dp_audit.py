"""The audit of DP training passes what is sound and catches less noise, no clipping and division by batch size."""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from paclm.config import DpConfig
from paclm.engine import dp_training
from paclm.engine.dp_training import DpTraining, Units, choose_pass_sizes
from paclm.engine.training_forward import make_forward
from paclm.engine.training_order import make_blocks
from paclm.engine.weights import output_layer
from paclm.errors import InvalidInput
from paclm.study.attacks.dp_audit import check_curve, empirical_epsilon, rates

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import audit_dp

SIGMA, TRAININGS = 0.8, 300


def gaussian_curve(sigma):
    """The trade-off curve of one noisy sum of all units: the largest true-positive rate at each false-positive rate."""
    return lambda false: norm.cdf(norm.ppf(false) + 1.0 / sigma)


def draw_scores(sigma, size, seed=0):
    source = np.random.default_rng(seed)
    return source.normal(1.0 / sigma, size=size), source.normal(size=size)


def test_the_best_attack_on_a_sound_mechanism_is_below_its_curve_and_half_the_noise_is_above():
    """False alarms: 1 % by construction, if the seed were not fixed."""
    curve = gaussian_curve(1.0)
    sound, broken = check_curve(*draw_scores(1.0, 1000), curve), check_curve(*draw_scores(0.5, 1000), curve)
    assert not sound.is_alarm
    assert broken.is_alarm
    assert broken.band == pytest.approx(0.0515, abs=1e-3)


def test_the_band_covers_the_truth_as_often_as_it_says():
    """An optimal attack touches the curve. 400 audits, at most 4 false alarms on average; above 14: one in 50,000."""
    curve = gaussian_curve(1.0)
    alarms = sum(check_curve(*draw_scores(1.0, 100, seed), curve).is_alarm for seed in range(400))
    assert alarms <= 14


def test_empirical_epsilon_is_below_the_true_one_and_rises_with_less_noise():
    """ε of σ = 1 by the formula of the Gaussian mechanism; false alarms: 1 %, if the seed were not fixed."""
    delta = 0.01
    epsilon = brentq(lambda e: norm.cdf(0.5 - e) - np.exp(e) * norm.cdf(-0.5 - e) - delta, 0.1, 10.0)
    assert 0.5 < empirical_epsilon(*draw_scores(1.0, 4000), delta) < epsilon
    assert empirical_epsilon(*draw_scores(0.5, 4000), delta) > epsilon
    assert empirical_epsilon(*draw_scores(1e6, 4000), delta) < 0.1


def test_scores_that_cannot_be_ranked_are_refused():
    with pytest.raises(InvalidInput, match="at least 20"):
        rates(np.zeros(19), np.zeros(40))
    with pytest.raises(InvalidInput, match="finite"):
        rates(np.full(40, np.nan), np.zeros(40))


class SeededDraws:
    def __init__(self, seed):
        self._source = np.random.default_rng(seed)

    def sample(self, num_units, rate):
        return self._source.random(num_units) < rate

    def normals(self, size):
        return self._source.standard_normal(size)


@cache
def experiment():
    return audit_dp.Experiment(sampling_rate=1.0, steps=1)


@cache
def canary_direction():
    return audit_dp.Observer(experiment())._direction.double()


def audit(noise=1.0):
    """Whether one step of the real training raises an alarm, by what it leaves in Adam's first moment."""
    chosen = experiment()
    dp = DpConfig(sampling_rate=1.0, steps=1, clip_norm=chosen.clip_norm, factors="both")
    forward, head = make_forward(chosen.model), output_layer(chosen.model)
    scores = []
    for has_canary in (True, False):
        records = chosen.records if has_canary else chosen.records[:-1]
        units = Units.of(make_blocks(records, 12, 12), np.arange(len(records)), 16)
        sizes = choose_pass_sizes(forward, head, chosen.start, units, len(chosen.records))
        draws, own = SeededDraws(10 + has_canary), []
        for _ in range(TRAININGS):
            given = (audit_dp.SETTINGS, dp, len(chosen.records), noise * SIGMA)
            training = DpTraining(forward, head, chosen.start, units, sizes, *given)
            training.step(draws)
            moment = training.optimizer.first[0].double()
            own.append((float(moment @ canary_direction()), -float(moment.norm())))
        scores.append(np.array(own))
    forward.close()
    found = [check_curve(scores[0][:, i], scores[1][:, i], gaussian_curve(SIGMA)) for i in range(2)]
    return any(one.is_alarm for one in found)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_sound_training_passes_its_audit(one_thread):
    """Two statistics: 2 % false alarms at most, if the seed were not fixed."""
    assert not audit()


def test_half_the_noise_is_caught(one_thread):
    assert audit(noise=0.5)


def test_gradients_that_are_not_clipped_are_caught(one_thread, monkeypatch):
    monkeypatch.setattr(dp_training, "clip", lambda gradient, clip_norm: gradient)
    assert audit()


def test_division_by_the_size_of_the_sampled_batch_is_caught(one_thread, monkeypatch):
    whole = DpTraining.clipped_sum

    def by_batch(self, sampled):
        self.expected_units = max(1, int(sampled.sum()))
        return whole(self, sampled)

    monkeypatch.setattr(DpTraining, "clipped_sum", by_batch)
    assert audit()
