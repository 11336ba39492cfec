"""Attack bounds and their inverse: reference values, the paper's tables, the safe side, extended precision."""

import math
from decimal import Context, Decimal, localcontext

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paclm
from paclm.errors import InvalidInput
from paclm.privacy.bounds import format_bound, round_up, tpr_bound_from_nats

priors = st.sampled_from([0.5, 1 / 128, 1 / 2064, 0.9, 1e-6])


def exact_divergence(success, prior):
    with mpmath.workdps(60):
        d, p = mpmath.mpf(success), mpmath.mpf(prior)
        rest = (1 - d) * mpmath.log((1 - d) / (1 - p)) if d < 1 else 0
        return d * mpmath.log(d / p) + rest


@pytest.mark.parametrize(
    ("nats", "prior", "bound"),
    [
        (2**-32 * 10**6, 1 / 2, 0.510789),
        (2**-16 * 64, 1 / 2, 0.522093),
        (2**-16 * 4096, 1 / 2, 0.674909),
        (2**-20 * 4096, 1 / 2, 0.544165),
        (0.25, 1 / 2, 0.837893),
        (math.log(2), 1 / 2, 1.0),
        (5.0, 1 / 2, 1.0),
        (0.25, 1 / 128, 0.129592),
        (1.0, 1 / 128, 0.336686),
        (4.0, 1 / 128, 0.893932),
        (2**-16 * 4096, 1 / 128, 0.055603),
    ],
)
def test_reference_values(nats, prior, bound):
    assert paclm.success_bound(nats, prior) == pytest.approx(bound, abs=1.01e-6)


@pytest.mark.parametrize(
    ("tokens", "exponent", "world", "record"),
    [
        (64, -4, 0.894, 1.000),  # tab:sweep, nominal length, and tab:session
        (64, -8, 0.130, 0.838),
        (64, -16, 0.012, 0.522),
        (64, -32, 0.008, 0.500),
        (256, -8, 0.337, 1.000),
        (1024, -16, 0.028, 0.588),
        (4096, -16, 0.056, 0.675),
        (4096, -20, 0.017, 0.544),
        (4096, -24, 0.010, 0.511),
    ],
)
def test_bounds_of_the_papers_tables(tokens, exponent, world, record):
    assert round(paclm.success_bound(tokens * 2.0**exponent, 1 / 128), 3) == world
    assert round(paclm.success_bound(tokens * 2.0**exponent, 1 / 2), 3) == record


@pytest.mark.parametrize(
    ("success", "nats", "digits"), [(0.7310586, 0.11094, 5), (0.8807971, 0.32781, 5), (0.51, 2.00013e-4, 9)]
)
def test_reference_values_of_the_inverse(success, nats, digits):
    assert round(paclm.nats_for(success, 1 / 2), digits) == pytest.approx(nats, abs=1e-12)
    assert paclm.nats_for(0.51, 1 / 2) // 2**-32 == 859_050


@given(nats=st.floats(-12, 0.8).map(lambda x: 10.0**x), prior=priors)
def test_bound_is_on_the_safe_side_of_extended_precision(nats, prior):
    bound = paclm.success_bound(nats, prior)
    if bound < 1:
        assert exact_divergence(bound, prior) >= nats
        assert exact_divergence(bound * (1 - 1e-9), prior) < nats or bound * (1 - 1e-9) <= prior * (1 + 1e-9)
    else:
        assert nats >= -math.log(prior) * (1 - 1e-9)


@given(share=st.floats(1e-6, 0.999), prior=priors)
def test_inverse_never_allows_more_than_the_target(share, prior):
    target = prior + share * (1 - prior)
    nats = paclm.nats_for(target, prior)
    assert paclm.success_bound(nats, prior) <= target
    assert nats <= exact_divergence(target, prior)
    assert nats >= exact_divergence(target, prior) * (1 - 1e-6)


@given(a=st.floats(0, 6), b=st.floats(0, 6), prior=priors)
def test_bound_grows_with_information_and_never_falls_below_the_prior(a, b, prior):
    low, high = sorted((a, b))
    assert prior <= paclm.success_bound(low, prior) <= paclm.success_bound(high, prior) <= 1.0


@pytest.mark.parametrize("prior", [0.5, 1 / 128, 0.9999978])
@pytest.mark.parametrize("ulps", [1, 2, 1000])
def test_inverse_converges_next_to_the_prior_and_no_leak_leaves_it(prior, ulps):
    target = prior + ulps * (math.nextafter(prior, 1) - prior)
    assert paclm.success_bound(paclm.nats_for(target, prior), prior) <= target
    assert (paclm.success_bound(0.0, prior), paclm.nats_for(prior, prior)) == (prior, 0.0)


