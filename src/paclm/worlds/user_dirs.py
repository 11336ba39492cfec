"""Folders of the user outside of workspaces: a cache of model weights, and a little state."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Folder of downloaded and converted base models; may be deleted at any time. `PACLM_CACHE_DIR` moves it."""
    return _folder("PACLM_CACHE_DIR", "XDG_CACHE_HOME", ".cache", "Library/Caches")


def state_folder() -> Path:
    """Folder of the registry of workspaces and ledgers. `PACLM_STATE_DIR` moves it."""
    return _folder("PACLM_STATE_DIR", "XDG_STATE_HOME", ".local/state", "Library/Application Support")


def _folder(own: str, xdg: str, unix: str, mac: str) -> Path:
    if chosen := os.environ.get(own):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / mac / "paclm"
    base = os.environ.get(xdg, "")
    return (Path(base) if os.path.isabs(base) else Path.home() / unix) / "paclm"
