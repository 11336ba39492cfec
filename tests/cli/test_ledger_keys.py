"""Ledgers without their workspace, keys from files and the environment, and `paclm ledger rotate-key`."""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands import invoke
from cli.ledgers import figures, run
from curator.deployments import ScriptedEngine
from paclm import Curator
from paclm.curator.master_key import MasterKeys, load_keys, read_key
from paclm.errors import (
    CuratorError,
    InvalidInput,
    LedgerBusy,
    LedgerError,
    LedgerMissing,
    LedgerRolledBack,
    LedgerWrongKey,
    WitnessMissing,
)
from paclm.ledger.events import key_name

OPERATIONS = Path(__file__).parent.parent.parent / "docs" / "guide" / "operations.md"


def open_curator(clinic, tokenizer, **options):
    return Curator.open(clinic, engine=ScriptedEngine(), tokenizer=tokenizer, **options)


@pytest.fixture
def used(clinic, small_tokenizer):
    with open_curator(clinic, small_tokenizer) as curator:
        curator.generate("the", 8)
    return clinic


@pytest.fixture
def backup(used, tmp_path):
    """A backup alone in a folder, as for a restore drill."""
    (tmp_path / "drill").mkdir()
    run("backup", used, tmp_path / "drill" / "monday.sqlite")
    return tmp_path / "drill" / "monday.sqlite"


def test_a_ledger_that_was_rolled_back_is_not_intact(used, small_tokenizer, tmp_path):
    shutil.copy(used / "curator" / "ledger.sqlite", tmp_path / "monday")
    with open_curator(used, small_tokenizer) as curator:
        curator.generate("the", 8)
    shutil.copy(tmp_path / "monday", used / "curator" / "ledger.sqlite")
    with pytest.raises(LedgerRolledBack):
        open_curator(used, small_tokenizer)
    assert "NOT INTACT" in run("show", used).output
    assert figures("show", used)["intact"] is False
    assert run("verify", used).exit_code == 1


def test_a_ledger_from_before_a_rotation_is_not_intact(used, small_tokenizer, tmp_path):
    """An attacker who knows the old key could continue from there, and remove the lock, which is not signed."""
    shutil.copy(used / "curator" / "ledger.sqlite", tmp_path / "before")
    run("rotate-key", used)
    assert run("verify", used).exit_code == 0
    shutil.copy(tmp_path / "before", used / "curator" / "ledger.sqlite")
    (used / "curator" / "ledger.lock").unlink()
    with pytest.raises(LedgerError):
        open_curator(used, small_tokenizer)
    verified = run("verify", used)
    assert verified.exit_code == 1
    assert key_name(load_keys(used / "curator", may_create=False).mac.reveal()) in verified.output


@pytest.fixture
def before_rotation(used, tmp_path):
    """A copy from before a rotation, alone in a folder, and both keys as options, the old one first."""
    alone = tmp_path / "alone" / "ledger.sqlite"
    alone.parent.mkdir()
    shutil.copy(used / "curator" / "ledger.sqlite", alone)
    shutil.copy(used / "curator" / "key", tmp_path / "old.key")
    run("rotate-key", used)
    return alone, ["--key-file", str(tmp_path / "old.key"), "--key-file", str(used / "curator" / "key")]


@pytest.mark.parametrize("order", [1, -1])
def test_the_sealed_secret_shows_which_of_several_keys_is_the_newest(used, before_rotation, order):
    alone, keys = before_rotation
    keys = keys if order == 1 else [*keys[2:], *keys[:2]]
    shutil.copy(used / "curator" / "secret.json", alone.parent)
    assert run("verify", alone, *keys).exit_code == 1
    for place in (used, used / "curator" / "ledger.sqlite"):
        verified = run("verify", place, *keys)
        assert (verified.exit_code, "Warning" in verified.output) == (0, False)


