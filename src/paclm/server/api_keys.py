"""API keys and quotas, in the service database. Keys are stored hashed and shown once. Knows no budget and no secret.

A quota is no privacy bound: all keys share one belief, so the only bound is the global one, at the committed total.
Counters err on the safe side: a reservation is durable before its first token, and what a crashed server had reserved
counts as used.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from paclm.errors import InvalidInput, KeyRefused, QuotaExceeded, ServiceError
from paclm.server.database import Database, Sql, open_database

KEY_PREFIX = "paclm-"
"""Recognisable to people and secret scanners."""
KEY_BYTES = 32
LOCAL = "local"
"""The caller of a loopback server that needs no key."""
MAX_TOKENS = 2**62
"""Counters are integers of the database, which end at 2^63."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COLUMNS = "name, is_admin, quota_tokens, used_tokens, reserved_tokens, created, revoked_at"


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key's metadata, without the key."""

    name: str
    is_admin: bool
    quota_tokens: int | None
    """Private tokens this key may use in total; None for no limit of its own."""
    used_tokens: int
    reserved_tokens: int
    """Worst cases of requests in progress."""
    created: str
    revoked_at: str | None

    @property
    def remaining_tokens(self) -> int | None:
        """What is left of the quota beside requests in progress; None without a quota."""
        if self.quota_tokens is None:
            return None
        return max(0, self.quota_tokens - self.used_tokens - self.reserved_tokens)


def _now() -> datetime:
    return datetime.now(UTC)


