"""Pooled collections: the interval covers the truth as often as stated, and without their spread it would not."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from paclm.errors import InvalidInput
from paclm.study.results import load_results

TOOLS = Path(__file__).parents[2] / "tools"
RESULTS = TOOLS.parent / "docs" / "research" / "results"
COLLECTIONS, DOCUMENTS, STUDIES, TRUTH = 3, 64, 2000, 0.3


@pytest.fixture(scope="module")
def pooling():
    sys.path.insert(0, str(TOOLS))
    from results_page import pooling

    return pooling


def simulate(documents, collections, both):
    """Studies of three collections each, as rows; the arguments are standard deviations of their parts, of a mean."""
    rng = np.random.default_rng(0)
    shape = (STUDIES, COLLECTIONS, DOCUMENTS)
    each = TRUTH + np.sqrt(DOCUMENTS) * documents * rng.normal(size=(STUDIES, 1, DOCUMENTS))
    each = each + collections * rng.normal(size=(STUDIES, COLLECTIONS, 1))
    each = each + np.sqrt(DOCUMENTS) * both * rng.normal(size=shape)
    means, errors = each.mean(axis=2), each.std(axis=2, ddof=1) / np.sqrt(DOCUMENTS)
    return [
        [{"gain_points": m, "gain_stderr": e, "passages": DOCUMENTS} for m, e in zip(*study, strict=True)]
        for study in zip(means.tolist(), errors.tolist(), strict=True)
    ]


def covers(low, high):
    return low <= TRUTH <= high


def without_spread(row):
    half = norm.ppf(0.975) * np.sqrt(row["gain_stderr"] ** 2 - row["gain_stderr_between"] ** 2)
    return row["gain_points"] - half, row["gain_points"] + half


def as_if_normal(row):
    half = norm.ppf(0.975) * row["gain_stderr"]
    return row["gain_points"] - half, row["gain_points"] + half


@pytest.mark.parametrize(
    ("documents", "collections", "both", "is_exact"),
    [(1, 0, 0, True), (0, 1, 0, True), (1, 1, 0, False), (1, 4, 0, False), (4, 1, 0, False), (1, 1, 1, False)],
)
def test_an_interval_of_95_percent_covers_at_least_so_often(pooling, documents, collections, both, is_exact):
    """2,000 studies: a coverage has a standard error of 0.005. False alarm, at four of them: below 1e-4."""
    rows = [pooling.pool_rows(study) for study in simulate(0.01 * documents, 0.01 * collections, 0.01 * both)]
    coverage = np.mean([covers(*pooling.interval(row, "gain_points")) for row in rows])
    assert coverage > 0.95 - 0.02
    assert coverage < (0.95 + 0.02 if is_exact else 1.0)
    if collections >= documents and not both:  # elsewhere the mistakes are too small to see
        assert np.mean([covers(*without_spread(row)) for row in rows]) < 0.95 - 0.02
    if collections > documents:
        assert np.mean([covers(*as_if_normal(row)) for row in rows]) < 0.95 - 0.02


def test_a_claim_about_few_collections_counts_them_and_not_their_passages(pooling):
    """Claims allow one false alarm in a hundred; 2,000 studies have a standard error of 0.0022 there. As if all 64
    passages were evidence about other collections, there are many.
    """
    from results_page.claims import most_errors

    rows = [pooling.pool_rows(study) for study in simulate(0.0, 0.01, 0.0)]
    gaps = np.array([abs(row["gain_points"] - TRUTH) / row["gain_stderr"] for row in rows])
    assert np.mean(gaps > most_errors(1, rows)) < 0.01 + 4 * 0.0022
    assert np.mean(gaps > most_errors(1, [{"passages": DOCUMENTS}])) > 0.08


def test_held_out_records_that_each_collection_draws_are_shared_in_part(pooling):
    """2,000 studies of 3 draws of a fifth of 320 records, as above; as if none were shared, it covers too seldom."""
    rng = np.random.default_rng(1)
    covered = {"both": 0, "as if apart": 0}
    for _ in range(STUDIES):
        records = TRUTH + rng.normal(size=320)
        rows = []
        for _ in range(COLLECTIONS):
            own = records[rng.permutation(320)[:64]] + 0.02 * rng.normal()
            rows.append({"gain_points": own.mean(), "gain_stderr": own.std(ddof=1) / 8.0, "passages": 64})
        both, apart = pooling.pool_rows(rows, 0.2), pooling.pool_rows(rows, 0.0)
        covered["both"] += covers(*pooling.interval(both, "gain_points"))
        low, high = pooling.interval(apart, "gain_points")
        covered["as if apart"] += covers(low, high)
    assert covered["both"] > (0.95 - 0.02) * STUDIES > covered["as if apart"]


def test_results_of_one_split_share_all_documents_and_of_others_the_rate_of_holding_out(pooling):
    one = load_results(RESULTS / "wiki" / "results")["accuracy"]
    origin = one.provenance

    def of(seed, digest):
        arguments = {**origin["arguments"], "seed": seed}
        return replace(one, provenance={**origin, "arguments": arguments, "corpus": {"corpus/heldout.jsonl": digest}})

    assert pooling.shared_documents([of(101, "a"), of(102, "b")]) == pytest.approx(512 / 2576)
    assert pooling.shared_documents([of(101, "a"), of(101, "a")]) == 1.0
    assert pooling.shared_documents([of(101, "a"), of(102, "b"), of(103, "b")]) == 1.0
    assert pooling.shared_documents([of(101, "a"), of(101, "b")]) == 1.0  # split otherwise: nothing is known


def test_the_error_contains_the_spread_and_what_is_shared(pooling):
    rows = [{"retained_gain": v, "retained_gain_stderr": 0.03, "flip": v, "package": None} for v in (0.7, 0.8, 0.9)]
    rows[1]["package"], rows[2]["flip"] = "plugin 1.0", None
    row = pooling.pool_rows(rows)
    assert row["retained_gain"] == pytest.approx(0.8)
    assert row["retained_gain_stderr"] == pytest.approx(np.sqrt(0.03**2 + 0.1**2 / 3))
    assert (row["flip"], row["package"], row["collections"]) == (None, "plugin 1.0", 3)
    with pytest.raises(InvalidInput, match="no error"):
        pooling.interval(row, "flip")


@pytest.mark.parametrize("regime", ["accuracy", "census", "releases", "flatness"])
def test_every_error_of_recorded_rows_is_found_and_pooled(pooling, regime):
    found = load_results(RESULTS / "wiki" / "results")[regime]
    kept = ("per_token_nats", "collection")
    moved = [
        {name: 1.01 * value if isinstance(value, float) and name not in kept else value for name, value in row.items()}
        for row in found.rows
    ]
    pooled = pooling.pool_results([found, replace(found, rows=moved)])
    for before, row in zip(found.rows, pooled.rows, strict=True):
        errors = {name for name in before if "stderr" in name}
        assert {f"{name}_between" for name in errors} == {name for name in row if name.endswith("_between")}
        for name in before:
            if (error := pooling.error_name(row, name)) and before[name]:
                assert row[name] == pytest.approx(1.005 * before[name])
                assert row[error] > before[error]
                assert pooling.interval(row, name)[0] < row[name]


def test_what_is_not_a_set_of_collections_is_refused(pooling):
    wiki, cables = (load_results(RESULTS / name / "results")["accuracy"] for name in ("wiki", "cables"))
    for results, why in (([wiki], "from 1"), ([wiki, wiki], "twice"), ([wiki, cables], "corpus")):
        with pytest.raises(InvalidInput, match=why):
            pooling.pool_results(results)
    with pytest.raises(InvalidInput, match="one kind"):
        pooling.pool_rows([{"budget": "2^-4"}, {"budget": "2^-8"}])
