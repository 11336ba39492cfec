"""Run a driver in a process of its own, and what the report of the kill driver must say."""

import json
import os
import subprocess
import sys
from pathlib import Path

from curator.kill_driver import STREAMS


def run_driver(name, *arguments):
    """What the driver of this name, in a process of its own, reports."""
    done = subprocess.run(
        [sys.executable, *map(str, [Path(__file__).parent / name, *arguments])],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr[-800:]
    return json.loads(done.stdout.splitlines()[-1])


def drive(workspace, kills, order, seed):
    return run_driver("kill_driver.py", workspace.path, kills, order, seed)


def check_report(report, kills):
    assert report["kills"] == kills
    assert report["left_tokens"] >= kills
    assert report["undercounts"] == 0
    assert report["worst_overcharge"] <= STREAMS  # tokens: at most one engine step a kill
    assert report["wrong_beliefs"] == 0
    assert report["spent_tokens"] >= report["left_tokens"]
