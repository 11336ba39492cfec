"""The curator's tests have the workspaces."""

from curator.conftest import no_keys_around

__all__ = ["no_keys_around"]
