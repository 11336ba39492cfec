"""Accounts in whole units: safe rounding, the stop rule, no overspending by a unit, states that can be restored."""

import dataclasses
import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.errors import BudgetExceeded, InvalidInput
from paclm.privacy.accounting import UNITS_PER_NAT, Account, charge_units, nats_down, nats_up, units_down, units_up

nats = st.floats(2.0**-70, 8.0)
# More than 53 bits: the nearest float is above some and below others.
units_beside_floats = st.builds(
    lambda x, more: int(x * UNITS_PER_NAT) + more, st.floats(2.0**-6, 7.0), st.integers(-9, 9)
)


def test_a_power_of_two_and_a_fraction_are_exact():
    assert units_up(2.0**-32) == units_down(2.0**-32) == 2**28
    assert units_up(Fraction(2**53 + 1, 2**60)) == 2**53 + 1


@given(value=nats)
def test_charges_round_up_and_totals_round_down(value):
    assert Fraction(units_up(value), UNITS_PER_NAT) >= Fraction(value) >= Fraction(units_down(value), UNITS_PER_NAT)
    assert units_up(value) - units_down(value) in (0, 1)


@given(units=units_beside_floats)
def test_conversion_to_nats_rounds_to_its_side(units):
    account = Account(units, spent_units=units)
    for above in (nats_up(units), account.total_nats, account.spent_nats):
        assert Fraction(above) * UNITS_PER_NAT >= units >= Fraction(nats_down(units)) * UNITS_PER_NAT
    assert units_up(nats_down(units)) <= units <= units_down(nats_up(units))


@given(total=st.floats(1e-9, 4.0), charges=st.lists(nats, max_size=60))
def test_no_path_of_varying_charges_overspends_by_a_unit(total, charges):
    account = Account.open(total)
    for charge in charges:
        units = units_up(charge)
        if account.affords(units):
            account = account.charge(units, is_dissent=True)
        else:
            with pytest.raises(BudgetExceeded):
                account.charge(units, is_dissent=True)
        assert account.spent_units <= account.total_units
        assert Fraction(account.spent_units, UNITS_PER_NAT) <= Fraction(total)


def test_the_last_token_that_fits_is_served_and_the_next_is_not():
    account = Account.open(3 * 2.0**-10)
    for _ in range(3):
        account = account.charge(units_up(2.0**-10), is_dissent=False)
    assert account.remaining_units == 0
    assert account.remaining_tokens(2.0**-10) == 0
    with pytest.raises(BudgetExceeded, match=r"2\^-10"):
        account.charge(units_up(2.0**-10), is_dissent=False)
    assert account.charge(0, is_dissent=False).tokens == 4  # a token without a charge is always served


def test_one_unit_less_in_the_total_or_more_in_the_price_costs_one_token():
    per_token = units_up(2.0**-10)
    assert Account(3 * per_token).remaining_tokens(2.0**-10) == 3
    assert Account(3 * per_token - 1).remaining_tokens(2.0**-10) == 2
    total, tokens = units_down(0.1), 7
    assert Account(total).remaining_tokens(nats_up(total // tokens + 1)) == tokens - 1
    assert Account(total).remaining_tokens(nats_down(total // tokens)) == tokens


@given(paths=st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=30))
def test_an_account_counts_what_it_was_charged_and_reading_changes_nothing(paths):
    account = Account.open(1.0)
    for units, is_dissent in paths:
        account = account.charge(units, is_dissent=is_dissent)
    before = dataclasses.asdict(account)
    _ = account.spent_nats, account.total_nats, account.remaining_tokens(2.0**-20), repr(account), account.affords(5)
    assert dataclasses.asdict(account) == before
    assert Account(**before) == account
    assert account.tokens == len(paths)
    assert account.charged_tokens == sum(units > 0 for units, _ in paths)
    assert account.dissent_tokens == sum(is_dissent for _, is_dissent in paths)


@pytest.mark.parametrize(
    ("charge", "reads_secret", "is_dissent", "costs"),
    [
        ("every-token", True, False, True),
        ("every-token", True, True, True),
        ("dissent", True, False, False),
        ("dissent", True, True, True),
        ("every-token", False, True, False),
        ("dissent", False, True, False),
    ],
)
def test_which_tokens_are_charged(charge, reads_secret, is_dissent, costs):
    units = charge_units(charge, 2.0**-32, reads_secret=reads_secret, is_dissent=is_dissent)
    assert units == (2**28 if costs else 0)


@pytest.mark.parametrize(
    "state",
    [
        {"total_units": 1, "spent_units": 2},
        {"total_units": -1},
        {"total_units": 1, "dissent_tokens": 1},
        {"total_units": 1, "charged_tokens": 1},
        {"total_units": 1, "spent_units": 0.5},
    ],
)
def test_a_broken_state_is_refused(state):
    with pytest.raises(InvalidInput):
        Account(**state)


@given(total=st.integers(0, 2**64), share=st.fractions(0, 1))
def test_a_coarse_account_shows_no_less_than_was_spent_and_less_than_a_part_more(total, share):
    account = Account(total, int(total * share))
    coarse = account.coarse(100)
    assert account.spent_units <= coarse.spent_units <= min(total, account.spent_units + total // 100 + 1)
    assert coarse.spent_units in {-(-part * total // 100) for part in range(101)}


@pytest.mark.parametrize(
    ("compute", "values"),
    [
        (units_up, [0.0, -1.0, math.inf, math.nan, True, "0.5"]),
        (lambda units: Account.open(1.0).charge(units, is_dissent=False), [-1, 1.5, True]),
        (lambda charge: charge_units(charge, 0.1, reads_secret=True, is_dissent=True), ["never"]),
    ],
    ids=["budget", "units", "charge"],
)
def test_impossible_values_are_refused(compute, values):
    for value in values:
        with pytest.raises(InvalidInput, match=re.escape(repr(value))):
            compute(value)
