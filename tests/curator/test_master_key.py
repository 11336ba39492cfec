"""Keys: where they come from, what derives from them, and that they never show."""

import base64
import copy
import errno
import os
import pickle

import pytest

from paclm.curator.master_key import KEY_FILE, MasterKeys, load_keys, parse_key, read_key, settle_own_key, write_key
from paclm.curator.redacted import Redacted
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
