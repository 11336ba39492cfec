"""Plugins for paclm. Each entry point of pyproject.toml names an object in one of these modules."""
