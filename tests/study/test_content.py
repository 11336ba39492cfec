"""The regime `content`: text with and without a quorum, and forced canaries that must not come."""

from dataclasses import replace

import numpy as np
import pytest

from paclm.engine.training_job import membership_of
from paclm.study.lab import Lab
from paclm.study.recorded_votes import RecordedVotes, TextVotes
from paclm.study.regimes import accuracy, content
from paclm.study.regimes.content import REGIME, ContentScale
from paclm.study.run import run_regime
from paclm.worlds.assignment import assign_worlds
from study.small_lab import build_study_workspace, open_lab

SCALE = ContentScale(60, 2, 40, (1, 2, 8))


@pytest.fixture(scope="module")
def planted(tmp_path_factory, texts, small_base):
    path = tmp_path_factory.mktemp("content") / "template"
    return build_study_workspace(path, texts[:40], small_base, num_canaries=24)


@pytest.fixture(params=["planted", "invented"])
def lab(request, planted, study_template, tmp_path):
    return open_lab(planted if request.param == "planted" else study_template, tmp_path / "lab")


def test_forced_canaries_are_emitted_without_a_quorum_and_never_with_one(lab):
    result = run_regime(lab, REGIME, "quick", scale=SCALE)
    assert {row["quorum"] for row in result.rows} == {0, 1, 2}  # 8 is more than half of eight worlds
    alike = result.select(part="forced", others="agree")
    for row in alike:
        assert row["lacking"] in (0, row["trials"]) or row["decoder"] == "gumbel"
        if row["lacking"] == row["trials"]:
            assert (row["emitted"] > 0.2) == (row["can_emit"] == 1.0) == (row["quorum"] == 0)
    assert any(row["lacking"] == row["trials"] for row in alike)
    (line,) = REGIME.verdicts(result)
    assert not line.startswith("ALARM")
    assert (content.INVENTED in result.notes) == (not lab.workspace.canaries())


def test_the_verdict_is_an_alarm_where_the_quorum_does_nothing(lab, monkeypatch):
    monkeypatch.setattr(content, "_under", lambda votes, public, membership, quorum: votes)
    (line,) = REGIME.verdicts(run_regime(lab, REGIME, "quick", scale=SCALE))
    assert line.startswith("ALARM")


def test_the_verdict_is_an_alarm_where_the_control_emits_nothing_and_says_if_nothing_was_tested(lab):
    result = run_regime(lab, REGIME, "quick", scale=SCALE)
    forced = result.select(part="forced")
    for row in forced:
        row["emitted_lacking"] = 0
    (line,) = REGIME.verdicts(result)
    assert line.startswith("ALARM")
    for row in forced:
        row["lacking"] *= bool(row["quorum"])  # a control without trials is no failed control
    (line,) = REGIME.verdicts(result)
    assert "not tested" in line
    forced[-1]["emitted_lacking"] = 1
    (line,) = REGIME.verdicts(result)
    assert line.startswith("ALARM")


def test_the_text_without_a_quorum_has_the_numbers_of_accuracy(small_lab):
    result = run_regime(small_lab, REGIME, "quick", scale=SCALE)
    known = run_regime(small_lab, accuracy.REGIME, "quick", scale=accuracy.AccuracyScale(60, 2))
    for decoder in ("greedy", "gumbel"):
        row = result.one(part="text", decoder=decoder, quorum=0)
        for end, budget in (("at_32", "2^-32"), ("at_8", "2^-8"), ("noiseless", "inf")):
            same = known.one(decoder=decoder, budget=budget)
            assert (row[f"accuracy_{end}"], row[f"retained_gain_{end}"]) == pytest.approx(
                (same["accuracy_private"], same["retained_gain"])
            )
            assert (row[f"change_{end}"], row["replaced"]) == (0.0, 0.0)


def test_on_real_votes_a_quorum_removes_dissent_and_keeps_the_gain(small_lab, vote_files):
    """128 worlds of SmolLM2-135M and 2,048 records: exact, but for the assignment, which is seeded."""
    votes = RecordedVotes.load(vote_files["gumbel"])
    position = np.arange(votes.num_positions)
    recorded = TextVotes(**votes.columns(), passage=position // 256, position=position)
    none, some, many = content._on_text(small_lab, "gumbel", recorded, assign_worlds(2048, 128, 1), (0, 1, 8))
    assert none["dissent"] == pytest.approx(0.2440, abs=1e-4)
    assert none["dissent"] - 0.05 > some["dissent"] > many["dissent"] + 0.03
    assert 0.0 < some["replaced"] < many["replaced"] < 0.02
    assert many["retained_gain_at_32"] > none["retained_gain_at_32"] + 0.02
    assert abs(many["change_noiseless"]) < 4 * many["change_noiseless_stderr"]
    assert [row["most_times"] for row in (none, some, many)] == [None, 64.0, 8.0]


def test_every_collection_is_judged_by_its_own_members(small_lab, monkeypatch):
    asked = []
    monkeypatch.setattr(content, "apply_quorum", lambda votes, *given: asked.append(given[1]) or votes)
    other = Lab(small_lab.workspace, collection=2)
    found = small_lab.text_votes(60, (content.GREEDY,))["greedy"]
    for lab in (small_lab, other):
        content._on_text(lab, "greedy", replace(found), lab.membership, (1,))
    assert (asked[0] == small_lab.workspace.membership).all()
    assert (asked[1] == membership_of(small_lab.workspace, "collection-2")).all()
