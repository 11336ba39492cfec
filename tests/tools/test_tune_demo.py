"""The search for settings of the demo: the grid, its lines, and figures that follow from one another."""

import json
import sys
from pathlib import Path
from shutil import copyfile

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from tiny import tune_demo
from tiny.model import Shape, TinyGPT2, to_hugging_face

SHIPPED = Path(__file__).parents[2] / "src" / "paclm" / "data" / "tiny"


@pytest.fixture
def base(tmp_path):
    """A model of one small layer that knows nothing, with the shipped tokenizer."""
    shape = Shape(width=32, num_layers=1, num_heads=1, hidden=32)
    to_hugging_face(TinyGPT2(shape), 0).save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(SHIPPED / name, tmp_path / "base" / name)
    return tmp_path / "base"


def test_every_setting_is_measured_on_every_hospital(base, monkeypatch, capsys):
    command = "tune --hospitals 100 101 --notes 40 --worlds 2 --rank 1 --held-out-tokens 50 --more-notes 8 --base"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(base)])
    tune_demo.main()
    first, second, mean = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["hospital"] for line in (first, second, mean)] == [100, 101, "mean"]
    for line in (first, second):
        assert (line["notes"], line["worlds"], line["rank"], line["positions"]) == (40, 2, 1, 50)
        assert line["gain_points"] == pytest.approx(100 * (line["accuracy_full"] - line["accuracy_public"]), abs=0.01)
    assert mean["unanimity"] == pytest.approx((first["unanimity"] + second["unanimity"]) / 2, abs=1e-3)


def test_the_grid_holds_every_combination_and_only_what_was_given(monkeypatch):
    command = "tune --worlds 16 32 --learning-rate 1e-3 2e-3 --epochs 3"
    monkeypatch.setattr(sys, "argv", command.split())
    found = list(tune_demo.settings_of(tune_demo.parse_args()))
    assert [(one["worlds"], one["learning_rate"]) for one in found] == [(16, 1e-3), (16, 2e-3), (32, 1e-3), (32, 2e-3)]
    assert all(one["epochs"] == 3 and "rank" not in one for one in found)


def test_what_is_retained_of_several_hospitals_is_a_share_of_their_mean_gain():
    rows = [
        {"accuracy_public": 0.2, "accuracy_full": 0.3, "accuracy": 0.25, "retained_gain": 0.5},
        {"accuracy_public": 0.2, "accuracy_full": 0.2, "accuracy": 0.21, "retained_gain": None},
    ]
    assert tune_demo.mean_of(rows)["retained_gain"] == pytest.approx(0.6)


def test_further_notes_are_of_other_patients():
    class Letters:
        def __call__(self, texts, **_):
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    passages = tune_demo.more_notes(100, 30, 12, Letters())
    known = {note["patient"] for note in tune_demo.generate_notes(30, 100)}
    others = [note["text"] for note in tune_demo.generate_notes(42, 100) if note["patient"] not in known]
    assert ["".join(map(chr, passage.tokens)) for passage in passages] == others
    assert tune_demo.more_notes(100, 30, 0, Letters()) is None