class KeyStore:
    """The keys of one workspace. Every call sees what another process changed: a revoked key is refused."""

    def __init__(self, db: Database, clock: Callable[[], datetime] = _now) -> None:
        self.database = db
        self._clock = clock
        self._read: tuple[int, Sequence[tuple[bytes, KeyInfo]]] = (-1, [])

    @classmethod
    def open(cls, address: Path | str) -> KeyStore:
        """Open or create the database. Changes no counter: the command line can read it while a server runs."""
        return cls(open_database(address))

    def recover(self) -> int:
        """Count as used what a crashed server had reserved; returns the tokens.

        For the server that holds the curator's lock, before it takes requests.
        """
        with self.database.writing() as db:
            (tokens,) = db.execute("SELECT coalesce(sum(reserved_tokens), 0) FROM keys").fetchone()
            db.execute("UPDATE keys SET used_tokens = used_tokens + reserved_tokens, reserved_tokens = 0")
        return int(tokens)

    def add(self, name: str, *, admin: bool = False, quota_tokens: int | None = None) -> str:
        """Make a key and return it; it cannot be shown again."""
        _check_name(name)
        if quota_tokens is not None and not 0 < quota_tokens <= MAX_TOKENS:
            raise InvalidInput(f"A quota is a whole number of tokens of at least 1, not {quota_tokens!r}.")
        key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
        with self.database.writing() as db:
            if (found := _find(db, name)) is not None:
                raise InvalidInput(
                    f"There is a key named {name!r} already"
                    + (f", revoked at {found.revoked_at}" if found.revoked_at else "")
                    + ". A name cannot be reused; choose another, for example with a date."
                )
            db.execute(
                "INSERT INTO keys (name, digest, is_admin, quota_tokens, created) VALUES (?, ?, ?, ?, ?)",
                (name, _digest(key), int(admin), quota_tokens, self._stamp()),
            )
        return key

    def list(self) -> list[KeyInfo]:
        """Every key ever made, oldest first."""
        return [key for _, key in self._all()]

    def revoke(self, name: str) -> KeyInfo:
        """Revoke a key for good and delete its stored replies; its counters stay."""
        with self.database.writing() as db:
            key = _find(db, name)
            if key is None:
                known = [row[0] for row in db.execute("SELECT name FROM keys WHERE revoked_at IS NULL ORDER BY name")]
                raise InvalidInput(f"There is no key named {name!r}. Keys in force: {', '.join(known) or 'none'}.")
            key = replace(key, revoked_at=key.revoked_at or self._stamp())
            db.execute("UPDATE keys SET revoked_at = ? WHERE name = ?", (key.revoked_at, name))
            db.execute("DELETE FROM replies WHERE key_name = ?", (name,))
        self.database.scrub()
        return key

    def identify(self, presented: str) -> KeyInfo | None:
        """The key's metadata; None if it is unknown or revoked.

        Compares with every key in constant time: the time taken depends neither on the guess nor on which key it is.
        """
        digest, found = _digest(presented), None
        for stored, key in self._all():
            if hmac.compare_digest(stored, digest):
                found = key
        return found if found is not None and found.revoked_at is None else None

    def has_keys(self) -> bool:
        """Whether any key is in force."""
        return any(key.revoked_at is None for key in self.list())

    def reserve(self, name: str, tokens: int) -> None:
        """Reserve the worst case of a request durably before its first token; refuse what the quota cannot cover."""
        _check_tokens(tokens)
        with self.database.writing() as db:
            key = _find(db, name)
            if key is None or key.revoked_at is not None:
                raise KeyRefused(f"The key {name!r} is {'unknown' if key is None else 'revoked'}.")
            if key.remaining_tokens is not None and tokens > key.remaining_tokens:
                raise QuotaExceeded(
                    name=name,
                    quota_tokens=key.quota_tokens or 0,
                    used_tokens=key.used_tokens,
                    reserved_tokens=key.reserved_tokens,
                    requested=tokens,
                )
            db.execute("UPDATE keys SET reserved_tokens = reserved_tokens + ? WHERE name = ?", (tokens, name))

    def settle(self, name: str, *, reserved: int, used: int) -> None:
        """Free a reservation and count what was used; also for a key revoked meanwhile."""
        _check_tokens(reserved)
        _check_tokens(used)
        with self.database.writing() as db:
            done = db.execute(
                "UPDATE keys SET reserved_tokens = reserved_tokens - ?, used_tokens = used_tokens + ? "
                "WHERE name = ? AND reserved_tokens >= ?",
                (reserved, used, name, reserved),
            )
            if done.rowcount != 1:
                raise ServiceError(f"{reserved:,} tokens were never reserved for the key {name!r}.")

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def _all(self) -> Sequence[tuple[bytes, KeyInfo]]:
        """Digests and keys as of the last commit of any process; read again only if there was one."""
        with self.database.reading() as db:
            version = self.database.version(db)
            if version != self._read[0]:
                rows = db.execute(f"SELECT digest, {_COLUMNS} FROM keys ORDER BY created, name").fetchall()
                self._read = version, [(digest, _info(row)) for digest, *row in rows]
            return self._read[1]

    def _stamp(self) -> str:
        return self._clock().isoformat(timespec="seconds")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _digest(key: str) -> bytes:
    """A key is 32 random bytes, which cannot be guessed: a slow hash would add nothing."""
    return hashlib.sha256(b"paclm api key\n" + key.encode("utf-8", "surrogatepass")).digest()


def _find(db: Sql, name: str) -> KeyInfo | None:
    row = db.execute(f"SELECT {_COLUMNS} FROM keys WHERE name = ?", (name,)).fetchone()
    return None if row is None else _info(row)


def _info(row: Sequence[Any]) -> KeyInfo:
    name, is_admin, *rest = row
    return KeyInfo(name, bool(is_admin), *rest)


def _check_name(name: str) -> None:
    """Names appear in the ledger, logs and metrics; a key pasted by mistake must not."""
    if name.startswith(KEY_PREFIX):
        raise InvalidInput(f"A key's name cannot begin with {KEY_PREFIX!r}: that is how keys themselves begin.")
    if name == LOCAL:
        raise InvalidInput(f"{LOCAL!r} is reserved for callers without a key. Choose another.")
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            "A key's name has 1 to 64 ASCII letters, digits, dots, dashes and underscores and begins with a letter or "
            f"digit; {name[:80]!r} does not."
        )


def _check_tokens(tokens: int) -> None:
    if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS:
        raise InvalidInput(f"A number of tokens must be a whole number of at least 0, not {tokens!r}.")
