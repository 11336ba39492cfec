"""A trained workspace with a budget, for the commands that serve from one."""

import json
import shutil
import sys

import pytest

from cli.commands import SECRET_WORDS, Desk, Outcome
from cli.ledgers import make_used_workspace
from curator.deployments import build_workspace, set_mechanism
from paclm.cli import main as entry


@pytest.fixture(autouse=True)
def no_keys_of_the_user(monkeypatch):
    for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_KEY_COMMAND", "PACLM_WITNESS", "PACLM_LEDGER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["sqlite", "postgres"])
def used(request, tmp_path, monkeypatch):
    """As much of a workspace as `paclm ledger` needs, with a ledger in use: in a file, then in a database."""
    if request.param == "postgres":
        monkeypatch.setenv("PACLM_LEDGER", request.getfixturevalue("database"))
    return make_used_workspace(tmp_path / "clinic")


@pytest.fixture(scope="session")
def template(tmp_path_factory, texts, small_base):
    return build_workspace(tmp_path_factory.mktemp("cli") / "clinic", texts[:60], small_base).path


@pytest.fixture
def clinic(tmp_path, template):
    path = tmp_path / "clinic"
    shutil.copytree(template, path)
    set_mechanism(path, per_token="2^-16", total="2^-4", support_size=40)
    return path


@pytest.fixture
def desk(tmp_path, clinic, small_base, texts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_base, tmp_path / "model")
    rows = [json.dumps({"text": f"{SECRET_WORDS} {text}", "patient": number}) for number, text in enumerate(texts)]
    (tmp_path / "notes.jsonl").write_text("\n".join(rows) + "\n")
    return Desk(tmp_path, small_base)


@pytest.fixture
def paclm(monkeypatch, capfd):
    """Run a command through the real entry point, in this process."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # main sets it; this keeps it from staying set

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["paclm", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            entry.main()
        return Outcome(int(left.value.code or 0), *capfd.readouterr())

    return run
