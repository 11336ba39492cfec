from __future__ import annotations

import pytest

from paclm.errors import InvalidInput
from paclm.study import recorded_votes
from paclm.study.decoding import GREEDY, GUMBEL, Decoding


def test_a_decoding_with_more_draws_is_the_same_otherwise() -> None:
    assert GUMBEL.times(8) == Decoding("gumbel", 1.0, 8)
    assert (GREEDY.temperature, GREEDY.draws, GREEDY.coupling) == (0.0, 1, "coupled")


@pytest.mark.parametrize("temperature", [-0.5, float("nan"), float("inf")])
def test_a_temperature_is_a_number_of_at_least_zero(temperature: float) -> None:
    with pytest.raises(InvalidInput, match="temperature must be a number"):
        Decoding("gumbel", temperature)


def test_no_draw_at_all_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least once, not 0 times"):
        GUMBEL.times(0)


def test_other_couplings_than_the_coupled_one_cannot_vote_on_a_text() -> None:
    apart = Decoding("independent", 1.0, coupling="independent")
    with pytest.raises(InvalidInput, match="independent is for generated sequences only"):
        recorded_votes.collect_votes(None, [], [apart], [0], False)
