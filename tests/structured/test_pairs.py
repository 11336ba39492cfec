"""Structured output with every pair of features: small models, all answers checked against what public values allow."""

from itertools import combinations_with_replacement

import pytest

from structured.checks import check_run
from structured.covering import combinations_of, covering_array, possible_combinations
from structured.features import FEATURES, is_possible
from structured.runs import Lab, kinds_of

ROWS = covering_array(FEATURES, is_possible)


@pytest.fixture(scope="module")
def lab(tmp_path_factory, texts, small_base, small_tokenizer):
    lab = Lab(tmp_path_factory.mktemp("lab"), texts, small_base, small_tokenizer)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def runs(lab):
    """Each row's run, once."""
    done = {}

    def run(number):
        if number not in done:
            done[number] = lab.run(ROWS[number], number)
        return done[number]

    return run


def name_of(number):
    row = ROWS[number]
    return "-".join(str(row[name]) for name in ("release", "grammar", "model", "streams")) + f"-{number}"


@pytest.mark.parametrize("number", range(len(ROWS)), ids=name_of)
def test_a_run(lab, runs, number):
    check_run(lab, runs(number))
