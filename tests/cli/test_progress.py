"""Progress without a terminal: plain lines, often enough that the program does not look dead."""

import io
import time

from rich.console import Console

from paclm.cli.progress import SECONDS, PlainProgress, format_task, progress


def written_by(step, seconds=SECONDS, until=""):
    """What a task of four steps of this length by its own clock prints; before the last one come these words."""
    file, now = io.StringIO(), 0.0
    console = Console(file=file, soft_wrap=True)
    with PlainProgress(console=console, seconds=seconds, get_time=lambda: now) as bar:
        task = bar.add_task("   training worlds", total=480)
        for done in (10, 20, 30):
            now += step
            bar.update(task, completed=done)
        deadline = time.monotonic() + 60
        while until not in file.getvalue():  # its thread waits in real time
            assert time.monotonic() < deadline
            time.sleep(0.001)
        now += step
        bar.update(task, completed=480)
    return file.getvalue().splitlines()


def test_lines_show_what_is_done_the_speed_and_the_time_left():
    lines = written_by(step=10.0, seconds=0.01, until="30 of 480")
    expected = ["training worlds: 30 of 480, 1.0 per second, about 8 min left", "training worlds: 480 of 480 in 40 s"]
    assert lines[-2:] == expected


def test_only_tasks_longer_than_the_interval_print_a_line_at_their_end():
    assert written_by(step=SECONDS / 5) == []
    assert written_by(step=SECONDS) == ["training worlds: 480 of 480 in 2 min"]


def test_tasks_without_a_total_and_slow_ones():
    now = 0.0
    bar = PlainProgress(console=Console(file=io.StringIO()), get_time=lambda: now)
    bar.add_task("reading", total=None, completed=1234)
    assert format_task(bar.tasks[0]) == "reading: 1,234 so far"
    slow = bar.add_task("training", total=20)
    for now in (100.0, 200.0, 300.0):  # noqa: B007  the clock of the bar
        bar.advance(slow)
    assert format_task(bar.tasks[1]) == "training: 3 of 20, 0.6 per minute, about 28 min left"


def test_long_lines_are_not_wrapped_without_a_terminal_and_quiet_prints_nothing(capsys):
    sentence = "word " * 100
    with progress() as bar:
        assert isinstance(bar, PlainProgress)
        bar.console.print(sentence, highlight=False, markup=False)
    assert capsys.readouterr().err.splitlines() == [sentence]
    with progress(quiet=True) as bar:
        bar.add_task("votes", total=10)
        assert not isinstance(bar, PlainProgress)
    assert capsys.readouterr().err == ""
