"""Released text on disk, sealed as it is charged: what a distillation was given so far.

One file per distillation, in the curator's folder. Every step appends one line, durable before the next step begins, so
a kill loses the tokens of one step at most. A last line that was cut off is dropped.

    line    base64 of a step, sealed under the master key together with the file's name and the line before it
    first   {"id": drawn when the file is made: its tokens have a tag of their own in the ledger}
    step    {"begin": [[prompt, seed, τ], …], "tokens": [[text, token], …], "units": charged for all of them,
             "price": the most that one of them could cost}

Lines cannot be changed, moved or taken from another file. Without the last ones there is less text; it stays charged.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from paclm.curator.master_key import MasterKeys
from paclm.errors import CuratorError
from paclm.worlds.storage import refuse_if_shared, write_private

TAG = "distill"
"""What the ledger's usage figures call such tokens, before the id of their file."""


@dataclass(slots=True)
class ReleasedText:
    """One stream of a distillation, as far as it was released."""

    prompt: tuple[int, ...]
    coins_seed: int
    temperature: float
    tokens: list[int] = field(default_factory=list)
    most_units: int = 0
    """What its tokens cost if every one was charged: may be published, unlike the charge, which counts dissent."""


class SealedTranscript:
    """The released text of one distillation. Open it with `SealedTranscript.open`, use it as a context manager."""

    def __init__(self, path: Path, keys: MasterKeys) -> None:
        self.path = path
        self._keys = keys
        self._descriptor = -1
        self._last_line = b""
        self._num_lines = 0
        self.tag = ""
        """Of its tokens in the ledger: nothing else is charged under it, and no API key can have this name."""
        self.texts: list[ReleasedText] = []
        """In the order of their first tokens."""
        self.num_tokens = 0
        self.charged_units = 0
        """For all of it, in the ledger's units; for the owner only."""

    @classmethod
    def open(cls, path: Path, keys: Sequence[MasterKeys]) -> SealedTranscript:
        """Read what is there, drop a line that was cut off, and append from there on; makes the file if there is none.

        `keys`: the one in force, which seals new lines, then retired ones. The caller keeps a second writer out.
        """
        transcript = cls(path, keys[0])
        if os.path.lexists(path):
            refuse_if_shared(path)
        else:
            write_private(path, b"")
        *lines, cut_off = path.read_bytes().split(b"\n")
        for line in lines:
            key, step = transcript._unsealed(line, keys)
            transcript._take(line, step)
            if key is keys[0]:
                keys = keys[:1]  # a retired key seals nothing after that
        transcript._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        if cut_off:
            os.ftruncate(transcript._descriptor, sum(len(line) + 1 for line in lines))
            os.fsync(transcript._descriptor)
        if not lines:
            transcript._write({"id": secrets.token_hex(8)})
        return transcript

    def append(
        self, begun: Sequence[ReleasedText], tokens: Sequence[tuple[int, int]], *, units: int, price: int
    ) -> None:
        """Keep what one step released, durably: `begun` follow the texts so far, `tokens` are (text, token)."""
        step = {
            "begin": [[text.prompt, f"{text.coins_seed:x}", text.temperature] for text in begun],
            "tokens": tokens,
            "units": units,
            "price": price,
        }
        self._write(step)

    def _write(self, step: dict[str, Any]) -> None:
        content = json.dumps(step, separators=(",", ":")).encode()
        line = base64.b64encode(self._keys.seal(content, self._about()))
        try:
            if os.write(self._descriptor, line + b"\n") != len(line) + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._descriptor)
        except OSError as error:
            self.close()  # what follows a line that was cut off could not be read
            raise CuratorError(
                f"{self.path} cannot be written ({error.strerror}), so the {len(step.get('tokens', ())):,} tokens of "
                "the last step are lost; they were charged. Free some space, then repeat the command: it goes on from "
                "there."
            ) from None
        self._take(line, step)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _about(self) -> bytes:
        """What the next line is bound to."""
        return f"transcript 1 of {self.path.name} {hashlib.sha256(self._last_line).hexdigest()}".encode()

    def _unsealed(self, line: bytes, keys: Sequence[MasterKeys]) -> tuple[MasterKeys, dict[str, Any]]:
        try:
            sealed = base64.b64decode(line, validate=True)
        except ValueError:
            sealed = b""
        for key in keys:
            if (content := key.unseal(sealed, self._about())) is not None:
                return key, json.loads(content.reveal())
        raise CuratorError(
            f"Line {self._num_lines + 1:,} of {self.path} cannot be opened: it was changed, or sealed with another "
            f"key than {keys[0].name}. Restore the file from a backup. To distill from the beginning, at the full "
            "price, delete it."
        )

    def _take(self, line: bytes, step: dict[str, Any]) -> None:
        self._last_line = line
        self._num_lines += 1
        if "id" in step:
            self.tag = f"{TAG}:{step['id']}"
            return
        self.texts += (ReleasedText(tuple(prompt), int(seed, 16), tau) for prompt, seed, tau in step["begin"])
        for number, token in step["tokens"]:
            self.texts[number].tokens.append(token)
            self.texts[number].most_units += step["price"]
        self.num_tokens += len(step["tokens"])
        self.charged_units += step["units"]