def test_a_key_that_signed_nothing_is_named_if_nothing_shows_which_is_the_newest(used, before_rotation):
    alone, keys = before_rotation
    new, old = (key_name(MasterKeys.derived(read_key(Path(path))).mac.reveal()) for path in (keys[3], keys[1]))
    verified = run("verify", alone, *keys)
    assert verified.exit_code == 0
    assert all(word in verified.output for word in ("Warning", new, old))
    assert figures("verify", alone, *keys)["unplaced_keys"] == [new]
    for options in (keys[:2], ["--without-key"]):
        assert "Warning" not in run("verify", alone, *options).output
    shutil.copy(used / "curator" / "ledger.sqlite", alone)  # with both keys in it the order is that of its rows
    assert "Warning" not in run("verify", alone, *keys).output


def test_a_backup_is_read_and_verified_by_itself(used, backup, tmp_path, monkeypatch):
    assert figures("show", backup)["private_tokens"] == 8
    with pytest.raises(CuratorError, match=r"--key-file FILE.*PACLM_KEY_FILE.*--without-key"):
        run("verify", backup)
    assert not figures("verify", backup, "--without-key")["macs_checked"]
    key = shutil.move(used / "curator" / "key", tmp_path / "key")
    for place in (backup, used):
        found = figures("verify", place, "--key-file", key)
        assert (found["macs_checked"], found["is_copy"]) == (True, place == backup)
    monkeypatch.setenv("PACLM_KEY_FILE", str(key))
    assert figures("verify", backup)["macs_checked"]


def test_a_backup_holds_the_keys_before_it_and_secret_json_those_after_it(used, backup, tmp_path):
    old, newer = tmp_path / "old", tmp_path / "drill" / "tuesday.sqlite"
    shutil.copy(used / "curator" / "key", old)
    run("rotate-key", used)
    run("backup", used, newer)
    new = used / "curator" / "key"
    assert run("verify", newer, "--key-file", new).exit_code == 0
    with pytest.raises(LedgerWrongKey, match="not checked"):  # signed with a key that this one does not open
        run("verify", backup, "--key-file", new)
    for order in ((new, old), (old, new)):
        assert run("verify", newer, "--key-file", order[0], "--key-file", order[1]).exit_code == 0
    shutil.copy(used / "curator" / "secret.json", newer.parent)
    assert run("verify", newer, "--key-file", new).exit_code == 0
    assert run("verify", backup, "--key-file", new).exit_code == 0  # from before, under today's key


def test_the_restore_drill_of_the_documentation_works(used):
    """Every command of the page, as written; only the folder of the backups is elsewhere."""
    _, _, section = OPERATIONS.read_text().partition("Try a restore before you need one")
    commands = re.search(r"```console\n(.*?)```", section, re.DOTALL)
    script = re.sub(r"^\$ ", "", commands[1], flags=re.MULTILINE).replace("/backup", "./backup")
    here = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=used.parent, env=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Intact: 10 rows (hashes, sums and MACs)" in done.stdout
    assert "backup copy" in done.stdout


def test_a_fresh_key_replaces_the_one_in_the_workspace_and_has_one_name(used, small_tokenizer, tmp_path):
    old = shutil.copy(used / "curator" / "key", tmp_path / "old.key")
    before = load_keys(used / "curator", may_create=False).name
    shown = run("rotate-key", used).output
    after = load_keys(used / "curator", may_create=False).name
    assert after != before
    assert after in shown
    assert f"{after} signs from here on, not {before}" in " ".join(run("explain", used).output.split())
    with pytest.raises(LedgerWrongKey, match=f"signed with the key {after}; the keys given are {before}"):
        run("verify", used, "--key-file", old)
    with open_curator(used, small_tokenizer) as curator:
        assert curator.account.tokens == 8
    assert figures("verify", used)["intact"]
    with pytest.raises(InvalidInput, match="--new-key-file"):
        run("rotate-key", used, "--new-key-file", used.parent / "new.key")


def test_a_workspace_that_never_served_has_no_key_to_replace_and_commits_to_nothing(clinic):
    before = sorted(clinic.rglob("*"))
    with pytest.raises(LedgerMissing, match="PACLM_KEY_FILE"):
        run("rotate-key", clinic)
    assert sorted(clinic.rglob("*")) == before


