"""API keys: hashed on disk, refused when revoked, and quotas that no race and no crash can undercount."""

import base64
import hmac
import os
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest

from paclm.errors import InvalidInput, KeyRefused, QuotaExceeded, ServiceError, WorkspaceError
from paclm.server import api_keys
from paclm.server.api_keys import KEY_BYTES, KEY_PREFIX, KeyInfo, KeyStore
from server.live import bytes_on_disk


@pytest.fixture
def store(books):
    with KeyStore.open(books) as opened:
        yield opened


def counters(store, name="alice"):
    (key,) = (key for key in store.list() if key.name == name)
    return key.used_tokens, key.reserved_tokens


def test_a_key_is_32_random_bytes_behind_a_prefix_and_known_by_its_name_quota_and_rank(store):
    alice, root = store.add("alice", quota_tokens=10), store.add("root", admin=True)
    assert alice.startswith(KEY_PREFIX)
    assert len(base64.urlsafe_b64decode(alice.removeprefix(KEY_PREFIX) + "=")) == KEY_BYTES == 32
    assert alice != root
    known = store.identify(alice)
    assert known == KeyInfo("alice", False, 10, 0, 0, known.created, None)
    assert (known.remaining_tokens, store.identify(root).remaining_tokens) == (10, None)
    assert store.identify(root).is_admin


def test_nothing_but_a_hash_reaches_the_disk(path):
    with KeyStore.open(path) as store:
        key = store.add("alice")
    text = key.removeprefix(KEY_PREFIX)
    written = bytes_on_disk(path)
    assert b"alice" in written  # the search finds what is there, in the file or its log
    assert text.encode() not in written
    assert base64.urlsafe_b64decode(text + "=") not in written
    assert text[:12].encode() not in written


def test_the_file_and_its_side_files_are_the_owners_alone_under_every_umask(path):
    old = os.umask(0)
    try:
        with KeyStore.open(path) as store:
            store.add("alice")
            modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    finally:
        os.umask(old)
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("place", ["open folder", "link", "newer format", "no database"])
def test_a_file_that_is_not_ours_alone_or_not_readable_is_refused(path, place):
    if place == "open folder":
        path.parent.chmod(0o750)
    elif place == "link":
        path.symlink_to(path.parent.parent / "elsewhere")
    elif place == "newer format":
        KeyStore.open(path).close()
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA user_version=99")
    else:
        path.write_bytes(b"not a database, but long enough to look at" * 40)
    with pytest.raises(WorkspaceError if place == "open folder" else ServiceError):
        KeyStore.open(path)


@pytest.mark.parametrize("change", [lambda k: k[:-1], lambda k: k + "x", str.upper, lambda k: "", lambda k: "\udcff"])
def test_what_is_not_exactly_a_key_is_nobodys(store, change):
    key = store.add("alice")
    assert store.identify(change(key)) is None
    assert store.identify(key).name == "alice"


def test_every_key_is_compared_in_constant_time_wherever_the_match_is(store, monkeypatch):
    made = [store.add(name) for name in ("alice", "bob", "carol")]
    compared, compare = [], hmac.compare_digest

    def counting(left, right):
        compared.append((len(left), len(right)))
        return compare(left, right)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", counting)
    for presented in (*made, "wrong"):
        compared.clear()
        store.identify(presented)
        assert compared == [(32, 32)] * 3


def test_a_revoked_key_is_refused_at_once_also_by_a_store_that_was_open_before(store, books):
    alice, bob = store.add("alice"), store.add("bob")
    with KeyStore.open(books) as other:
        revoked = other.revoke("alice")
    assert revoked.revoked_at is not None
    assert (store.identify(alice), store.identify(bob).name) == (None, "bob")
    with pytest.raises(KeyRefused, match="revoked"):
        store.reserve("alice", 1)


def test_a_key_that_another_process_adds_is_known_at_once(store, books):
    program = f"""
from pathlib import PosixPath
from paclm.server.api_keys import KeyStore
print(KeyStore.open({books!r}).add("bob"))
"""
    added = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert store.identify(added).name == "bob"


def test_revoking_twice_keeps_the_first_moment_and_only_keys_in_force_count(store):
    assert not store.has_keys()
    store.add("alice")
    assert store.has_keys()
    first = store.revoke("alice")
    assert store.revoke("alice") == first
    assert not store.has_keys()
    store.add("bob")
    with pytest.raises(InvalidInput, match="bob"):
        store.revoke("carol")


def test_a_name_is_never_given_twice_and_a_key_given_as_a_name_is_not_repeated(store):
    key = store.add("alice")
    store.revoke("alice")
    for name in ("alice", key):
        with pytest.raises(InvalidInput) as refused:
            store.add(name)
        assert key not in str(refused.value)


@pytest.mark.parametrize("name", ["", "a b", "ä", "-x", "a" * 65, 'x"y', "x\n", "local", "paclm-abc"])
def test_a_name_that_could_not_stand_in_a_label_is_refused(store, name):
    with pytest.raises(InvalidInput):
        store.add(name)
    assert store.list() == []


