"""A workspace that commit adfd882 made and charged still opens, verifies and serves."""

import tarfile
from pathlib import Path

import pytest

from curator.sequential import world_of
from paclm.curator.preflight import worlds_digest
from paclm.curator.sealed import decode
from paclm.engine.adapters import AdapterStack
from paclm.errors import LedgerRolledBack
from paclm.ledger.verify import sealed_secret, verify
from paclm.worlds.workspace import Workspace

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "workspace-adfd882" / "workspace.tar.gz"
TOKENS, UNITS, HEAD = 15, 11 * 2**44 + 4 * 2**43, 20


@pytest.fixture
def older(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="tar")
    return tmp_path / "workspace"


def test_its_worlds_have_the_digest_that_its_ledger_is_bound_to(older):
    digest = worlds_digest(Workspace.open(older, verify_in_full=True))
    assert digest == verify(older / "curator" / "ledger.sqlite").contents.opened.workspace
    stack = AdapterStack.load(older / "adapters" / "worlds.safetensors")
    assert (stack.spec.top, stack.trunk) == (None, 0), "adapters in all layers"


def test_its_ledger_verifies(older):
    report = verify(older / "curator" / "ledger.sqlite")
    assert report.intact, report.problem
    assert (report.num_events, len(report.signers)) == (HEAD, 2)
    assert (report.contents.state.tokens, report.contents.state.spent_units) == (TOKENS, UNITS)


def test_it_serves_on_from_the_same_account_and_belief(older, open_curator):
    for served in (3, 6):
        with open_curator(Workspace.open(older), witness=older.parent / "witness") as curator:
            assert curator.generate("the", 3).private_tokens == 3
            assert curator.account.tokens == TOKENS + served
            assert curator.account.spent_units == UNITS + served * 2**43
    assert verify(older / "curator" / "ledger.sqlite").intact


def test_its_secret_is_taken_into_the_ledger_once(older, open_curator):
    file, ledger = older / "curator" / "secret.json", older / "curator" / "ledger.sqlite"
    secret = file.read_bytes()
    worlds = set()
    for _ in range(2):
        with open_curator(Workspace.open(older), witness=older.parent / "witness") as curator:
            worlds.add(world_of(curator))
            assert curator._custody.ledger.head.seq == HEAD + 1
    assert len(worlds) == 1
    assert list(decode(sealed_secret(ledger), "")) == list(decode(secret, ""))
    file.unlink()
    with open_curator(Workspace.open(older), witness=older.parent / "witness") as curator:
        assert {world_of(curator)} == worlds


@pytest.mark.parametrize("witness", ["witness", "before.witness"], ids=["by its witness", "by its lock note"])
def test_a_rollback_of_its_files_is_noticed(older, open_curator, witness):
    ledger = older / "curator" / "ledger.sqlite"
    ledger.write_bytes((older.parent / "before.sqlite").read_bytes())
    with pytest.raises(LedgerRolledBack, match=rf"row {HEAD - 5}.*row {HEAD}"):
        open_curator(Workspace.open(older), witness=older.parent / witness)
