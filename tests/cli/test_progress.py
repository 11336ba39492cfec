"""Progress without a terminal: plain lines, often enough that nobody takes the program for dead."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from paclm.cli.console import progress
from paclm.cli.plain_progress import SECONDS, PlainProgress, line


def written_by(step: float, seconds: float = SECONDS, until: str = "") -> list[str]:
    """What a task of four steps writes that take so long by its own clock; before the last one come these words."""
    file, now = io.StringIO(), 0.0
    console = Console(file=file, soft_wrap=True)
    with PlainProgress(console=console, seconds=seconds, get_time=lambda: now) as bar:
        task = bar.add_task("   training worlds, loss 3.210", total=480)
        for done in (10, 20, 30):
            now += step
            bar.update(task, completed=done)
        deadline = time.monotonic() + 60
        while until not in file.getvalue():  # its thread looks by the clock on the wall
            assert time.monotonic() < deadline
            time.sleep(0.001)
        now += step
        bar.update(task, completed=480)
    return file.getvalue().splitlines()


def test_lines_say_what_is_done_how_fast_and_how_long_it_will_take() -> None:
    lines = written_by(step=10.0, seconds=0.01, until="30 of 480")
    assert all(line.startswith("training worlds, loss 3.210: ") for line in lines)
    assert lines[-2] == "training worlds, loss 3.210: 30 of 480, 1.0 a second, about 8 min left"
    assert lines[-1] == "training worlds, loss 3.210: 480 of 480 in 40 s"


def test_what_is_quicker_than_the_interval_writes_nothing() -> None:
    assert written_by(step=SECONDS / 5) == []


def test_what_took_longer_than_the_interval_says_so_at_its_end() -> None:
    assert written_by(step=SECONDS) == ["training worlds, loss 3.210: 480 of 480 in 2 min"]


def test_a_task_without_an_end_says_how_far_it_is_and_a_slow_one_counts_by_the_minute() -> None:
    now = 0.0
    bar = PlainProgress(console=Console(file=io.StringIO()), get_time=lambda: now)
    bar.add_task("reading", total=None, completed=1234)
    assert line(bar.tasks[0]) == "reading: 1,234 so far"
    slow = bar.add_task("training", total=20)
    for now in (100.0, 200.0, 300.0):  # noqa: B007  the clock of the bar
        bar.advance(slow)
    assert line(bar.tasks[1]) == "training: 3 of 20, 0.6 a minute, about 28 min left"


def test_long_sentences_are_not_cut_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "word " * 100
    with progress() as bar:
        assert isinstance(bar, PlainProgress)
        bar.console.print(sentence, highlight=False, markup=False)
    assert capsys.readouterr().err.splitlines() == [sentence]


def test_json_asks_for_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=True) as bar:
        bar.add_task("votes", total=10)
        assert not isinstance(bar, PlainProgress)
    assert capsys.readouterr().err == ""
