"""Tensors on disk: files that appear whole or not at all, for their owner's eyes. Knows not what they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paclm.errors import EngineError


def save_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write one safetensors file with notes; a full disk is an error that leaves what was there."""
    partial = path.with_name(path.name + ".partial")
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial, dict(notes))
        partial.chmod(0o600)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise EngineError(
            f"{path} cannot be written ({error}). Make room on that disk or mend its permissions, then go on: what was "
            "finished before is kept."
        ) from None
