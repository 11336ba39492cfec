"""A trained workspace with a budget, for the commands that serve from one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from curator.deployments import build_workspace, set_mechanism


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, texts: list[str], small_base: Path) -> Path:
    path: Path = build_workspace(tmp_path_factory.mktemp("cli") / "clinic", texts[:60], small_base).path
    return path


@pytest.fixture
def clinic(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_WITNESS"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "clinic"
    shutil.copytree(template, path)
    set_mechanism(path, per_token="2^-16", total="2^-4", support_size=40)
    return path
