"""The workspace: a folder with one corpus, its worlds and one deployment (docs/guide/workspace.md).

Opening checks all hashes. Knows the path of the curator's folder and never looks inside.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from paclm.config import DpConfig, MechanismConfig, RuntimeConfig, TrainingConfig
from paclm.errors import WorkspaceError
from paclm.worlds import layout
from paclm.worlds.assignment import BoolArray
from paclm.worlds.blocks import TextEncoder
from paclm.worlds.canaries import Canary, canary_from_json
from paclm.worlds.fingerprints import Base
from paclm.worlds.line_files import LineFile
from paclm.worlds.manifest import Manifest, load_manifest, verify_adapters, verify_base, verify_files
from paclm.worlds.records import Corpus, Record, StartTask, StoredRecords
from paclm.worlds.registry import sketch_noted, sketch_texts
from paclm.worlds.settings import Settings, load_settings
from paclm.worlds.storage import refuse_if_others_can_enter

Part = Literal["train", "heldout", "canaries"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Workspace:
    """One corpus, its worlds and one deployment on disk, checked."""

    path: Path
    manifest: Manifest
    settings: Settings

    @classmethod
    def open(cls, path: str | Path, *, verify_in_full: bool = False) -> Workspace:
        """Open a workspace and check it.

        Corpus and membership are always hashed. Base model and adapters are large: they are hashed when their size or
        time of change differs from the manifest, or with `verify_in_full`.
        """
        folder = Path(path).expanduser().absolute()
        manifest = load_manifest(folder)
        if manifest.held is not None:
            raise WorkspaceError(
                f"{folder} is the folder of a worker: some of the worlds, and no records. Only paclm worker opens it. "
                "Use the workspace that it was exported from."
            )
        refuse_if_others_can_enter(folder)
        refuse_if_others_can_enter(folder / layout.CURATOR_FOLDER)
        verify_files(folder, manifest)
        verify_base(manifest, verify_in_full)
        verify_adapters(folder, manifest, verify_in_full)
        return cls(folder, manifest, load_settings(folder / layout.SETTINGS_FILE))

    @classmethod
    def open_for_worker(cls, path: str | Path) -> Workspace:
        """Open a workspace or the folder of a worker without looking at records, which a worker does not need.

        The base model of a worker's folder is hashed; adapters are hashed when they are loaded, world by world.
        """
        folder = Path(path).expanduser().absolute()
        manifest = load_manifest(folder)
        refuse_if_others_can_enter(folder)
        verify_base(manifest, in_full=manifest.held is not None)
        return cls(folder, manifest, load_settings(folder / layout.SETTINGS_FILE))

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        corpus: Corpus,
        base: Base,
        tokenizer: TextEncoder,
        num_worlds: int = 128,
        seed: int = 101,
        holdout: int | None = None,
        num_canaries: int = 0,
        group_by: str | None = None,
        max_record_tokens: int = TrainingConfig().max_record_tokens,
        start_task: StartTask | None = None,
    ) -> Workspace:
        """Make a workspace, or open the existing one if it was made from the same arguments.

        Cautions for its owner, such as that there are few records, are issued as warnings.
        """
        from paclm.worlds.creation import create_workspace

        created = create_workspace(
            path,
            corpus=corpus,
            base=base,
            tokenizer=tokenizer,
            num_worlds=num_worlds,
            seed=seed,
            holdout=holdout,
            num_canaries=num_canaries,
            group_by=group_by,
            max_record_tokens=max_record_tokens,
            start_task=start_task,
        )
        for sentence in created.cautions:
            warnings.warn(sentence, stacklevel=2)
        return created.workspace

    @property
    def num_units(self) -> int:
        """n: the units when the workspace was made; a public constant, whatever the records are now."""
        if "units" not in self.manifest.arguments:
            raise WorkspaceError(
                f"{self.path} was made before DP training existed: its held-out records were drawn by a permutation, "
                "so that one record more or less changes who is trained on, and no promise about the corpus can be "
                "given. Make a new workspace from the same corpus with paclm init."
            )
        return int(self.manifest.arguments["units"])

    @property
    def config(self) -> MechanismConfig | None:
        """The mechanism's settings, or None while paclm.toml sets no budget."""
        return self.settings.config

    def mechanism(self, **changes: Any) -> MechanismConfig:
        """The mechanism's settings with changes; raises if a budget is missing."""
        return self.settings.mechanism_with(**changes)

    @property
    def runtime(self) -> RuntimeConfig:
        """Settings of speed and memory only."""
        return self.settings.runtime

    @property
    def training(self) -> TrainingConfig:
        """Settings of training."""
        return self.settings.training

    @property
    def dp(self) -> DpConfig:
        """Settings of DP training."""
        return self.settings.dp

    @property
    def base(self) -> Base:
        """The base model as recorded at init."""
        return self.manifest.base_model

    @property
    def num_worlds(self) -> int:
        """m."""
        return int(self.manifest.arguments["worlds"])

    @property
    def adapters_path(self) -> Path:
        """Folder of the stacked adapters."""
        return self.path / layout.ADAPTERS_FOLDER

    @property
    def curator_path(self) -> Path:
        """Folder of secret and ledger."""
        return self.path / layout.CURATOR_FOLDER

    @property
    def ledger_path(self) -> Path:
        """Path of the ledger, whether or not it exists."""
        return layout.ledger_path(self.path)

    @property
    def ledger_address(self) -> Path | str:
        """Where the ledger is: its path, or the URL of a PostgreSQL database."""
        return self.settings.ledger.url or self.ledger_path

    @property
    def study_path(self) -> Path:
        """Folder of study results."""
        return self.path / layout.STUDY_FOLDER

    @cached_property
    def membership(self) -> BoolArray:
        """Who is in which world, (n, m) bool; rows as in `members()`."""
        path = self.path / layout.MEMBERSHIP_FILE
        with np.load(path, allow_pickle=False) as arrays:
            membership: BoolArray = arrays["membership"]
        if membership.dtype != np.bool_ or (membership.sum(axis=1) * 2 != self.num_worlds).any():
            raise WorkspaceError(f"{path} does not put every record into half of the worlds.")
        membership.setflags(write=False)
        return membership

    @cached_property
    def sketch(self) -> list[str]:
        """By which other workspaces over the same records are recognized: as noted at init, else computed."""
        noted = sketch_noted(self.manifest.id)
        if noted is not None:
            return noted
        return sketch_texts(record.text for part in ("train", "heldout") for record in self.records(part))

    def records(self, part: Part) -> Sequence[Record]:
        """The records of `train`, `heldout` or `canaries`, in file order; parsed when they are read."""
        if part == "canaries":
            return [canary.record for canary in self.canaries()]
        return StoredRecords(self._lines(part))

    def canaries(self) -> list[Canary]:
        """Planted records with their triggers and payloads; empty without --canaries at init."""
        return [canary_from_json(json.loads(line)) for line in self._lines("canaries")]

    def members(self) -> Sequence[Record]:
        """All records that worlds are drawn from, train first, then canaries: the rows of `membership`."""
        return StoredRecords(self._lines("train"), self.records("canaries"))

    def training_changes(self) -> str:
        """How [training] differs from the settings the worlds were trained with; empty if it does not."""
        trained = self.manifest.adapters.get(layout.WORLDS_FILE, {}).get("training")
        if not trained:  # worlds that were trained elsewhere
            return ""
        then = {**asdict(TrainingConfig()), **trained}  # a setting that came later had its default
        now = json.loads(json.dumps(asdict(self.training)))  # tuples are lists in the manifest
        return ", ".join(f"{name} was {then[name]!r}, now {now[name]!r}" for name in now if then[name] != now[name])

    def with_adapters(self, name: str, details: Mapping[str, Any] | None = None) -> Workspace:
        """Enter a file of adapters/ with its hash into the manifest; returns the changed workspace."""
        manifest = self.manifest.with_adapters(self.adapters_path / name, details or {})
        manifest.write(self.path)
        return replace(self, manifest=manifest)

    def _lines(self, part: str) -> LineFile:
        if part not in PARTS:
            raise WorkspaceError(f"A workspace has the parts {', '.join(PARTS)}, not {part!r}.")
        if self.manifest.held is not None:
            raise WorkspaceError(f"{self.path} is the folder of a worker and has no records. Use a whole workspace.")
        with (self.path / layout.CORPUS_FOLDER / f"{part}.jsonl").open("rb") as file:
            return LineFile(file)
