"""Every error paclm raises on purpose. Each message states what failed, with the value, and what to do next.

PaclmError
├── InvalidInput          a value that is not allowed; also a ValueError
│   └── ContextExceeded   prompt and answer together are longer than the context
├── BudgetExceeded        the next charge would pass the committed total
├── RandomnessMisuse      coins where noise belongs, a seed where none may be; also a TypeError
├── UnsoundState          a broken invariant, such as a belief that does not sum to one: release nothing
├── MissingExtra          a package of an extra is not installed; also an ImportError
├── PluginError           a plugin that cannot be imported, is of another kind, or takes a built-in name
├── CorpusError           records that cannot be read
├── WorkspaceError        a workspace that is missing, broken, changed or exists already
│   └── StudentGiven      a student, where a workspace or private adapters are needed
├── ModelError            a base model that is missing or not supported
├── EngineError           the engine cannot run: adapters, memory, determinism
├── LedgerError           the ledger cannot be trusted or written: nothing is released
│   ├── LedgerMissing     there is no ledger
│   ├── LedgerBusy        another process holds it
│   │   └── LedgerHeld    one that was seen alive by the database
│   ├── LedgerFenced      another process took it over
│   ├── LedgerMoved       it is kept elsewhere now
│   ├── LedgerFull        no space to write the charge
│   ├── LedgerUnwritable  read-only, or a disk error
│   ├── LedgerNotDurable  commits would not reach the disk
│   ├── LedgerDamaged     truncated or overwritten
│   ├── LedgerTampered    a row was edited, removed, reordered or forged
│   ├── LedgerWrongKey    signed with another key
│   ├── LedgerRolledBack  older than its witness or lock, or a copy that was not adopted
│   ├── WitnessMissing    the recorded witness is missing
│   └── LedgerStopped     an earlier failure; restart to continue
├── CuratorError          secret, keys or state do not match: nothing is served
│   └── PromiseConflict   the other promise was served from the same records
└── ServiceError          API keys, quotas, stored replies or the address of the server
    ├── KeyRefused        an API key that is unknown or was revoked
    ├── QuotaExceeded     the request is larger than what the key's quota has left
    ├── ReplyConflict     an idempotency key that was used for another request
    └── RepliesFull       no space to store one more reply
"""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


class PaclmError(Exception):
    """Base of all errors raised on purpose; the command line prints its message and exits with status 2."""


class InvalidInput(PaclmError, ValueError):
    """A value that is not allowed."""


class ContextExceeded(InvalidInput):
    """Prompt and answer together are longer than the context."""

    def __init__(self, *, prompt_tokens: int, max_new_tokens: int, context: int, is_least: bool = False) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.context = context
        super().__init__(  # litellm knows it by the first words, LangChain by the last; some read the first number
            f"This model's maximum context length is {context} tokens: the prompt has "
            f"{'at least ' if is_least else ''}{prompt_tokens} and {max_new_tokens} more were asked for. Shorten the "
            "prompt or ask for fewer tokens (context_length_exceeded)."
        )


class BudgetExceeded(PaclmError):
    """The next charge would pass the committed total."""


class RandomnessMisuse(PaclmError, TypeError):
    """Coins where noise belongs, noise where coins belong, or a seed where none may be."""


class UnsoundState(PaclmError):
    """A broken invariant, such as a second copy of a secret: nothing may be released."""


EXTRAS = {
    **dict.fromkeys(
        ("torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate", "cryptography"), "core"
    ),
    **dict.fromkeys(("fastapi", "uvicorn", "pydantic", "prometheus_client"), "serve"),
    **dict.fromkeys(("matplotlib", "jinja2"), "report"),
    "dp_accounting": "dp",
    "psycopg": "postgres",
    "opentelemetry": "otel",
}
"""The extra of paclm that installs each package; without extras only `plan` and `replay` work."""


