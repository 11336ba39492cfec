"""Keys: where they come from, what derives from them, and that they never show."""

import base64
import copy
import errno
import os
import pickle
import resource
import shlex
import traceback

import pytest

from paclm.curator import master_key
from paclm.curator.master_key import KEY_FILE, MasterKeys, load_keys, parse_key, read_key, settle_own_key, write_key
from paclm.curator.redacted import Redacted
from paclm.curator.rotation import rotate_key
from paclm.errors import CuratorError, UnsoundState

MASTER = bytes(range(32))


def test_a_first_opening_makes_a_key_that_only_its_owner_can_read_and_finds_it_again(tmp_path):
    made = load_keys(tmp_path, may_create=True)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert load_keys(tmp_path, may_create=False).id == made.id
    assert load_keys(tmp_path, may_create=True).id == made.id


def test_the_environment_goes_before_a_named_file_and_that_before_the_workspace(tmp_path, monkeypatch):
    own = load_keys(tmp_path, may_create=True)
    named = tmp_path / "elsewhere"
    write_key(named, Redacted(bytes(32)))
    monkeypatch.setenv("PACLM_KEY_FILE", str(named))
    assert load_keys(tmp_path, may_create=False).id == MasterKeys.derived(Redacted(bytes(32))).id != own.id
    monkeypatch.setenv("PACLM_KEY", MASTER.hex())
    assert load_keys(tmp_path, may_create=False).id == MasterKeys.derived(Redacted(MASTER)).id


@pytest.mark.parametrize("text", [MASTER.hex(), MASTER.hex().upper() + "\n", base64.b64encode(MASTER).decode()])
def test_a_key_is_written_in_hexadecimal_or_base64(text):
    assert parse_key(Redacted(text), "it").reveal() == MASTER


@pytest.mark.parametrize("text", ["", "sesame", MASTER.hex()[:-2], base64.b64encode(MASTER[:-1]).decode()])
def test_anything_else_is_refused_without_repeating_it(text):
    with pytest.raises(CuratorError, match="32 bytes") as caught:
        parse_key(Redacted(text), "PACLM_KEY")
    assert not text or text not in str(caught.value)


def test_a_key_file_is_never_overwritten_and_refused_where_others_can_read_it(tmp_path):
    write_key(tmp_path / "key", Redacted(MASTER))
    with pytest.raises(CuratorError):
        write_key(tmp_path / "key", Redacted(bytes(32)))
    assert read_key(tmp_path / "key").reveal() == MASTER
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(CuratorError, match="chmod 600"):
        read_key(tmp_path / "key")


@pytest.mark.parametrize("interruption", [None, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_key_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch, call, interruption):
    def refuse(*_):
        raise interruption or OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(interruption or CuratorError):
        write_key(tmp_path / "key", Redacted(MASTER))
    assert list(tmp_path.iterdir()) == []


def test_a_key_of_which_only_half_was_written_is_refused_and_leaves_nothing_behind(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:32]))
    with pytest.raises(CuratorError, match="32 of 65"):
        write_key(tmp_path / "key", Redacted(MASTER))
    assert list(tmp_path.iterdir()) == []


def test_settling_removes_every_key_in_clear_that_a_kill_left_behind_and_stumbles_over_nothing_else(tmp_path):
    keys = load_keys(tmp_path, may_create=True)
    for name in (".key.0badcafe.part", ".key.new.0badcafe.part"):
        write_key(tmp_path / name, Redacted(bytes(32)))
    for name in (".key.folder.part", ".key.new.folder.part"):
        (tmp_path / name).mkdir()
    settle_own_key(tmp_path, keys)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [KEY_FILE]
    assert load_keys(tmp_path, may_create=False).id == keys.id


def test_a_first_opening_that_another_one_overtook_says_so(tmp_path, monkeypatch):
    link = os.link

    def overtake(part, path):
        monkeypatch.undo()
        settle_own_key(tmp_path, load_keys(tmp_path, may_create=True))
        link(part, path)

    monkeypatch.setattr(os, "link", overtake)
    with pytest.raises(CuratorError):
        write_key(tmp_path / KEY_FILE, Redacted(MASTER))
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]
    assert read_key(tmp_path / KEY_FILE).reveal() != MASTER


def test_what_is_sealed_opens_with_the_same_key_and_subject_only():
    keys, other = MasterKeys.derived(Redacted(MASTER)), MasterKeys.derived(Redacted(bytes(32)))
    sealed = keys.seal(b"content", b"subject")
    assert b"content" not in sealed
    assert keys.seal(b"content", b"subject") != sealed
    opened = keys.unseal(sealed, b"subject")
    assert opened is not None
    assert opened.reveal() == b"content"
    assert keys.unseal(sealed, b"another") is None
    assert other.unseal(sealed, b"subject") is None
    assert keys.unseal(sealed[:-1] + bytes([sealed[-1] ^ 1]), b"subject") is None
    assert keys.unseal(b"", b"subject") is None


def test_every_purpose_has_its_own_key_and_none_shows():
    keys = MasterKeys.derived(Redacted(MASTER))
    assert keys.mac.reveal() != MASTER
    assert len(keys.mac.reveal()) == 32
    for secret in (MASTER.hex(), keys.mac.reveal().hex()):
        assert secret not in repr(keys) + str(keys) + f"{keys}"
        assert secret[:16] != keys.id
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UnsoundState):
            attempt(keys)


