"""The curator's keys: one master key, held by the operator, and one key per purpose derived from it.

    PACLM_KEY           the key itself, 64 hexadecimal digits or base64
    PACLM_KEY_FILE      a file that holds it
    PACLM_KEY_COMMAND   a program that prints it: a vault's, a key service's or a hardware module's
    none of them        curator/key inside the workspace, created on first use

Knows nothing of what the keys protect. The master key and the workspace together give the secret: keep them apart where
that matters.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import secrets
import shlex
import subprocess
from pathlib import Path
from typing import NoReturn, final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from paclm.config import in_shell
from paclm.curator.redacted import Redacted, hide_memory, redact_traceback
from paclm.errors import CuratorError, UnsoundState
from paclm.ledger.events import key_name
from paclm.worlds.storage import sync_folder

KEY_VARIABLE = "PACLM_KEY"
KEY_FILE_VARIABLE = "PACLM_KEY_FILE"
KEY_COMMAND_VARIABLE = "PACLM_KEY_COMMAND"
KEY_VARIABLES = (KEY_VARIABLE, KEY_FILE_VARIABLE, KEY_COMMAND_VARIABLE)
KEY_FILE = "key"
NEW_KEY_FILE = "key.new"
SIZE = 32

_HEX = re.compile(r"[0-9a-fA-F]{64}")
_NONCE = 12
_NAME = 16
PACKED_SIZE = _NAME + 2 * SIZE
_COMMAND_SECONDS = 60


@final
class MasterKeys:
    """The keys derived from one master key. They cannot be printed, copied or pickled."""

    __slots__ = ("__mac", "__seal", "id")

    def __init__(self, name: str, mac: Redacted[bytes], seal: Redacted[bytes]) -> None:
        self.id = name
        """Identifies the key without revealing anything about it."""
        self.__mac = mac
        self.__seal = seal

    @classmethod
    def derived(cls, master: Redacted[bytes]) -> MasterKeys:
        """Derive all keys from a master key."""
        name = _derive(master, "id").reveal().hex()[:_NAME]
        return cls(name, _derive(master, "ledger-mac"), _derive(master, "seal"))

    @property
    def name(self) -> str:
        """The key's public name, as the rows of the ledger and all messages have it; `id` is in files only."""
        return key_name(self.__mac.reveal())

    def packed(self) -> Redacted[bytes]:
        """Both keys as bytes, to be sealed: a retired key is still needed to check what it signed."""
        return Redacted(self.id.encode() + self.__mac.reveal() + self.__seal.reveal())

    @classmethod
    def unpacked(cls, packed: Redacted[bytes]) -> MasterKeys:
        """The inverse of `packed`."""
        content = packed.reveal()
        return cls(content[:_NAME].decode(), Redacted(content[_NAME : _NAME + SIZE]), Redacted(content[_NAME + SIZE :]))

    @property
    def mac(self) -> Redacted[bytes]:
        """The key of the ledger's message authentication codes."""
        return self.__mac

    def seal(self, content: bytes, about: bytes) -> bytes:
        """Encrypt with `about` as associated data."""
        nonce = os.urandom(_NONCE)
        return nonce + AESGCM(self.__seal.reveal()).encrypt(nonce, content, about)

    def unseal(self, sealed: bytes, about: bytes) -> Redacted[bytes] | None:
        """Decrypt; None for another key, other associated data or changed bytes."""
        try:
            return Redacted(AESGCM(self.__seal.reveal()).decrypt(sealed[:_NONCE], sealed[_NONCE:], about))
        except (InvalidTag, ValueError):
            return None

    def __repr__(self) -> str:
        return f"<MasterKeys {self.id}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsoundState(
            "Keys cannot be pickled or copied: each process reads them from the environment or from the key file."
        )


def load_keys(folder: Path, *, may_create: bool) -> MasterKeys:
    """The keys of a workspace with this curator folder; first use may create curator/key."""
    return keys_at_hand(folder, may_create=may_create)[0]


def keys_at_hand(folder: Path, *, may_create: bool = False) -> list[MasterKeys]:
    """Two keys if a rotation of curator/key was interrupted: only the ledger knows then which is in force.

    Hides the memory of this process first: all that opens a curator comes through here.
    """
    hide_memory()
    variable = key_variable()
    if variable == KEY_VARIABLE:
        return [MasterKeys.derived(parse_key(Redacted(os.environ[KEY_VARIABLE]), KEY_VARIABLE))]
    if variable == KEY_FILE_VARIABLE:
        return [MasterKeys.derived(read_key(Path(os.environ[KEY_FILE_VARIABLE]).expanduser()))]
    if variable == KEY_COMMAND_VARIABLE:
        return [_keys_of_command()]
    path, following = folder / KEY_FILE, folder / NEW_KEY_FILE
    for file in (path, following):
        if file.is_symlink():  # elsewhere it may be one: PACLM_KEY_FILE often names a mounted secret
            raise CuratorError(
                f"{file} is a symbolic link. Move the key itself to this place, or name where it is: "
                f"{KEY_FILE_VARIABLE}={in_shell(os.path.realpath(file))}"
            )
    if may_create and not path.exists():
        write_key(path, new_key())
    found = [MasterKeys.derived(read_key(path))]
    return [*found, MasterKeys.derived(read_key(following))] if following.exists() else found


def key_variable() -> str | None:
    """The variable that says where the key is; None: it is in the workspace."""
    named = [name for name in KEY_VARIABLES if os.environ.get(name)]
    if KEY_COMMAND_VARIABLE in named[1:]:
        raise CuratorError(
            f"{' and '.join(named)} are set, and only one of them can say where the key is. Unset the others."
        )
    return named[0] if named else None


