"""The long tests use the workspaces of the curator's tests."""

from __future__ import annotations

from curator.conftest import make, no_keys_around, no_notes, template

__all__ = ["make", "no_keys_around", "no_notes", "template"]
