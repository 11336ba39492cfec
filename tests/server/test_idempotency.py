"""Stored replies: the same tokens again at no charge, for the same API key alone, and forgotten down to the bytes."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paclm.errors import InvalidInput, RepliesFull, ReplyConflict
from paclm.server.api_keys import KeyStore
from paclm.server.database import open_database
from paclm.server.idempotency import Fresh, InProgress, Keep, Lost, Replies, Stored, body_digest
from server.live import bytes_on_disk

BODY = body_digest("/v1/completions", b'{"prompt": "the patient"}')
OTHER = body_digest("/v1/completions", b'{"prompt": "the doctor"}')
TEXT = b'{"choices": [{"text": " presents with a persistent cough"}]}'
WORD = b"persistent cough"


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def db(books):
    with open_database(books) as opened:
        yield opened


@pytest.fixture
def file(path):
    with open_database(path) as opened:
        yield opened


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def replies(db, clock):
    return Replies(db, clock=clock)


def finish(replies, ticket, body=TEXT, media_type="application/json"):
    replies.finish(ticket, Stored(200, body, media_type, {"paclm-mia-bound": "0.51"}))


def store(replies, key="uuid-1", name="alice", body=TEXT):
    finish(replies, replies.begin(name, key, BODY).ticket, body)


@pytest.mark.parametrize(
    ("body", "media_type"),
    [(TEXT, "application/json"), (b'data: {"text": "a\\n"}\n\ndata: [DONE]\n\n', "text/event-stream")],
)
def test_the_same_key_and_body_get_the_same_bytes_again_and_again(replies, body, media_type):
    finish(replies, replies.begin("alice", "uuid-1", BODY).ticket, body, media_type)
    for _ in range(3):
        again = replies.begin("alice", "uuid-1", BODY)
        assert again == Stored(200, body, media_type, {"paclm-mia-bound": "0.51"})


@pytest.mark.parametrize("state", ["running", "stored", "lost"])
def test_the_same_key_with_another_body_is_a_conflict_in_every_state(replies, state):
    ticket = replies.begin("alice", "uuid-1", BODY).ticket
    if state == "stored":
        finish(replies, ticket)
    elif state == "lost":
        replies.lose(ticket)
    with pytest.raises(ReplyConflict):
        replies.begin("alice", "uuid-1", OTHER)


def test_the_same_bytes_to_another_path_are_another_request():
    assert body_digest("/v1/completions", b"{}") != body_digest("/v1/chat/completions", b"{}")
    assert body_digest("/a", b"bc") != body_digest("/ab", b"c")


def test_another_api_key_never_sees_the_reply_however_names_and_keys_are_cut(replies):
    store(replies, name="ab", key="c")
    for name, key in (("bob", "c"), ("a", "bc")):
        assert isinstance(replies.begin(name, key, BODY), Fresh)


def test_of_many_at_once_exactly_one_goes_on(books, replies):
    answers, start = [], threading.Barrier(8)

    def ask(mine):
        start.wait()
        answers.append(mine.begin("alice", "uuid-1", BODY))

    with open_database(books) as other, ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, (replies, Replies(other, clock=Clock())) * 4))
    assert sorted(type(answer).__name__ for answer in answers) == ["Fresh"] + ["InProgress"] * 7


def test_a_request_that_cost_nothing_leaves_its_key_free_also_for_another_body(replies):
    replies.abandon(replies.begin("alice", "uuid-1", BODY).ticket)
    assert isinstance(replies.begin("alice", "uuid-1", OTHER), Fresh)


def test_a_stored_reply_cannot_be_abandoned_or_lost_and_a_lost_one_is_not_charged_again(replies):
    ticket = replies.begin("alice", "uuid-1", BODY).ticket
    finish(replies, ticket)
    replies.abandon(ticket)
    replies.lose(ticket)
    assert isinstance(replies.begin("alice", "uuid-1", BODY), Stored)
    replies.lose(replies.begin("alice", "uuid-2", BODY).ticket)
    assert replies.begin("alice", "uuid-2", BODY) == Lost()


def test_what_a_killed_server_had_under_way_is_lost_and_what_it_had_stored_is_not(books):
    program = f"""
