"""`paclm ledger backup`, `adopt`, `replace-witness`: a restored ledger is charged, and only after a question."""

import shutil

import pytest

from cli.ledgers import PRICE, figures, make_used_workspace, open_ledger, run, write_total
from paclm.config import in_shell
from paclm.curator.master_key import keys_at_hand, load_keys, new_key, write_key
from paclm.curator.sealed import SealedFile, Sealing
from paclm.curator.secret import Secret
from paclm.errors import InvalidInput, LedgerRolledBack
from paclm.ledger.events import Usage, key_name
from paclm.ledger.verify import signing_key
from paclm.privacy.bounds import success_bound


@pytest.fixture
def workspace(tmp_path):
    return make_used_workspace(tmp_path / "clinic")


def remaining(workspace):
    return figures("show", workspace)["remaining_tokens"]


def test_a_backup_is_adopted_with_the_witness_or_at_the_price_of_the_budget(workspace, tmp_path, monkeypatch):
    path, copy, witness = workspace / "curator" / "ledger.sqlite", tmp_path / "copy.sqlite", tmp_path / "witness"
    open_ledger(workspace, witness=witness).close()
    assert run("backup", workspace, copy).stdout.endswith(f"paclm ledger adopt {in_shell(workspace)}\n")
    with open_ledger(workspace, witness=witness) as ledger:
        ledger.commit([Usage("alice", 1, 1, 1, PRICE)], b"newest")
    path.write_bytes(copy.read_bytes())
    with pytest.raises(LedgerRolledBack):
        open_ledger(workspace, witness=witness)
    monkeypatch.setenv("PACLM_WITNESS", str(witness))
    assert "witness" in run("adopt", workspace).output
    assert "row 9 (1 lost" in run("verify", workspace).output
    assert figures("verify", workspace)["lost_rows"] == 1
    with open_ledger(workspace, witness=witness) as ledger:
        assert (ledger.sealed_belief, ledger.account.tokens) == (b"newest", 61)
    monkeypatch.delenv("PACLM_WITNESS")
    assert run("adopt", workspace, input="n\n").exit_code == 1
    assert remaining(workspace) > 0
    run("adopt", workspace, "--yes")
    assert remaining(workspace) == 0


def test_a_ledger_that_serves_as_it_is_is_not_charged_by_a_script(workspace):
    with pytest.raises(InvalidInput, match="--put-back --yes"):
        run("adopt", workspace, "--yes")
    declined = run("adopt", workspace, input="n\n")
    assert declined.exit_code == 1
    assert declined.output.index(str(workspace)) < declined.output.index("Adopt?")
    assert remaining(workspace) > 0


@pytest.mark.parametrize(
    ("has_lock", "options", "answer"),
    [(True, ["--put-back", "--yes"], None), (True, [], "y\n"), (False, ["--yes"], None)],
)
def test_a_ledger_is_adopted_where_only_the_operator_can_know(workspace, has_lock, options, answer):
    """A folder rolled back as a whole, with its lock; or a file copied by hand, without a record of its newest row."""
    if not has_lock:
        (workspace / "curator" / "ledger.lock").unlink()
    run("adopt", workspace, *options, input=answer)
    assert remaining(workspace) == 0


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
    with pytest.raises(InvalidInput, match="--put-back"):
        run("adopt", workspace, "--yes")
    with open_ledger(workspace) as ledger:
        assert ledger.sealed_belief == b"newest"


@pytest.fixture
def from_before_an_extension(workspace, tmp_path):
    """A backup, then a larger total, then the backup restored."""
    run("backup", workspace, tmp_path / "copy.sqlite")
    write_total(workspace, "2^-6")
    run("extend", workspace, "--yes")
    (workspace / "curator" / "ledger.sqlite").write_bytes((tmp_path / "copy.sqlite").read_bytes())
    return workspace


def bound_shown(workspace):
    return figures("show", workspace)["mia_bound"]


@pytest.mark.parametrize(("given", "bound_at"), [(None, 2.0**-6), ("2^-8", 2.0**-6), ("2^-4", 2.0**-4)])
def test_without_a_witness_the_bound_is_at_the_larger_total_of_option_and_settings(
    from_before_an_extension, given, bound_at
):
    run("adopt", from_before_an_extension, "--yes", *([] if given is None else ["--largest-total", given]))
    assert bound_shown(from_before_an_extension) == success_bound(bound_at, 1 / 2)


@pytest.mark.parametrize("settings", [None, "[mechanism", "[mechanism]\n"])
def test_adopting_without_a_witness_needs_to_know_the_largest_total(from_before_an_extension, settings):
    workspace = from_before_an_extension
    (workspace / "paclm.toml").unlink()
    if settings is not None:
        (workspace / "paclm.toml").write_text(settings)
    with pytest.raises(InvalidInput, match="--largest-total"):
        run("adopt", workspace, "--yes")
    run("adopt", workspace, "--yes", "--largest-total", "2^-6")
    assert bound_shown(workspace) == success_bound(2.0**-6, 1 / 2)


@pytest.fixture
def rotate_until(workspace):
    """A rotation of keys that stops where the test says: secret.json as it is meanwhile, and both keys."""
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
def test_after_an_interrupted_rotation_the_key_in_force_is_used(workspace, rotate_until, steps):
    for step in steps:
        rotate_until(step)
    found = figures("verify", workspace)
    assert (found["intact"], found["macs_checked"]) == (True, True)
    write_total(workspace, "2^-9")
    assert run("extend", workspace, "--yes").exit_code == 0
    assert figures("verify", workspace)["intact"]


def test_a_backup_from_before_a_rotation_is_adopted_under_the_new_key(workspace, rotate_until, tmp_path):
    run("backup", workspace, tmp_path / "copy.sqlite")
    rotate_until("rotated")
    rotate_until("sealed")
    (workspace / "curator" / "ledger.sqlite").write_bytes((tmp_path / "copy.sqlite").read_bytes())
    run("adopt", workspace, "--yes")
    assert remaining(workspace) == 0
    new = keys_at_hand(workspace / "curator")[1]
    assert signing_key(workspace / "curator" / "ledger.sqlite") == key_name(new.mac.reveal())
    assert figures("verify", workspace)["intact"]


def test_a_lost_witness_is_replaced_after_a_question(workspace, tmp_path):
    open_ledger(workspace, witness=tmp_path / "old").close()
    assert run("replace-witness", workspace, tmp_path / "new", input="n\n").exit_code == 1
    assert str(tmp_path / "new") in run("replace-witness", workspace, tmp_path / "new", input="y\n").output
    open_ledger(workspace, witness=tmp_path / "new").close()
