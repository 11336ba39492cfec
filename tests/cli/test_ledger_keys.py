"""Ledgers without their workspace, keys from wherever they are, and `paclm ledger rotate-key`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.commands import invoke
from curator.deployments import ScriptedEngine
from paclm import Curator
from paclm.cli.main import app
from paclm.curator.master_key import MasterKeys, load_keys, read_key
from paclm.errors import (
    CuratorError,
    InvalidInput,
    LedgerBusy,
    LedgerError,
    LedgerMissing,
    LedgerRolledBack,
    WitnessMissing,
)
from paclm.ledger.events import key_name

OPERATIONS = Path(__file__).parent.parent.parent / "docs" / "guide" / "operations.md"


run = partial(invoke, "ledger")


def open_curator(clinic: Path, tokenizer: Any, **options: Any) -> Curator:
    return Curator.open(clinic, engine=ScriptedEngine(), tokenizer=tokenizer, **options)


@pytest.fixture
def used(clinic: Path, small_tokenizer: Any) -> Path:
    with open_curator(clinic, small_tokenizer) as curator:
        curator.generate("the", 8)
    return clinic


@pytest.fixture
def backup(used: Path, tmp_path: Path) -> Path:
    """A backup alone in a folder, as somebody has it who tries a restore."""
    (tmp_path / "drill").mkdir()
    run("backup", used, tmp_path / "drill" / "monday.sqlite")
    return tmp_path / "drill" / "monday.sqlite"


def test_a_ledger_that_was_put_back_is_not_called_intact(used: Path, small_tokenizer: Any, tmp_path: Path) -> None:
    shutil.copy(used / "curator" / "ledger.sqlite", tmp_path / "monday")
    with open_curator(used, small_tokenizer) as curator:
        curator.generate("the", 8)
    shutil.copy(tmp_path / "monday", used / "curator" / "ledger.sqlite")
    with pytest.raises(LedgerRolledBack, match="rolled back"):
        open_curator(used, small_tokenizer)
    assert "NOT INTACT" in run("show", used).output
    assert json.loads(run("show", used, "--json").output)["intact"] is False
    verified = run("verify", used)
    assert verified.exit_code == 1
    assert "rolled" in verified.output


def test_a_ledger_from_before_an_exchange_of_keys_is_not_called_intact(
    used: Path, small_tokenizer: Any, tmp_path: Path
) -> None:
    """Who knows the old key can go on from there; the lock's memory, which is not signed, they can remove."""
    shutil.copy(used / "curator" / "ledger.sqlite", tmp_path / "before")
    run("rotate-key", used)
    assert run("verify", used).exit_code == 0
    shutil.copy(tmp_path / "before", used / "curator" / "ledger.sqlite")
    (used / "curator" / "ledger.lock").unlink()
    with pytest.raises(LedgerError, match="signed with an old key"):
        open_curator(used, small_tokenizer)
    verified = run("verify", used)
    assert verified.exit_code == 1
    assert "rotated" in verified.output


