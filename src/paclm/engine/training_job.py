"""Training for a workspace: from its records to adapters in its folder, entered in its manifest.

    worlds      every world of the workspace        adapters/worlds.safetensors
    full        one adapter on all records          adapters/full.safetensors
    shards:N    N disjoint parts of the records     adapters/shards-N.safetensors, who is where in shards-N.npz

Neither the secret nor the ledger is looked at.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from paclm.config import TrainingConfig
from paclm.engine.base import base_of, load_model, load_tokenizer
from paclm.engine.checkpoint import RUN_FILE, Checkpoints
from paclm.engine.loading import pick_device
from paclm.engine.schedule import Schedule, make_blocks
from paclm.engine.training import OnProgress, Trained, make_schedule, train_worlds
from paclm.engine.training_plan import TrainingPlan, plan_training
from paclm.errors import InvalidInput
from paclm.worlds.assignment import BoolArray
from paclm.worlds.blocks import encode_texts
from paclm.worlds.holdout import units_of
from paclm.worlds.records import Record
from paclm.worlds.shards import assign_shards
from paclm.worlds.storage import write_private
from paclm.worlds.workspace import Workspace

Dtype = Literal["auto", "float32", "bfloat16"]

_SHARDS = re.compile(r"shards:([0-9]+)")


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Everything training needs, loaded."""

    workspace: Workspace
    name: str
    """Of the adapters: worlds, full or shards-N."""
    model: PreTrainedModel
    schedule: Schedule
    settings: TrainingConfig

    @property
    def file_name(self) -> str:
        return f"{self.name}.safetensors"

    @property
    def folder(self) -> Path:
        """Where a run keeps what it has done so far."""
        return self.workspace.adapters_path / f".training-{self.name}"

    @property
    def is_unfinished(self) -> bool:
        """Whether an earlier run was stopped and can be resumed."""
        return (self.folder / RUN_FILE).is_file()

    def plan(self, worlds_per_step: int | None = None, estimate_time: bool = False) -> TrainingPlan:
        """What training will take."""
        return plan_training(
            self.model, self.schedule, self.settings, worlds_per_step=worlds_per_step, estimate_time=estimate_time
        )

    def run(
        self, worlds_per_step: int | None = None, *, resume: bool = False, on_progress: OnProgress | None = None
    ) -> tuple[Workspace, Trained]:
        """Train, save and enter into the manifest; returns the workspace as it is from now on."""
        trained = train_worlds(
            self.model,
            self.schedule,
            self.settings,
            base=self.workspace.base.fingerprint,
            worlds_per_step=worlds_per_step or self.plan().worlds_per_step,
            folder=self.folder,
            resume=resume,
            on_progress=on_progress,
        )
        path = self.workspace.adapters_path / self.file_name
        trained.stack.save(path)
        path.chmod(0o600)
        if self.name.startswith("shards"):
            self._save_shards()
        workspace = self.workspace.with_adapters(self.file_name, self._details(trained))
        Checkpoints(self.folder).remove()
        return workspace, trained

    def _save_shards(self) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, membership=self.schedule.membership)  # (n, shards), rows as members()
        write_private(self.workspace.adapters_path / f"{self.name}.npz", buffer.getvalue())

    def _details(self, trained: Trained) -> dict[str, Any]:
        return {
            "training": asdict(self.settings),
            "seed": self.schedule.seed,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "worlds": self.schedule.num_worlds,
            "parameters_per_world": trained.stack.num_parameters,
            "tokens": int(self.schedule.num_tokens.sum()),
            "loss_public": float(trained.improvement.public.mean()),
            "loss_trained": float(trained.improvement.trained.mean()),
        }


def prepare_training(workspace: Workspace, what: str = "worlds", *, dtype: Dtype = "auto") -> TrainingJob:
    """Load the base model and cut the records into blocks; `what` is worlds, full or shards:N."""
    records = workspace.members()
    settings = workspace.training
    seed = int(workspace.manifest.arguments["seed"])
    name, membership = _who(workspace, what, records, seed)
    base = base_of(workspace)
    device = pick_device(workspace.runtime.device)
    model: Any = load_model(base, pick_dtype(dtype, device)).to(device)
    encoded = encode_texts(load_tokenizer(base), [record.text for record in records])
    blocks = make_blocks(
        encoded,
        _block_tokens(settings, int(model.config.max_position_embeddings)),
        settings.max_record_tokens,
        [record.repetitions for record in records],
    )
    return TrainingJob(workspace, name, model, make_schedule(blocks, membership, settings, seed), settings)


def pick_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """Arithmetic of the base model while training; adapters and moments are always float32.

    `auto` is bfloat16 where the hardware multiplies it natively: faster, and the votes stay (docs/training.md).
    """
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" or _multiplies_bfloat16() else "float32"
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def _multiplies_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has bfloat16 products; elsewhere than on Linux the answer is no, which is only slower."""
    try:
        words = set(cpu_info.read_text().split())
    except OSError:
        return False
    return not words.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def _who(workspace: Workspace, what: str, records: Sequence[Record], seed: int) -> tuple[str, BoolArray]:
    """What the adapters are called, and which records each of them sees."""
    if what == "worlds":
        return "worlds", workspace.membership
    if what == "full":
        return "full", np.ones((len(records), 1), dtype=np.bool_)
    if found := _SHARDS.fullmatch(what):
        num_shards = int(found[1])
        return f"shards-{num_shards}", assign_shards(units_of(records), num_shards, seed)
    raise InvalidInput(f"What can be trained: worlds, full, or shards:N such as shards:16; not {what!r}.")


def _block_tokens(settings: TrainingConfig, context: int) -> int:
    if settings.block_tokens > context:
        raise InvalidInput(
            f"block_tokens = {settings.block_tokens} is longer than the base model's context of {context}. "
            "Lower it in [training], or set 0 for the context itself."
        )
    return min(settings.block_tokens or context, max(2, settings.max_record_tokens))
