"""Worlds that were trained elsewhere: check their PEFT folders against a workspace and make them its worlds.

What no file can prove is left to the operator (docs/guide/guarantee.md): that each world was trained on its own records
alone, and all of them alike. Reads neither the secret nor the ledger.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from paclm.engine.adapters import AdapterStack, decoder_layer, linear_layers, matches_target
from paclm.engine.base_model import base_of, config_of
from paclm.engine.peft_io import import_peft, read_config, world_folders
from paclm.errors import EngineError, StudentGiven
from paclm.worlds.layout import WORLDS_FILE
from paclm.worlds.student_folder import has_mark, is_student
from paclm.worlds.workspace import Workspace


@dataclass(frozen=True, slots=True)
class ImportedWorlds:
    """The adapters of all worlds, checked, and the base model that their folders name."""

    stack: AdapterStack
    base_named: str

    def save(self, workspace: Workspace) -> Workspace:
        """Make them the worlds of the workspace; its manifest says that they were imported. Returns it changed."""
        spec = self.stack.spec
        details = {
            "worlds_sha256": self.stack.hashes(),
            "imported": {
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "base_named": self.base_named,
                "vouched": "each world trained on its own records alone, all worlds alike",
            },
            "adapter": {"rank": spec.rank, "alpha": spec.alpha, "dropout": spec.dropout, "targets": list(spec.targets)},
            "worlds": self.stack.num_worlds,
            "parameters_per_world": self.stack.num_parameters,
        }
        self.stack.save(workspace.adapters_path / WORLDS_FILE)
        return workspace.with_adapters(WORLDS_FILE, details)


def read_worlds(workspace: Workspace, folder: Path) -> ImportedWorlds:
    """Read one PEFT folder per world and refuse what cannot be the worlds of this workspace."""
    _refuse_students([folder])
    folders = _find_folders(folder, workspace.num_worlds)
    _refuse_students(folders)
    base = base_of(workspace)
    with torch.device("meta"):  # shapes only
        model = AutoModelForCausalLM.from_config(config_of(base))
    layers = linear_layers(model)
    num_layers = 1 + max(map(decoder_layer, layers), default=-1)
    stack = import_peft(folders, base.fingerprint, num_layers)
    stack.check_fits(layers, base.fingerprint)
    config = read_config(folders[0])
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named.strip():
        raise EngineError(
            f"{folders[0]} names no base model. Write the one that it was trained on into base_model_name_or_path of "
            "adapter_config.json, in every folder."
        )
    _check_targets(folders[0], stack, list(layers), config.get("layers_to_transform"))
    _refuse_untrained(folders, stack)
    _refuse_copies(folders, stack, workspace)
    return ImportedWorlds(stack, named)


def _find_folders(folder: Path, num_worlds: int) -> list[Path]:
    if not folder.is_dir():
        raise EngineError(f"There is no folder {folder}. Name the one with world-000, world-001 and so on.")
    wanted = world_folders(folder, num_worlds)
    found = {path.name for path in folder.glob("world-*")}
    missing = [path.name for path in wanted if path.name not in found]
    strange = sorted(found - {path.name for path in wanted})
    if missing or strange:
        parts = [f"missing: {len(missing)}, such as {missing[0]}"] if missing else []
        parts += [f"with another name: {len(strange)}, such as {strange[0]}"] if strange else []
        raise EngineError(
            f"{folder} must hold {num_worlds} PEFT folders, {wanted[0].name} to {wanted[-1].name}, one for each world: "
            f"{'; '.join(parts)}."
        )
    return wanted


def _refuse_students(folders: list[Path]) -> None:
    """A student was trained on released text, not on the records of a world."""
    if found := [place for place in folders if is_student(place) or has_mark(place)]:
        raise StudentGiven(
            f"{found[0]} is a student made by paclm distill, not a world: it was trained on released text. Name the "
            "folder of the adapters that were trained on records."
        )


def _check_targets(folder: Path, stack: AdapterStack, layers: list[str], numbers: int | list[int] | None) -> None:
    """Refuse tensors of other layers than the settings name: PEFT would leave the others as they were."""
    wanted = {name for name in layers if any(matches_target(name, target) for target in stack.spec.targets)}
    if numbers is not None and numbers != []:
        kept = set(numbers) if isinstance(numbers, list) else {numbers}
        wanted = {name for name in wanted if decoder_layer(name) in kept}
    if other := sorted(wanted ^ set(stack.layers)):
        state = "has no adapter" if other[0] in wanted else "has an adapter that no target module names"
        raise EngineError(
            f"{folder}: the layer {other[0]} of the base model {state} ({len(stack.layers)} layers have one, "
            f"target_modules names {len(wanted)}). Save the adapter with PEFT's save_pretrained again."
        )


def _refuse_untrained(folders: list[Path], stack: AdapterStack) -> None:
    moved = torch.stack([b.flatten(1).any(dim=1) for b in stack.B.values()]).any(dim=0)  # (m,)
    if not bool(moved.all()):
        still = folders[int(torch.nonzero(~moved)[0])]
        raise EngineError(f"{still} was not trained: every B is zero, so this world would vote as the public model.")


def _refuse_copies(folders: list[Path], stack: AdapterStack, workspace: Workspace) -> None:
    """Two worlds with the same numbers were not trained on different records."""
    alike: dict[str, list[int]] = defaultdict(list)
    for world, sha256 in enumerate(stack.hashes()):
        alike[sha256].append(world)
    for first, *others in alike.values():
        for other in others:
            if (workspace.membership[:, first] != workspace.membership[:, other]).any():
                raise EngineError(
                    f"{folders[first]} and {folders[other].name} hold the same adapter, although these worlds have "
                    "different records. Train each world on its own records."
                )
