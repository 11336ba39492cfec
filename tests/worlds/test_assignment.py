"""Membership, holdout and shards: exact sums, and statistics that accept uniform draws and reject biased ones."""

import hashlib
from dataclasses import replace
from unittest.mock import Mock, call

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paclm.errors import InvalidInput
from paclm.worlds.assignment import (
    _draw_rows,
    assign_groups,
    assign_shards,
    assign_worlds,
    default_holdout,
    draw_holdout,
    number_units,
    units_of,
)
from paclm.worlds.records import Record

NUM_RECORDS, NUM_WORLDS, SEED = 2064, 128, 101
ALARM = 1e-6  # each p-value below must exceed this; for a fresh seed, five of them: false alarm <= 5e-6


def two_sided(distribution, value):
    """Too irregular and too regular are both wrong."""
    return float(2 * min(distribution.cdf(value), distribution.sf(value)))


def p_world_sizes(membership):
    """Sizes of worlds: a row has covariance m/(4(m-1)) (I - 11'/m), so the scaled squares add up to chi² with m-1."""
    n, m = membership.shape
    squares = ((membership.sum(axis=0) - n / 2) ** 2).sum()
    return two_sided(stats.chi2(m - 1), squares / (n * m / (4 * (m - 1))))


def p_neighbouring_worlds(membership):
    """Overlaps of worlds 0-1, 2-3, …: how many of the pairs of a record are split, against its exact moments."""
    n, m = membership.shape
    split = (membership[:, 0::2] != membership[:, 1::2]).sum(axis=1)  # (n,)
    half = m // 2
    p = half / (m - 1)
    both = (half / (m - 1)) * ((half - 1) / (m - 3)) if m > 2 else 0.0  # two given pairs both split
    variance = half * p * (1 - p) + half * (half - 1) * (both - p * p)
    return two_sided(stats.norm(), (split.sum() - n * half * p) / np.sqrt(n * variance))


def p_all_world_overlaps(membership):
    """Overlaps of all pairs of worlds: the Frobenius norm of the centred Gram matrix, against 100 other draws.

    The null distribution is estimated from sorted random keys, a different construction from the one under test.
    """
    n, m = membership.shape
    rng = np.random.default_rng(7)

    def norm(rows):
        signs = np.where(rows, 1.0, -1.0)
        gram = signs.T @ signs  # (m, m)
        return float(np.sum((gram[~np.eye(m, dtype=bool)] + n / (m - 1)) ** 2))

    draws = np.array([norm(np.argsort(np.argsort(rng.random((n, m)), axis=1), axis=1) < m // 2) for _ in range(100)])
    return two_sided(stats.t(99), (norm(membership) - draws.mean()) / (draws.std(ddof=1) * np.sqrt(1 + 1 / 100)))


def p_record_overlaps(membership):
    """Worlds shared by disjoint pairs of neighbouring records: hypergeometric if the records are independent."""
    n, m = membership.shape
    shared = (membership[0 : n - 1 : 2] & membership[1:n:2]).sum(axis=1)
    law = stats.hypergeom(m, m // 2, m // 2)
    edges = np.unique(law.ppf(np.linspace(0, 1, 12)[1:-1]))
    probabilities = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]]))
    counts = np.bincount(np.searchsorted(edges, shared, side="left"), minlength=len(probabilities))
    return float(stats.chisquare(counts, probabilities * shared.size).pvalue)


def p_serial(membership):
    """Memberships of one world along the records: no more and no fewer changes than independent rows have."""
    n, m = membership.shape
    centred = np.where(membership, 1.0, -1.0)
    products = (centred[:-1] * centred[1:]).sum(axis=1)  # (n-1,), mean 0, variance m²/(m-1), uncorrelated
    return two_sided(stats.norm(), products.sum() / np.sqrt((n - 1) * m * m / (m - 1)))


CHECKS = [p_world_sizes, p_neighbouring_worlds, p_all_world_overlaps, p_record_overlaps, p_serial]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_assignment_looks_uniform_and_independent(check):
    assert check(assign_worlds(NUM_RECORDS, NUM_WORLDS, SEED)) > ALARM


def favours_early_worlds():
    keys = np.random.default_rng(0).random((NUM_RECORDS, NUM_WORLDS)) + np.linspace(0, 0.2, NUM_WORLDS)
    return np.argsort(np.argsort(keys, axis=1), axis=1) < NUM_WORLDS // 2