def keeps_own_key() -> bool:
    """Whether the key is in the workspace, because the environment names no other."""
    return key_variable() is None


def settle_own_key(folder: Path, keys: MasterKeys) -> None:
    """After a rotation, finished or interrupted: make the key in force the only one, in curator/key.

    Called under the ledger's lock with the key in force, so no other process needs the files removed here.
    """
    for part in folder.glob(f".{KEY_FILE}.*.part"):  # left by a `write_key` that was killed: leave no key in clear
        if part.is_file():
            part.unlink(missing_ok=True)
    following = folder / NEW_KEY_FILE
    if not keeps_own_key() or not following.exists():
        return
    if MasterKeys.derived(read_key(following)).id == keys.id:
        os.replace(following, folder / KEY_FILE)
    else:
        following.unlink()
    sync_folder(folder)


def new_key() -> Redacted[bytes]:
    """A fresh master key."""
    hide_memory()
    return Redacted(secrets.token_bytes(SIZE))


def write_key(path: Path, master: Redacted[bytes]) -> None:
    """Write a new key file durably, mode 0600; an existing one is never overwritten.

    The file is complete or absent, also after a crash.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        try:
            _write_part(part, master)
            os.link(part, path)  # unlike a rename, a link never replaces a file
        finally:
            part.unlink(missing_ok=True)  # leave no key in clear
        sync_folder(path.parent)
    except OSError as error:
        if isinstance(error, FileExistsError | FileNotFoundError) and path.exists():  # another process made it
            raise CuratorError(
                f"The key file {path} exists already, and a key is never overwritten. If another process has just made "
                "it, open the workspace again."
            ) from None
        raise CuratorError(
            f"The key file {path} cannot be created: {error.strerror}. It needs a writable folder on a file system "
            f"with hard links. Or set {KEY_FILE_VARIABLE} to a key kept elsewhere: openssl rand -hex 32 makes one."
        ) from None


def _write_part(part: Path, master: Redacted[bytes]) -> None:
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        written = os.write(descriptor, master.reveal().hex().encode() + b"\n")
        if written != 2 * SIZE + 1:
            raise OSError(errno.ENOSPC, f"only {written} of {2 * SIZE + 1} bytes were written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_key(path: Path) -> Redacted[bytes]:
    """The master key in a file; refuses one that other users can read. Hides the memory of this process first."""
    hide_memory()
    try:
        mode = path.stat().st_mode & 0o777
        text = Redacted(path.read_bytes().decode("ascii", errors="replace"))
    except OSError as error:
        raise CuratorError(
            f"The key file {path} cannot be read: {error.strerror}. Restore it, or set {KEY_VARIABLE} or "
            f"{KEY_FILE_VARIABLE}: without the key the secret cannot be read, and nothing can be served."
        ) from None
    if mode & 0o077:
        raise CuratorError(
            f"The key file {path} can be read by other users (mode {mode:04o}). Restrict it: chmod 600 {in_shell(path)}"
        )
    return parse_key(text, str(path))


@redact_traceback
def _keys_of_command() -> MasterKeys:
    """Run the program of PACLM_KEY_COMMAND, which prints the master key.

    Not kept for the next opening: the key may have been rotated. No error repeats the output, nor the command, which
    may hold a PIN, or the key itself by mistake.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACLM_")}
    try:
        words = shlex.split(os.environ[KEY_COMMAND_VARIABLE])
        ended = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, timeout=_COMMAND_SECONDS
        )
    except (ValueError, IndexError):
        raise CuratorError(
            f"{KEY_COMMAND_VARIABLE} is no command: give a program and its arguments, quoted as in a shell."
        ) from None
    except OSError as error:
        raise CuratorError(
            f"The program of {KEY_COMMAND_VARIABLE} cannot be run: {error.strerror}. Give its full path; it is run "
            "without a shell."
        ) from None
    except subprocess.TimeoutExpired:
        raise CuratorError(
            f"The program of {KEY_COMMAND_VARIABLE} has not ended after {_COMMAND_SECONDS} seconds. Run it by hand: "
            "it must print the key without asking anything."
        ) from None
    if ended.returncode != 0:
        raise CuratorError(
            f"The program of {KEY_COMMAND_VARIABLE} failed with status {ended.returncode}, so there is no key. Its own "
            "message is on standard error."
        )
    if not ended.stdout.strip():
        raise CuratorError(f"The program of {KEY_COMMAND_VARIABLE} printed nothing: it must print the key and no more.")
    return MasterKeys.derived(
        parse_key(Redacted(ended.stdout.decode("ascii", errors="replace")), f"The output of {KEY_COMMAND_VARIABLE}")
    )


def parse_key(text: Redacted[str], where: str) -> Redacted[bytes]:
    """Parse a key in hexadecimal or base64; the error never repeats it."""
    master = _decoded(text)
    if master is None:
        raise CuratorError(
            f"{where} holds no key: a key is {SIZE} bytes as {2 * SIZE} hexadecimal digits or in base64. "
            "Make one with: openssl rand -hex 32"
        )
    return master


def _decoded(text: Redacted[str]) -> Redacted[bytes] | None:
    written = text.reveal().strip()
    try:
        master = bytes.fromhex(written) if _HEX.fullmatch(written) else base64.b64decode(written, validate=True)
    except ValueError:
        return None
    return Redacted(master) if len(master) == SIZE else None


def _derive(master: Redacted[bytes], purpose: str) -> Redacted[bytes]:
    derivation = HKDF(algorithm=hashes.SHA256(), length=SIZE, salt=None, info=f"paclm {purpose} 1".encode())
    return Redacted(derivation.derive(master.reveal()))
