"""Small workspaces with random adapters: real engine, real ledger, real files."""

import shutil

import pytest

from curator.deployments import ScriptedEngine, build_workspace, set_mechanism, without_notes
from paclm import Curator
from paclm.worlds.workspace import Workspace


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch):
    for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_KEY_COMMAND", "PACLM_WITNESS", "PACLM_LEDGER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_notes(own_state):
    with without_notes():
        yield


@pytest.fixture(params=["file", "database"])
def each_store(request, no_keys_around):
    """Keep the ledgers of this test in files, then in one database."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "database":
            patch.setenv("PACLM_LEDGER", request.getfixturevalue("database"))
        yield request.param


@pytest.fixture(scope="session")
def template(tmp_path_factory, texts, small_base):
    return build_workspace(tmp_path_factory.mktemp("template") / "clinic", texts[:60], small_base).path


@pytest.fixture(scope="session")
def engine(template):
    """One engine for all tests: it keeps nothing between sequences."""
    from paclm.engine.loading import open_engine

    return open_engine(Workspace.open(template), support_size=40)


@pytest.fixture
def scripted():
    return ScriptedEngine()


@pytest.fixture
def open_curator(scripted, small_tokenizer):
    """A curator over the scripted engine, unless the options name another."""

    def open_curator(workspace, **options):
        return Curator.open(workspace, **{"engine": scripted, "tokenizer": small_tokenizer, **options})

    return open_curator


@pytest.fixture
def make(tmp_path, template):
    """A fresh copy of the workspace with these settings in [mechanism]."""

    def make(name="clinic", **mechanism):
        target = tmp_path / name
        if not target.exists():
            shutil.copytree(template, target)
        settings = {"per_token": "2^-16", "total": "2^-4", "support_size": 40, **mechanism}
        set_mechanism(target, **settings)
        return Workspace.open(target)

    return make


@pytest.fixture
def used(make, open_curator):
    """A workspace from which a few private tokens have left."""
    workspace = make()
    with open_curator(workspace) as curator:
        curator.generate("the", 6)
    return workspace