import os
from pathlib import PosixPath
from paclm.server.database import open_database
from paclm.server.idempotency import Replies, Stored
replies = Replies(open_database({books!r}))
ticket = replies.begin("alice", "done", {BODY!r}).ticket
replies.finish(ticket, Stored(200, {TEXT!r}, "application/json", {{}}))
replies.begin("alice", "halfway", {BODY!r})
os.kill(os.getpid(), {signal.SIGKILL})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    with open_database(books) as db:
        replies = Replies(db)
        assert replies.recover() == 1
        assert replies.begin("alice", "halfway", BODY) == Lost()
        assert replies.begin("alice", "done", BODY).body == TEXT


def test_a_reply_is_forgotten_when_its_time_is_over_and_one_that_runs_does_not_start_twice(replies, clock):
    store(replies)
    clock.now += 24 * 3600 - 1
    assert isinstance(replies.begin("alice", "uuid-1", BODY), Stored)
    clock.now += 1
    assert isinstance(replies.begin("alice", "uuid-1", BODY), Fresh)
    clock.now += 10 * 24 * 3600
    assert replies.forget_expired() == 0
    assert isinstance(replies.begin("alice", "uuid-1", BODY), InProgress)


def test_no_reply_key_or_body_can_be_read_from_the_file(file, path):
    store(Replies(file), key="order-4711-for-mrs-miller")
    written = bytes_on_disk(path)
    assert b"alice" in written  # the search finds what is there
    for text in (WORD, b"order-4711", b"patient", BODY, b"application/json"):
        assert text not in written


def sealed_bytes(db):
    with db.reading() as connection:
        return connection.execute("SELECT sealed FROM replies").fetchone()[0]


@pytest.mark.parametrize("how", ["expiry", "revocation", "room"])
def test_a_forgotten_reply_is_gone_from_the_bytes_of_file_and_log(file, clock, path, how):
    replies = Replies(file, clock=clock)
    keys = KeyStore(file)
    keys.add("alice")
    store(replies, body=os.urandom(3000))
    sealed = sealed_bytes(file)
    assert all(part in bytes_on_disk(path) for part in (sealed[:64], sealed[-64:]))
    if how == "expiry":
        clock.now += 24 * 3600
        assert replies.forget_expired() == 1
    elif how == "revocation":
        keys.revoke("alice")
    else:
        store(Replies(file, Keep(total_bytes=3000), clock), key="uuid-2", body=os.urandom(2900))
        replies.forget_expired()
    left = bytes_on_disk(path)
    assert not any(sealed[at : at + 32] in left for at in range(0, len(sealed) - 32, 32))


def test_without_overwriting_a_deleted_reply_stays_in_the_bytes(file, clock, path):
    """The twin of the test above: what SQLite does by itself."""
    replies = Replies(file, clock=clock)
    store(replies, body=os.urandom(3000))
    sealed = sealed_bytes(file)
    with file.writing() as connection:
        connection.execute("PRAGMA secure_delete=OFF").fetchall()
    clock.now += 24 * 3600
    replies.forget_expired()
    assert sealed[-64:] in bytes_on_disk(path)


def test_a_reader_in_the_way_puts_the_overwriting_off_to_the_next_round(file, clock, path):
    replies = Replies(file, clock=clock)
    store(replies, body=os.urandom(3000))
    sealed = sealed_bytes(file)
    clock.now += 24 * 3600
    with open_database(path) as other, other.reading() as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM replies").fetchone()
        replies.forget_expired()
        assert sealed[-64:] in bytes_on_disk(path)
        connection.execute("COMMIT")
    replies.forget_expired()
    assert sealed[-64:] not in bytes_on_disk(path)


def test_nothing_is_kept_for_an_api_key_that_was_revoked_meanwhile(db, replies):
    keys = KeyStore(db)
    keys.add("alice")
    ticket = replies.begin("alice", "uuid-1", BODY).ticket
    keys.revoke("alice")
    finish(replies, ticket)
    with db.reading() as connection:
        assert connection.execute("SELECT count(*) FROM replies").fetchone() == (0,)


def test_a_reply_that_is_too_large_is_not_kept_and_asking_again_says_so(db, clock):
    replies = Replies(db, Keep(reply_bytes=1000), clock)
    store(replies, body=b"x" * 1001)
    assert replies.begin("alice", "uuid-1", BODY) == Lost()