@pytest.fixture
def vault(tmp_path, monkeypatch):
    """PACLM_KEY_COMMAND is a script that notes what it was given, then does what `vault` says; returns its folder."""

    def vault(ending='cat "$1/content"'):
        folder = tmp_path / "a vault"
        folder.mkdir()
        (folder / "content").write_text(f"{MASTER.hex()}\n")
        script = folder / "script"
        script.write_text(f"""#!/bin/sh
echo "$@" >>"$1/runs"
env >"$1/environment"
cat >"$1/input"
ulimit -c >"$1/core"
echo note >&2
{ending}
""")
        script.chmod(0o700)
        monkeypatch.setenv("PACLM_KEY_COMMAND", f"{shlex.quote(str(script))} {shlex.quote(str(folder))} '$HOME; x'")
        return folder

    return vault


def runs(folder):
    return (folder / "runs").read_text().splitlines()


def test_a_program_prints_the_key_and_learns_nothing_but_its_arguments(vault, tmp_path, monkeypatch, capfd):
    folder = vault()
    monkeypatch.setenv("PACLM_LEDGER", "postgresql://curator:planted@host/ledger")
    monkeypatch.setenv("PACLM_KEY_FILE", "")  # as good as not set
    monkeypatch.setenv("VAULT_ADDR", "https://vault")
    limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (limit[1], limit[1]))
    (tmp_path / "typed").write_text("typed")
    stdin, typed = os.dup(0), os.open(tmp_path / "typed", os.O_RDONLY)
    os.dup2(typed, 0)
    try:
        assert load_keys(tmp_path, may_create=True).id == MasterKeys.derived(Redacted(MASTER)).id
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limit)
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(typed)
    assert runs(folder) == [f"{folder} $HOME; x"]
    environment = (folder / "environment").read_text()
    assert "VAULT_ADDR=https://vault" in environment
    assert "PACLM_" not in environment
    assert (folder / "input").read_bytes() == b""
    assert (folder / "core").read_text() == "0\n"
    assert capfd.readouterr() == ("", "note\n")
    assert not (tmp_path / KEY_FILE).exists()


def test_each_opening_asks_the_program_once_and_finds_a_rotated_key(vault, make, open_curator):
    folder, workspace, other = vault(), make(), bytes(32)
    with open_curator(workspace) as curator:
        curator.generate("the", 6)
    assert len(runs(folder)) == 1
    open_curator(workspace).close()
    assert len(runs(folder)) == 2
    with pytest.raises(CuratorError):
        rotate_key(workspace)  # no new key was given
    rotate_key(workspace, Redacted(other))
    assert len(runs(folder)) == 3
    (folder / "content").write_text(other.hex())
    with open_curator(workspace) as curator:
        assert curator.account.tokens == 6
    assert len(runs(folder)) == 4
    assert not (workspace.curator_path / KEY_FILE).exists()


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ('cat "$1/content"; exit 3', "status 3"),
        ('cat "$1/content"; kill -9 $$', "status -9"),
        ("echo", "printed nothing"),
        ('cat "$1/content" "$1/content"', "32 bytes"),
        ('cat "$1/content"; exec sleep 600', "0.5 seconds"),
        ('cat "$1/content"; sleep 20 &', "0.5 seconds"),  # its standard output is still open
    ],
)
def test_a_program_that_prints_no_key_is_refused_without_repeating_it(
    vault, tmp_path, monkeypatch, capfd, ending, says
):
    folder = vault(ending)
    if "sleep" in ending:
        monkeypatch.setattr(master_key, "_COMMAND_SECONDS", 0.5)
    with pytest.raises(CuratorError, match=says) as caught:
        load_keys(tmp_path, may_create=True)
    check_silent(caught.value, MASTER.hex(), str(folder / "script"))
    assert MASTER.hex() not in "".join(capfd.readouterr())
    assert not (tmp_path / KEY_FILE).exists()


@pytest.mark.parametrize("command", [MASTER.hex(), f"/nowhere --pin={MASTER.hex()}", f"'{MASTER.hex()}", " ", "a\\"])
def test_a_command_that_cannot_be_run_is_not_repeated(tmp_path, monkeypatch, command):
    monkeypatch.setenv("PACLM_KEY_COMMAND", command)
    with pytest.raises(CuratorError, match="PACLM_KEY_COMMAND") as caught:
        load_keys(tmp_path, may_create=True)
    check_silent(caught.value, MASTER.hex())
    assert list(tmp_path.iterdir()) == []


def check_silent(error, *private):
    """Neither the message nor the locals of any frame below this module's hold a private text."""
    report = traceback.TracebackException.from_exception(error, capture_locals=True)
    for frame in list(report.stack):
        if frame.filename == __file__:
            report.stack.remove(frame)
    assert not [text for text in private if text in "".join(report.format())]


@pytest.mark.parametrize("name", ["PACLM_KEY", "PACLM_KEY_FILE"])
def test_a_program_beside_another_place_for_the_key_is_refused(vault, tmp_path, monkeypatch, name):
    folder = vault()
    monkeypatch.setenv(name, MASTER.hex())
    with pytest.raises(CuratorError, match=f"{name} and PACLM_KEY_COMMAND"):
        load_keys(tmp_path, may_create=True)
    assert not (folder / "runs").exists()
