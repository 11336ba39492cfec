"""More threads than cores: a few with a caution, thousands not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paclm.engine import cores
from paclm.engine.cores import MOST_PER_CORE, check_threads, crowding, read_limit, usable_cores
from paclm.engine.threads import set_threads
from paclm.errors import InvalidInput


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)


@pytest.mark.parametrize(("written", "limit"), [("200000 100000\n", 2.0), ("max 100000\n", float("inf"))])
def test_the_limit_of_a_container_is_read(tmp_path: Path, written: str, limit: float) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(written)
    assert read_limit(path) == limit


def test_where_there_is_no_container_there_is_no_limit(tmp_path: Path) -> None:
    assert read_limit(tmp_path / "none") == float("inf")


@pytest.mark.parametrize(("limit", "usable"), [(float("inf"), 8), (2.5, 3), (0.25, 1), (64.0, 8)])
def test_cores_are_those_of_the_process_and_of_its_container(
    monkeypatch: pytest.MonkeyPatch, limit: float, usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "read_limit", lambda: limit)
    assert usable_cores() == usable


def test_where_a_process_is_not_told_its_cores_all_of_the_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(cores, "read_limit", lambda: float("inf"))
    assert usable_cores() == 6


@pytest.mark.usefixtures("two_cores")
def test_thousands_of_threads_are_refused_before_torch_has_them() -> None:
    before = torch.get_num_threads()
    with pytest.raises(InvalidInput, match=r"threads = 5000 in \[runtime\].* 2 cores.*Set 2, or 0"):
        set_threads(5000)
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(("threads", "is_cautioned"), [(0, False), (2, False), (3, True), (2 * MOST_PER_CORE, True)])
def test_somewhat_more_threads_than_cores_bring_a_caution_and_work(threads: int, is_cautioned: bool) -> None:
    check_threads(threads)
    assert bool(crowding(threads)) is is_cautioned


@pytest.mark.usefixtures("two_cores")
def test_what_is_refused_is_not_cautioned_about_first() -> None:
    assert crowding(2 * MOST_PER_CORE + 1) == ""
