"""AUC and true positives: known answers, honest errors."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from paclm.errors import InvalidInput
from paclm.study.attacks.record_scores import roc, separate

RNG = np.random.default_rng


def two_sides(shift, count, seed):
    scores = RNG(seed).normal(size=2 * count)
    scores[:count] += shift
    return scores, np.arange(2 * count) < count, np.arange(2 * count)


def test_separated_normal_scores_have_the_auc_and_power_of_theory():
    scores, is_member, clusters = two_sides(1.5, 1000, 1)
    found = separate(scores, is_member, clusters, RNG(0))
    # Four errors: false alarm under 1e-4.
    assert abs(found.auc.mean - ndtr(1.5 / math.sqrt(2))) < 4 * found.auc.stderr
    assert abs(found.true_positives.mean - ndtr(1.5 - 2.3263)) < 4 * found.true_positives.stderr
    assert found.auc.stderr == pytest.approx(0.0083, rel=0.2)  # the large-sample value of Hanley and McNeil


def test_scores_that_say_nothing_are_not_called_a_separation_and_shifted_ones_are():
    nothing = separate(*two_sides(0.0, 200, 2), RNG(0)).auc
    assert abs(nothing.mean - 0.5) < 4 * nothing.stderr
    something = separate(*two_sides(0.8, 200, 2), RNG(0)).auc
    assert something.mean - 0.5 > 4 * something.stderr


def test_clusters_that_repeat_one_record_widen_the_error():
    scores, is_member, clusters = two_sides(0.5, 40, 3)
    alone = separate(scores, is_member, clusters, RNG(0)).auc
    copies = separate(np.repeat(scores, 9), np.repeat(is_member, 9), np.repeat(clusters, 9), RNG(0)).auc
    naive = separate(np.repeat(scores, 9), np.repeat(is_member, 9), np.arange(720), RNG(0)).auc
    assert copies.mean == pytest.approx(alone.mean)
    assert copies.stderr == pytest.approx(alone.stderr, rel=0.15)
    assert naive.stderr < 0.5 * copies.stderr


def test_ties_count_half_and_true_positives_must_beat_every_other_where_few_were_held_out():
    is_member = np.array([True, True, True, False, False])
    found = separate(np.array([1.0, 2.0, 3.0, 2.0, 0.0]), is_member, np.arange(5), RNG(0))
    assert found.auc.mean == pytest.approx((1 + 1.5 + 2) / 6)
    assert found.true_positives.mean == pytest.approx(1 / 3)


def test_the_roc_runs_from_none_to_all_and_encloses_the_auc():
    scores, is_member, clusters = two_sides(1.0, 500, 4)
    false, true = roc(scores, is_member)
    assert (false[0], true[0], false[-1], true[-1]) == (0.0, 0.0, 1.0, 1.0)
    assert np.trapezoid(true, false) == pytest.approx(separate(scores, is_member, clusters, RNG(0)).auc.mean)


def test_one_sided_scores_are_refused():
    with pytest.raises(InvalidInput):
        separate(np.zeros(3), np.ones(3, bool), np.arange(3), RNG(0))
