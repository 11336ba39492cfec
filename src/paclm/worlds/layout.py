"""Names of the folders and files of a workspace. Reads no disk and imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

SETTINGS_FILE = "paclm.toml"
MANIFEST_FILE = "manifest.json"
MEMBERSHIP_FILE = "membership.npz"

CORPUS_FOLDER = "corpus"
ADAPTERS_FOLDER = "adapters"
CURATOR_FOLDER = "curator"
STUDY_FOLDER = "study"

LEDGER_FILE = "ledger.sqlite"  # in the curator's folder
DP_LOG_FILE = "dp.jsonl"  # in the curator's folder


def adapters_file(name: str) -> str:
    """The file in the folder of adapters that holds `worlds`, `full`, `shards:8` or `shards-8` …"""
    return f"{name.replace(':', '-')}.safetensors"


WORLDS_FILE = adapters_file("worlds")
FULL_FILE = adapters_file("full")
DP_FILE = adapters_file("dp")
DP_CARD_FILE = "dp-card.md"  # in the folder of adapters


def ledger_path(workspace: Path) -> Path:
    """The path of a workspace's ledger, whether or not it exists."""
    return workspace / CURATOR_FOLDER / LEDGER_FILE


def dp_log_path(workspace: Path) -> Path:
    """The path of a workspace's log of DP trainings, whether or not it exists."""
    return workspace / CURATOR_FOLDER / DP_LOG_FILE
