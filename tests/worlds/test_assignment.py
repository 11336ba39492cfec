"""Membership: exact row sums, and statistics that accept the uniform assignment and reject biased ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import paclm
from paclm.errors import InvalidInput
from paclm.worlds.assignment import BoolArray, _draw_rows, assign_groups, assign_worlds

NUM_RECORDS, NUM_WORLDS, SEED = 2064, 128, 101
ALARM = 1e-6  # each p-value below must exceed this; for a fresh seed, five of them: false alarm <= 5e-6


def two_sided(distribution: object, value: float) -> float:
    """Too irregular and too regular are both wrong."""
    return float(2 * min(distribution.cdf(value), distribution.sf(value)))  # type: ignore[attr-defined]


def p_world_sizes(membership: BoolArray) -> float:
    """Sizes of worlds: a row has covariance m/(4(m-1)) (I - 11'/m), so the scaled squares add up to chi² with m-1."""
    n, m = membership.shape
    squares = ((membership.sum(axis=0) - n / 2) ** 2).sum()
    return two_sided(stats.chi2(m - 1), squares / (n * m / (4 * (m - 1))))


def p_neighbouring_worlds(membership: BoolArray) -> float:
    """Overlaps of worlds 0-1, 2-3, …: how many of the pairs of a record are split, against its exact moments."""
    n, m = membership.shape
    split = (membership[:, 0::2] != membership[:, 1::2]).sum(axis=1)  # (n,)
    half = m // 2
    p = half / (m - 1)
    both = (half / (m - 1)) * ((half - 1) / (m - 3)) if m > 2 else 0.0  # two given pairs both split
    variance = half * p * (1 - p) + half * (half - 1) * (both - p * p)
    return two_sided(stats.norm(), (split.sum() - n * half * p) / np.sqrt(n * variance))


def p_all_world_overlaps(membership: BoolArray) -> float:
    """Overlaps of all pairs of worlds: the Frobenius norm of the centred Gram matrix, against 100 other draws.

    The null distribution is estimated from sorted random keys, a different construction from the one under test.
    """
    n, m = membership.shape
    rng = np.random.default_rng(7)

    def norm(rows: BoolArray) -> float:
        signs = np.where(rows, 1.0, -1.0)
        gram = signs.T @ signs  # (m, m)
        return float(np.sum((gram[~np.eye(m, dtype=bool)] + n / (m - 1)) ** 2))

    draws = np.array([norm(np.argsort(np.argsort(rng.random((n, m)), axis=1), axis=1) < m // 2) for _ in range(100)])
    return two_sided(stats.t(99), (norm(membership) - draws.mean()) / (draws.std(ddof=1) * np.sqrt(1 + 1 / 100)))


def p_record_overlaps(membership: BoolArray) -> float:
    """Worlds shared by disjoint pairs of neighbouring records: hypergeometric if the records are independent."""
    n, m = membership.shape
    shared = (membership[0 : n - 1 : 2] & membership[1:n:2]).sum(axis=1)
    law = stats.hypergeom(m, m // 2, m // 2)
    edges = np.unique(law.ppf(np.linspace(0, 1, 12)[1:-1]))
    probabilities = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]]))
    counts = np.bincount(np.searchsorted(edges, shared, side="left"), minlength=len(probabilities))
    return float(stats.chisquare(counts, probabilities * shared.size).pvalue)


def p_serial(membership: BoolArray) -> float:
    """Memberships of one world along the records: no more and no fewer changes than independent rows have."""
    n, m = membership.shape
    centred = np.where(membership, 1.0, -1.0)
    products = (centred[:-1] * centred[1:]).sum(axis=1)  # (n-1,), mean 0, variance m²/(m-1), uncorrelated
    return two_sided(stats.norm(), products.sum() / np.sqrt((n - 1) * m * m / (m - 1)))


CHECKS = [p_world_sizes, p_neighbouring_worlds, p_all_world_overlaps, p_record_overlaps, p_serial]
Check = Callable[[BoolArray], float]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_assignment_looks_uniform_and_independent(check: Check) -> None:
    assert check(assign_worlds(NUM_RECORDS, NUM_WORLDS, SEED)) > ALARM


def favours_early_worlds() -> BoolArray:
    keys = np.random.default_rng(0).random((NUM_RECORDS, NUM_WORLDS)) + np.linspace(0, 0.2, NUM_WORLDS)
    return np.argsort(np.argsort(keys, axis=1), axis=1) < NUM_WORLDS // 2


def balances_worlds_exactly() -> BoolArray:
    half = assign_worlds(NUM_RECORDS // 2, NUM_WORLDS, 3)
    return np.random.default_rng(1).permutation(np.concatenate([half, ~half]), axis=0)


def keeps_pairs_of_worlds_together() -> BoolArray:
    return np.repeat(assign_worlds(NUM_RECORDS, NUM_WORLDS // 2, SEED), 2, axis=1)


def draws_from_few_rows() -> BoolArray:
    rows = assign_worlds(64, NUM_WORLDS, SEED)
    return rows[np.random.default_rng(2).integers(64, size=NUM_RECORDS)]


def repeats_every_row() -> BoolArray:
    return np.repeat(assign_worlds(NUM_RECORDS // 2, NUM_WORLDS, SEED), 2, axis=0)


def slides_along_the_worlds() -> BoolArray:
    row = assign_worlds(1, NUM_WORLDS, SEED)[0]
    return np.array([np.roll(row, i) for i in range(NUM_RECORDS)])


@pytest.mark.parametrize(
    ("check", "biased"),
    [
        (p_world_sizes, favours_early_worlds),
        (p_world_sizes, balances_worlds_exactly),
        (p_neighbouring_worlds, keeps_pairs_of_worlds_together),
        (p_all_world_overlaps, keeps_pairs_of_worlds_together),
        (p_all_world_overlaps, draws_from_few_rows),
        (p_record_overlaps, repeats_every_row),
        (p_record_overlaps, slides_along_the_worlds),
        (p_serial, repeats_every_row),
    ],
    ids=lambda item: item.__name__,
)
def test_the_same_check_fails_on_a_biased_assignment(check: Check, biased: Callable[[], BoolArray]) -> None:
    membership = biased()
    assert (membership.sum(axis=1) == NUM_WORLDS // 2).all()  # the row sums alone would not have caught it
    assert check(membership) < ALARM


def test_all_rows_of_four_worlds_are_equally_likely() -> None:
    rows = assign_worlds(60_000, 4, 5) @ np.array([8, 4, 2, 1])
    counts = np.bincount(rows, minlength=16)
    assert set(np.flatnonzero(counts)) == {3, 5, 6, 9, 10, 12}
    assert stats.chisquare(counts[counts > 0]).pvalue > ALARM  # false alarm 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 70).map(lambda half: 2 * half), st.integers(0, 2**70))
def test_every_row_has_exactly_half_of_the_worlds_and_a_seed_names_one_assignment(n: int, m: int, seed: int) -> None:
    membership = assign_worlds(n, m, seed)
    assert membership.shape == (n, m)
    assert membership.dtype == np.bool_
    assert (membership.sum(axis=1) == m // 2).all()
    np.testing.assert_array_equal(membership, assign_worlds(n, m, seed))


def test_a_seed_names_the_same_assignment_on_every_platform_and_version() -> None:
    digest = hashlib.sha256(np.packbits(assign_worlds(5000, 128, 101)).tobytes()).hexdigest()
    assert digest == "118c4e542e5e315d88d1cf1add2adc612ac67a5ff85733075de05eaaae2dc963"


def test_other_seeds_give_other_assignments() -> None:
    assert (assign_worlds(50, 16, 1) != assign_worlds(50, 16, 2)).any()


def test_a_row_with_tied_keys_is_drawn_again() -> None:
    class TiedThenFree:
        def __init__(self) -> None:
            self.batches = [[5, 5, 5, 9, 1, 2, 3, 4], [4, 3, 2, 1]]

        def random_raw(self, size: int) -> np.ndarray:
            batch = self.batches.pop(0)
            assert len(batch) == size
            return np.array(batch, dtype=np.uint64)

    rows = _draw_rows(TiedThenFree(), 2, 4)  # type: ignore[arg-type]
    np.testing.assert_array_equal(rows, [[False, False, True, True], [True, True, False, False]])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60), st.integers(0, 1000))
def test_groups_are_never_split(groups: list[str], seed: int) -> None:
    membership = assign_groups(groups, 8, seed)
    rows = {group: membership[groups.index(group)] for group in groups}
    for group, row in zip(groups, membership, strict=True):
        np.testing.assert_array_equal(row, rows[group])
    np.testing.assert_array_equal(np.array(list(rows.values())), assign_worlds(len(rows), 8, seed))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 1), "num_records must be a whole number of at least 1, not 0"),
        ((2.5, 4, 1), "num_records must be a whole number, not 2.5"),
        ((4, 0, 1), "The number of worlds must be a whole number of at least 2, not 0"),
        ((4, 5, 1), "The number of worlds must be even, because every record is in half of them, not 5"),
        ((4, 4, -1), "seed must be a whole number of at least 0, not -1"),
        ((4, 4, True), "seed must be a whole number of at least 0, not True"),
        ((4, 4, "101"), "seed must be a whole number, not '101'"),
    ],
)
def test_a_wrong_argument_is_named_with_its_rule(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        assign_worlds(*arguments)


def test_no_groups_at_all_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least one record"):
        assign_groups([], 4, 1)


def test_assign_worlds_is_a_public_name() -> None:
    assert paclm.assign_worlds is assign_worlds
