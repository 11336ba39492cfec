"""Torch gets no more threads than there are idle cores, unless somebody has said how many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paclm.engine import threads
from paclm.engine.threads import ThreadChoice, choose_threads, idle_cores, set_threads


def stat(*cpus: tuple[int, int], steal: int = 0) -> str:
    """A /proc/stat with (busy, idle) ticks per CPU."""
    lines = [f"cpu{number} {busy} 0 0 {idle} 0 0 0 {steal} 0 0" for number, (busy, idle) in enumerate(cpus)]
    return "\n".join(["cpu  99 0 99 99 0 0 0 0 0 0", *lines, "intr 123", "ctxt 5", "btime 1", ""])


@pytest.fixture(autouse=True)
def torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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


def test_idle_cores_are_counted_between_two_readings() -> None:
    before = stat((100, 100), (0, 500), (7, 7))
    after = stat((130, 100), (0, 530), (22, 22))
    assert idle_cores(before, after, {0, 1, 2}) == pytest.approx(0 + 1 + 0.5)
    assert idle_cores(before, after, {1}) == 1  # only those this process may run on


def test_waiting_for_a_disk_is_idle_and_stolen_time_is_not() -> None:
    assert idle_cores("cpu0 0 0 0 0 0 0 0 0 0 0", "cpu0 0 0 0 10 20 0 0 0 0 0", {0}) == 1
    assert idle_cores(stat((0, 0)), stat((0, 10), steal=30), {0}) == pytest.approx(0.25)


def test_time_at_a_disk_that_the_kernel_takes_back_is_no_less_than_none() -> None:
    assert idle_cores("cpu0 0 0 0 0 9 0 0 0 0 0", "cpu0 30 0 0 0 4 0 0 0 0 0", {0}) == 0


def test_guests_are_part_of_user_time_and_not_counted_twice() -> None:
    assert idle_cores("cpu0 0 0 0 0 0 0 0 0 0 0", "cpu0 10 0 0 10 0 0 0 0 10 0", {0}) == pytest.approx(0.5)


@pytest.mark.parametrize(("idle", "chosen"), [(0.0, 1), (0.4, 1), (1.4, 1), (1.6, 2), (3.9, 4), (9.0, 4)])
def test_threads_are_whole_idle_cores_and_at_least_one(idle: float, chosen: int) -> None:
    assert choose_threads(idle, 4) == chosen


def test_a_busy_machine_gives_fewer_threads_and_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr(threads, "_look", lambda _: looks.append(1.2) or 1.2)
    choice = set_threads()
    assert choice == ThreadChoice(1, 4)
    assert choice is not None
    assert choice.busy == 3
    assert torch.get_num_threads() == 1
    assert len(looks) == 3
    assert set_threads() == choice  # and torch's own number has changed since: by us
    assert len(looks) == 3


def test_one_idle_look_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([0.9, 3.8])
    monkeypatch.setattr(threads, "_look", lambda _: next(looks))
    assert set_threads() == ThreadChoice(4, 4)


def test_a_container_gets_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_look", lambda _: 4.0)
    monkeypatch.setattr(threads, "read_limit", lambda: 2.0)
    assert set_threads() == ThreadChoice(2, 2)


def test_a_number_in_the_settings_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert set_threads(2) is None
    assert torch.get_num_threads() == 2


def test_what_the_environment_or_the_process_sets_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_look", lambda _: 1.0)
    torch.set_num_threads(3)
    assert set_threads() is None
    assert torch.get_num_threads() == 3
    torch.set_num_threads(4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert set_threads() is None
    assert torch.get_num_threads() == 4


def test_without_such_figures_torch_keeps_its_own_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threads, "_STAT", tmp_path / "none")
    assert set_threads() is None
    assert torch.get_num_threads() == 4


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux says how busy its cores are")
def test_this_machine_can_be_looked_at() -> None:
    assert 0 <= threads._look(range(os.cpu_count() or 1)) <= (os.cpu_count() or 1) + 1
