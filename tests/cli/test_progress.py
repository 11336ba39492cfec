"""Progress without a terminal: plain lines, often enough that nobody takes the program for dead."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from paclm.cli.console import progress
from paclm.cli.plain_progress import PlainProgress, line


def written_by(seconds: float, pause: float) -> list[str]:
    file = io.StringIO()
    with PlainProgress(console=Console(file=file, soft_wrap=True), seconds=seconds) as bar:
        task = bar.add_task("   training worlds, loss 3.210", total=480)
        for done in (10, 20, 30):
            bar.update(task, completed=done)
            time.sleep(pause)
        bar.update(task, completed=480)
    return file.getvalue().splitlines()


def test_lines_say_what_is_done_how_fast_and_how_long_it_will_take() -> None:
    lines = written_by(seconds=0.05, pause=0.1)
    assert len(lines) >= 3
    assert all(line.startswith("training worlds, loss 3.210: ") for line in lines)
    assert "30 of 480, " in lines[-2]
    assert " a second, about " in lines[-2]
    assert lines[-2].endswith(" left")
    assert lines[-1] == "training worlds, loss 3.210: 480 of 480 in 0 s"


def test_what_is_quicker_than_the_interval_writes_nothing() -> None:
    assert written_by(seconds=30, pause=0.0) == []


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
