from dataclasses import replace

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.study.regimes.sessions import REGIME, Sessions, SessionScale
from paclm.study.run import run_regime
from paclm.study.tables import table_named
from study.small_lab import interrupt, open_lab, rows_of

SCALE = SessionScale(
    sessions=6, queries=4, tokens=8, horizons=(8, 32), budgets=(2.0**-4, 2.0**-6), prompt=8, queries_per_part=2
)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(study_template, small_lab, tmp_path):
    first = rows_of(small_lab, REGIME, SCALE)
    assert first == rows_of(small_lab, REGIME, SCALE)
    assert len(first) == 4
    assert first != rows_of(open_lab(study_template, tmp_path / "other", seed=1), REGIME, SCALE)


def test_a_run_that_was_stopped_goes_on_where_it_was_and_ends_with_the_same_numbers(small_lab, monkeypatch):
    whole = rows_of(small_lab, REGIME, SCALE)
    calls = interrupt(monkeypatch, Sessions, "_play_queries", at=2)
    with pytest.raises(KeyboardInterrupt):
        rows_of(small_lab, REGIME, SCALE)
    assert rows_of(small_lab, REGIME, SCALE) == whole
    first, second = range(2), range(2, 4)  # the first part is not played again; then the second budget
    assert [given[2] for given, _ in calls] == [first, second, second, first, second]
    assert not list((small_lab.folder / "parts").iterdir())


def test_a_stopped_run_of_another_scale_is_not_continued(small_lab, monkeypatch):
    calls = interrupt(monkeypatch, Sessions, "_play_queries", at=2)
    with pytest.raises(KeyboardInterrupt):
        rows_of(small_lab, REGIME, SCALE)
    rows_of(small_lab, REGIME, replace(SCALE, budgets=(2.0**-4, 2.0**-8)))
    assert calls[2][0][2] == range(2)


def test_smaller_batches_give_the_same_sessions(small_lab):
    sessions = Sessions(small_lab, SCALE, 2.0**-4)
    engine = small_lab.engine("worlds", "full", sequences=6, context=16)
    whole, split = (sessions.play(engine, together).arrays() for together in (6, 4))
    for name in whole:
        assert np.allclose(whole[name], split[name]), name


def test_rows_are_charged_by_horizon_and_tables_show_the_tokens_in_between(small_lab):
    result = run_regime(small_lab, REGIME, "quick", scale=SCALE)
    assert [(row["budget"], row["horizon"]) for row in result.rows][:2] == [("2^-4", 8), ("2^-4", 32)]
    for row in result.rows:
        assert row["charged_nats"] == row["horizon"] * row["per_token_nats"]
        assert 0 < row["dissent"] < 1
        assert row["step_information_nats"] <= row["charged_nats"]
    shown = table_named("tab:session-accuracy").build({"sessions": result})
    assert [row[1] for row in shown.rows] == ["1 – 8", "9 – 32"] * 2
    assert not any("ALARM" in line for line in REGIME.verdicts(result))
    parted = replace(result, rows=[{**row, "estimators_parting": 9.0} for row in result.rows])
    assert REGIME.verdicts(parted)[0].startswith("ALARM")


def test_horizons_are_whole_queries_and_the_papers_are_fifteen_cells():
    with pytest.raises(InvalidInput, match="whole queries of 8 tokens"):
        replace(SCALE, horizons=(12,))
    paper = REGIME.presets["paper"]
    assert len(paper.horizons) * len(paper.budgets) == 15
    assert (paper.sessions, paper.queries * paper.tokens) == (100, 4096)
