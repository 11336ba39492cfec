import numpy as np
import pytest

from paclm.study.parts import Parts


def test_a_finished_part_is_read_and_not_made_again(tmp_path):
    made = []

    def make():
        made.append(1)
        return [{"x": np.float64(0.5)}]

    assert (
        Parts(tmp_path / "parts", [1]).rows("a", make) == Parts(tmp_path / "parts", [1]).rows("a", make) == [{"x": 0.5}]
    )
    assert len(made) == 1


def test_other_circumstances_find_nothing(tmp_path):
    Parts(tmp_path, {"seed": 0}).rows("a", lambda: [{"x": 1}])
    assert Parts(tmp_path, {"seed": 1}).rows("a", lambda: [{"x": 2}]) == [{"x": 2}]
    assert Parts(tmp_path, {"seed": 0}).rows("a", lambda: [{"x": 3}]) == [{"x": 1}]


def test_a_part_that_failed_leaves_nothing_behind(tmp_path):
    parts = Parts(tmp_path, [0])

    def fail():
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        parts.rows("a", fail)
    assert parts.rows("a", lambda: [{"x": 1}]) == [{"x": 1}]


def test_clearing_forgets_the_parts_of_these_circumstances_only(tmp_path):
    first, second = Parts(tmp_path, [1]), Parts(tmp_path, [2])
    for parts in (first, second):
        parts.rows("a", lambda: [{"x": 1}])
    first.clear()
    assert first.rows("a", lambda: [{"x": 2}]) == [{"x": 2}]
    assert second.rows("a", lambda: [{"x": 2}]) == [{"x": 1}]
