"""What training keeps on disk while it runs, and how Ctrl-C waits until it can be kept.

    run.json                  a hash of what is trained; a resumed run must have the same
    group-0003.safetensors    the adapters of a finished group
    current-0004.safetensors  parameters, moments and position of a group under way; with workers there are several

Files are written atomically. A run that was killed continues at the last of them and ends with the same adapters.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paclm.config import TrainingConfig
from paclm.engine.adapters import save_tensors
from paclm.engine.optimizer import StackedAdamW
from paclm.engine.training_order import Schedule
from paclm.errors import EngineError
from paclm.worlds.storage import make_private_folder, write_private_json

RUN_FILE = "run.json"
_ROWS_AT_ONCE = 1 << 20
_EARLIER_CURRENT_FILE = "current.safetensors"
"""Of versions with one group under way."""
_LATER_SETTINGS = ("layers",)
"""Settings that older versions did not have."""


@dataclass(frozen=True, slots=True)
class Position:
    """State of a group under way."""

    group: int
    num_steps: int
    rows: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, optimizer: StackedAdamW, group: int = 0) -> Self:
        return cls(group, optimizer.num_steps, optimizer.rows, optimizer.first, optimizer.second)

    def restore(self, optimizer: StackedAdamW) -> None:
        """Continue from here."""
        optimizer.num_steps = self.num_steps
        for name in ("rows", "first", "second"):
            getattr(optimizer, name).copy_(getattr(self, name))


def identify_run(schedule: Schedule, details: Mapping[str, Any]) -> str:
    """A hash of everything that decides the adapters: blocks, membership, order and settings."""
    digest = hashlib.sha256()
    blocks = schedule.blocks
    for array in (blocks.tokens, blocks.starts, blocks.records, blocks.repetitions, schedule.membership):
        for piece in pieces_of(array):
            digest.update(piece)
    plain = {key: getattr(schedule, key) for key in ("batch_size", "epochs", "seed", "coupled")}
    if schedule.own_orders:
        plain["order"] = "of each part"
    digest.update(json.dumps({**plain, **details}, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def pieces_of(array: NDArray[Any]) -> Iterator[bytes]:
    """The bytes of an array, to be hashed; whole numbers as 64-bit ones, however they are stored."""
    dtype = np.int64 if array.dtype.kind == "i" else array.dtype
    for start in range(0, len(array), _ROWS_AT_ONCE):
        yield np.ascontiguousarray(array[start : start + _ROWS_AT_ONCE], dtype).tobytes()


def deciding(settings: TrainingConfig) -> dict[str, Any]:
    """The settings that identify a run; later ones only where they are set, so that older runs can be resumed."""
    values, usual = asdict(settings), asdict(TrainingConfig())
    return {name: value for name, value in values.items() if name not in _LATER_SETTINGS or value != usual[name]}


class Checkpoints:
    """The folder of a training run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, run: str, worlds_per_step: int, has_states: bool = False) -> None:
        """Start a new run; files of an earlier one are deleted."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(self.folder)
        found = {"run": run, "worlds_per_step": worlds_per_step, "has_states": has_states}
        write_private_json(self.folder / RUN_FILE, found)

    def worlds_per_step(self, run: str) -> int | None:
        """Worlds per step of the run to resume; None if there is nothing to resume."""
        path = self.folder / RUN_FILE
        if not path.is_file():
            return None
        found = json.loads(path.read_text())
        if found["run"] != run:
            raise EngineError(
                f"The training run in {self.folder} cannot be resumed: records, worlds, settings, seed or base model "
                "have changed. Change them back to continue, or start a new run, which loses its work, with --again."
            )
        return int(found["worlds_per_step"])

    @property
    def has_states(self) -> bool:
        """Whether the run uses stored states of the trunk; without them a resumed one would round differently."""
        return bool(json.loads((self.folder / RUN_FILE).read_text()).get("has_states"))

    def save_group(self, group: int, tensors: Mapping[str, Tensor]) -> None:
        """Save a finished group and delete the position inside it."""
        save_tensors(self._group_file(group), tensors, {})
        self._current_file(group).unlink(missing_ok=True)

    def load_group(self, group: int) -> dict[str, Tensor] | None:
        path = self._group_file(group)
        return _read(path)[0] if path.is_file() else None

    def save_position(self, position: Position) -> None:
        tensors = {name: getattr(position, name) for name in ("rows", "first", "second")}
        notes = {"group": str(position.group), "num_steps": str(position.num_steps)}
        save_tensors(self._current_file(position.group), tensors, notes)

    def load_position(self, group: int) -> Position | None:
        """The saved position inside `group`, if there is one."""
        for path in (self._current_file(group), self.folder / _EARLIER_CURRENT_FILE):
            if path.is_file():
                tensors, notes = _read(path)
                if int(notes["group"]) == group:
                    return Position(group, int(notes["num_steps"]), **tensors)
        return None

    def remove(self) -> None:
        """Delete the folder, once the adapters are saved."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _group_file(self, group: int) -> Path:
        return self.folder / f"group-{group:04d}.safetensors"

    def _current_file(self, group: int) -> Path:
        return self.folder / f"current-{group:04d}.safetensors"


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and notes of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise EngineError(f"{path} is damaged ({error}). Start a new run with --again.") from error


class HeldInterrupt:
    """Defers the first Ctrl-C to `release`, so that a training step is never cut in the middle; the second one raises.

    Works only in the main thread, which receives signals, and only if the program has no handler of its own.
    """

    came = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        self._holds = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.release()

    def release(self) -> None:
        """Raise the deferred Ctrl-C, if there was one."""
        if self.came:
            self.came = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