class MissingExtra(PaclmError, ImportError):
    """A package of an extra is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"This needs the package {package!r}. {_how_to_install(EXTRAS[package])}")
        self.package = package

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str]]:
        return MissingExtra, (self.package,)


def _how_to_install(extra: str) -> str:
    """The command that adds an extra to this installation.

    paclm is on no index, and a package of its name there would be a stranger's: pip is given the checkout or the wheel
    that this installation came from, as pip recorded it.
    """
    try:
        origin = json.loads(distribution("paclm").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # run from src/
        origin = {}
    place = urlsplit(origin.get("url", ""))
    if place.scheme != "file" or not Path(url2pathname(place.path)).exists():
        return f"Install it in a checkout of paclm with: pip install '.[{extra}]'"
    if origin.get("dir_info", {}).get("editable"):
        return f"Install it with: pip install -e {shlex.quote(f'{url2pathname(place.path)}[{extra}]')}"
    return f"Install it with: pip install 'paclm[{extra}] @ {place.geturl()}'"


class PluginError(PaclmError):
    """A plugin that cannot be imported, is of another kind, or takes a built-in name."""


class CorpusError(PaclmError):
    """Records that cannot be read."""


class WorkspaceError(PaclmError):
    """A workspace that is missing, broken, changed or exists already."""


class StudentGiven(WorkspaceError):
    """A student, where a workspace or private adapters are needed."""


class ModelError(PaclmError):
    """A base model that is missing or not supported."""


class EngineError(PaclmError):
    """The engine cannot run: adapters, memory, determinism."""


class WorkerLost(EngineError):
    """A worker died or was silent for too long. Nothing was drawn for the step in flight."""


class CuratorError(PaclmError):
    """Secret, keys or state do not match: nothing is served."""


class PromiseConflict(CuratorError):
    """The other promise was served from the same records."""


class LedgerError(PaclmError):
    """The ledger cannot be trusted or written: nothing is released."""


class LedgerMissing(LedgerError):
    """There is no ledger."""


class LedgerBusy(LedgerError):
    """Another process holds the ledger."""


class LedgerHeld(LedgerBusy):
    """Another process holds a ledger in a database, and was seen not long ago."""


class LedgerFenced(LedgerError):
    """Another process took the ledger over: this one may not write any more."""


class LedgerMoved(LedgerError):
    """The ledger is kept elsewhere now, or its move did not finish."""


class LedgerFull(LedgerError):
    """No space to write the charge."""


class LedgerUnwritable(LedgerError):
    """Read-only, or a disk error."""


class LedgerNotDurable(LedgerError):
    """Commits would not reach the disk before a token leaves."""


class LedgerDamaged(LedgerError):
    """Truncated or overwritten."""


class LedgerTampered(LedgerError):
    """A row was edited, removed, reordered or forged."""

    def __init__(self, message: str, seq: int | None = None, verified: int | None = None) -> None:
        super().__init__(message)
        self.seq = seq
        self.verified = verified
        """The last row before it that passed its checks."""


class LedgerWrongKey(LedgerError):
    """Signed with another key than the one given."""


class LedgerRolledBack(LedgerError):
    """Older than its witness or the note in its lock, or a copy that was not adopted."""


class WitnessMissing(LedgerError):
    """The recorded witness is missing."""


class LedgerStopped(LedgerError):
    """An earlier failure stopped this ledger; restart to continue."""


class ServiceError(PaclmError):
    """API keys, quotas, stored replies or the address of the server: the request cannot be served."""


class ServiceStopped(ServiceError):
    """The connection to keys and quotas is lost, or another server took them over: only a restart helps."""


class KeyRefused(ServiceError):
    """An API key that is unknown or was revoked."""


class QuotaExceeded(ServiceError):
    """The request is larger than what the key's quota has left."""

    def __init__(self, *, name: str, quota_tokens: int, used_tokens: int, reserved_tokens: int, requested: int) -> None:
        self.quota_tokens = quota_tokens
        self.used_tokens = used_tokens
        self.reserved_tokens = reserved_tokens
        self.requested = requested
        self.remaining_tokens = max(0, quota_tokens - used_tokens - reserved_tokens)
        super().__init__(
            f"The request may take {requested:,} tokens, and the key {name!r} has {self.remaining_tokens:,} left: of "
            f"{quota_tokens:,}, {used_tokens:,} are used and {reserved_tokens:,} are held for its other requests. Ask "
            "for fewer, wait for those to end, or ask the operator for a larger quota."
        )


class ReplyConflict(ServiceError):
    """An idempotency key that was used for another request."""


class RepliesFull(ServiceError):
    """No space to store one more reply."""
