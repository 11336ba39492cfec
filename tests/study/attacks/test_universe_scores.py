"""Scores of the universe audit: higher for what was learnt or released."""

import math

import numpy as np
import pytest

from paclm.study.attacks.record_scores import Surrogate, informed_scores, shared_ngrams


def test_informed_scores_are_what_they_say():
    log_probability = np.log(
        np.array([[0.5, 0.1, 0.5, 0.5, 0.5], [0.25, 0.1, 0.5, 0.5, 0.5], [0.125, 0.1, 0.5, 0.5, 0.5]])
    )
    scores = informed_scores(log_probability)  # two worlds, then the public model
    tokens = log_probability[:2].mean(axis=0)
    assert scores["loss"] == pytest.approx(tokens.mean())
    assert scores["reference"] == pytest.approx(math.log(2) * 1.5 / 5)
    assert scores["min-k"] == pytest.approx(math.log(0.1))  # one token in five
    assert scores["spread"] == pytest.approx(math.log(2) / 5 / 2)


def test_shared_ngrams_are_a_share_of_the_record():
    assert shared_ngrams([1, 2, 3, 4, 9], [1, 2, 3, 4]) == 1.0
    assert shared_ngrams([1, 2, 3, 7], [1, 2, 3, 4]) == pytest.approx((3 / 4 + 2 / 3 + 1 / 2) / 3)
    assert shared_ngrams([4, 3, 2, 1], [1, 2, 3, 4]) == pytest.approx(1 / 3)  # the same words in no like order
    assert shared_ngrams([1, 2, 3], [5, 6]) == 0.0


def test_the_surrogate_is_a_distribution_and_leans_towards_its_text():
    surrogate = Surrogate([[1, 2, 3, 1, 2, 3, 1, 2]], vocabulary=6)
    total = sum(math.exp(surrogate.log_likelihood([token], [1, 2])) for token in range(6))
    assert total == pytest.approx(1.0)
    assert surrogate.log_likelihood([3], [1, 2]) > surrogate.log_likelihood([5], [1, 2])
    seen, unseen = surrogate.log_likelihood([3, 1, 2], [1, 2]), surrogate.log_likelihood([4, 5, 4], [1, 2])
    assert seen > unseen + 2.0
    assert Surrogate([], vocabulary=6).log_likelihood([3], [1]) == pytest.approx(math.log(0.01 / 6))
