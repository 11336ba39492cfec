"""Text files, compressed or not: opened by their suffix. Knows nothing of what they hold."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal

DAMAGE = (EOFError, zlib.error, lzma.LZMAError)
"""What reading a compressed file that is cut off or broken raises, beside OSError."""

_OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def open_text(
    path: Path, *, errors: Literal["strict", "surrogateescape"] = "strict", newline: str | None = None
) -> IO[str]:
    """Open a UTF-8 text, with or without a byte order mark, plain or .gz, .xz, .bz2."""
    opener: Callable[..., IO[str]] = _OPENERS.get(path.suffix.lower(), open)
    return opener(path, "rt", encoding="utf-8-sig", errors=errors, newline=newline)


def kind_of(path: Path) -> str:
    """The suffix that names the format, without a compression suffix; empty where there is none."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _OPENERS else suffix
