"""Stored replies: the same idempotency key and the same body get the same tokens again, at no charge.

    begin ─► Fresh ─► finish   a whole reply: repeated until it expires (the charge stays)
                    ├ abandon  nothing was charged: the idempotency key is free again
                    └ lose     something was charged and there is no whole reply to repeat
          ─► InProgress        the first request is in progress
          ─► Stored            the reply, unchanged
          ─► Lost              charged, or perhaps charged, and the text is lost: reported, never charged again silently

A reply is private text. It is encrypted under a key derived from the idempotency key and the body, neither of which is
stored: the file, or a backup of it, cannot be decrypted alone. Knows no prompt, no budget and no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paclm.errors import InvalidInput, RepliesFull, ReplyConflict
from paclm.server.database import Database, Sql

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_NONCE = bytes(12)
"""Each key encrypts once, so a fixed nonce is safe."""
_FILLED = 0.9
"""How full to leave it after making room, so that not every reply has to make some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """How long and how much to store."""

    seconds: float = 24 * 3600.0
    """After this long a reply is deleted, and its idempotency key starts a new request."""
    reply_bytes: int = 2**20
    """A larger reply is sent but not stored: asking for it again returns Lost."""
    total_bytes: int = 64 * 2**20
    """Beyond this the oldest texts are dropped; asking for one of them again returns Lost."""
    rows: int = 100_000
    """Requests remembered at a time, with or without a text; at most half of them of one API key."""

    def __post_init__(self) -> None:
        for name in ("seconds", "reply_bytes", "total_bytes", "rows"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} of stored replies must be more than 0, not {getattr(self, name)!r}.")


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to finish, abandon or lose one request."""

    id: bytes = field(repr=False)
    seal: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Fresh:
    """A new request; the caller must end it with finish, abandon or lose."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class InProgress:
    """The first request with this key is in progress."""

    id: bytes = field(repr=False)
    """As in its ticket."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The reply, unchanged. A stream is one text: its events delimit themselves."""

    status: int
    body: bytes = field(repr=False)
    media_type: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Lost:
    """The first attempt was charged, or may have been, and its text is lost."""


Found = Fresh | InProgress | Stored | Lost


def body_digest(path: str, body: bytes) -> bytes:
    """Two requests are the same if method, path and every byte of the body are."""
    return hashlib.sha256(b"%d %s" % (len(path), path.encode()) + body).digest()


