"""Structured output with every three features, and pairs with other prompts, coins, secrets and noise."""

import pytest

from structured.checks import check_run
from structured.covering import combinations_of, covering_array, possible_combinations
from structured.features import FEATURES, is_possible


@pytest.mark.stress
def test_every_three_features(lab):
    rows = covering_array(FEATURES, is_possible, 3)
    triples = {triple for row in rows for triple in combinations_of(row, 3)}
    assert triples == possible_combinations(FEATURES, is_possible, 3)
    for number, row in enumerate(rows):
        check_run(lab, lab.run(row, number))


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(1, 6))
def test_every_two_features_in_other_rows(lab, seed):
    for number, row in enumerate(covering_array(FEATURES, is_possible, seed=seed)):
        check_run(lab, lab.run(row, 1000 * seed + number))