def test_quotas_and_reservations_are_numbers_of_tokens(store):
    store.add("alice")
    for quota in (0, -1, 2**63):
        with pytest.raises(InvalidInput, match="quota"):
            store.add("bob", quota_tokens=quota)
    for tokens in (-1, 1.5, True, 2**63):
        with pytest.raises(InvalidInput):
            store.reserve("alice", tokens)


def test_a_quota_covers_used_and_held_and_says_what_is_left(store):
    store.add("alice", quota_tokens=100)
    store.reserve("alice", 60)
    store.settle("alice", reserved=60, used=25)
    store.reserve("alice", 70)
    with pytest.raises(QuotaExceeded) as refused:
        store.reserve("alice", 6)
    error = refused.value
    figures = (error.quota_tokens, error.used_tokens, error.reserved_tokens, error.requested, error.remaining_tokens)
    assert figures == (100, 25, 70, 6, 5)
    assert "5 left" in str(error)
    store.reserve("alice", 5)
    assert counters(store) == (25, 75)


def test_a_key_without_a_quota_is_counted_and_settled_though_it_was_revoked(store):
    store.add("alice")
    store.reserve("alice", 10**12)
    store.revoke("alice")
    store.settle("alice", reserved=10**12, used=7)
    assert counters(store) == (7, 0)


def test_what_was_never_held_cannot_be_settled(store):
    store.add("alice")
    store.reserve("alice", 5)
    with pytest.raises(ServiceError):
        store.settle("alice", reserved=6, used=0)
    with pytest.raises(ServiceError):
        store.settle("nobody", reserved=0, used=1)
    assert counters(store) == (0, 5)


def test_threads_and_two_connections_never_hold_more_than_the_quota(store, books):
    store.add("alice", quota_tokens=100)
    granted, start = [], threading.Barrier(8)

    def ask(mine):
        start.wait()
        for _ in range(10):
            try:
                mine.reserve("alice", 3)
                granted.append(3)
            except QuotaExceeded:
                pass

    with KeyStore.open(books) as other, ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, (store, other) * 4))
    assert sum(granted) == 99
    assert counters(store) == (0, 99)


def test_without_one_transaction_for_check_and_hold_the_same_race_overdraws(books, monkeypatch):
    """The twin: the check and the write made apart, with everyone between the two at once."""
    with KeyStore.open(books) as store:
        store.add("alice", quota_tokens=100)
        seen, between = [], threading.Barrier(4)

        def ask(_):
            (key,) = store.list()
            between.wait()
            if key.remaining_tokens >= 60:
                seen.append(60)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(ask, range(4)))
    assert sum(seen) > 100


def test_what_a_killed_server_had_reserved_counts_as_used_after_a_restart(books):
    program = f"""
import os, signal
from pathlib import PosixPath
from paclm.server.api_keys import KeyStore
store = KeyStore.open({books!r})
store.add("alice", quota_tokens=100)
store.reserve("alice", 40)
store.settle("alice", reserved=40, used=10)
store.reserve("alice", 50)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    with KeyStore.open(books) as store:
        assert counters(store) == (10, 50)  # opening alone changes nothing: the command line does it beside a server
        assert store.recover() == 50
        assert counters(store) == (60, 0)
        assert store.recover() == 0
        with pytest.raises(QuotaExceeded):
            store.reserve("alice", 41)


def test_a_failed_write_leaves_nothing_behind(store):
    def fail():
        with store.database.writing() as db:
            db.execute("INSERT INTO keys (name, digest, is_admin, created) VALUES (?, ?, 0, '')", ("x", b"0"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert store.list() == []


def test_a_write_that_fails_in_a_group_is_undone_alone_and_the_others_are_done(store):
    key = store.add("alice", quota_tokens=10)

    def half_done():
        with store.database.writing() as db:
            db.execute("UPDATE keys SET used_tokens = 9")
            raise KeyRefused("no")

    writes = [partial(store.reserve, "alice", tokens) for tokens in (4, 5, 7, 1)]
    first, second, third, fourth, fifth = store.database.together([*writes[:2], half_done, *writes[2:]])
    assert (first, second, fifth) == (None, None, None)
    assert isinstance(third, KeyRefused)
    assert isinstance(fourth, QuotaExceeded)  # the writes before it count
    assert fourth.reserved_tokens == 9
    assert counters(store) == (0, 10)
    assert store.identify(key).reserved_tokens == 10


def test_a_group_is_durable_when_it_returns_and_not_before(store, books):
    store.add("alice")
    seen = []
    with KeyStore.open(books) as other:
        store.database.together([partial(store.reserve, "alice", 3), lambda: seen.append(counters(other))])
        assert seen == [(0, 0)]
        assert counters(other) == (0, 3)


def test_a_group_whose_transaction_is_undone_reports_none_of_its_writes_as_done(path):
    def undo_all():
        with store.database.writing() as db:
            db.execute("ROLLBACK")  # as SQLite does by itself when the disk is full
            raise sqlite3.OperationalError("database or disk is full")

    with KeyStore.open(path) as store:
        store.add("alice")
        with pytest.raises(ServiceError, match="disk is full"):
            store.database.together([partial(store.reserve, "alice", 3), undo_all, partial(store.reserve, "alice", 4)])
        assert counters(store) == (0, 0)
        store.reserve("alice", 5)
        assert counters(store) == (0, 5)
