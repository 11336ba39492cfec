"""Torch gets no more threads than idle cores unless a number is set; far too many are refused."""

import os
from pathlib import Path

import pytest
import torch

from paclm.engine import cores, threads
from paclm.engine.cores import MOST_PER_CORE, check_threads, crowding, read_limit, usable_cores
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


def test_idle_cores_are_counted_between_two_readings():
    before = stat((100, 100), (0, 500), (7, 7))
    after = stat((130, 100), (0, 530), (22, 22))
    assert idle_cores(before, after, {0, 1, 2}) == pytest.approx(0 + 1 + 0.5)
    assert idle_cores(before, after, {1}) == 1  # only those this process may run on


@pytest.mark.parametrize(
    ("before", "after", "idle"),
    [
        ("cpu0 0 0 0 0 0 0 0 0 0 0", "cpu0 0 0 0 10 20 0 0 0 0 0", 1.0),  # waiting for a disk is idle
        (stat((0, 0)), stat((0, 10), steal=30), 0.25),  # stolen time is not
        ("cpu0 0 0 0 0 9 0 0 0 0 0", "cpu0 30 0 0 0 4 0 0 0 0 0", 0.0),  # the kernel reduced its count of disk waits
        ("cpu0 0 0 0 0 0 0 0 0 0 0", "cpu0 10 0 0 10 0 0 0 0 10 0", 0.5),  # guests are part of user time
    ],
)
def test_ticks_are_counted_as_idle_or_busy(before, after, idle):
    assert idle_cores(before, after, {0}) == pytest.approx(idle)


@pytest.mark.parametrize(("idle", "chosen"), [(0.0, 1), (0.4, 1), (1.4, 1), (1.6, 2), (3.9, 4), (9.0, 4)])
def test_threads_are_whole_idle_cores_and_at_least_one(idle, chosen):
    assert choose_threads(idle, 4) == chosen


def test_a_busy_machine_gives_fewer_threads_and_is_looked_at_once(monkeypatch):
    looks = []
    monkeypatch.setattr(threads, "_look", lambda _: looks.append(1.2) or 1.2)
    choice = set_threads()
    assert choice == ThreadChoice(1, 4)
    assert choice is not None
    assert choice.busy == 3
    assert torch.get_num_threads() == 1
    assert len(looks) == 3
    assert set_threads() == choice  # and torch's own number has changed since: by us
    assert len(looks) == 3


def test_one_idle_look_is_enough(monkeypatch):
    looks = iter([0.9, 3.8])
    monkeypatch.setattr(threads, "_look", lambda _: next(looks))
    assert set_threads() == ThreadChoice(4, 4)


def test_a_container_gets_no_more_than_its_share(monkeypatch):
    monkeypatch.setattr(threads, "_look", lambda _: 4.0)
    monkeypatch.setattr(threads, "read_limit", lambda: 2.0)
    assert set_threads() == ThreadChoice(2, 2)


def test_a_number_in_the_settings_holds(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert set_threads(2) is None
    assert torch.get_num_threads() == 2


def test_what_the_environment_or_the_process_sets_is_left_alone(monkeypatch):
    monkeypatch.setattr(threads, "_look", lambda _: 1.0)
    torch.set_num_threads(3)
    assert set_threads() is None
    assert torch.get_num_threads() == 3
    torch.set_num_threads(4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert set_threads() is None
    assert torch.get_num_threads() == 4


def test_without_such_figures_torch_keeps_its_own_number(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "_STAT", tmp_path / "none")
    assert set_threads() is None
    assert torch.get_num_threads() == 4


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux says how busy its cores are")
def test_this_machine_can_be_looked_at():
    assert 0 <= threads._look(range(os.cpu_count() or 1)) <= (os.cpu_count() or 1) + 1


# --- cores -----------------------------------------------------------------------------------------------------------


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
    check_threads(number)
    assert bool(crowding(number)) is is_cautioned
    assert crowding(2 * MOST_PER_CORE + 1) == ""  # refused instead
