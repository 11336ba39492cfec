"""Every error paclm raises on purpose. Each message says what happened, with the value, and what to do next.

PaclmError
├── InvalidInput          a value outside its rule; also a ValueError
│   └── ContextExceeded   prompt and answer together are longer than the context
├── BudgetExceeded        the next charge would pass the committed total
├── RandomnessMisuse      coins where noise belongs, a seed where none may be; also a TypeError
├── UnsoundState          a belief that does not sum to one, a second copy of a secret: stop, release nothing
├── MissingExtra          a part of paclm that is not installed
├── CorpusError           records that cannot be read as they stand
├── WorkspaceError        a workspace that is missing, broken, changed or already there
├── ModelError            a base model that cannot be had or is not supported
├── EngineError           adapters, memory, determinism: the engine cannot do what was asked
├── LedgerError           the ledger cannot be trusted or written: nothing is released
│   ├── LedgerMissing     there is none
│   ├── LedgerBusy        another process holds it
│   ├── LedgerFull        no room to write the charge
│   ├── LedgerUnwritable  read-only, or the disk fails
│   ├── LedgerNotDurable  commits would not reach the disk
│   ├── LedgerDamaged     cut off or overwritten: not a whole database
│   ├── LedgerTampered    a row was edited, removed, swapped or forged
│   ├── LedgerWrongKey    signed with another key
│   ├── LedgerRolledBack  older than its witness, or a copy
│   ├── WitnessMissing    the witness on record is not there
│   └── LedgerStopped     an earlier failure; only a restart goes on
├── CuratorError          the secret, its keys and its state: something does not fit, so nothing is served
└── ServiceError          the service's own books (API keys, quotas, replies) cannot do what was asked
    ├── KeyRefused        an API key that is unknown or was revoked
    ├── QuotaExceeded     a key's slice of the budget does not cover the request
    ├── ReplyConflict     an idempotency key that was used for another request
    └── RepliesFull       no room to remember one more request
"""

from __future__ import annotations


class PaclmError(Exception):
    """Base of all errors raised on purpose; the command line prints its message and exits with status 2."""


class InvalidInput(PaclmError, ValueError):
    """A value outside its rule."""


class ContextExceeded(InvalidInput):
    """Prompt and answer together are longer than the context."""

    def __init__(self, *, prompt_tokens: int, max_new_tokens: int, context: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.context = context
        super().__init__(
            f"The prompt has {prompt_tokens:,} tokens and {max_new_tokens:,} more were asked for; the context holds "
            f"{context:,}. Shorten the prompt or ask for fewer tokens."
        )


class BudgetExceeded(PaclmError):
    """The next charge would pass the committed total."""


class RandomnessMisuse(PaclmError, TypeError):
    """Coins where noise belongs, noise where coins belong, or a seed where none may be."""


class UnsoundState(PaclmError):
    """A state from which nothing may be released, or a copy of what one process alone may hold."""


EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors", "gguf", "cryptography"), "core"),
    **dict.fromkeys(("fastapi", "uvicorn", "pydantic", "prometheus_client"), "serve"),
    **dict.fromkeys(("matplotlib", "jinja2"), "report"),
}
"""Which extra of paclm brings a package: the bare package can plan and replay, and no more."""


class MissingExtra(PaclmError, ImportError):
    """A part of paclm that is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"This needs the package {package!r}. Install it with: pip install 'paclm[{EXTRAS[package]}]'")
        self.package = package

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str]]:
        return MissingExtra, (self.package,)


class CorpusError(PaclmError):
    """Records that cannot be read as they stand."""


class WorkspaceError(PaclmError):
    """A workspace that is missing, broken, changed or already there."""


class ModelError(PaclmError):
    """A base model that cannot be had or is not supported."""


class EngineError(PaclmError):
    """Adapters, memory, determinism: the engine cannot do what was asked."""


class CuratorError(PaclmError):
    """The secret, its keys and its state: something does not fit, so nothing is served."""


class LedgerError(PaclmError):
    """The ledger cannot be trusted or written: nothing is released."""


class LedgerMissing(LedgerError):
    """There is no ledger."""


class LedgerBusy(LedgerError):
    """Another process holds the ledger."""


class LedgerFull(LedgerError):
    """There is no room to write the charge."""


class LedgerUnwritable(LedgerError):
    """Read-only, or the disk fails."""


class LedgerNotDurable(LedgerError):
    """Commits would not reach the disk before a token leaves."""


class LedgerDamaged(LedgerError):
    """Cut off or overwritten: not a whole database."""


class LedgerTampered(LedgerError):
    """A row was edited, removed, swapped or forged."""

    def __init__(self, message: str, seq: int | None = None) -> None:
        super().__init__(message)
        self.seq = seq


class LedgerWrongKey(LedgerError):
    """Signed with another key than the one given."""


class LedgerRolledBack(LedgerError):
    """Older than its witness or the note in its lock, or a copy that was not adopted."""


class WitnessMissing(LedgerError):
    """The witness on record is not there."""


class LedgerStopped(LedgerError):
    """An earlier failure stopped this ledger; only a restart goes on."""


class ServiceError(PaclmError):
    """The service's own books (API keys, quotas, replies) cannot do what was asked."""


class KeyRefused(ServiceError):
    """An API key that is unknown or was revoked."""


class QuotaExceeded(ServiceError):
    """A key's slice of the budget does not cover the request."""

    def __init__(self, *, name: str, quota_tokens: int, used_tokens: int, reserved_tokens: int, requested: int) -> None:
        self.quota_tokens = quota_tokens
        self.used_tokens = used_tokens
        self.reserved_tokens = reserved_tokens
        self.requested = requested
        self.remaining_tokens = max(0, quota_tokens - used_tokens - reserved_tokens)
        super().__init__(
            f"The request may take {requested:,} tokens, and the key {name!r} has {self.remaining_tokens:,} left: of "
            f"{quota_tokens:,}, {used_tokens:,} are used and {reserved_tokens:,} held for its other requests. Ask for "
            "fewer, wait for those to end, or ask the operator for a key with a larger quota."
        )


class ReplyConflict(ServiceError):
    """An idempotency key that was used for another request."""


class RepliesFull(ServiceError):
    """There is no room to remember one more request."""
