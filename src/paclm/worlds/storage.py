"""Private files on disk: mode 0600, complete or absent, with locks and hashes.

Knows nothing of what it stores. Modes are set explicitly, so they hold under every umask.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from paclm.config import in_shell
from paclm.errors import WorkspaceError


def in_utf8(name: str | Path) -> str:
    """A file name as valid UTF-8: bytes that are not become \\xe9 and the like."""
    return str(name).encode(errors="surrogateescape").decode(errors="backslashreplace")


def make_private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter (0700), or restrict an existing one."""
    path.mkdir(mode=0o700, exist_ok=True)
    path.chmod(0o700)
    return path


@contextmanager
def private_file(path: Path, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """Write a file of this mode atomically: a reader finds the old content or the new one, never a part."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # also on Ctrl-C: no half-written private text stays behind
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_private(path: Path, content: bytes | Iterable[bytes], mode: int = 0o600) -> None:
    """Write a private file as a whole, or piece by piece."""
    with private_file(path, mode) as file:
        file.writelines([content] if isinstance(content, bytes) else content)


def write_private_json(path: Path, value: Any) -> None:
    """Write indented JSON with a newline at the end."""
    write_private(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_private_arrays(path: Path, **arrays: Any) -> None:
    """Write arrays as a compressed .npz file."""
    import numpy as np  # here: commands that only read settings start without it

    with private_file(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def sync_folder(path: Path) -> None:
    """Make renames inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def try_lock(path: Path, flags: int = os.O_RDONLY) -> Iterator[tuple[int, bool]]:
    """Lock a file or folder unless it is locked elsewhere; yields its descriptor and whether the lock was taken.

    The system releases the lock when the holder dies.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield descriptor, False
        else:
            yield descriptor, True
    finally:
        os.close(descriptor)


@contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file with the holder's process id, or raise if another process holds it."""
    with try_lock(path, os.O_RDWR | os.O_CREAT) as (descriptor, is_mine):
        if not is_mine:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise WorkspaceError(f"{what} is already running in process {holder}. Wait for it, or stop it.")
        os.pwrite(descriptor, f"{os.getpid():<11}\n".encode(), 0)
        yield


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_if_shared(file: Path) -> None:
    """A private file is a plain one, closed to other users; a link could lead to an older copy."""
    if file.is_symlink():
        raise WorkspaceError(
            f"{file} is a symbolic link, and what it leads to could be exchanged unnoticed. Move the file itself to "
            "this place, or link its whole folder."
        )
    mode = file.stat().st_mode & 0o777
    if mode & 0o077:
        raise WorkspaceError(
            f"{file} is open to other users (mode {mode:04o}). Close it: chmod -R go-rwx {in_shell(file.parent)}"
        )


def refuse_if_others_can_enter(folder: Path) -> None:
    """Private text in a folder that others can enter is an error, as it is for an SSH key."""
    if not folder.is_dir():
        raise WorkspaceError(f"The folder {folder} is missing. Restore it from a backup, or make a new workspace.")
    mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        raise WorkspaceError(
            f"Other users can enter {folder} (mode {mode:04o}), which holds private text. "
            f"Close it with: chmod -R go-rwx {in_shell(folder)}"
        )