@pytest.mark.parametrize(
    ("compute", "values"),
    [
        (lambda nats: paclm.success_bound(nats, 0.5), [-1.0, math.nan]),
        (lambda prior: paclm.success_bound(0.1, prior), [0.0, 1.0, -0.1, math.nan]),
        (lambda success: paclm.nats_for(success, 0.5), [0.4, 1.0, math.nan]),
        (format_bound, [math.nan, -1e-9, 1.0001, math.inf]),
    ],
    ids=["information", "prior", "target", "shown bound"],
)
def test_impossible_values_are_refused(compute, values):
    for value in values:
        with pytest.raises(InvalidInput, match=repr(value)):
            compute(value)


@given(
    bound=st.one_of(st.floats(0.0, 1.0), st.floats(-300.0, 0.0).map(lambda x: 10.0**x)),
    decimals=st.none() | st.integers(0, 8),
)
def test_a_shown_bound_is_never_less_than_the_bound_and_less_than_one_last_digit_more(bound, decimals):
    shown = Decimal(format_bound(bound, decimals).removesuffix("%"))
    assert float(shown.scaleb(-2)) >= bound
    unit = Decimal(1).scaleb(shown.as_tuple().exponent)
    assert shown - unit < 100 * Decimal(bound)
    if decimals is None and bound >= 1e-300:  # and less than a hundredth of it more
        assert float(shown.scaleb(-2)) < bound * 1.0101


@pytest.mark.parametrize(
    ("bound", "decimals", "shown"),
    [
        (0.51, None, "51.00%"),
        (0.5100000001, None, "51.01%"),
        (0.5881573838475457, None, "58.82%"),
        (0.00963782358368998, None, "0.964%"),
        (1 / 2064, None, "0.0485%"),
        (0.99999, None, "100.00%"),
        (1.0, None, "100.00%"),
        (0.0, None, "0.00%"),
        (0.50002, 4, "50.0020%"),
        (0.5000201, 4, "50.0021%"),
    ],
)
def test_how_bounds_are_shown(bound, decimals, shown):
    assert format_bound(bound, decimals) == shown


def test_a_shown_bound_does_not_depend_on_the_decimal_context_of_the_thread():
    with localcontext(Context(prec=3)):
        assert format_bound(0.510714) == "51.08%"
        assert float(Decimal(format_bound(5e-324).removesuffix("%"))) >= 5e-322
    assert format_bound(-0.0) == "0.00%"


@given(st.floats(0.0, 1.0), st.integers(0, 12))
def test_a_rounded_bound_is_never_below_it_and_less_than_a_step_above(bound, decimals):
    shown = round_up(bound, decimals)
    with localcontext(Context(prec=400)):
        assert Decimal(repr(bound)) <= Decimal(shown) < Decimal(repr(bound)) + Decimal(10) ** -decimals
    assert len(shown.partition(".")[2]) == decimals


def exact_information(tpr, fpr):
    """Of the verdict about a membership with prior 1/2."""
    mean = (mpmath.mpf(tpr) + mpmath.mpf(fpr)) / 2
    return (exact_divergence(tpr, mean) + exact_divergence(fpr, mean)) / 2


@given(tpr=st.floats(1e-6, 1 - 1e-6), fpr=st.floats(1e-6, 1 - 1e-6))
def test_no_attack_has_a_higher_rate_than_its_information_allows_and_one_reaches_it(tpr, fpr):
    low, high = sorted((tpr, fpr))
    nats = float(exact_information(high, low))
    assert high <= tpr_bound_from_nats(nats, low) <= high + 1e-6


@pytest.mark.parametrize(("nats", "rate"), [(0.0625, 0.2125), (0.0002, 0.0144), (math.log(2), 1.0), (0.0, 0.01)])
def test_rates_at_one_per_cent_of_false_positives(nats, rate):
    assert round(tpr_bound_from_nats(nats, 0.01), 4) == rate


@given(nats=st.floats(1e-6, 0.6))
def test_the_two_bounds_meet_where_both_kinds_of_error_are_equal(nats):
    success = paclm.success_bound(nats, 1 / 2)
    assert tpr_bound_from_nats(nats, 1 - success) == pytest.approx(success, abs=1e-9)


@pytest.mark.parametrize(("nats", "fpr"), [(-1.0, 0.01), (math.nan, 0.01), (0.1, 1.0), (0.1, -0.1), (0.1, math.nan)])
def test_rates_of_nothing_are_refused(nats, fpr):
    with pytest.raises(InvalidInput):
        tpr_bound_from_nats(nats, fpr)