def test_beyond_the_room_there_is_the_oldest_texts_go_and_their_keys_stay_taken(db, clock):
    replies = Replies(db, Keep(total_bytes=10_000), clock)
    for number in range(30):
        clock.now += 1
        store(replies, key=f"uuid-{number}", body=b"x" * 900)
        with db.reading() as connection:
            (held,) = connection.execute("SELECT sum(length(sealed)) FROM replies").fetchone()
        assert held <= 10_000
    answers = [type(replies.begin("alice", f"uuid-{number}", BODY)) for number in range(30)]
    first_kept = answers.index(Stored)
    assert answers == [Lost] * first_kept + [Stored] * (30 - first_kept)
    assert 8 <= 30 - first_kept <= 10


def test_when_no_more_requests_can_be_remembered_a_new_one_is_refused_and_old_ones_still_answered(db, clock):
    replies = Replies(db, Keep(rows=2), clock)
    store(replies, key="uuid-1")
    store(replies, key="uuid-2", name="bob")
    for name in ("alice", "carol"):
        with pytest.raises(RepliesFull, match="Idempotency-Key"):
            replies.begin(name, "uuid-3", BODY)
    assert isinstance(replies.begin("alice", "uuid-1", BODY), Stored)
    clock.now += 24 * 3600
    assert isinstance(replies.begin("alice", "uuid-3", BODY), Fresh)


def test_one_api_key_cannot_take_the_places_of_the_others(db, clock):
    replies = Replies(db, Keep(rows=10), clock)
    for number in range(5):
        store(replies, key=f"uuid-{number}", name="greedy")
    with pytest.raises(RepliesFull, match="5"):
        replies.begin("greedy", "uuid-5", BODY)
    for number in range(5):
        assert isinstance(replies.begin("alice", f"uuid-{number}", BODY), Fresh)


def test_limits_count_what_an_earlier_server_left(db, clock):
    earlier = Replies(db, clock=clock)
    for number in range(3):
        store(earlier, key=f"uuid-{number}", body=b"x" * 900)
    with pytest.raises(RepliesFull):
        Replies(db, Keep(rows=3), clock).begin("alice", "uuid-3", BODY)
    store(Replies(db, Keep(total_bytes=2000), clock), key="uuid-3", body=b"x" * 900)
    assert earlier.begin("alice", "uuid-0", BODY) == Lost()


def test_a_reply_that_was_stored_before_replies_had_headers_is_repeated(db, replies):
    ticket = replies.begin("alice", "uuid-1", BODY).ticket
    sealed = AESGCM(ticket.seal).encrypt(bytes(12), b'[200, "application/json"]\n' + TEXT, None)
    with db.writing() as sql:
        sql.execute("UPDATE replies SET state = 'stored', sealed = ? WHERE id = ?", (sealed, ticket.id))
    assert replies.begin("alice", "uuid-1", BODY) == Stored(200, TEXT, "application/json", {})


def test_a_damaged_reply_is_lost_not_repeated(db, replies):
    store(replies)
    with db.writing() as connection:
        connection.execute("UPDATE replies SET sealed = ?", (bytes(80),))
    assert replies.begin("alice", "uuid-1", BODY) == Lost()


@pytest.mark.parametrize("key", ["", "a b", "ä", "x" * 256, "a\n"])
def test_an_idempotency_key_is_visible_ascii_and_an_error_does_not_repeat_it(replies, key):
    with pytest.raises(InvalidInput) as refused:
        replies.begin("alice", key, BODY)
    assert not key or key not in str(refused.value).replace("An Idempotency-Key has", "")


@pytest.mark.parametrize("field", ["seconds", "reply_bytes", "total_bytes", "rows"])
def test_keeping_nothing_is_not_a_way_to_keep(field):
    with pytest.raises(InvalidInput, match=field):
        Keep(**{field: 0})


def test_neither_ticket_nor_reply_shows_its_contents(replies):
    fresh = replies.begin("alice", "uuid-1", BODY)
    finish(replies, fresh.ticket)
    assert repr(fresh) == "Fresh(ticket=Ticket())"
    assert "cough" not in repr(replies.begin("alice", "uuid-1", BODY))


def test_no_two_replies_are_ever_sealed_under_one_key(replies):
    seals = set()
    for _ in range(3):
        ticket = replies.begin("alice", "uuid-1", BODY).ticket
        seals.add(ticket.seal)
        replies.abandon(ticket)
    assert len(seals) == 3
    store(replies, key="uuid-2")
    ticket = replies.begin("alice", "uuid-3", BODY).ticket
    for body in (TEXT, b"another"):
        finish(replies, ticket, body)
    assert replies.begin("alice", "uuid-3", BODY).body == TEXT
