"""Real kills: a process that dies by SIGKILL has never let more leave than it paid for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from curator.kill_driver import STREAMS
from paclm import Workspace


def drive(workspace: Workspace, kills: int, order: str, seed: int) -> dict[str, Any]:
    program = Path(__file__).parent / "kill_driver.py"
    done = subprocess.run(
        [sys.executable, str(program), str(workspace.path), str(kills), order, str(seed)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr[-800:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def check_report(report: dict[str, Any], kills: int) -> None:
    assert report["kills"] == kills
    assert report["left_tokens"] >= kills
    assert report["undercounts"] == 0
    assert report["worst_overcharge"] <= STREAMS  # tokens: at most one engine step a kill
    assert report["wrong_beliefs"] == 0
    assert report["spent_tokens"] >= report["left_tokens"]


def test_kills_at_random_instants_overcharge_one_step_at_most_and_never_undercharge(
    make: Callable[..., Workspace],
) -> None:
    check_report(drive(make(per_token="2^-24"), kills=6, order="right", seed=1), kills=6)


def test_the_driver_reports_undercounts_where_tokens_leave_before_the_commit(make: Callable[..., Workspace]) -> None:
    report = drive(make(per_token="2^-24"), kills=6, order="release-first", seed=2)
    assert report["undercounts"] > 0
    with pytest.raises(AssertionError):
        check_report(report, kills=6)