def balances_worlds_exactly():
    half = assign_worlds(NUM_RECORDS // 2, NUM_WORLDS, 3)
    return np.random.default_rng(1).permutation(np.concatenate([half, ~half]), axis=0)


def keeps_pairs_of_worlds_together():
    return np.repeat(assign_worlds(NUM_RECORDS, NUM_WORLDS // 2, SEED), 2, axis=1)


def draws_from_few_rows():
    rows = assign_worlds(64, NUM_WORLDS, SEED)
    return rows[np.random.default_rng(2).integers(64, size=NUM_RECORDS)]


def repeats_every_row():
    return np.repeat(assign_worlds(NUM_RECORDS // 2, NUM_WORLDS, SEED), 2, axis=0)


def slides_along_the_worlds():
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
def test_the_same_check_fails_on_a_biased_assignment(check, biased):
    membership = biased()
    assert (membership.sum(axis=1) == NUM_WORLDS // 2).all()  # the row sums alone would not have caught it
    assert check(membership) < ALARM


def test_all_rows_of_four_worlds_are_equally_likely():
    rows = assign_worlds(60_000, 4, 5) @ np.array([8, 4, 2, 1])
    counts = np.bincount(rows, minlength=16)
    assert set(np.flatnonzero(counts)) == {3, 5, 6, 9, 10, 12}
    assert stats.chisquare(counts[counts > 0]).pvalue > ALARM  # false alarm 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 70).map(lambda half: 2 * half), st.integers(0, 2**70))
def test_every_row_has_exactly_half_of_the_worlds_and_a_seed_names_one_assignment(n, m, seed):
    membership = assign_worlds(n, m, seed)
    assert membership.shape == (n, m)
    assert membership.dtype == np.bool_
    assert (membership.sum(axis=1) == m // 2).all()
    np.testing.assert_array_equal(membership, assign_worlds(n, m, seed))


def test_a_seed_names_the_same_assignment_on_every_platform_and_version():
    digest = hashlib.sha256(np.packbits(assign_worlds(5000, 128, 101)).tobytes()).hexdigest()
    assert digest == "118c4e542e5e315d88d1cf1add2adc612ac67a5ff85733075de05eaaae2dc963"
    assert (assign_worlds(50, 16, 1) != assign_worlds(50, 16, 2)).any()


def test_a_row_with_tied_keys_is_drawn_again():
    batches = [np.array(batch, dtype=np.uint64) for batch in ([5, 5, 5, 9, 1, 2, 3, 4], [4, 3, 2, 1])]
    source = Mock(random_raw=Mock(side_effect=batches))
    rows = _draw_rows(source, 2, 4)
    np.testing.assert_array_equal(rows, [[False, False, True, True], [True, True, False, False]])
    assert source.random_raw.mock_calls == [call(8), call(4)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60), st.integers(0, 1000))
def test_groups_are_never_split(groups, seed):
    membership = assign_groups(groups, 8, seed)
    rows = {group: membership[groups.index(group)] for group in groups}
    for group, row in zip(groups, membership, strict=True):
        np.testing.assert_array_equal(row, rows[group])
    np.testing.assert_array_equal(np.array(list(rows.values())), assign_worlds(len(rows), 8, seed))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 4, 1), "num_records.*0"),
        ((2.5, 4, 1), r"num_records.*2\.5"),
        ((4, 0, 1), "worlds.*0"),
        ((4, 5, 1), "worlds.*5"),
        ((4, 65_538, 1), "worlds.*65,538"),
        ((4, 4, -1), "seed.*-1"),
        ((4, 4, True), "seed.*True"),
        ((4, 4, "101"), "seed.*'101'"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_and_value(arguments, named):
    with pytest.raises(InvalidInput, match=named):
        assign_worlds(*arguments)
    with pytest.raises(InvalidInput):
        assign_groups([], 4, 1)


def numbered(count, group_size=None):
    return [Record(str(i), f"text {i}", None if group_size is None else f"g{i // group_size}") for i in range(count)]


def split_holdout(records, rate, seed):
    """(train, held out), as creation writes them."""
    held_out = draw_holdout(records, number_units(records), rate, seed)
    return tuple([r for r, is_out in zip(records, held_out, strict=True) if is_out == side] for side in (False, True))


@given(st.lists(st.sampled_from(["a", "b", "c", None]), max_size=30))
def test_units_are_numbered_by_first_appearance(groups):
    records = [Record(str(i), "text", group) for i, group in enumerate(groups)]
    names = list(dict.fromkeys(units_of(records)))
    assert number_units(iter(records)).tolist() == [names.index(unit) for unit in units_of(records)]


@given(st.integers(30, 80), st.sampled_from([0.0, 0.1, 0.3]), st.integers(0, 99))
def test_train_and_held_out_are_the_whole_corpus_in_order(count, rate, seed):
    records = numbered(count)
    train, held_out = split_holdout(records, rate, seed)
    assert rate > 0 or not held_out
    assert sorted([*train, *held_out], key=lambda record: int(record.id)) == records
    for part in (train, held_out):
        assert [int(record.id) for record in part] == sorted(int(record.id) for record in part)


@given(st.integers(1, 5), st.integers(0, 99))
def test_groups_are_held_out_whole(group_size, seed):
    train, held_out = split_holdout(numbered(40 * group_size, group_size), 0.2, seed)
    assert not {record.group for record in train} & {record.group for record in held_out}
    assert len(held_out) % group_size == 0


def permuted_holdout(records, rate, seed):
    """The split of earlier versions: a permutation of all units."""
    units = list(dict.fromkeys(units_of(records)))
    drawn = np.random.default_rng([seed, 1]).permutation(len(units))[: round(rate * len(units))]
    held_out = {units[index] for index in drawn}
    return tuple([r for r, unit in zip(records, units_of(records), strict=True) if (unit in held_out) is side]
                 for side in (False, True))  # fmt: skip


def num_moved_by_one_more(split, records, more, place, seed):
    """How many records change sides when one is added to the corpus."""
    before, after = (set(split(corpus, 0.2, seed)[1]) for corpus in (records, insert(records, place, more)))
    return len((before ^ after) - {more})


def insert(records, place, more):
    return [*records[:place], more, *records[place:]]


@pytest.mark.parametrize("group_size", [None, 3], ids=["records", "groups"])
def test_one_record_more_changes_the_side_of_no_other(group_size):
    records, more = numbered(60, group_size), Record("new", "a new text", None if group_size is None else "new")
    for seed in range(20):
        assert num_moved_by_one_more(split_holdout, records, more, 3 * seed, seed) == 0


def test_the_permutation_of_earlier_versions_moved_others():
    more = Record("new", "a new text")
    moved = [num_moved_by_one_more(permuted_holdout, numbered(60), more, 3 * seed, seed) for seed in range(20)]
    assert np.mean(moved) > 5


def test_the_side_depends_on_the_text_or_the_group_alone():
    records = [Record(f"id{i}", f"text {i % 40}") for i in range(80)]  # each text twice
    held_out = {record.text for record in split_holdout(records, 0.3, 7)[1]}
    assert 0 < len(held_out) < 40
    renamed = [replace(record, id=f"other {record.id}", source="elsewhere") for record in reversed(records)]
    for corpus in (records, renamed):
        assert {record.text for record in split_holdout(corpus, 0.3, 7)[0]}.isdisjoint(held_out)
    assert {record.text for record in split_holdout(renamed[:45], 0.3, 7)[1]} == held_out & {
        record.text for record in renamed[:45]
    }
    grouped = [Record(str(i), f"{i}", f"text {i % 40}") for i in range(80)]
    others = [replace(record, text=f"changed {record.text}") for record in grouped]
    names = [{record.group for record in split_holdout(corpus, 0.3, 7)[1]} for corpus in (grouped, others)]
    assert names[0] == names[1]
    assert names[0] != held_out  # a group is no text


def test_each_record_is_held_out_equally_often_and_independently():
    records = numbered(40)
    drawn = np.zeros((2000, 40))
    for seed in range(2000):
        drawn[seed, [int(record.id) for record in split_holdout(records, 0.25, seed)[1]]] = 1
    # 40 binomial(2000, 1/4) counts, standard deviation 19.4: five of them miss with chance 40 x 6e-7
    assert np.abs(drawn.sum(axis=0) - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)
    # 780 correlations, standard deviation 1/sqrt(2000): five of them miss with chance 780 x 6e-7
    correlations = np.corrcoef(drawn, rowvar=False)[np.triu_indices(40, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(2000)
    # a fixed number would have no variance: this one has 40 x 3/16, up to a standard error of about 3.2 %
    assert abs(drawn.sum(axis=1).var() / 7.5 - 1) < 5 * 0.032


@pytest.mark.parametrize("wrong", [2 / 3, 1, 3 / 2])
def test_the_rate_is_the_one_asked_for(wrong):
    """One binomial(20,000, 0.2) count at five standard deviations: false alarm 6e-7; caught at 2/3 and 3/2."""
    count = len(split_holdout(numbered(20_000), 0.2, 3)[1])
    is_right = abs(count - 4000 * wrong) < 5 * np.sqrt(20_000 * 0.2 * 0.8)
    assert is_right == (wrong == 1)


def test_the_default_is_a_fifth_and_at_most_512():
    assert [default_holdout(count) for count in (4, 100, 2560, 50_000)] == [0, 20, 512, 512]


def test_too_few_units_for_the_worlds_are_refused():
    for records, rate, left in ((numbered(10), 1.0, 0), (numbered(7), 0.0, 7), (numbered(50, 10), 0.0, 5)):
        with pytest.raises(InvalidInput, match=f"leave {left} "):
            split_holdout(records, rate, 1)


def test_every_record_is_in_exactly_one_shard_shards_are_even_and_a_seed_names_them():
    shards = assign_shards(range(103), 8, seed=1)
    assert shards.shape == (103, 8)
    assert (shards.sum(axis=1) == 1).all()
    assert np.ptp(shards.sum(axis=0)) <= 1
    assert np.array_equal(shards, assign_shards(range(103), 8, seed=1))
    assert not np.array_equal(shards, assign_shards(range(103), 8, seed=4))


def test_records_of_one_unit_share_a_shard():
    units = [f"patient {number // 3}" for number in range(60)]
    shards = assign_shards(units, 4, seed=2)
    assert (shards.reshape(20, 3, 4) == shards[::3, None]).all()


@pytest.mark.parametrize("num_shards", [0, 1, 41])
def test_shards_that_cannot_be_filled_are_refused(num_shards):
    with pytest.raises(InvalidInput, match="shards"):
        assign_shards(range(40), num_shards, seed=0)
