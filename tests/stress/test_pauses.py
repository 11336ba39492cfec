"""The tests of many requests at once, with threads that stop where they meet; see `pauses`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stress

STRESS = Path(__file__).parent
SERVER = STRESS.parent / "server"


def run(seed, *files):
    environment = {**os.environ, "PACLM_PAUSES": str(seed)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "stress.pauses", *map(str, files)]
    return subprocess.run(command, cwd=STRESS.parents[1], env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("seed", range(3))
def test_many_requests_at_once_fare_no_worse_when_threads_stop_anywhere(seed):
    ended = run(seed, SERVER / "test_service.py", SERVER / "test_attacks.py")
    assert ended.returncode == 0, ended.stdout


def test_pauses_find_a_race():
    ended = run(0, STRESS / "race.py")
    assert ended.returncode == 1, ended.stdout
    assert "assert len(engine.orders[2]) == 1" in ended.stdout
