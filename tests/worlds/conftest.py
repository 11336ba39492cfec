"""A small corpus and workspaces over it."""

import pytest

from paclm.worlds.creation import create_workspace
from paclm.worlds.fingerprints import Base, fingerprint_base
from paclm.worlds.records import ReadOptions, SourceRow, collect_records


@pytest.fixture
def corpus(texts):
    rows = (SourceRow(f"n:{i}", {"text": text, "patient": f"p{i // 2}"}) for i, text in enumerate(texts, start=1))
    return collect_records("notes", rows, ReadOptions(group_by="patient"))


@pytest.fixture
def base(small_base):
    return Base("small", small_base, fingerprint_base(small_base))


@pytest.fixture
def state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def make(tmp_path, state_folder, corpus, base, small_tokenizer):
    """Make a workspace in this test's folder; anything can be changed."""

    def make(name="clinic", **changes):
        arguments = {
            "corpus": corpus,
            "base": base,
            "tokenizer": small_tokenizer,
            "num_worlds": 8,
            "group_by": "patient",
        }
        return create_workspace(tmp_path / name, **{**arguments, **changes})

    return make
