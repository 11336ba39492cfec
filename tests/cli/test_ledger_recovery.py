"""`paclm ledger backup`, `adopt`, `replace-witness`: what comes back is charged for, and only after a question."""

from __future__ import annotations

import json
import shutil

import pytest

from cli.ledgers import PRICE, make_used_workspace, open_ledger, run, write_total
from paclm.config import in_shell
from paclm.curator.master_key import keys_at_hand, load_keys, new_key, write_key
from paclm.curator.sealed import SealedFile, Sealing
from paclm.curator.secret import Secret
from paclm.errors import (
    InvalidInput,
    LedgerMissing,
    LedgerRolledBack,
)
from paclm.ledger.events import Usage, key_name
from paclm.ledger.verify import signing_key
from paclm.privacy.bounds import success_bound


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_WITNESS"):
        monkeypatch.delenv(name, raising=False)
    return make_used_workspace(tmp_path / "clinic")


def test_a_backup_is_adopted_with_the_witness_or_at_the_price_of_the_budget(workspace, tmp_path, monkeypatch):
    path, copy, witness = workspace / "curator" / "ledger.sqlite", tmp_path / "copy.sqlite", tmp_path / "witness"
    open_ledger(workspace, witness=witness).close()
    run("backup", workspace, copy)
    with open_ledger(workspace, witness=witness) as ledger:
        ledger.commit([Usage("alice", 1, 1, 1, PRICE)], b"newest")
    path.write_bytes(copy.read_bytes())
    with pytest.raises(LedgerRolledBack):
        open_ledger(workspace, witness=witness)
    monkeypatch.setenv("PACLM_WITNESS", str(witness))
    assert "taken from the witness" in run("adopt", workspace).output
    assert "Head: row 9 (1 lost before a restore), " in run("verify", workspace).output
    assert json.loads(run("verify", workspace, "--json").output)["lost_rows"] == 1
    with open_ledger(workspace, witness=witness) as ledger:
        assert (ledger.sealed_belief, ledger.account.tokens) == (b"newest", 61)
    monkeypatch.delenv("PACLM_WITNESS")
    assert run("adopt", workspace, input="n\n").exit_code == 1
    assert "counts as spent" in run("adopt", workspace, "--yes").output
    assert json.loads(run("show", workspace, "--json").output)["remaining_tokens"] == 0


def test_backup_says_what_must_be_moved_away_before_the_copy_is_put_back(workspace, tmp_path):
    said = run("backup", workspace, tmp_path / "copy.sqlite").stdout
    path = workspace / "curator" / "ledger.sqlite"
    steps = ("stop what serves", f"move {path} with its -wal and -shm", "together", f"as {path}", "paclm ledger adopt ")
    places = [said.index(step) for step in steps]
    assert places == sorted(places)
    assert said.endswith(f"paclm ledger adopt {in_shell(workspace)}\n")


def test_a_ledger_that_serves_as_it_is_is_not_charged_by_a_script(workspace):
    with pytest.raises(InvalidInput, match=r"no backup copy.* serves as it is.* --put-back --yes$"):
        run("adopt", workspace, "--yes")
    declined = run("adopt", workspace, input="n\n")
    assert declined.exit_code == 1
    assert declined.output.index("serves as it is") < declined.output.index("Adopt?")
    assert json.loads(run("show", workspace, "--json").output)["remaining_tokens"] > 0


@pytest.mark.parametrize("how", [{"options": ("--put-back", "--yes")}, {"options": (), "input": "y\n"}])
def test_a_folder_that_was_put_back_as_a_whole_can_be_adopted(workspace, how):
    """Lock and all: nothing shows it, and the operator knows."""
    assert "counts as spent" in run("adopt", workspace, *how["options"], input=how.get("input")).output
    assert json.loads(run("show", workspace, "--json").output)["remaining_tokens"] == 0


def test_a_file_without_its_lock_is_adopted_as_ever(workspace):
    """Copied by hand to another place: nobody remembers its newest row."""
    (workspace / "curator" / "ledger.lock").unlink()
    said = run("adopt", workspace, "--yes").output
    assert "counts as spent" in said
    assert "serves as it is" not in said


def test_a_copy_put_over_a_ledger_that_was_killed_is_not_charged_by_a_script(workspace, tmp_path):
    """The log that was left there belongs to the other file: it brings the newest rows back."""
    path, copy = workspace / "curator" / "ledger.sqlite", tmp_path / "copy.sqlite"
    killed = tmp_path / "killed"
    run("backup", workspace, copy)
    with open_ledger(workspace) as ledger:
        ledger.commit([Usage("alice", 1, 1, 1, PRICE)], b"newest")
        shutil.copytree(path.parent, killed)  # as a kill would leave it
    shutil.rmtree(path.parent)
    shutil.move(killed, path.parent)
    path.write_bytes(copy.read_bytes())
    with pytest.raises(InvalidInput, match="serves as it is"):
        run("adopt", workspace, "--yes")
    with open_ledger(workspace) as ledger:
        assert ledger.sealed_belief == b"newest"


