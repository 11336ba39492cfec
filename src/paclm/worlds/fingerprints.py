"""Identify a base model by content: a hash over its weights, configuration and tokenizer.

Reads bytes and knows nothing of models; the engine finds the folder of a name.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paclm.errors import ModelError
from paclm.worlds.storage import hash_file

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
)
_NOT_CONTENT = ("transformers_version", "_name_or_path", "name_or_path", "local_files_only", "is_local")


@dataclass(frozen=True, slots=True)
class Base:
    """A base model on this machine: the name it was asked for, its folder and its hash."""

    name: str
    folder: Path
    fingerprint: str


def base_files(folder: Path) -> list[Path]:
    """The files of a base model that decide its votes, by name."""
    weights = [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern))]
    named = [folder / name for name in ("config.json", *_TOKENIZER) if (folder / name).is_file()]
    if not (folder / "config.json").is_file() or not weights:
        raise ModelError(
            f"{folder} holds no base model: it needs config.json, tokenizer.json and weights (*.safetensors). "
            "Name a folder that has them, or use --base tiny."
        )
    return sorted([*weights, *named], key=lambda path: path.name)


def fingerprint_base(folder: Path) -> str:
    """Hash the content of a base model; of JSON settings only the values count, not the formatting."""
    digest = hashlib.sha256()
    for path in base_files(folder):
        is_settings = path.name in ("config.json", "tokenizer_config.json")
        digest.update(f"{path.name} {_hash_settings(path) if is_settings else hash_file(path)}\n".encode())
    return digest.hexdigest()


def stat_files(paths: list[Path]) -> dict[str, list[int]]:
    """Size and time of change of files; files with equal stats count as unchanged, as in Git's index."""
    stats = {path.name: path.stat() for path in paths}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _hash_settings(path: Path) -> str:
    try:
        settings: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}. Fetch the base model again.") from None
    if isinstance(settings, dict):
        settings = {key: value for key, value in settings.items() if key not in _NOT_CONTENT}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
