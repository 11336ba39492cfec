"""Where paclm keeps things outside of workspaces: a cache of model weights and a little state, per user."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Converted and fetched base models; may be deleted at any time. `PACLM_CACHE_DIR` moves it."""
    return _folder("PACLM_CACHE_DIR", "XDG_CACHE_HOME", ".cache", "Library/Caches")


def state_folder() -> Path:
    """Which corpora have workspaces, and which workspaces had a ledger. `PACLM_STATE_DIR` moves it."""
    return _folder("PACLM_STATE_DIR", "XDG_STATE_HOME", ".local/state", "Library/Application Support")


def _folder(own: str, xdg: str, unix: str, mac: str) -> Path:
    if chosen := os.environ.get(own):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / mac / "paclm"
    base = os.environ.get(xdg, "")
    return (Path(base) if os.path.isabs(base) else Path.home() / unix) / "paclm"