class Replies:
    """Requests of the last day that had an idempotency key, each visible to its own API key only."""

    def __init__(self, db: Database, keep: Keep | None = None, clock: Callable[[], float] = time.time) -> None:
        self._db = db
        self._keep = keep or Keep()
        self._clock = clock
        # Upper bounds; counted exactly when they would pass a limit, and at first.
        self._rows = self._keep.rows
        self._bytes = self._keep.total_bytes

    def recover(self) -> int:
        """Mark as lost what a crashed server had in progress; returns how many.

        For the server that holds the curator's lock, before it takes requests. Whether a token was released is not
        known here, so the client is told that one may have been.
        """
        with self._db.writing() as db:
            lost: int = db.execute("UPDATE replies SET state = 'lost' WHERE state = 'running'").rowcount
        self.forget_expired()
        return lost

    def begin(self, key_name: str, idempotency_key: str, digest: bytes) -> Found:
        """Look up a request. `digest` comes from `body_digest`."""
        if not _IDEMPOTENCY_KEY.fullmatch(idempotency_key):
            raise InvalidInput(
                "An Idempotency-Key has 1 to 255 visible ASCII characters, for example a random UUID; "
                f"this one has {len(idempotency_key)} characters."
            )
        row_id = _mixed(b"id", key_name.encode(), idempotency_key.encode())
        with self._db.writing() as db:
            self._delete_expired(db)
            found = db.execute("SELECT salt, body_check, state, sealed FROM replies WHERE id = ?", (row_id,)).fetchone()
            if found is None:
                return Fresh(self._enter(db, row_id, key_name, idempotency_key, digest))
        salt, body_check, state, sealed = found
        if not hmac.compare_digest(body_check, _mixed(b"body", salt, digest)):
            raise ReplyConflict(
                "This Idempotency-Key was used for another request. Use a new key for a new request; to repeat the "
                "first one, send the same bytes to the same path."
            )
        if state == "running":
            return InProgress(row_id)
        return Lost() if sealed is None else _open(_mixed(b"seal", salt, idempotency_key.encode(), digest), sealed)

    def finish(self, ticket: Ticket, reply: Stored) -> None:
        """Store a whole reply. Nothing is stored for an API key that was revoked meanwhile."""
        head = json.dumps([reply.status, reply.media_type, reply.headers]).encode()
        sealed = AESGCM(ticket.seal).encrypt(_NONCE, head + b"\n" + reply.body, None)
        if len(sealed) > min(self._keep.reply_bytes, self._keep.total_bytes):
            self.lose(ticket)
            return
        with self._db.writing() as db:
            self._make_room(db, len(sealed))
            db.execute(
                "UPDATE replies SET state = 'stored', sealed = ? WHERE id = ? AND state = 'running'",
                (sealed, ticket.id),
            )

    def abandon(self, ticket: Ticket) -> None:
        """Nothing was charged: the idempotency key is free again."""
        with self._db.writing() as db:
            db.execute("DELETE FROM replies WHERE id = ? AND state = 'running'", (ticket.id,))

    def lose(self, ticket: Ticket) -> None:
        """Something was charged, and there is no whole reply to repeat."""
        with self._db.writing() as db:
            db.execute("UPDATE replies SET state = 'lost' WHERE id = ? AND state = 'running'", (ticket.id,))

    def forget_expired(self) -> int:
        """Delete expired replies, and what the database keeps of them; returns how many. Call it every minute or so."""
        with self._db.writing() as db:
            forgotten = self._delete_expired(db)
        self._db.scrub()
        return forgotten

    def _enter(self, db: Sql, row_id: bytes, key_name: str, idempotency_key: str, digest: bytes) -> Ticket:
        self._check_rows(db, key_name)
        self._rows += 1
        salt = secrets.token_bytes(16)
        db.execute(
            "INSERT INTO replies (id, key_name, salt, body_check, state, expires) VALUES (?, ?, ?, ?, 'running', ?)",
            (row_id, key_name, salt, _mixed(b"body", salt, digest), self._clock() + self._keep.seconds),
        )
        return Ticket(row_id, _mixed(b"seal", salt, idempotency_key.encode(), digest))

    def _check_rows(self, db: Sql, key_name: str) -> None:
        """Refuse beyond the limit, and beyond half of it for one API key, which must not shut the others out."""
        half = (self._keep.rows + 1) // 2
        if self._rows < half:
            return
        (self._rows,) = db.execute("SELECT count(*) FROM replies").fetchone()
        if self._rows < half:
            return
        (own,) = db.execute("SELECT count(*) FROM replies WHERE key_name = ?", (key_name,)).fetchone()
        if own >= half or self._rows >= self._keep.rows:
            raise RepliesFull(
                f"{self._rows:,} requests with an Idempotency-Key are stored, {own:,} of them of this API key; the "
                f"limits are {self._keep.rows:,} and {half:,}. Send this one later, or without the Idempotency-Key: "
                "it is then charged each time it is sent."
            )

    def _delete_expired(self, db: Sql) -> int:
        """A request that still runs is kept however old: deleting it would let it start twice."""
        done = db.execute("DELETE FROM replies WHERE expires <= ? AND state != 'running'", (self._clock(),))
        return int(done.rowcount)

    def _make_room(self, db: Sql, wanted: int) -> None:
        """Drop the oldest texts, not their rows: a request that was charged must never look new."""
        self._bytes += wanted
        if self._bytes <= self._keep.total_bytes:
            return
        (held,) = db.execute("SELECT coalesce(sum(length(sealed)), 0) FROM replies").fetchone()
        self._bytes = held + wanted
        if self._bytes <= self._keep.total_bytes:
            return
        oldest = db.execute("SELECT id, length(sealed) FROM replies WHERE sealed IS NOT NULL ORDER BY expires")
        for row_id, size in oldest.fetchall():
            if self._bytes <= _FILLED * self._keep.total_bytes:
                return
            db.execute("UPDATE replies SET state = 'lost', sealed = NULL WHERE id = ?", (row_id,))
            self._bytes -= size


def _mixed(purpose: bytes, *parts: bytes) -> bytes:
    """SHA-256 of several parts for one purpose; the length prefix makes it unambiguous."""
    lengths = " ".join(str(len(part)) for part in parts)
    return hashlib.sha256(b"paclm reply %s %s\n" % (purpose, lengths.encode()) + b"".join(parts)).digest()


def _open(seal: bytes, sealed: bytes) -> Stored | Lost:
    try:
        head, _, body = AESGCM(seal).decrypt(_NONCE, sealed, None).partition(b"\n")
    except InvalidTag:  # the file was damaged
        return Lost()
    status, media_type, *headers = json.loads(head)
    return Stored(status, body, media_type, headers[0] if headers else {})  # none: stored before there were any
