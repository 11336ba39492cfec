"""A trained workspace with a budget, for the commands that serve from one."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from cli.commands import SECRET_WORDS, Desk, Outcome, Paclm
from curator.deployments import build_workspace, set_mechanism
from paclm.cli import main as entry


@pytest.fixture(autouse=True)
def no_keys_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_WITNESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, texts: list[str], small_base: Path) -> Path:
    path: Path = build_workspace(tmp_path_factory.mktemp("cli") / "clinic", texts[:60], small_base).path
    return path


@pytest.fixture
def clinic(tmp_path: Path, template: Path) -> Path:
    path = tmp_path / "clinic"
    shutil.copytree(template, path)
    set_mechanism(path, per_token="2^-16", total="2^-4", support_size=40)
    return path


@pytest.fixture
def desk(tmp_path: Path, clinic: Path, small_base: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_base, tmp_path / "model")
    rows = [json.dumps({"text": f"{SECRET_WORDS} {text}", "patient": number}) for number, text in enumerate(texts)]
    (tmp_path / "notes.jsonl").write_text("\n".join(rows) + "\n")
    return Desk(tmp_path, small_base)


@pytest.fixture
def paclm(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Paclm:
    """Run a command through the real entry point, in this process."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # main sets it; this keeps it from staying set

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["paclm", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            entry.main()
        return Outcome(int(left.value.code or 0), *capfd.readouterr())

    return run
