"""The folder of a worker on another host: what one rank needs of a workspace, and nothing else.

    manifest.json                  base model, number of worlds, hashes of their adapters
    paclm.toml                     [workers]; rank 0 sends all other settings
    adapters/worlds.safetensors    the worlds of this rank only

No records, no membership, no other worlds, nothing of the curator. The base model is public, and is found on that host
as at `paclm init`.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paclm.config import in_toml
from paclm.engine.distributed import own_worlds, world_hashes
from paclm.engine.workers import Split
from paclm.errors import InvalidInput
from paclm.worlds.layout import ADAPTERS_FOLDER, SETTINGS_FILE, WORLDS_FILE
from paclm.worlds.storage import make_private_folder, write_private

if TYPE_CHECKING:
    from paclm.worlds.workspace import Workspace

_SETTINGS = "# The folder of a worker: all other settings are those of rank 0.\n[workers]\n"


def export_worker(workspace: Workspace, folder: Path, rank: int, workers: int) -> slice:
    """Write the folder of this rank, whole or not at all; returns which worlds are in it."""
    if not 1 <= rank < workers:
        raise InvalidInput(f"--rank must be between 1 and {workers - 1}, not {rank}; rank 0 is the command itself.")
    if folder.exists():
        raise InvalidInput(f"{folder} exists already. Name a folder that does not exist yet.")
    split = Split(workspace.num_worlds, workers)
    which, hashes = split.worlds(rank), world_hashes(workspace, split)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        make_private_folder(folder)
        adapters = make_private_folder(folder / ADAPTERS_FOLDER) / WORLDS_FILE
        own_worlds(workspace, split, rank)[0].save(adapters)
        settings = asdict(workspace.settings.workers)
        lines = [f"{name} = {in_toml(value)}\n" for name, value in settings.items()]
        write_private(folder / SETTINGS_FILE, "".join([_SETTINGS, *lines]).encode())
        held = [which.start, which.stop]
        whole = replace(workspace.manifest, arguments={"worlds": split.num_worlds}, summary={}, files={}, adapters={})
        whole.with_adapters(adapters, {"worlds_sha256": hashes, "held": held}).write(folder)
    except BaseException:  # an incomplete folder could be taken for a complete one
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return which
