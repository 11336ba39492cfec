"""The long tests use the workspaces of the curator's tests, and the servers of the server's."""

from curator.conftest import make, no_keys_around, no_notes, template
from server.conftest import engine, roles, start

__all__ = ["engine", "make", "no_keys_around", "no_notes", "roles", "start", "template"]
