"""JSON lines with counts only. No line can carry a prompt, an answer or a key: no field takes free text.

Every field of our own lines (`Entry`) is a number or is checked against a fixed pattern. Lines of libraries (uvicorn,
asyncio) are reduced to logger, level, error type and source position: messages and exception arguments may hold request
bodies.
"""

from __future__ import annotations

import json
import logging
import logging.config
import re
import sys
import threading
import traceback
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from paclm.errors import InvalidInput
from paclm.server.metrics import ROUTES, Route

LOGGER = "paclm.server"

EventName = Literal[
    "started",
    "answered",
    "refused",
    "replayed",
    "disconnected",
    "failed",
    "budget_low",
    "budget_exhausted",
    "stopping",
    "stopped",
]
EVENTS: tuple[str, ...] = get_args(EventName)

_PATTERNS = {
    "request": re.compile(r"[a-z]{1,12}[-_][A-Za-z0-9]{8,64}"),
    "key": re.compile(r"(?!paclm-)[A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
    "code": re.compile(r"[a-z]+(_[a-z]+)*"),
    "on_exhausted": re.compile("public|refuse"),
}
_TEMPLATES = ("uvicorn", "uvicorn.error")
"""Loggers whose message templates are fixed texts; their arguments are left out."""
_DEEPEST = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line. A field that is None is left out."""

    event: EventName
    request: str | None = None
    """The server's id of the request."""
    key: str | None = None
    """The name of an API key."""
    route: Route | None = None
    status: int | None = None
    code: str | None = None
    """The error code of the answer, such as privacy_budget_exhausted."""
    prompt_tokens: int | None = None
    private_tokens: int | None = None
    public_tokens: int | None = None
    charged_nats: float | None = None
    remaining_tokens: int | None = None
    on_exhausted: str | None = None
    """What happens to requests after the budget is spent."""
    running: int | None = None
    queued: int | None = None
    first_token_seconds: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        _check(self.event in EVENTS, "event")
        _check(self.route is None or self.route in ROUTES, "route")
        for field in fields(self)[1:]:
            value, pattern = getattr(self, field.name), _PATTERNS.get(field.name)
            if pattern is not None:
                _check(value is None or (isinstance(value, str) and pattern.fullmatch(value) is not None), field.name)
            elif field.name != "route":
                _check(isinstance(value, int | float | None), field.name)


def _check(is_fit: bool, name: str) -> None:
    """The value is not repeated: it may be private."""
    if not is_fit:
        raise InvalidInput(f"The field {name!r} of a log line takes a number or one plain word of its own pattern.")


def write(entry: Entry, level: int = logging.INFO) -> None:
    """Log one line."""
    logging.getLogger(LOGGER).log(level, entry.event, extra={"entry": entry})


class JsonLines(logging.Formatter):
    """Formats an `Entry` in full and reduces everything else."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object on one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        entry = getattr(record, "entry", None)
        if isinstance(entry, Entry):
            known = {field.name: getattr(entry, field.name) for field in fields(entry)}
            return json.dumps(line | {name: value for name, value in known.items() if value is not None})
        line |= {"event": "log", "logger": record.name, "at": f"{record.module}:{record.lineno}"}
        if record.name in _TEMPLATES and isinstance(record.msg, str):
            line["template"] = record.msg.strip()
        if record.exc_info and record.exc_info[1] is not None:
            line |= describe_error(record.exc_info[1])
        return json.dumps(line)


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error's type, causes and source positions; never its message or local values."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < _DEEPEST:
        chain.append(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    frames = traceback.extract_tb(error.__traceback__, limit=-_DEEPEST)
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": chain[0], "caused_by": chain[1:], "trace": where}


def logging_config(level: str = "INFO") -> dict[str, Any]:
    """For `logging.config.dictConfig`. uvicorn's access log holds paths and queries: off."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "paclm.server.logs.JsonLines"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            LOGGER: {"handlers": ["stderr"], "level": level, "propagate": False},
            "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
            "uvicorn.error": {"level": "WARNING"},
            "uvicorn.access": {"handlers": [], "level": "CRITICAL", "propagate": False},
        },
    }


def install(level: str = "INFO") -> None:
    """Send loggers, warnings and uncaught errors of this process through `JsonLines`."""
    logging.config.dictConfig(logging_config(level))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt | SystemExit):
        logging.getLogger(LOGGER).error("uncaught", exc_info=None if error is None else (kind, error, trace))
