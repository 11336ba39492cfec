"""Released text on disk, sealed as it is charged: what a distillation was given so far.

One file per distillation, in the curator's folder. Every step appends one record, which is durable before the next step
begins, so a kill loses the tokens of one step at most. A record that was cut off is dropped.

    record    4 bytes of length, then the sealed JSON of a step; its number and the file's name are sealed with it
    step      {"begin": [[stream, prompt, seed, τ], …], "tokens": [[stream, token], …], "units": charged,
               "most": what they would have cost if every token were charged}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from paclm.curator.master_key import MasterKeys
from paclm.errors import CuratorError
from paclm.worlds.storage import refuse_if_shared, sync_folder, write_private

_LENGTH = 4


@dataclass(slots=True)
class ReleasedText:
    """One stream of a distillation, as far as it was released."""

    prompt: tuple[int, ...]
    coins_seed: int
    temperature: float
    tokens: list[int] = field(default_factory=list)


class Begun(NamedTuple):
    """A stream whose first token a step released."""

    stream: int
    prompt: tuple[int, ...]
    coins_seed: int
    temperature: float


class Transcript:
    """The released text of one distillation. Open it with `Transcript.open`, use it as a context manager."""

    def __init__(self, path: Path, keys: MasterKeys) -> None:
        self.path = path
        self._keys = keys
        self._num_records = 0
        self._descriptor = -1
        self.streams: dict[int, ReleasedText] = {}
        """By number."""
        self.num_tokens = 0
        self.charged_units = 0
        """For all of it, in the ledger's units. Where dissent alone is charged, how often there was any follows."""
        self.most_units = 0
        """If every token had been charged: what may be published."""

    @classmethod
    def open(cls, path: Path, keys: Sequence[MasterKeys]) -> Transcript:
        """Read what is there, drop a record that was cut off, and append from there on.

        `keys`: the key in force, which seals new records, and retired ones. The caller holds the ledger's lock, or
        another that keeps a second writer out.
        """
        transcript = cls(path, keys[0])
        if path.exists() or path.is_symlink():
            refuse_if_shared(path)
        else:
            write_private(path, b"")
        content = path.read_bytes()
        whole = 0
        for sealed in _records(content):
            transcript._take(transcript._unsealed(sealed, keys))
            whole += _LENGTH + len(sealed)
        transcript._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        if whole < len(content):
            os.ftruncate(transcript._descriptor, whole)
            os.fsync(transcript._descriptor)
        return transcript

    def append(self, begun: Iterable[Begun], tokens: Iterable[tuple[int, int]], units: int, most: int) -> None:
        """Keep what one step released, (stream, token) each, durably. `begun`: streams that it is the first of."""
        step = {
            "begin": [[one.stream, list(one.prompt), f"{one.coins_seed:x}", one.temperature] for one in begun],
            "tokens": [list(pair) for pair in tokens],
            "units": units,
            "most": most,
        }
        sealed = self._keys.seal(json.dumps(step, separators=(",", ":")).encode(), self._about())
        record = len(sealed).to_bytes(_LENGTH, "big") + sealed
        try:
            if os.write(self._descriptor, record) != len(record):
                raise OSError(None, "the disk is full")
            os.fsync(self._descriptor)
        except OSError as error:
            raise CuratorError(
                f"{self.path} cannot be written ({error.strerror}), so the tokens of the last step are lost; they were "
                "charged. Free some space, then repeat the command: it goes on from there."
            ) from None
        self._take(step)

    def texts(self) -> list[ReleasedText]:
        """All streams, in the order of their numbers."""
        return [self.streams[number] for number in sorted(self.streams)]

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Delete the file: the text is gone, its charges stay."""
        self.close()
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _about(self) -> bytes:
        """What a record is bound to: it cannot be moved to another place or another file."""
        return f"paclm transcript {self.path.name} {self._num_records}".encode()

    def _unsealed(self, sealed: bytes, keys: Sequence[MasterKeys]) -> dict[str, Any]:
        for key in keys:
            if (content := key.unseal(sealed, self._about())) is not None:
                step: dict[str, Any] = json.loads(content.reveal())
                return step
        raise CuratorError(
            f"Record {self._num_records + 1:,} of {self.path} cannot be opened: it was changed, or sealed with another "
            f"key than {keys[0].name}. Restore the file from a backup. To distill from the beginning, at its full "
            "price, delete it."
        )

    def _take(self, step: dict[str, Any]) -> None:
        for number, prompt, seed, temperature in step["begin"]:
            self.streams[number] = ReleasedText(tuple(prompt), int(seed, 16), temperature)
        for number, token in step["tokens"]:
            self.streams[number].tokens.append(token)
        self.num_tokens += len(step["tokens"])
        self.charged_units += step["units"]
        self.most_units += step["most"]
        self._num_records += 1

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CuratorError("A transcript has one writer: open it again instead.")


def _records(content: bytes) -> Iterator[bytes]:
    """The complete records of a file."""
    start = 0
    while start + _LENGTH <= len(content):
        size = int.from_bytes(content[start : start + _LENGTH], "big")
        end = start + _LENGTH + size
        if end > len(content):
            return
        yield content[start + _LENGTH : end]
        start = end