def test_a_key_that_the_operator_keeps_is_replaced_by_one_that_the_operator_names(
    used, tmp_path, small_tokenizer, monkeypatch
):
    old, new = tmp_path / "old.key", tmp_path / "new.key"
    shutil.move(used / "curator" / "key", old)
    monkeypatch.setenv("PACLM_KEY_FILE", str(old))
    with pytest.raises(InvalidInput, match=r"PACLM_KEY_FILE.*--new-key-file FILE"):
        run("rotate-key", used)
    with pytest.raises(CuratorError):  # it is in force already
        run("rotate-key", used, "--new-key-file", old)
    assert f"PACLM_KEY_FILE to {new}" in run("rotate-key", used, "--new-key-file", new).output
    assert new.stat().st_mode & 0o777 == 0o600
    assert not (used / "curator" / "key").exists()
    monkeypatch.setenv("PACLM_KEY_FILE", str(new))
    with open_curator(used, small_tokenizer) as curator:
        assert curator.account.tokens == 8
    third = "ab" * 32
    (tmp_path / "third.key").write_text(third)
    (tmp_path / "third.key").chmod(0o600)
    monkeypatch.setenv("PACLM_KEY", new.read_text())
    assert "PACLM_KEY to the content of" in run("rotate-key", used, "--new-key-file", tmp_path / "third.key").output
    monkeypatch.setenv("PACLM_KEY", third)
    open_curator(used, small_tokenizer).close()


def test_a_key_that_a_program_prints_is_asked_for_once_by_each_command(used, tmp_path, small_tokenizer, monkeypatch):
    store, runs, new = tmp_path / "store", tmp_path / "runs", tmp_path / "new.key"
    shutil.move(used / "curator" / "key", store)
    monkeypatch.setenv("PACLM_KEY_COMMAND", f"sh -c 'echo run >>{runs}; cat {store}'")
    with pytest.raises(InvalidInput, match=r"PACLM_KEY_COMMAND.*--new-key-file FILE"):
        run("rotate-key", used)
    assert not runs.exists()
    said = run("rotate-key", used, "--new-key-file", new).output
    assert f"Store the content of {new} where PACLM_KEY_COMMAND reads" in said
    assert new.read_text().strip() not in said
    with pytest.raises(LedgerError):  # the store still has the old one
        open_curator(used, small_tokenizer)
    shutil.copy(new, store)
    runs.unlink()
    commands = (
        ("verify", used),
        ("replace-witness", used, tmp_path / "witness", "--yes"),
        ("adopt", used, "--witness", tmp_path / "witness"),
    )
    for count, command in enumerate(commands, 1):
        assert run(*command).exit_code == 0
        assert len(runs.read_text().splitlines()) == count
    assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0
    assert not (used / "curator" / "key").exists()


def test_keys_are_rotated_with_the_witness_and_only_while_nothing_serves(
    clinic, tmp_path, small_tokenizer, monkeypatch
):
    witness = tmp_path / "witness"
    with open_curator(clinic, small_tokenizer, witness=witness) as curator:
        curator.generate("the", 8)
        monkeypatch.setenv("PACLM_WITNESS", str(witness))
        with pytest.raises(LedgerBusy):
            run("rotate-key", clinic)
    run("rotate-key", clinic)
    monkeypatch.delenv("PACLM_WITNESS")
    with pytest.raises(WitnessMissing, match="--witness"):
        run("rotate-key", clinic)
    run("rotate-key", clinic, "--witness", witness)
    open_curator(clinic, small_tokenizer, witness=witness).close()


def test_generate_takes_the_witness_by_an_option_too(clinic, tmp_path):
    command = ["generate", clinic, "--prompt", "the", "--max-tokens", "2"]
    assert invoke(*command, "--witness", tmp_path / "witness").exit_code == 0
    assert (tmp_path / "witness").is_file()
    with pytest.raises(WitnessMissing):
        invoke(*command)