@pytest.fixture
def before_exchange(used: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A copy from before an exchange of keys, alone in a folder, and both keys as options, the old one first."""
    alone = tmp_path / "alone" / "ledger.sqlite"
    alone.parent.mkdir()
    shutil.copy(used / "curator" / "ledger.sqlite", alone)
    shutil.copy(used / "curator" / "key", tmp_path / "old.key")
    run("rotate-key", used)
    return alone, ["--key-file", str(tmp_path / "old.key"), "--key-file", str(used / "curator" / "key")]


@pytest.mark.parametrize("order", [1, -1])
def test_the_sealed_secret_says_which_of_several_keys_is_the_newest(
    used: Path, before_exchange: tuple[Path, list[str]], order: int
) -> None:
    alone, keys = before_exchange
    keys = keys if order == 1 else [*keys[2:], *keys[:2]]
    shutil.copy(used / "curator" / "secret.json", alone.parent)
    verified = run("verify", alone, *keys)
    assert verified.exit_code == 1
    assert "rotated" in verified.output
    for place in (used, used / "curator" / "ledger.sqlite"):
        verified = run("verify", place, *keys)
        assert verified.exit_code == 0
        assert "Caution" not in verified.output


def test_a_key_that_signed_nothing_is_named_where_nothing_says_which_is_the_newest(
    used: Path, before_exchange: tuple[Path, list[str]]
) -> None:
    alone, keys = before_exchange
    verified = run("verify", alone, *keys)
    assert verified.exit_code == 0
    assert "Caution" in verified.output
    new, old = (key_name(load_keys_from(path).mac.reveal()) for path in (keys[3], keys[1]))
    assert f"the key {new} signed no row here" in verified.output
    assert f"If it replaced {old}" in verified.output
    assert json.loads(run("verify", alone, *keys, "--json").output)["unplaced_keys"] == [new]
    for options in (keys[:2], ["--without-key"]):
        assert "Caution" not in run("verify", alone, *options).output
    shutil.copy(used / "curator" / "ledger.sqlite", alone)  # with both keys in it the order is that of its rows
    assert "Caution" not in run("verify", alone, *keys).output


def load_keys_from(path: str) -> MasterKeys:
    return MasterKeys.derived(read_key(Path(path)))


def test_a_backup_is_read_and_verified_by_itself(
    used: Path, backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(run("show", backup, "--json").output)["private_tokens"] == 8
    with pytest.raises(CuratorError, match=r"no key was named.*--key-file FILE or PACLM_KEY_FILE.*--without-key"):
        run("verify", backup)
    assert "without the key no MACs" in run("verify", backup, "--without-key").output
    key = shutil.move(used / "curator" / "key", tmp_path / "key")
    shown = run("verify", backup, "--key-file", key).output
    assert "hashes, sums and MACs" in shown
    assert "This is a backup copy" in shown
    assert json.loads(run("verify", used, "--key-file", key, "--json").output)["macs_checked"]
    monkeypatch.setenv("PACLM_KEY_FILE", str(key))
    assert json.loads(run("verify", backup, "--json").output)["macs_checked"]


def test_a_backup_under_several_keys_needs_them_all_or_the_sealed_secret(
    used: Path, backup: Path, tmp_path: Path
) -> None:
    old, newer = tmp_path / "old", tmp_path / "drill" / "tuesday.sqlite"
    shutil.copy(used / "curator" / "key", old)
    run("rotate-key", used)
    run("backup", used, newer)
    new = used / "curator" / "key"
    assert run("verify", newer, "--key-file", new).exit_code == 1  # the rows before the exchange were not checked
    for order in ((new, old), (old, new)):
        assert run("verify", newer, "--key-file", order[0], "--key-file", order[1]).exit_code == 0
    shutil.copy(used / "curator" / "secret.json", newer.parent)
    assert run("verify", newer, "--key-file", new).exit_code == 0
    assert run("verify", backup, "--key-file", new).exit_code == 0  # from before, under the key of today


def test_the_restore_drill_of_the_documentation_works(used: Path) -> None:
    """Every command of the page, as written; only the folder of the backups is elsewhere."""
    _, _, section = OPERATIONS.read_text().partition("Try a restore before you need one")
    commands = re.search(r"```console\n(.*?)```", section, re.DOTALL)
    assert commands is not None
    script = re.sub(r"^\$ ", "", commands[1], flags=re.MULTILINE).replace("/backup", "./backup")
    here = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=used.parent, env=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Intact: 9 rows (hashes, sums and MACs)" in done.stdout
    assert "This is a backup copy" in done.stdout


def test_a_fresh_key_replaces_the_one_in_the_workspace(used: Path, small_tokenizer: Any) -> None:
    before = load_keys(used / "curator", may_create=False).id
    shown = run("rotate-key", used).output
    after = load_keys(used / "curator", may_create=False).id
    assert after != before
    assert f"The key {after} is in force" in shown
    with open_curator(used, small_tokenizer) as curator:
        assert curator.account.tokens == 8
    assert json.loads(run("verify", used, "--json").output)["intact"]
    with pytest.raises(InvalidInput, match="leave --new-key-file out"):
        run("rotate-key", used, "--new-key-file", used.parent / "new.key")


def test_a_workspace_that_never_served_has_no_key_to_replace_and_commits_to_nothing(clinic: Path) -> None:
    before = sorted(clinic.rglob("*"))
    with pytest.raises(LedgerMissing, match="served nothing yet"):
        run("rotate-key", clinic)
    assert sorted(clinic.rglob("*")) == before


def test_a_key_that_the_operator_keeps_is_replaced_by_one_that_the_operator_names(
    used: Path, tmp_path: Path, small_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.key", tmp_path / "new.key"
    shutil.move(used / "curator" / "key", old)
    monkeypatch.setenv("PACLM_KEY_FILE", str(old))
    with pytest.raises(InvalidInput, match=r"comes from PACLM_KEY_FILE.*--new-key-file FILE"):
        run("rotate-key", used)
    with pytest.raises(CuratorError, match="is the one in force"):
        run("rotate-key", used, "--new-key-file", old)
    assert f"PACLM_KEY_FILE must name the file: {new}" in run("rotate-key", used, "--new-key-file", new).output
    assert new.stat().st_mode & 0o777 == 0o600
    assert not (used / "curator" / "key").exists()
    monkeypatch.setenv("PACLM_KEY_FILE", str(new))
    with open_curator(used, small_tokenizer) as curator:
        assert curator.account.tokens == 8
    third = "ab" * 32
    (tmp_path / "third.key").write_text(third)
    (tmp_path / "third.key").chmod(0o600)
    monkeypatch.setenv("PACLM_KEY", new.read_text())
    assert "PACLM_KEY must name its content" in run("rotate-key", used, "--new-key-file", tmp_path / "third.key").output
    monkeypatch.setenv("PACLM_KEY", third)
    open_curator(used, small_tokenizer).close()


def test_keys_are_exchanged_with_the_witness_and_with_nothing_serving(
    clinic: Path, tmp_path: Path, small_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = tmp_path / "witness"
    with open_curator(clinic, small_tokenizer, witness=witness) as curator:
        curator.generate("the", 8)
        monkeypatch.setenv("PACLM_WITNESS", str(witness))
        with pytest.raises(LedgerBusy):
            run("rotate-key", clinic)
    run("rotate-key", clinic)
    monkeypatch.delenv("PACLM_WITNESS")
    with pytest.raises(WitnessMissing, match=r"PACLM_WITNESS=PATH or --witness PATH"):
        run("rotate-key", clinic)
    run("rotate-key", clinic, "--witness", witness)
    open_curator(clinic, small_tokenizer, witness=witness).close()


def test_generate_takes_the_witness_by_an_option_too(clinic: Path, tmp_path: Path) -> None:
    command = ["generate", str(clinic), "--prompt", "the", "--max-tokens", "2"]
    assert CliRunner().invoke(app, [*command, "--witness", str(tmp_path / "witness")]).exit_code == 0
    assert (tmp_path / "witness").is_file()
    assert isinstance(CliRunner().invoke(app, command).exception, WitnessMissing)
