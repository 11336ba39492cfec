"""A small corpus and workspaces over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paclm.worlds.creation import Created, create_workspace
from paclm.worlds.fingerprints import Base, fingerprint_base
from paclm.worlds.records import Corpus, ReadOptions, SourceRow, collect_records

MakeWorkspace = Callable[..., Created]


@pytest.fixture
def corpus(texts: list[str]) -> Corpus:
    rows = (SourceRow(f"n:{i}", {"text": text, "patient": f"p{i // 2}"}) for i, text in enumerate(texts, start=1))
    return collect_records("notes", rows, ReadOptions(group_by="patient"))


@pytest.fixture
def base(small_base: Path) -> Base:
    return Base("small", small_base, fingerprint_base(small_base))


@pytest.fixture
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def make(tmp_path: Path, state_folder: Path, corpus: Corpus, base: Base, small_tokenizer: Any) -> MakeWorkspace:
    """Make a workspace in this test's folder; anything can be changed."""

    def make(name: str = "clinic", **changes: Any) -> Created:
        arguments = {
            "corpus": corpus,
            "base": base,
            "tokenizer": small_tokenizer,
            "num_worlds": 8,
            "group_by": "patient",
        }
        return create_workspace(tmp_path / name, **{**arguments, **changes})

    return make
