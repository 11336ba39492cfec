"""Train the adapters of a workspace, save them in its folder and enter them in its manifest.

    worlds      every world of the workspace        adapters/worlds.safetensors
    full        one adapter on all records          adapters/full.safetensors
    shards:N    N disjoint parts of the records     adapters/shards-N.safetensors, who is where in shards-N.npz
    collection:N   as many worlds, from another draw, start and order (N ≥ 2)   adapters/collection-N.safetensors
    design:N    N worlds drawn for themselves: every record is in N/2 of them   adapters/design-N.safetensors
    uncoupled   the same worlds, each from its own start and in its own order, to compare with coupled training
    …-first-N   only the first N worlds of a collection or of uncoupled

Reads neither the secret nor the ledger.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from paclm.config import TrainingConfig
from paclm.engine.adapters import decoder_layer, find_targets
from paclm.engine.base_model import base_of, load_model, load_tokenizer
from paclm.engine.checkpoint import RUN_FILE, Checkpoints
from paclm.engine.distributed import identity
from paclm.engine.loading import pick_device, planned_trunk
from paclm.engine.loading import pick_dtype as served_dtype
from paclm.engine.memory import token_bytes
from paclm.engine.threads import ThreadChoice, set_threads
from paclm.engine.training import Trained, adapter_spec, make_schedule, train_worlds
from paclm.engine.training_order import Blocks, Schedule, make_blocks
from paclm.engine.training_plan import TrainingPlan, plan_training
from paclm.engine.training_queue import OnProgress
from paclm.engine.training_refinements import Refinements
from paclm.engine.training_workers import TrainingWorkers
from paclm.engine.workers import WorkerGroup
from paclm.errors import EngineError, InvalidInput
from paclm.worlds.assignment import BoolArray, assign_groups, assign_shards, units_of
from paclm.worlds.blocks import block_length, encode_stream
from paclm.worlds.layout import adapters_file
from paclm.worlds.storage import only_one, write_private_arrays
from paclm.worlds.workspace import Workspace

Dtype = Literal["auto", "float32", "bfloat16"]

_NUMBERED = re.compile(r"(shards|collection|design)[:-]([0-9]+)")
_FIRST = re.compile(r"(uncoupled|collection[:-][0-9]+)-first-([0-9]+)")


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training run, ready to start."""

    workspace: Workspace
    name: str  # name of the adapters in file names: worlds, full, shards-N, collection-N …
    model: PreTrainedModel
    schedule: Schedule
    settings: TrainingConfig
    threads: ThreadChoice | None = None  # number of threads, if it was measured
    workers: int = 1  # processes that train, with this one
    processes: int = 1  # of them, those on this machine
    refinements: Refinements | None = None  # of studies; workers know none

    @property
    def file_name(self) -> str:
        return adapters_file(self.name)

    @property
    def folder(self) -> Path:
        """Checkpoints of an unfinished run."""
        return training_folder(self.workspace, self.name)

    @property
    def is_unfinished(self) -> bool:
        """Whether an earlier run was stopped and can be resumed."""
        return (self.folder / RUN_FILE).is_file()

    @property
    def has_kept_work(self) -> bool:
        """Whether a stopped run has saved any progress."""
        return self.is_unfinished and any(self.folder.glob("*.safetensors"))

    def cache_per_token(self) -> dict[str, int]:
        """Bytes that a served token takes in the cache, by `layers`: all, half or a quarter, and those of this run."""
        runtime, config = self.workspace.runtime, self.model.config
        dtype = getattr(torch, served_dtype(runtime.dtype, pick_device(runtime.device)))
        num_layers, own = int(config.num_hidden_layers), self.settings.top
        tops = {num_layers, -(-num_layers // 2), -(-num_layers // 4), own or num_layers}
        targets = find_targets(self.model, replace(adapter_spec(self.settings), top=None))
        found = [decoder_layer(target.name) for target in targets]
        sizes = {}
        for top in sorted(tops, reverse=True):
            adapted = [layer for layer in found if layer >= num_layers - top or top == num_layers]
            if adapted:
                name = "all" if top == num_layers else f"top:{top}"
                trunk = planned_trunk(self.model, max(0, min(adapted)))
                sizes[name] = token_bytes(config, self.schedule.num_worlds + 1, dtype, trunk)
        return sizes

    def plan(self, worlds_per_step: int | None = None, estimate_time: bool = False) -> TrainingPlan:
        """Memory, disk and time of training."""
        with fitting_memory("A test step of two worlds", smaller_steps(self.settings)):
            return plan_training(
                self.model,
                self.schedule,
                self.settings,
                worlds_per_step=worlds_per_step,
                estimate_time=estimate_time,
                folder=self.workspace.path,
                workers=self.workers,
                processes=self.processes,
            )

    def run(
        self,
        worlds_per_step: int | None = None,
        *,
        resume: bool = False,
        on_progress: OnProgress | None = None,
        group: WorkerGroup | None = None,
    ) -> tuple[Workspace, Trained]:
        """Train, with the help of a group of workers if there is one, save and enter into the manifest.

        Returns the changed workspace.
        """
        if group is not None and self.refinements is not None:
            raise InvalidInput("Workers cannot train with refinements. Train in one process, without --workers.")
        with only_training(self.workspace):
            worlds_per_step = worlds_per_step or self.plan().worlds_per_step
            with fitting_memory(f"Training {worlds_per_step} worlds at a time", smaller_steps(self.settings)):
                trained = train_worlds(
                    self.model,
                    self.schedule,
                    self.settings,
                    base=self.workspace.base.fingerprint,
                    worlds_per_step=worlds_per_step,
                    folder=self.folder,
                    resume=resume,
                    on_progress=on_progress,
                    processes=self.processes,
                    help_from=None if group is None else self._workers(group).help,
                    refinements=self.refinements,
                    must_improve=self.refinements is None or self.refinements.validation is None,  # else as it is found
                )
            trained.stack.save(self.workspace.adapters_path / self.file_name)
            if self.name.startswith("shards"):
                shards = self.workspace.adapters_path / f"{self.name}.npz"
                write_private_arrays(shards, membership=self.schedule.membership)  # (n, shards), rows as members()
            workspace = self.workspace.with_adapters(self.file_name, self._details(trained))
            Checkpoints(self.folder).remove()
            return workspace, trained

    def refuse_if_running(self) -> None:
        """Raise if another process is training here: its checkpoints are not of a stopped run."""
        with only_training(self.workspace):
            pass

    def _workers(self, group: WorkerGroup) -> TrainingWorkers:
        runtime = replace(self.workspace.runtime, device=self.model.device.type, threads=torch.get_num_threads())
        setup = {"what": self.name, "dtype": self._dtype, "runtime": asdict(runtime)}
        return TrainingWorkers(group, setup, identity(self.workspace.base.fingerprint, runtime))

    @property
    def _dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def _details(self, trained: Trained) -> dict[str, Any]:
        hashes = {"worlds_sha256": trained.stack.hashes()} if self.name == "worlds" else {}  # what workers prove
        refined = {} if self.refinements is None else {"refinements": self.refinements.details()}
        return (
            hashes
            | refined
            | {
                "training": asdict(self.settings),
                "seed": self.schedule.seed,
                "dtype": self._dtype,
                "device": self.model.device.type,
                "worlds": self.schedule.num_worlds,
                "parameters_per_world": trained.stack.num_parameters,
                "tokens": int(self.schedule.num_tokens.sum()),
                "loss_public": float(trained.improvement.public.mean()),
                "loss_trained": float(trained.improvement.trained.mean()),
            }
        )


def training_folder(workspace: Workspace, name: str) -> Path:
    """Where an unfinished training of these adapters is kept."""
    return workspace.adapters_path / f".training-{name}"


def only_training(workspace: Workspace) -> AbstractContextManager[None]:
    """Keep other trainings of this workspace out, or raise if one is running."""
    return only_one(workspace.path / ".training.lock", f"A training in {workspace.path}")


def prepare_training(
    workspace: Workspace, what: str = "worlds", *, dtype: Dtype = "auto", workers: int = 1, processes: int = 1
) -> TrainingJob:
    """Load the base model and cut the records into blocks; `what` as in the docstring of this module.

    With `workers`, each of the `processes` on this machine has its share of the threads.
    """
    settings = replace(workspace.training, coupled=False) if what.startswith("uncoupled") else workspace.training
    seed = _seed_of(workspace, what)
    name, membership = what.replace(":", "-"), membership_of(workspace, what)
    if not 1 <= workers <= membership.shape[1]:
        raise InvalidInput(
            f"--workers must be between 1 and {membership.shape[1]}, the number of adapters of {what}, not {workers}."
        )
    model, blocks, threads = load_for_training(workspace, settings, dtype)
    if processes > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    schedule = make_schedule(blocks, membership, settings, seed, own_orders=what.startswith("shards"))
    return TrainingJob(workspace, name, model, schedule, settings, threads, workers, processes)


def load_for_training(
    workspace: Workspace, settings: TrainingConfig, dtype: Dtype
) -> tuple[PreTrainedModel, Blocks, ThreadChoice | None]:
    """The base model, the records cut into blocks, and the number of threads if it was measured."""
    base = base_of(workspace)
    device = pick_device(workspace.runtime.device)
    threads = set_threads(workspace.runtime.threads) if device.type == "cpu" else None
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # A CPU compiles products for each shape, MBs each.
    with fitting_memory("The base model", 'choose a smaller one, or device = "cpu" in [runtime]'):
        model: Any = load_model(base, pick_dtype(dtype, device)).to(device)
    find_targets(model, adapter_spec(settings))  # refuses wrong layers before records are read, and DP is logged
    context = int(model.config.max_position_embeddings)
    if settings.block_tokens > context:
        raise InvalidInput(
            f"block_tokens = {settings.block_tokens} is longer than the base model's context of {context}. "
            "Lower it in [training], or set 0 for the context itself."
        )
    encoded = encode_stream(load_tokenizer(base), (record.text for record in workspace.members()))
    repetitions = [record.repetitions for record in workspace.members()]
    length, most = block_length(settings, context), settings.max_record_tokens
    blocks = make_blocks(encoded, length, most, repetitions, workspace.adapters_path)
    return model, blocks, threads


@contextmanager
def fitting_memory(what: str, remedy: str) -> Iterator[None]:
    """Turn running out of memory into an EngineError with a remedy."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise EngineError(f"{what} does not fit into memory. Stop other programs that use it, or {remedy}.") from error


def smaller_steps(settings: TrainingConfig) -> str:
    """What helps if a step does not fit."""
    return (
        "lower --worlds-per-step (with --again, as a resumed run keeps its number), then batch_size (now "
        f"{settings.batch_size}) or block_tokens (now {settings.block_tokens or 'the whole context'}) in [training]"
    )


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Allocations fail as `OutOfMemoryError` on a GPU, and with these words on a CPU and inside libraries."""
    words = ("out of memory", "can't allocate memory", "_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def pick_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """Type of the base model while training; adapters and moments are always float32.

    `auto` is bfloat16 where the hardware supports it: faster, with the same votes (docs/guide/training.md).
    """
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" or _multiplies_bfloat16() else "float32"
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def _multiplies_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has bfloat16 products; always false outside of Linux, which is only slower."""
    try:
        words = set(cpu_info.read_text().split())
    except OSError:
        return False
    return not words.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def _seed_of(workspace: Workspace, what: str) -> int:
    """The seed of start and order; another collection has another, so that it differs as another workspace would."""
    found = _NUMBERED.match(what)
    further = int(found[2]) - 1 if found and found[1] == "collection" else 0
    return int(workspace.manifest.arguments["seed"]) + further


def membership_of(workspace: Workspace, what: str) -> BoolArray:
    """Which records each of the adapters `what` is trained on, (records, adapters)."""
    if cut := _FIRST.fullmatch(what):
        if not 2 <= int(cut[2]) <= workspace.num_worlds:
            raise InvalidInput(f"first-N needs N between 2 and {workspace.num_worlds}, not {cut[2]}.")
        return membership_of(workspace, cut[1])[:, : int(cut[2])]
    if what in ("worlds", "uncoupled"):
        return workspace.membership
    seed = int(workspace.manifest.arguments["seed"])
    if what == "full":
        return np.ones((len(workspace.membership), 1), dtype=np.bool_)
    if found := _NUMBERED.fullmatch(what):
        kind, number = found[1], int(found[2])
        if kind == "shards":
            return assign_shards(units_of(workspace.members()), number, seed)
        if kind == "design":
            return assign_groups(units_of(workspace.members()), number, seed)
        if number >= 2:
            return assign_groups(units_of(workspace.members()), workspace.num_worlds, _seed_of(workspace, what))
    raise InvalidInput(
        f"{what!r} cannot be trained. Choose worlds, full, shards:N such as shards:16, collection:N with N from 2 on, "
        "design:N, uncoupled, or dp:EPSILON such as dp:8."
    )
