"""The regime of chosen prompts: its rows, its verdicts, the worst record, and copies of records."""

import math
from dataclasses import replace

import numpy as np
import pytest

from paclm.study.copied_records import train_copies
from paclm.study.leak_tests import holm
from paclm.study.regimes import chosen_prompts
from paclm.study.regimes.chosen_prompts import ALL, FORCED, FOURFOLD, OWN, PLAIN, Attacked, Budget
from paclm.study.run import run_regime
from study.rehearsal import SCALES, build_trainable_workspace
from study.small_lab import open_lab

SCALE = SCALES["chosen_prompts"]


@pytest.fixture(scope="module")
def template(tmp_path_factory, texts, small_base):
    return build_trainable_workspace(tmp_path_factory.mktemp("chosen") / "template", texts[:40], small_base, 10)


@pytest.fixture(scope="module")
def result(template, tmp_path_factory):
    lab = open_lab(template, tmp_path_factory.mktemp("chosen") / "lab")
    return run_regime(lab, chosen_prompts.REGIME, "quick", scale=SCALE)


def test_every_way_of_asking_has_a_row_for_every_budget_and_number_of_tokens(result):
    for pool, choice in chosen_prompts.WAYS:
        rows = result.select(target="record", attacker="belief", pool=pool, choice=choice, broken=None)
        assert [(row["budget"], row["tokens"]) for row in rows] == [("2^-4", 1), ("2^-4", 4), ("2^-8", 2), ("2^-8", 8)]
    assert {row["target"] for row in result.rows} == {
        "record",
        "canary, less than 16 visits",
        "canary, 16 visits or more",
        "one copy",
        "2 copies, one unit",
        "2 copies, own units",
        "2 copies, own units: any of them",
        "planted, 2 visits",
    }


def test_the_ideal_prompt_comes_near_the_bound_and_others_stay_below_it(result):
    ideal = result.one(target="record", attacker="belief", pool=FORCED, broken=None, tokens=8)
    assert ideal["record_over_charged"] == pytest.approx(1.0, abs=0.2)
    assert ideal["record_over_charged"] == pytest.approx(ideal["secret_over_charged"])
    for row in result.select(broken=None, attacker="belief"):
        assert row["leaked_record_nats"] <= row["secret_over_charged"] * row["charged_nats"] + 1e-12
        assert 0.0 <= row["dissent"] <= 1.0


def test_tokens_alone_say_less_than_the_history_of_the_same_sessions(result):
    for row in result.select(attacker="tokens"):
        assert row["p_leak"] is None
        assert row["record_over_charged"] < row["history_over_charged"]


def test_the_same_seed_gives_the_same_rows(template, tmp_path, result):
    again = run_regime(open_lab(template, tmp_path / "lab"), chosen_prompts.REGIME, "quick", scale=SCALE)
    assert repr(again.rows) == repr(result.rows)


def test_a_sound_release_is_silent_and_both_controls_are_found(result):
    lines = chosen_prompts.verdicts(result)
    assert len(lines) == 3
    assert not any(line.startswith("ALARM") for line in lines)
    assert all(": found" in line for line in lines[1:])


def test_a_row_above_its_bound_and_a_silent_control_raise_alarms(result):
    (at,) = (i for i, row in enumerate(result.rows) if row is result.select(broken=None, pool=OWN)[0])
    beaten = [{**row, "p_any_record": 1e-9} if i == at else row for i, row in enumerate(result.rows)]
    assert chosen_prompts.verdicts(replace(result, rows=beaten))[0].startswith("ALARM: comparisons with a bound: 1 of")
    for which, broken in enumerate((PLAIN, FOURFOLD), start=1):
        silent = [
            row | dict.fromkeys(chosen_prompts.PS, 0.5) if row["broken"] == broken else row for row in result.rows
        ]
        lines = chosen_prompts.verdicts(replace(result, rows=silent))
        assert [line.startswith("ALARM") for line in lines] == [i == which for i in range(3)]


def test_a_broken_release_without_the_name_of_a_control_raises_the_alarm(result):
    """What the control does, taken for a sound release: the comparisons themselves find it."""
    for broken in (PLAIN, FOURFOLD):
        rows = [{**row, "broken": None} if row["broken"] == broken else row for row in result.rows]
        rows += result.select(broken=broken)
        assert chosen_prompts.verdicts(replace(result, rows=rows))[0].startswith("ALARM")


def test_the_worst_record_is_not_biased_upward_by_being_chosen():
    """200 draws of 40 equal records: the mean of the worst one's figure is the truth, that of the largest is above."""
    rng = np.random.default_rng(0)
    budget, key = Budget(2.0**-8, (64,)), {"attacker": "belief"}
    found, largest = [], []
    for _ in range(200):
        record = rng.normal(0.1, 0.05, size=(40, 1, 32))
        same = np.ones_like(record)
        hits = rng.random(record.shape) < 0.6
        attacked = Attacked(record, 0.1 * same, hits, 0.6 * same, same, np.full(40, 0.5), record)
        (row,) = chosen_prompts._rows(key, budget, attacked)
        found.append(row["worst_over_charged"] * row["charged_nats"])
        largest.append(record.mean(axis=(1, 2)).max())
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - 0.1) < 4 * error  # false alarm < 1e-4
    assert np.mean(largest) - 0.1 > 4 * error


def test_holm_rejects_step_by_step_and_keeps_its_false_alarm_rate():
    assert holm([0.02, 0.001, 0.9, 0.016], 0.05) == [True, True, False, True]  # Bonferroni would take one
    assert holm([0.02, 0.04, 0.9], 0.05) == [False, False, False]
    assert holm([], 0.05) == []
    uniform = np.random.default_rng(1).random((4000, 20))
    alarms = sum(any(holm(row.tolist(), 0.05)) for row in uniform)
    assert abs(alarms / 4000 - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 4000)  # false alarm < 1e-4
    assert sum((row < 0.05).any() for row in uniform) / 4000 > 0.5  # without correction


def test_copies_of_one_unit_share_their_worlds_and_others_do_not(template, tmp_path):
    lab = open_lab(template, tmp_path / "lab")
    scale = replace(SCALE.copies, worlds=8, attacked=4)
    engine, asked = train_copies(lab, scale)
    assert engine.num_worlds == 8
    of = {kind: [one.is_member for one in asked if one.kind == kind] for kind in {one.kind for one in asked}}
    for kind in ("one copy", "2 copies, one unit", "2 copies, own units", "planted, 2 visits"):
        assert all(row.sum() == 4 for row in of[kind])
    anyone = of["2 copies, own units: any of them"]
    assert all(row.sum() >= 4 for row in anyone)
    assert np.mean(anyone) > 0.5
    firsts = of["2 copies, own units"]
    assert all(row[first].all() for row, first in zip(anyone, firsts, strict=True))


def test_where_no_canary_was_planted_a_note_says_so(texts, small_base, tmp_path):
    lab = open_lab(build_trainable_workspace(tmp_path / "template", texts[:40], small_base), tmp_path / "lab")
    found = run_regime(lab, chosen_prompts.REGIME, "quick", scale=replace(SCALE, records=2, attacked=2))
    assert "no canaries" in found.notes[-1]
    assert not [row for row in found.rows if row["target"].startswith("canary")]
    assert found.select(pool=ALL, attacker="belief")
