"""Servers and curators as their own tests start them."""

from curator.conftest import make, no_keys_around, no_notes, open_curator, scripted, template
from server.conftest import shared, start

__all__ = ["make", "no_keys_around", "no_notes", "open_curator", "scripted", "shared", "start", "template"]
