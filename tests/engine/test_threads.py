"""Torch gets no more threads than idle cores unless a number is set; far too many are refused."""

import os
from pathlib import Path

import pytest
import torch

from paclm.engine import cores, threads
from paclm.engine.cores import MOST_PER_CORE, check_threads, read_limit, usable_cores
from paclm.engine.threads import ThreadChoice, choose_threads, idle_cores, set_threads
from paclm.errors import InvalidInput


def stat(*cpus, steal=0):
    """A /proc/stat with (busy, idle) ticks per CPU."""
    lines = [f"cpu{number} {busy} 0 0 {idle} 0 0 0 {steal} 0 0" for number, (busy, idle) in enumerate(cpus)]
    return "\n".join(["cpu  99 0 99 99 0 0 0 0 0 0", *lines, "intr 123", "ctxt 5", "btime 1", ""])


@pytest.fixture(autouse=True)
def torch_as_it_was(monkeypatch):
    """Four threads at the start, nothing set by hand, nothing measured yet."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_AT_IMPORT", 4)
    monkeypatch.setattr(threads, "read_limit", lambda: float("inf"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    torch.set_num_threads(4)
    threads._measured_choice.cache_clear()
    yield
    threads._measured_choice.cache_clear()
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("before", "after", "cpus", "idle"),
    [
        (stat((100, 100), (0, 500), (7, 7)), stat((130, 100), (0, 530), (22, 22)), {0, 1, 2}, 0 + 1 + 0.5),
        (stat((100, 100), (0, 500)), stat((130, 100), (0, 530)), {1}, 1.0),  # only those this process may run on
        ("cpu0 0 0 0 0 0 0 0 0 0 0", "cpu0 0 0 0 10 20 0 0 0 0 0", {0}, 1.0),  # waiting for a disk is idle
        (stat((0, 0)), stat((0, 10), steal=30), {0}, 0.25),  # stolen time is not
        ("cpu0 0 0 0 0 9 0 0 0 0 0", "cpu0 30 0 0 0 4 0 0 0 0 0", {0}, 0.0),  # the kernel reduced its disk waits
        ("cpu0 0 0 0 0 0 0 0 0 0 0", "cpu0 10 0 0 10 0 0 0 0 10 0", {0}, 0.5),  # guests are part of user time
    ],
)
def test_idle_cores_are_counted_between_two_readings(before, after, cpus, idle):
    assert idle_cores(before, after, cpus) == pytest.approx(idle)


@pytest.mark.parametrize(("idle", "chosen"), [(0.0, 1), (0.4, 1), (1.4, 1), (1.6, 2), (3.9, 4), (9.0, 4)])
def test_threads_are_whole_idle_cores_and_at_least_one(idle, chosen):
    assert choose_threads(idle, 4) == chosen


def test_a_busy_machine_gives_fewer_threads_and_is_looked_at_once(monkeypatch):
    looks = []
    monkeypatch.setattr(threads, "_look", lambda _: looks.append(1.2) or 1.2)
    choice = set_threads()
    assert choice == ThreadChoice(1, 4)
    assert choice.busy == 3
    assert torch.get_num_threads() == 1
    assert len(looks) == 3
    assert set_threads() == choice  # and torch's own number has changed since: by us
    assert len(looks) == 3


@pytest.mark.parametrize(("looks", "limit", "threads_set"), [([0.9, 3.8], float("inf"), 4), ([4.0], 2.0, 2)])
def test_one_idle_look_is_enough_and_a_container_gets_no_more_than_its_share(monkeypatch, looks, limit, threads_set):
    left = iter(looks)
    monkeypatch.setattr(threads, "_look", lambda _: next(left))
    monkeypatch.setattr(threads, "read_limit", lambda: limit)
    assert set_threads() == ThreadChoice(threads_set, threads_set)


@pytest.mark.parametrize(
    ("own", "environment", "setting", "expected"), [(4, "4", 2, 2), (3, None, 0, 3), (4, "4", 0, 4)]
)
def test_what_settings_environment_or_process_set_holds(monkeypatch, own, environment, setting, expected):
    monkeypatch.setattr(threads, "_look", lambda _: 1.0)
    torch.set_num_threads(own)
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert set_threads(setting) is None
    assert torch.get_num_threads() == expected


def test_without_figures_of_the_cores_torch_keeps_its_own_number(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "_STAT", tmp_path / "none")
    assert set_threads() is None
    assert torch.get_num_threads() == 4


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux says how busy its cores are")
def test_this_machine_can_be_looked_at():
    assert 0 <= threads._look(range(os.cpu_count() or 1)) <= (os.cpu_count() or 1) + 1


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)


@pytest.mark.parametrize(
    ("written", "limit"), [("200000 100000\n", 2.0), ("max 100000\n", float("inf")), (None, float("inf"))]
)
def test_the_limit_of_a_container_is_read(tmp_path, written, limit):
    path = tmp_path / "cpu.max"
    if written is not None:
        path.write_text(written)
    assert read_limit(path) == limit


@pytest.mark.parametrize(("limit", "usable"), [(float("inf"), 8), (2.5, 3), (0.25, 1), (64.0, 8)])
def test_cores_are_those_of_the_process_and_of_its_container(monkeypatch, limit, usable):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "read_limit", lambda: limit)
    assert usable_cores() == usable


def test_where_a_process_is_not_told_its_cores_all_of_the_machine_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(cores, "read_limit", lambda: float("inf"))
    assert usable_cores() == 6


@pytest.mark.usefixtures("two_cores")
def test_thousands_of_threads_are_refused_before_torch_has_them():
    before = torch.get_num_threads()
    with pytest.raises(InvalidInput, match="threads = 5000"):
        set_threads(5000)
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(("number", "is_cautioned"), [(0, False), (2, False), (3, True), (2 * MOST_PER_CORE, True)])
def test_somewhat_more_threads_than_cores_bring_a_caution_and_work(number, is_cautioned):
    assert bool(check_threads(number)) is is_cautioned
