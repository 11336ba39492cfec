"""Forced choice against free text, from a small workspace to rows."""

import pytest

from paclm.study.regimes import choices
from study.small_lab import build_study_workspace, open_lab, rows_of

SCALE = choices.ChoicesScale(records=60, tokens=24, stride=2, draws=2, choices=(2, 4), sequences=16)


@pytest.fixture(scope="module")
def template(tmp_path_factory, texts, small_base):
    return build_study_workspace(tmp_path_factory.mktemp("choices") / "template", texts[:100], small_base, holdout=50)


def distance(row, name="auc", guess=0.5):
    return (row[name] - guess) / max(row[f"{name}_stderr"], 1e-12)


def test_worlds_that_saw_no_record_say_nothing(template):
    rows = rows_of(open_lab(template, template.parent / "random"), choices.REGIME, SCALE)
    print(len(rows), max(abs(distance(row)) for row in rows))
    for row in rows: print(row)
