"""Append-only log of the promise `corpus`: every DP training ever begun, and what was served.

JSON lines, each with its own hash and the one before. A line is durable when `append` returns. A last line that
is cut off is one whose `append` never returned: what it would have recorded did not begin, and the next event replaces
it. Everything else that breaks the chain is refused.

    training   a DP training is about to begin (run, q, σ, steps, ε, δ, n …); it counts in full from here on. Has the
               trainings of other workspaces over the same records, which count wherever this one is moved
    trained    its adapter was saved (run, sha256; all runs that count by then, and what they promise together)
    served     the promise `corpus` was served, once per start of a process
    mixed      the operator accepted both promises: nothing is promised about the corpus from here on
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from paclm.errors import InvalidInput, LedgerTampered, LedgerUnwritable
from paclm.ledger.sqlite_file import refuse_link
from paclm.privacy.dp import DpMechanism

DpEventKind = Literal["training", "trained", "served", "mixed"]

_START = "0" * 64
_REMEDY = "Restore it from a backup. Without it the DP trainings of this corpus are not known, so nothing is promised."


def mechanism_of(training: Mapping[str, Any]) -> DpMechanism:
    """What a `training` event did; raises if it cannot be read."""
    try:
        return DpMechanism(
            float(training["sampling_rate"]), float(training["noise_multiplier"]), int(training["steps"])
        )
    except (KeyError, TypeError, ValueError) as error:  # InvalidInput is a ValueError
        raise LedgerTampered(f"A recorded DP training cannot be accounted for ({error!r}). {_REMEDY}") from None


class DpLog:
    """The log of one workspace. The first event makes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first, after checking the chain."""
        refuse_link(self.path)
        try:
            return self._parse(self.path.read_bytes())[0]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LedgerUnwritable(f"{self.path} cannot be read ({error.strerror}).") from None

    def has(self, kind: DpEventKind) -> bool:
        """Whether an event of this kind was ever recorded."""
        return any(event["kind"] == kind for event in self.events())

    def trainings(self) -> dict[str, dict[str, Any]]:
        """Every DP training ever begun, by run, oldest first, finished or not."""
        return {str(event["run"]): event for event in self.events() if event["kind"] == "training"}

    def known(self) -> dict[str, dict[str, Any]]:
        """Those, and the trainings of other workspaces over the same records that were known when one began."""
        own = self.trainings()
        carried = {run: details for event in own.values() for run, details in event.get("elsewhere", {}).items()}
        return {**carried, **own}

    def trained(self) -> dict[str, str]:
        """The run that made each saved adapter, by its SHA-256."""
        return {str(event["sha256"]): str(event["run"]) for event in self.events() if event["kind"] == "trained"}

    def mechanisms(self) -> list[DpMechanism]:
        """What all trainings ever begun did."""
        return [mechanism_of(training) for training in self.trainings().values()]

    def append(self, kind: DpEventKind, **details: Any) -> dict[str, Any]:
        """Add one event; it is durable when this returns."""
        if kind not in get_args(DpEventKind):
            raise InvalidInput(f"The log has no event {kind!r}.")
        refuse_link(self.path)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed
                os.fchmod(descriptor, 0o600)
                events, length = self._parse(file.read())
                made = {
                    "seq": len(events) + 1,
                    "at": datetime.now(UTC).isoformat(timespec="seconds"),
                    "kind": kind,
                    **details,
                    "previous": events[-1]["hash"] if events else _START,
                }
                event = {**made, "hash": _hash(made)}
                file.truncate(length)
                file.seek(max(0, length - 1))
                if file.read(1) not in (b"", b"\n"):
                    file.write(b"\n")
                file.seek(0, os.SEEK_END)
                file.write(json.dumps(event, ensure_ascii=False, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(descriptor)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise LedgerUnwritable(
                f"{self.path} cannot be written ({error.strerror}), so nothing was begun. Free disk space, or correct "
                "the permissions of its folder."
            ) from None
        return event

    def _parse(self, content: bytes) -> tuple[list[dict[str, Any]], int]:
        """The events, and the length of the lines that hold them."""
        *lines, rest = content.split(b"\n")
        with suppress(ValueError):
            json.loads(rest)  # raises unless it is whole but for its end: then it counts, which is the safe side
            lines, rest = [*lines, rest], b""
        events: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            try:
                event = json.loads(line)
                made = {name: value for name, value in event.items() if name != "hash"}
                previous = events[-1]["hash"] if events else _START
                is_next = (event["seq"], event["previous"], event["hash"]) == (number, previous, _hash(made))
                is_known = event["kind"] in get_args(DpEventKind) and (event["kind"] != "training" or "run" in event)
            except (ValueError, KeyError, TypeError, AttributeError):
                is_next = is_known = False
            if not (is_next and is_known):
                raise LedgerTampered(
                    f"Line {number} of {self.path} was edited, removed or reordered, or is not of this version. "
                    f"{_REMEDY}",
                    seq=number,
                )
            events.append(event)
        return events, len(content) - len(rest)


def _hash(made: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(made, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
