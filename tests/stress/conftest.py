"""The long tests use the workspaces of the curator's tests, the servers of the server's, and tools/client_matrix."""

import sys
from pathlib import Path

from curator.conftest import make, no_keys_around, no_notes, template
from server.conftest import engine, roles, start
from structured.conftest import lab

__all__ = ["engine", "lab", "make", "no_keys_around", "no_notes", "roles", "start", "template"]

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
