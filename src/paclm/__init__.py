"""paclm: private text generation from a language model adapted to private records, with a proven leakage bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paclm.curator.curator import Curator
    from paclm.privacy.bounds import nats_for, success_bound
    from paclm.privacy.randomness import Coins, Noise, ResearchNoise
    from paclm.privacy.releases import release_token
    from paclm.worlds.assignment import assign_worlds
    from paclm.worlds.workspace import Workspace

# Loaded on first use, so that `paclm --help` and `import paclm` are fast.
_HOMES = {
    "Curator": "paclm.curator.curator",
    "success_bound": "paclm.privacy.bounds",
    "nats_for": "paclm.privacy.bounds",
    "release_token": "paclm.privacy.releases",
    "Coins": "paclm.privacy.randomness",
    "Noise": "paclm.privacy.randomness",
    "ResearchNoise": "paclm.privacy.randomness",
    "assign_worlds": "paclm.worlds.assignment",
    "Workspace": "paclm.worlds.workspace",
}

__all__ = [
    "Coins",
    "Curator",
    "Noise",
    "ResearchNoise",
    "Workspace",
    "assign_worlds",
    "nats_for",
    "release_token",
    "success_bound",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paclm' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from paclm.errors import EXTRAS, MissingExtra

        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise MissingExtra(package) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
