"""Hosts with copies of one workspace and one ledger in a database: one secret, one holder, one promise."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import psycopg
import pytest

from cli.commands import invoke
from curator.deployments import WORLDS
from curator.sequential import belief_of, world_of
from paclm import Workspace
from paclm.curator import custody
from paclm.curator.custody import holding_of, open_custody
from paclm.curator.master_key import MasterKeys
from paclm.curator.promises import claim_corpus, claim_half, is_corpus_promised
from paclm.curator.redacted import Redacted
from paclm.curator.rotation import rotate_key
from paclm.curator.sealed import SECRET_FILE, SealedFile, Sealing
from paclm.curator.secret import Secret
from paclm.errors import (
    CuratorError,
    LedgerFenced,
    LedgerHeld,
    LedgerUnwritable,
    LedgerWrongKey,
    PromiseConflict,
    WorkspaceError,
)
from paclm.ledger.address import name_of, promises_in, take_hold
from paclm.ledger.dp_log import DpLog
from paclm.ledger.recovery import replace_witness
from paclm.worlds.layout import dp_log_path
from paclm.worlds.registry import remember_workspace, sketch_texts
from paclm.worlds.settings import ledger_config

NOWHERE = "postgresql://127.0.0.1:1/nothing"


@pytest.fixture
def shared(database, monkeypatch):
    """One ledger and one key for all hosts."""
    monkeypatch.setenv("PACLM_LEDGER", database)
    monkeypatch.setenv("PACLM_KEY", "5a" * 32)
    return database


@pytest.fixture
def host(shared, make, monkeypatch, tmp_path):
    """Be on this host: a copy of the workspace, and notes of its own."""

    def host(name):
        monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / f"{name}-state"))
        return make(name)

    return host


@contextmanager
def another_host(*workspaces):
    program = [sys.executable, str(Path(__file__).parent / "host.py"), *(str(each.path) for each in workspaces)]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, env={**os.environ}) as process:
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def tell(process, line="open"):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def rows_of(url, kind):
    with psycopg.connect(url) as db:
        return db.execute("SELECT count(*) FROM paclm.events WHERE kind = %s", (kind,)).fetchone()[0]


def stale_soon(workspace):
    path = workspace.path / "paclm.toml"
    path.write_text(path.read_text() + "\n[ledger]\nstale_seconds = 2\n")
    return Workspace.open(workspace.path)


def test_each_host_opens_in_turn_with_the_same_secret_belief_and_account(host, shared, open_curator):
    states, before = [], None
    for name in ("one", "two", "one", "two"):
        workspace = host(name)
        with open_curator(workspace) as curator:
            states.append((world_of(curator), belief_of(curator).tobytes(), curator.account.tokens))
            curator.generate("the", 4)
            after = belief_of(curator).tobytes()
            copy = SealedFile(workspace.curator_path).read()
            assert list(copy) == [curator._custody.keys.id]
        if len(states) > 1:
            assert states[-1][:2] == (states[0][0], before)
        before = after
    assert [tokens for *_, tokens in states] == [0, 4, 8, 12]
    assert rows_of(shared, "secret-sealed") == 1


def test_hosts_that_race_at_first_use_draw_one_secret(host, shared):
    """Whoever comes second is refused, and then finds the secret of the first: two draws would be equal once in 8."""
    rounds = 4
    one, two = ([host(f"{name}-{number}") for number in range(rounds)] for name in ("one", "two"))
    with another_host(*one) as first, another_host(*two) as second:
        for number in range(rounds):
            tell(first)
            tell(second)
            found = [json.loads(process.stdout.readline()) for process in (first, second)]
            assert found[0]["world"] == found[1]["world"]
            assert rows_of(shared, "secret-sealed") == rows_of(shared, "opened") == 1
            copies = {(each.curator_path / SECRET_FILE).read_bytes() for each in (one[number], two[number])}
            assert len(copies) == 1
            with psycopg.connect(shared) as db:
                db.execute("DROP SCHEMA paclm CASCADE")


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_host_that_holds_another_secret_is_refused(host, open_curator, tokens):
    with open_curator(host("one")) as curator:
        if tokens:
            curator.generate("the", tokens)
        custody, world = curator._custody, world_of(curator)
    other = Secret(Redacted((world + 1) % WORLDS), WORLDS)
    workspace = host("two")
    sealing = Sealing.make(other, custody.keys, custody.digest, custody.ledger.ledger_id)
    workspace.curator_path.mkdir(mode=0o700, exist_ok=True)
    SealedFile(workspace.curator_path).write({custody.keys.id: sealing})
    with pytest.raises(CuratorError, match="another secret"):
        open_curator(workspace)
    open_curator(host("one")).close()


def test_a_host_whose_copy_belongs_to_a_ledger_that_is_gone_is_refused(host, shared, open_curator):
    open_curator(host("one")).close()
    with psycopg.connect(shared) as db:
        db.execute("DROP SCHEMA paclm CASCADE")
    with pytest.raises(CuratorError, match="its ledger is missing"):
        open_curator(host("one"))


def test_a_key_rotated_on_one_host_opens_on_the_other_with_its_older_copy(host, open_curator, monkeypatch):
    for name in ("one", "two"):
        with open_curator(host(name)) as curator:
            curator.generate("the", 2)
            world = world_of(curator)
    rotate_key(host("one"), Redacted(b"n" * 32))
    new = MasterKeys.derived(Redacted(b"n" * 32)).id
    monkeypatch.setenv("PACLM_KEY", b"n".hex() * 32)
    workspace = host("two")
    assert list(SealedFile(workspace.curator_path).read()) != [new]
    with open_curator(workspace) as curator:
        assert world_of(curator) == world
    assert list(SealedFile(workspace.curator_path).read()) == [new]


def test_while_a_holder_lives_everything_else_is_refused_and_works_once_it_is_dead(host, open_curator):
    held, workspace = stale_soon(host("one")), stale_soon(host("two"))
    with another_host(held) as process:
        tell(process, "hold")
        json.loads(process.stdout.readline())
        for attempt in (open_curator, rotate_new, claim_corpus, extend, generate):
            with pytest.raises(LedgerHeld, match=f"process {process.pid}"):
                attempt(workspace)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(LedgerHeld):  # not yet: it was seen a moment ago
            open_custody(workspace)
        deadline = time.monotonic() + 60
        while not opens(workspace):
            assert time.monotonic() < deadline
    rotate_new(workspace)


def opens(workspace):
    try:
        open_custody(workspace).ledger.close()
    except LedgerHeld:
        return False
    return True


def extend(workspace):
    invoke("ledger", "extend", workspace.path, "--yes")


def generate(workspace):
    invoke("generate", workspace.path, "--prompt", "the", "--max-tokens", "2")


def rotate_new(workspace):
    rotate_key(workspace, Redacted(b"n" * 32))


def events(workspace):
    return [event["kind"] for event in DpLog(dp_log_path(workspace.path)).events()]


def test_corpus_is_refused_where_another_host_released_half(host, open_curator):
    with open_curator(host("one")) as curator:
        workspace = host("two")
        with pytest.raises(LedgerHeld):
            claim_corpus(workspace)
        host("one")
        curator.generate("the", 2)
    workspace = host("two")
    with pytest.raises(PromiseConflict, match="half was served"):
        claim_corpus(workspace)
    assert (events(workspace), promises_in(workspace.ledger_address)) == ([], set())
    assert not is_corpus_promised(workspace)


def test_half_is_refused_where_another_host_served_corpus_before_and_after_its_ledger_is_made(
    host, shared, open_curator
):
    open_curator(host("three")).close()
    claim_corpus(host("one"))
    assert promises_in(shared) == {"served"}
    for name in ("two", "three"):
        workspace = host(name)
        with pytest.raises(PromiseConflict, match=r"corpus was served.*--mix-promises"):
            open_curator(workspace)
        custody = open_custody(workspace)  # also where the early look is skipped
        with pytest.raises(PromiseConflict):
            claim_half(workspace, epoch=custody.ledger.store.epoch)
        custody.ledger.close()
        assert is_corpus_promised(workspace)
    claim_corpus(host("two"))


def test_that_both_were_accepted_is_known_to_every_host(host, shared, open_curator):
    claim_corpus(host("one"))
    with pytest.warns(UserWarning, match="Nothing is promised"):
        open_curator(host("two"), mix_promises=True).close()
    assert promises_in(shared) == {"served", "mixed"}
    for name in ("one", "three"):
        assert not is_corpus_promised(host(name))
        assert "Nothing is promised" in claim_corpus(host(name))[0]


def test_a_corpus_whose_ledger_was_taken_over_meanwhile_is_not_recorded(host, shared):
    workspace = host("one")
    hold = take_hold(workspace.ledger_address, holding_of(workspace))
    newer = take_hold(workspace.ledger_address, holding_of(workspace, take_over=True))
    with pytest.raises(LedgerFenced):
        claim_corpus(workspace, epoch=hold.epoch)
    assert (events(workspace), promises_in(shared)) == ([], set())
    claim_corpus(workspace, epoch=newer.epoch)
    assert promises_in(shared) == {"served"}
    hold.release()
    newer.release()


@pytest.mark.parametrize("claim", [claim_half, claim_corpus])
def test_another_workspace_whose_database_cannot_be_asked_counts(make, tmp_path, monkeypatch, texts, claim):
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "state"))
    other, own = make("other").path, make("own")
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "id": "other"}))
    remember_workspace("other", other, sketch_texts(texts[:60]))
    claim(own)
    shutil.rmtree(tmp_path / "own")
    own = make("own")
    (other / "paclm.toml").write_text(f'[ledger]\nurl = "{NOWHERE}"\n')
    with pytest.raises(PromiseConflict, match="other"):
        claim(own)


def test_a_host_that_could_not_serve_takes_nothing_over(host, open_curator, monkeypatch, make):
    with open_curator(host("one")) as curator:
        curator.generate("the", 2)
        monkeypatch.setenv("PACLM_KEY", "6b" * 32)
        with pytest.raises(LedgerWrongKey, match="not taken over"):
            open_custody(host("two"), take_over=True)
        monkeypatch.setenv("PACLM_KEY", "5a" * 32)
        monkeypatch.setattr(custody, "worlds_digest", lambda workspace: "of other worlds")
        with pytest.raises(CuratorError):
            open_custody(host("three"), take_over=True)
        curator.generate("the", 2)  # still the holder


def test_an_extended_total_that_an_older_paclm_toml_lowers_is_named(host):
    one, other = host("one"), host("two")
    total = one.config.total
    with open_custody(one).ledger as ledger:
        ledger.extend(2 * total, confirmed_by="ada")
    opened = open_custody(Workspace.open(other.path))
    with opened.ledger:
        assert opened.ledger.settings.total == total
        assert "was lowered" in opened.cautions[0]
    again = open_custody(Workspace.open(other.path))
    with again.ledger:
        assert not again.cautions


def test_a_copy_without_the_variable_finds_the_same_ledger_or_none(host, shared, open_curator, monkeypatch, tmp_path):
    """Also one that lacks the copy of the secret, as where a crash came before it was written."""
    workspace = host("one")
    with open_curator(workspace) as curator:
        ledger = curator._custody.ledger.ledger_id
    copy = tmp_path / "copy"
    shutil.copytree(workspace.path, copy, ignore=shutil.ignore_patterns("secret.json", "*.lock"))
    monkeypatch.delenv("PACLM_LEDGER")
    password = urlsplit(shared).password
    assert password not in (copy / "paclm.toml").read_text()
    with pytest.raises(LedgerUnwritable, match="login"):
        open_curator(Workspace.open(copy))
    assert not list((copy / "curator").iterdir())
    monkeypatch.setenv("PGPASSWORD", password)
    with open_curator(Workspace.open(copy)) as curator:
        assert curator._custody.ledger.ledger_id == ledger


def test_a_copy_makes_no_second_ledger_where_the_variable_leads_elsewhere(
    host, shared, open_curator, postgres, monkeypatch, tmp_path
):
    workspace, copy, empty = host("one"), tmp_path / "copy", postgres.create_database()
    with open_curator(workspace):
        pass
    shutil.copytree(workspace.path, copy, ignore=shutil.ignore_patterns("secret.json", "*.lock"))
    monkeypatch.setenv("PACLM_LEDGER", empty)
    with pytest.raises(WorkspaceError, match="second budget"):
        open_curator(Workspace.open(copy))
    postgres.drop_database(empty)


@pytest.mark.parametrize("error", [None, PermissionError(13, "Permission denied")])
def test_the_address_is_kept_before_a_ledger_is_made(host, shared, monkeypatch, error):
    workspace, kept = host("one"), []

    def create(*arguments, **options):
        kept.append(ledger_config(workspace.path, by_environment=False).url)
        raise CuratorError("enough")

    monkeypatch.setattr(custody.Ledger, "create", create)
    if error:
        monkeypatch.setattr(custody, "write_settings", Mock(side_effect=error))
    with pytest.raises(WorkspaceError if error else CuratorError, match="second ledger" if error else "enough"):
        open_custody(workspace)
    assert [name_of(url) for url in kept] == ([] if error else [name_of(shared)])


def test_a_witness_in_another_database_of_the_same_server_is_named(host, postgres, tmp_path):
    witness = postgres.create_database()
    for place, cautions in ((tmp_path / "witness", 0), (witness, 1)):
        opened = open_custody(host("one"), None)
        with opened.ledger:
            assert not opened.cautions
        replace_witness(host("one").ledger_address, opened.keys.mac.reveal(), confirmed_by="ada", witness=place)
        opened = open_custody(host("one"), place)
        with opened.ledger:
            assert [len(opened.cautions), "one server" in str(opened.cautions)] == [cautions, bool(cautions)]
        replace_witness(host("one").ledger_address, opened.keys.mac.reveal(), confirmed_by="ada", witness=None)
    postgres.drop_database(witness)
