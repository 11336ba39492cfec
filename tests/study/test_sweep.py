from dataclasses import replace

import numpy as np
import pytest

from paclm.study.continuations import Continuations
from paclm.study.regimes import sweep
from paclm.study.regimes.sweep import REGIME, SweepScale
from paclm.study.run import run_regime
from paclm.study.table import to_markdown
from paclm.study.tables import table_named
from study.small_lab import interrupt, rows_of

SCALE = SweepScale(
    trials=12, long_trials=3, lengths=(4, 8, 16), budgets=(0.25, 2.0**-8, 2.0**-20), total=1.0, prompt=8, together=7
)


def test_the_total_stops_a_large_budget_early_and_the_table_marks_it(small_lab):
    result = run_regime(small_lab, REGIME, "quick", scale=SCALE)
    assert len(result.rows) == 9
    stopped = result.one(budget="2^-2", length=16)
    assert (stopped["realized_length"], stopped["is_stopped"], stopped["trials"]) == (4, True, 3)
    assert stopped["world_bound"] < stopped["world_nominal_bound"] == 1.0
    free = result.one(budget="2^-8", length=8)
    assert (free["realized_length"], free["is_stopped"], free["trials"]) == (8, False, 12)
    assert free["world_bound"] == free["world_nominal_bound"]
    text = to_markdown(table_named("tab:sweep").build({"sweep": result}))
    assert "4†" in text
    assert not any(row["is_violation"] for row in result.rows)
    assert "ALARM" not in REGIME.verdicts(result)[0]
    broken = replace(result, rows=[{**row, "is_violation": row is result.rows[0]} for row in result.rows])
    assert REGIME.verdicts(broken)[0].startswith("ALARM")


def test_the_same_seed_gives_the_same_rows_whatever_the_batches(small_lab):
    rows = rows_of(small_lab, REGIME, SCALE)
    assert rows_of(small_lab, REGIME, SCALE) == rows
    other = rows_of(small_lab, REGIME, replace(SCALE, together=5))
    for one, two in zip(rows, other, strict=True):
        assert one["unanimity"] == two["unanimity"]
        assert one["world_rate"] == pytest.approx(two["world_rate"], abs=1e-9)


def test_a_stopped_sweep_goes_on_and_ends_with_the_same_numbers(small_lab, monkeypatch):
    whole = rows_of(small_lab, REGIME, SCALE)
    calls = interrupt(monkeypatch, Continuations, "released", at=3)
    with pytest.raises(KeyboardInterrupt):
        rows_of(small_lab, REGIME, SCALE)
    assert rows_of(small_lab, REGIME, SCALE) == whole
    asked = [(given[1:], options["first"]) for given, options in calls]
    assert asked[2] == asked[3]
    assert asked.count(asked[0]) == 1


def test_a_release_without_noise_is_a_violation_of_the_bound(small_lab):
    secrets = np.arange(40) % 8
    beliefs = np.full((40, 8), -40.0)
    beliefs[np.arange(40), secrets] = np.log1p(-7 * np.exp(-40.0))  # every world found out
    row = sweep.measure(small_lab, SCALE, 8, 2.0**-20, beliefs, np.full((40, 8), 2), secrets, 9)
    assert row["is_violation"]
    assert row["world_rate"] == 1.0
    uniform = np.full((40, 8), -np.log(8))
    assert not sweep.measure(small_lab, SCALE, 8, 2.0**-20, uniform, np.ones((40, 8)), secrets, 9)["is_violation"]


def test_the_papers_scale_has_24_cells():
    paper = REGIME.presets["paper"]
    assert len(paper.budgets) * len(paper.lengths) == 24
    assert [paper.realized(2.0**-4, length) for length in paper.lengths] == [16, 16, 16]
    assert (paper.trials, paper.long_trials) == (1000, 100)
