"""The search of DP settings takes the same way after a stop, varies the best so far, and ends."""

import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "tools" / "gpu"


@pytest.fixture(scope="module")
def search():
    sys.path.insert(0, str(GPU))
    try:
        import dp_search
    finally:
        sys.path.remove(str(GPU))
    return dp_search


def loss(key):
    """Best: B at 5e-3, T = 40 and C = 0.1; ε = 2 wants half the learning rate."""
    wanted = 5e-3 if key["epsilon"] == 8.0 else 2.5e-3
    found = abs(key["learning_rate"] / wanted - 1.0) + (key["factors"] != "B") + abs(key["steps"] - 40) / 40
    return found + abs(key["clip_norm"] - 0.1)


def play(search, rows, stop=99):
    while len(rows) < stop and (trial := search.next_trial(rows, search.FIRST)) is not None:
        rows.append({**trial.key, "loss": loss(trial.key), "seconds": 10.0})
    return rows


def test_the_search_finds_what_is_best_and_a_stopped_one_takes_the_same_way(search):
    rows = play(search, [])
    assert 14 <= len(rows) <= 20
    assert len({tuple(row.items()) for row in rows}) == len(rows)  # nothing twice
    best = min((row for row in rows if row["epsilon"] == 8.0), key=lambda row: row["loss"])
    assert (best["factors"], best["steps"], best["clip_norm"]) == ("B", 40, 0.1)
    for stop in (1, 6, 11, 15):
        assert play(search, play(search, [], stop)) == rows


def test_steps_are_compared_at_equal_compute(search):
    rows = [row for row in play(search, [])[:12] if row["epsilon"] == 8.0]
    assert {row["steps"] for row in rows} == {10, 20, 40, 80}
    assert {row["sampling_rate"] * row["steps"] for row in rows} == {10.0}


def test_time_follows_from_the_work_of_earlier_runs(search):
    rows = play(search, [], 3)
    trial = search.next_trial(rows, search.FIRST)
    assert search.expected_seconds(rows, trial) == pytest.approx(10.0)
    assert search.expected_seconds([], trial) == 0.0