def restored_from_before_an_extension(workspace, copy):
    """A backup, then a larger total, then the backup put back in place."""
    run("backup", workspace, copy)
    write_total(workspace, "2^-6")
    run("extend", workspace, "--yes")
    (workspace / "curator" / "ledger.sqlite").write_bytes(copy.read_bytes())


def bound_shown(workspace):
    return json.loads(run("show", workspace, "--json").output)["mia_bound"]


def test_adopting_without_a_witness_states_the_bound_at_the_total_of_the_settings(workspace, tmp_path):
    restored_from_before_an_extension(workspace, tmp_path / "copy.sqlite")
    run("adopt", workspace, "--yes")
    assert bound_shown(workspace) == success_bound(2.0**-6, 1 / 2)


@pytest.mark.parametrize(("given", "bound_at"), [("2^-8", 2.0**-6), ("2^-4", 2.0**-4)])
def test_of_the_total_given_and_that_of_the_settings_the_larger_counts(workspace, tmp_path, given, bound_at):
    restored_from_before_an_extension(workspace, tmp_path / "copy.sqlite")
    run("adopt", workspace, "--yes", "--largest-total", given)
    assert bound_shown(workspace) == success_bound(bound_at, 1 / 2)


@pytest.mark.parametrize("settings", [None, "[mechanism", "[mechanism]\n"])
def test_adopting_without_a_witness_needs_to_know_the_largest_total(workspace, tmp_path, settings):
    restored_from_before_an_extension(workspace, tmp_path / "copy.sqlite")
    (workspace / "paclm.toml").unlink()
    if settings is not None:
        (workspace / "paclm.toml").write_text(settings)
    with pytest.raises(InvalidInput, match="name that total with --largest-total"):
        run("adopt", workspace, "--yes")
    run("adopt", workspace, "--yes", "--largest-total", "2^-6")
    assert bound_shown(workspace) == success_bound(2.0**-6, 1 / 2)


@pytest.fixture
def exchanged(workspace):
    """An exchange of keys that ends whenever the test says: secret.json as it is meanwhile, and both keys."""
    folder, file = workspace / "curator", SealedFile(workspace / "curator")
    old, secret = load_keys(folder, may_create=False), Secret.draw(128)
    write_key(folder / "key.new", new_key())
    new = keys_at_hand(folder)[1]
    after = Sealing.make(secret, new, "w", "ledger", [old])
    file.write({old.id: Sealing.make(secret, old, "w", "ledger"), new.id: after})

    def until(step):
        if step == "rotated":
            with open_ledger(workspace) as ledger:
                ledger.rotate_key(new.mac.reveal())
        if step == "sealed":
            file.write({new.id: after})

    return until


@pytest.mark.parametrize("steps", [(), ("rotated",), ("rotated", "sealed")], ids=["before", "during", "nearly done"])
def test_after_an_exchange_of_keys_was_cut_short_the_key_in_force_is_used(workspace, exchanged, steps):
    for step in steps:
        exchanged(step)
    figures = json.loads(run("verify", workspace, "--json").output)
    assert (figures["intact"], figures["macs_checked"]) == (True, True)
    write_total(workspace, "2^-9")
    assert run("extend", workspace, "--yes").exit_code == 0
    assert json.loads(run("verify", workspace, "--json").output)["intact"]


def test_a_backup_from_before_an_exchange_of_keys_is_adopted_under_the_new_key(workspace, exchanged, tmp_path):
    run("backup", workspace, tmp_path / "copy.sqlite")
    exchanged("rotated")
    exchanged("sealed")
    (workspace / "curator" / "ledger.sqlite").write_bytes((tmp_path / "copy.sqlite").read_bytes())
    assert "counts as spent" in run("adopt", workspace, "--yes").output
    new = keys_at_hand(workspace / "curator")[1]
    assert signing_key(workspace / "curator" / "ledger.sqlite") == key_name(new.mac.reveal())
    assert json.loads(run("verify", workspace, "--json").output)["intact"]


def test_a_lost_witness_is_replaced_after_a_question(workspace, tmp_path):
    open_ledger(workspace, witness=tmp_path / "old").close()
    assert run("replace-witness", workspace, tmp_path / "new", input="n\n").exit_code == 1
    assert "is now" in run("replace-witness", workspace, tmp_path / "new", input="y\n").output
    open_ledger(workspace, witness=tmp_path / "new").close()


@pytest.mark.parametrize("command", ["adopt", "replace-witness"])
def test_without_a_ledger_nothing_is_asked(workspace, command, monkeypatch):
    monkeypatch.setattr("paclm.worlds.manifest.load_manifest", lambda path: None)  # this workspace has none
    (workspace / "curator" / "ledger.sqlite").unlink()
    with pytest.raises(LedgerMissing, match="There is no ledger"):
        run(command, workspace)
