"""Mutants: the product broken on purpose, in one place each. The tests named beside a mutant have to fail on it.

`mutants.toml` lists them: what breaks, the file under src/paclm, the exact text to replace, its replacement, the tests.
That every text stands in its file exactly once is checked with every `make test`, so that the list stays current.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paclm"
MUTANTS = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["mutant"]
SOME_TESTS_FAILED = 1  # pytest's exit status; others mean that none ran


def test_every_mutant_replaces_one_text_and_names_tests_that_exist():
    for mutant in MUTANTS:
        assert (SOURCE / mutant["file"]).read_text().count(mutant["old"]) == 1, mutant
        for name in mutant["tests"]:
            path, _, test = name.partition("::")
            assert f"def {test}" in (ROOT / "tests" / path).read_text(), mutant
    assert len({mutant["breaks"] for mutant in MUTANTS}) == len(MUTANTS)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("src") / "paclm"
    large = {str(SOURCE): {"data"}}  # that of the base model; other rooms have small ones
    shutil.copytree(SOURCE, folder, ignore=lambda place, names: {"__pycache__"} | large.get(str(place), set()))
    (folder / "data").symlink_to(SOURCE / "data")
    return folder


@pytest.mark.stress
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["breaks"])
def test_a_mutant_is_caught(mutant, copy):
    path = copy / mutant["file"]
    sound = path.read_text()
    path.write_text(sound.replace(mutant["old"], mutant["new"]))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            [*command, *(f"tests/{name}" for name in mutant["tests"])],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    finally:
        path.write_text(sound)
    assert ended.returncode == SOME_TESTS_FAILED, f"{mutant['breaks']} lives\n{ended.stdout[-2000:]}"
