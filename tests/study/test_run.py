"""Running a regime: rows with their origin, collections, and going on after a stop."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from paclm.errors import InvalidInput
from paclm.study.decoding import GREEDY
from paclm.study.eval_text import Passage
from paclm.study.lab import Lab
from paclm.study.parts import Kept
from paclm.study.regime import Findings, Regime
from paclm.study.regimes import NAMES, READING, SPENDING
from paclm.study.results import Result
from paclm.study.run import regimes_named, results_folder, run_regime


@dataclass(frozen=True)
class Scale:
    parts: int


class Stopped(Exception):
    pass


def make_regime(stop_at=None, made=None):
    def run(lab, scale):
        parts = lab.parts("census", [scale.parts])

        def make(number):
            if number == stop_at:
                raise Stopped
            if made is not None:
                made.append(number)
            return [{"number": number, "drawn": float(lab.rng("example", number).random())}]

        names = {number: parts.rows(f"example-{number}", lambda n=number: make(n)) for number in range(scale.parts)}
        return Findings([row for rows in names.values() for row in rows], ["A note."])

    presets = {"quick": Scale(4), "paper": Scale(8)}
    return Regime(name="census", title="", question="", presets=presets, run=run)


def run_until_stopped(lab, regime, *rest):
    with pytest.raises(Stopped):
        run_regime(lab, regime, "quick", *rest)


def test_a_result_has_rows_notes_scale_and_origin_and_is_on_disk(small_lab):
    result = run_regime(small_lab, make_regime(), "quick")
    assert [row["number"] for row in result.rows] == [0, 1, 2, 3]
    assert {row["collection"] for row in result.rows} == {1}
    assert result.scale == {"parts": 4}
    assert result.provenance["stamp"].startswith("NOT PRIVATE")
    assert Result.load(results_folder(small_lab) / "census.json").rows == result.rows


def test_a_run_that_was_stopped_goes_on_and_ends_with_the_same_numbers(small_lab):
    made = []
    undisturbed = run_regime(small_lab, make_regime(), "quick").rows
    run_until_stopped(small_lab, make_regime(stop_at=2, made=made))  # from the start: the first run has finished
    run_regime(small_lab, make_regime(), "paper")  # takes nothing away from the one that was stopped
    assert run_regime(small_lab, make_regime(made=made), "quick").rows == undisturbed
    assert made == [0, 1, 2, 3], "no part was made twice"


def test_a_result_that_cannot_be_written_loses_no_part(small_lab, monkeypatch):
    made = []

    def full(self, folder):
        raise OSError("no space left")

    with monkeypatch.context() as disk:
        disk.setattr(Result, "save", full)
        with pytest.raises(OSError, match="no space"):
            run_regime(small_lab, make_regime(made=made), "quick")
    run_regime(small_lab, make_regime(made=made), "quick")
    assert made == [0, 1, 2, 3]


def test_parts_of_the_first_collection_stay_until_the_second_is_done(small_lab, monkeypatch):
    @contextmanager
    def second(self, number):
        yield self if number == 1 else self.with_runtime(self.runtime, number)  # over the same worlds

    monkeypatch.setattr(Lab, "of_collection", second)
    monkeypatch.setattr(Lab, "worlds_name", "worlds")
    made = []
    other = make_regime(stop_at=2, made=made)
    first = make_regime(made=made)
    both = replace(first, run=lambda lab, scale: (first if lab.collection == 1 else other).run(lab, scale))
    run_until_stopped(small_lab, both, 2)
    assert made == [0, 1, 2, 3, 0, 1]
    rows = run_regime(small_lab, first, "quick", 2).rows
    assert made == [0, 1, 2, 3, 0, 1, 2, 3], "nothing was made twice"
    assert [row["collection"] for row in rows] == [1] * 4 + [2] * 4
    assert not list((small_lab.folder / "parts").iterdir())


def test_another_seed_gives_other_numbers_also_when_parts_lie_around(small_lab):
    run_until_stopped(small_lab, make_regime(stop_at=2))
    other = run_regime(Lab(small_lab.workspace, seed=1), make_regime(), "quick")
    assert other.rows != run_regime(small_lab, make_regime(), "quick").rows


def test_parts_of_another_code_are_not_used(small_lab, monkeypatch):
    made = []
    run_until_stopped(small_lab, make_regime(stop_at=2, made=made))
    monkeypatch.setattr("paclm.study.lab.code_digest", lambda *_: "edited")
    run_regime(small_lab, make_regime(made=made), "quick")
    assert made == [0, 1, 0, 1, 2, 3]


def test_parts_of_another_text_or_arithmetic_are_not_used(small_lab):
    made = []
    for lab in (
        small_lab,
        Lab(small_lab.workspace, test_text=[Passage.of([5, 6, 7])], runtime=small_lab.runtime),
        small_lab.with_runtime(replace(small_lab.runtime, dtype="bfloat16")),
    ):
        run_until_stopped(lab, make_regime(stop_at=2, made=made))
    assert made == [0, 1] * 3


@pytest.mark.parametrize(("kept", "used", "expected"), [(Kept(), 2, [2, 3]), (Kept(again=True), 0, [0, 1, 2, 3])])
def test_a_result_says_how_much_of_it_is_of_an_earlier_run_and_again_makes_all(small_lab, kept, used, expected):
    made = []
    run_until_stopped(Lab(small_lab.workspace), make_regime(stop_at=2))  # with the runtime of the next
    result = run_regime(Lab(small_lab.workspace, kept=kept), make_regime(made=made), "quick")
    assert (result.provenance["kept_from_before"], made) == (used, expected)


def test_votes_of_the_same_run_are_shared_also_when_all_is_made_anew(small_lab, monkeypatch):
    small_lab.text_votes(40, (GREEDY,))
    lab = Lab(small_lab.workspace, runtime=small_lab.runtime, kept=Kept(again=True))
    taken, engine = [], Lab.engine
    monkeypatch.setattr(
        Lab, "engine", lambda self, *names, **options: taken.append(1) or engine(self, *names, **options)
    )
    for _ in range(2):
        lab.text_votes(40, (GREEDY,))
    assert taken == [1]
    assert not lab.kept.from_before


def test_every_name_is_a_regime_sorted_as_in_the_paper_and_unknown_ones_are_refused():
    regimes = regimes_named(["all", *SPENDING, *READING])
    assert tuple(regime.name for regime in regimes) == tuple(NAMES)
    assert all(set(regime.presets) == {"quick", "paper"} and regime.question.endswith("?") for regime in regimes)
    assert [regime.name for regime in regimes_named(["flatness", "census", "flatness"])] == ["census", "flatness"]
    with pytest.raises(InvalidInput, match="'cencus'"):
        regimes_named(["cencus"])
