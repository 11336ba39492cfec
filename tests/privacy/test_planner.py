"""Plans: any two give the third, all rounding is to the safe side, and the plan fits an account."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.errors import InvalidInput
from paclm.privacy.accounting import Account, units_up
from paclm.privacy.bounds import success_bound
from paclm.privacy.planner import plan


@pytest.mark.parametrize("charge", ["every-token", "dissent"])  # without a rate: planned for the worst case
def test_reference_plans_at_two_to_the_minus_32(charge):
    made = plan(mia=0.51, per_token=2.0**-32, charge=charge)
    assert made.tokens == 859_050
    assert made.mia_bound <= 0.51
    made = plan(tokens=10**6, per_token=2.0**-32, tokens_per_day=20_000, charge=charge)
    assert (f"{made.mia_bound:.2%}", made.days) == ("51.08%", 50)


@given(
    mia=st.floats(0.5001, 0.99),
    tokens=st.integers(1, 10**7),
    charge=st.sampled_from(["every-token", "dissent"]),
    rate=st.floats(0.01, 1.0),
)
def test_target_and_tokens_give_a_budget_that_fits(mia, tokens, charge, rate):
    made = plan(mia=mia, tokens=tokens, charge=charge, dissent_rate=rate)
    assert made.mia_bound <= mia
    charged = tokens if charge == "every-token" else math.ceil(tokens * Fraction(rate))
    assert Account.open(made.total_nats).remaining_tokens(made.per_token_nats) >= charged
    assert made.world_id_bound == success_bound(made.total_nats, 1 / 128)


@given(mia=st.floats(0.55, 0.99), exponent=st.integers(-40, -10), rate=st.floats(0.05, 1.0))
def test_target_and_budget_give_tokens_that_fit_and_no_more_would(mia, exponent, rate):
    made = plan(mia=mia, per_token=2.0**exponent, charge="dissent", dissent_rate=rate)
    assert made.mia_bound <= mia
    every = plan(mia=mia, per_token=2.0**exponent)
    assert made.tokens >= every.tokens
    assert Account.open(every.total_nats).remaining_tokens(2.0**exponent) == every.tokens
    again = plan(tokens=every.tokens + 1, per_token=2.0**exponent)
    assert again.mia_bound > mia * (1 - 1e-9)


@given(tokens=st.integers(1, 10**6), exponent=st.integers(-50, -21))
def test_tokens_and_budget_give_a_total_that_covers_them_exactly(tokens, exponent):
    made = plan(tokens=tokens, per_token=2.0**exponent)
    assert Account.open(made.total_nats).remaining_tokens(2.0**exponent) == tokens
    assert units_up(made.per_token_nats) * tokens <= Account.open(made.total_nats).total_units


@given(tokens=st.integers(1, 1000), rate=st.floats(0.01, 1.0), exponent=st.integers(-12, -4))
def test_a_plan_by_dissent_covers_every_charge_that_is_expected(tokens, rate, exponent):
    made = plan(tokens=tokens, per_token=2.0**exponent, charge="dissent", dissent_rate=rate)
    assert Account.open(made.total_nats).remaining_tokens(2.0**exponent) >= math.ceil(tokens * Fraction(rate))
    back = plan(mia=0.999, per_token=2.0**exponent, charge="dissent", dissent_rate=rate)
    assert back.tokens * Fraction(rate) <= Account.open(back.total_nats).remaining_tokens(2.0**exponent)


@pytest.mark.parametrize("num_worlds", [2, 32, 1024])
def test_the_world_bound_is_for_the_number_of_worlds(num_worlds):
    made = plan(tokens=1000, per_token=2.0**-16, num_worlds=num_worlds)
    assert made.world_id_bound == success_bound(made.total_nats, 1 / num_worlds)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({}, "mia"),
        ({"mia": 0.51}, "mia"),
        ({"mia": 0.51, "tokens": 5, "per_token": 0.1}, "mia"),
        ({"mia": 0.5, "tokens": 5}, "0.5"),
        ({"mia": 0.4, "tokens": 5}, "0.4"),
        ({"mia": 0.51, "tokens": 0}, "0"),
        ({"mia": 0.51, "per_token": 1.0}, "1.0 nats"),
        ({"mia": 0.5001, "tokens": 10**12}, "2\\^-60"),
        ({"tokens": 5, "per_token": -1.0}, "-1.0"),
        ({"tokens": 5, "per_token": 0.1, "num_worlds": 7}, "7"),
        ({"tokens": 5, "per_token": 0.1, "charge": "dissent", "dissent_rate": 0.0}, "0.0"),
        ({"tokens": 5, "per_token": 0.1, "tokens_per_day": 0.0}, "0.0"),
        ({"tokens": 5, "per_token": 0.1, "charge": "x"}, "'x'"),
    ],
)
def test_an_impossible_plan_is_refused_with_the_value(arguments, value):
    with pytest.raises(InvalidInput, match=value):
        plan(**arguments)
