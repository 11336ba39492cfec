"""Train the adapter of the promise `corpus`: engine, account and log of DP training meet here.

A training is logged before its first step and counts in full from then on, however it ends. A resumed run keeps its
entry in the log and the noise that stands there, and repeats no finished step. Nothing that follows from the records
is printed, stored in the card or decides anything: no loss, no check for an improvement.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from paclm.config import DpConfig, TrainingConfig
from paclm.curator.dp_account import all_trainings
from paclm.curator.dp_card import render_card
from paclm.curator.promises import trainings_elsewhere
from paclm.engine.adapters import AdapterStack
from paclm.engine.checkpoint import RUN_FILE, Checkpoints
from paclm.engine.dp_training import DpPlan, DpProgress, plan_dp, train_dp
from paclm.engine.optimizer import flatten
from paclm.engine.threads import ThreadChoice
from paclm.engine.training_job import Dtype, load_for_training, only_training
from paclm.engine.training_order import Blocks
from paclm.errors import InvalidInput, WorkspaceError
from paclm.ledger.dp_log import DpLog, mechanism_of
from paclm.privacy.dp import (
    DpGuarantee,
    DpMechanism,
    calibrate_noise,
    check_delta,
    check_epsilon,
    default_delta,
    guarantee,
)
from paclm.privacy.randomness import DpRandomness
from paclm.worlds.assignment import units_of
from paclm.worlds.layout import DP_CARD_FILE, DP_FILE, adapters_file, dp_log_path
from paclm.worlds.registry import remember_adapter, remember_training, trainings_noted
from paclm.worlds.storage import write_private
from paclm.worlds.workspace import Workspace

_DECIDES = ("epsilon", "delta", "sampling_rate", "steps", "clip_norm", "learning_rate", "factors", "num_units", "unit")
"""What a resumed run must have in common with its entry in the log; the engine compares the rest."""


@dataclass(frozen=True)
class DpTrainingJob:
    """A DP training, ready to start."""

    workspace: Workspace
    epsilon: float
    delta: float
    model: PreTrainedModel
    blocks: Blocks
    units: list[str]  # of each record
    threads: ThreadChoice | None = None  # number of threads, if it was measured
    name: str = "dp"  # of the adapter in file names; only `dp` is served, and has a card

    @property
    def settings(self) -> TrainingConfig:
        return self.workspace.training

    @property
    def dp(self) -> DpConfig:
        return self.workspace.dp

    @property
    def num_units(self) -> int:
        """n: fixed at init and public, whatever the records are now."""
        return int(self.workspace.manifest.arguments["units"])

    @property
    def file(self) -> Path:
        return self.workspace.adapters_path / adapters_file(self.name)

    @property
    def folder(self) -> Path:
        """Checkpoints of an unfinished run."""
        return self.workspace.adapters_path / f".training-{self.name}"

    @property
    def log(self) -> DpLog:
        return DpLog(dp_log_path(self.workspace.path))

    @property
    def is_trained(self) -> bool:
        return self.file.name in self.workspace.manifest.adapters

    @property
    def is_unfinished(self) -> bool:
        """Whether the newest training was stopped and can be resumed."""
        return self.unfinished is not None and (self.folder / RUN_FILE).is_file()

    @property
    def unfinished(self) -> dict[str, Any] | None:
        """The newest training in the log, if no adapter of it was saved."""
        *_, newest = (None, *self.log.trainings().values())
        return newest if newest is not None and newest["run"] not in self.log.trained().values() else None

    @cached_property
    def noise_multiplier(self) -> float:
        """σ for (ε, δ) of one training. Takes a second."""
        return calibrate_noise(self.epsilon, self.delta, self.dp.sampling_rate, self.dp.steps)

    @property
    def mechanism(self) -> DpMechanism:
        return DpMechanism(self.dp.sampling_rate, self.noise_multiplier, self.dp.steps)

    def before(self) -> list[DpMechanism]:
        """All trainings so far over these records, here and elsewhere; interrupted ones too."""
        return [mechanism_of(training) for training in all_trainings(self.workspace).values()]

    def composed(self, *, resume: bool = False) -> DpGuarantee:
        """What all trainings promise together once this one has begun; a resumed one has."""
        return guarantee([*self.before(), *([] if resume else [self.mechanism])], self.delta)

    def plan(self, estimate_time: bool = False) -> DpPlan:
        """Memory and time of training. For the operator's eyes: they follow from the lengths of the records."""
        return plan_dp(self.model, self.blocks, self.units, self.settings, self.dp, estimate_time=estimate_time)

    def _unfinished_to_resume(self) -> dict[str, Any]:
        """The stopped training in the log. Without its checkpoints its steps would be taken, and released, twice."""
        training = self.unfinished
        if training is None or not self.is_unfinished:
            raise WorkspaceError(
                "There is no stopped DP training to resume, or its checkpoints are gone. Begin one with --again; all "
                "that were begun count."
            )
        if training["run"] not in trainings_noted(self.workspace.manifest.id):
            raise WorkspaceError(
                "The stopped DP training was begun on another machine, or its notes are gone, so it may have been "
                "finished there: a second adapter of one training would not be accounted for. Resume it there, or "
                "begin another with --again; all that were begun count."
            )
        self._refuse_other_settings(training)
        return training

    def _refuse_other_settings(self, then: dict[str, Any]) -> None:
        now = self._details(0.0)
        changed = [
            f"{name} was {then.get(name)!r}, now {now[name]!r}" for name in _DECIDES if then.get(name) != now[name]
        ]
        if changed:
            raise WorkspaceError(
                f"The stopped DP training cannot be resumed: {'; '.join(changed)}. Set it back, or begin another with "
                "--again; both count."
            )

    def run(
        self, *, resume: bool = False, on_progress: Callable[[DpProgress], None] | None = None
    ) -> tuple[Workspace, dict[str, Any]]:
        """Log, train, save, and enter into the manifest; returns the changed workspace and the card."""
        with only_training(self.workspace):
            training = self._unfinished_to_resume() if resume else self._begin()
            composed = guarantee(self.before(), self.delta)  # includes this one
            stack = train_dp(
                self.model,
                self.blocks,
                self.units,
                self.settings,
                self.dp,
                num_units=self.num_units,
                noise_multiplier=float(training["noise_multiplier"]),
                draws=DpRandomness(),
                base=self.workspace.base.fingerprint,
                seed=int(self.workspace.manifest.arguments["seed"]),
                folder=self.folder,
                resume=resume,
                on_progress=on_progress,
            )
            card = self._card(training, composed, stack.num_parameters)
            self._refuse_second_adapter(str(training["run"]), stack)
            self._save(stack, card)
            workspace = self.workspace.with_adapters(self.file.name, card)
            sha256 = workspace.manifest.adapters[self.file.name]["sha256"]
            figures = {name: card["dp"][name] for name in ("runs", "composed")}
            self.log.append("trained", run=training["run"], sha256=sha256, **figures)
            Checkpoints(self.folder).remove()  # last: whatever is cut off before is done again by --resume
            return workspace, card

    def _save(self, stack: AdapterStack, card: dict[str, Any]) -> None:
        """Replace the files. An older entry leaves the manifest first, since a file of another hash is refused."""
        manifest = self.workspace.manifest
        others = {name: entry for name, entry in manifest.adapters.items() if name != self.file.name}
        replace(manifest, adapters=others).write(self.workspace.path)
        stack.save(self.file)
        if self.file.name == DP_FILE:
            write_private(self.workspace.adapters_path / DP_CARD_FILE, render_card(card).encode())

    def _refuse_second_adapter(self, run: str, stack: AdapterStack) -> None:
        """One entry in the log pays for one adapter: a copy of the workspace may have finished the same run.

        Compares parameters: two files of the same ones may differ in the order of their notes.
        """
        found = hashlib.sha256(flatten(stack).numpy().tobytes()).hexdigest()
        if remember_adapter(self.workspace.manifest.id, run, found) != found:
            raise WorkspaceError(
                f"The training {run} was finished from another copy of this workspace, or its adapter cannot be noted "
                "on this machine: a second adapter of one training would not be accounted for. Use the copy that was "
                "finished, or begin another training with --again; all that were begun count."
            )

    def _begin(self) -> dict[str, Any]:
        """Record the training, durably: from here on it counts, whatever happens."""
        Checkpoints(self.folder).remove()  # of an earlier run, whose steps count there
        run, details = secrets.token_hex(8), self._details(self.noise_multiplier)
        elsewhere = {
            other: {name: training[name] for name in (*_DECIDES, "noise_multiplier") if name in training}
            for other, training in trainings_elsewhere(self.workspace).items()
        }
        if not remember_training(self.workspace.manifest.id, run, details):
            raise WorkspaceError(
                "The training cannot be noted on this machine, so that another workspace over the same records would "
                "not count it. Set PACLM_STATE_DIR to a folder that can be written."
            )
        return self.log.append("training", run=run, **details, elsewhere=elsewhere)

    def _details(self, noise_multiplier: float) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise_multiplier": noise_multiplier,
            **asdict(self.dp),
            "num_units": self.num_units,
            "unit": self.workspace.manifest.unit_name,
            "training": json.loads(json.dumps(asdict(self.settings))),
            "base": self.workspace.base.fingerprint,
        }

    def _card(self, training: dict[str, Any], composed: DpGuarantee, num_parameters: int) -> dict[str, Any]:
        """What may be published beside the adapter; nothing here depends on the records."""
        alone = guarantee([mechanism_of(training)], self.delta)
        names = ("run", "noise_multiplier", *_DECIDES)
        name = self.workspace.base.name
        return {
            "dp": {
                **{key: training[key] for key in names},
                "is_default": self.dp == DpConfig(),
                "alone": asdict(alone),
                "composed": asdict(composed),
                "trainings": len(all_trainings(self.workspace)),
                "runs": list(all_trainings(self.workspace)),
            },
            "training": asdict(self.settings),
            "base": Path(name).name if Path(name).is_absolute() else name,
            "seed": int(self.workspace.manifest.arguments["seed"]),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "worlds": 1,
            "parameters_per_world": num_parameters,
        }


def prepare_dp_training(
    workspace: Workspace, epsilon: float, delta: float | None = None, *, dtype: Dtype = "auto", name: str = "dp"
) -> DpTrainingJob:
    """Check what can be checked without the model, then load it and cut the records into blocks.

    `name` is that of the adapter's file: studies train adapters of their own, which count like any other.
    """
    check_epsilon(epsilon)
    num_units = workspace.num_units
    delta = default_delta(num_units) if delta is None else check_delta(delta)
    if delta * num_units >= 1:
        raise InvalidInput(
            f"delta must be below one over the {num_units:,} units, not {delta:g}: otherwise a training that publishes "
            "a unit at random would keep the promise."
        )
    DpLog(dp_log_path(workspace.path)).events()  # refuses a broken chain before any work
    model, blocks, threads = load_for_training(workspace, workspace.training, dtype)
    return DpTrainingJob(workspace, epsilon, delta, model, blocks, units_of(workspace.members()), threads, name)
