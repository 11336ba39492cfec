"""Run the kill driver in a process of its own, and what its report must say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
