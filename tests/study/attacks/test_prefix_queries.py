"""Scores of an attacker who prompts every prefix: they find what is there, and nothing where nothing is."""

import numpy as np
import pytest
from scipy.special import expit

from paclm.errors import InvalidInput
from paclm.study.attacks.prefix_queries import Seen, expected_rates, score_records, shadow_features, with_products
from paclm.study.attacks.record_scores import separate

RECORDS, POSITIONS, QUERIES = 300, 30, 4


def draw(effect, seed=0):
    """Half of the records are members, whose worlds differ more often where the next token is a surprise."""
    rng = np.random.default_rng(seed)
    is_member = np.arange(RECORDS) < RECORDS // 2
    record = np.repeat(np.arange(RECORDS), POSITIONS)
    surprise = rng.normal(size=RECORDS)[record] + rng.normal(size=record.size)
    odds = -1.0 + 1.5 * surprise + effect * is_member[record] * (surprise > 0)
    counts = rng.binomial(QUERIES, expit(odds))
    features = np.column_stack([surprise, rng.normal(size=record.size)])
    return Seen(counts, QUERIES, record), features, is_member


def separation(seen, features, is_member):
    """z of the AUC of each score against a guess, and the AUC itself."""
    clusters = np.arange(RECORDS)
    scores = {"rate": seen.rates(), **score_records(seen, features, is_member, clusters, np.random.default_rng(1))}
    found = {name: separate(own, is_member, clusters, np.random.default_rng(2)).auc for name, own in scores.items()}
    return {name: ((auc.mean - 0.5) / auc.stderr, auc.mean) for name, auc in found.items()}


def test_without_an_effect_no_score_separates():
    """Three scores at |z| > 4: a false alarm in 5,000 for sound code, if the seed were not fixed."""
    assert all(abs(z) < 4.0 for z, _ in separation(*draw(effect=0.0)).values())


def test_an_effect_is_found_and_calibration_finds_more_of_it_than_the_bare_rate():
    found = separation(*draw(effect=0.6))
    assert all(found[name][0] > 4.0 for name in ("calibrated", "likelihood"))
    assert found["rate"][1] + 0.1 < found["calibrated"][1] < found["likelihood"][1]


def test_records_are_scored_by_models_that_never_saw_them():
    """With many features that name the record, a model fitted on the record itself separates what has no effect."""
    seen, _, is_member = draw(effect=0.0)
    named = np.random.default_rng(3).normal(size=(RECORDS, 12))[seen.record]
    assert abs(separation(seen, named, is_member)["likelihood"][0]) < 4.0
    design, everywhere = with_products(named), np.ones(seen.record.size, dtype=bool)
    inside, outside = (
        expected_rates(design, seen, is_member[seen.record] == side, everywhere) for side in (True, False)
    )
    gain = seen.counts * np.log(inside / outside) + (QUERIES - seen.counts) * np.log((1 - inside) / (1 - outside))
    wrong = np.bincount(seen.record, gain)
    assert separate(wrong, is_member, np.arange(RECORDS), np.random.default_rng(2)).auc.mean > 0.9


def test_expected_rates_are_those_of_the_known_positions():
    seen, features, is_member = draw(effect=0.0)
    known = ~is_member[seen.record]
    rates = expected_rates(with_products(features), seen, known, known)
    assert rates.sum() * QUERIES == pytest.approx(seen.counts[known].sum(), rel=1e-3)
    low, high = features[known, 0] < -1, features[known, 0] > 1
    for some in (low, high):
        assert rates[some].mean() == pytest.approx(seen.counts[known][some].mean() / QUERIES, abs=0.02)
    with pytest.raises(InvalidInput, match="both sides"):
        expected_rates(with_products(features), seen, np.zeros_like(known), known)


def test_shadow_features_tell_inside_from_outside():
    record = np.array([0, 0, 1, 1])
    dissent = np.array([[4, 0], [4, 0], [1, 3], [1, 3]])  # in the first shadow, in the second
    is_inside = np.array([[True, False], [False, True]])
    found = shadow_features(dissent, 4, is_inside, record)
    inside, outside = found[:, :2], found[:, 2:]
    assert (inside > 0).all()
    assert (outside < 0).all()
    assert found[0, 0] == pytest.approx(np.log(4.5 / 0.5))
    assert found[2, 1] == pytest.approx(np.log(6.5 / 2.5))
