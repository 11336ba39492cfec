"""Base models: from what a user writes after --base to a folder of public weights, its tokenizer and its model.

A base model is public; this file knows nothing of records, adapters or worlds. Torch and Transformers are imported
when something is loaded, so that naming a model stays quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paclm.engine.download import convert_gguf, fetched_smollm2
from paclm.errors import MissingExtra, ModelError
from paclm.worlds.fingerprints import Base, fingerprint_base
from paclm.worlds.manifest import refuse_other_base

if TYPE_CHECKING:
    import torch

    from paclm.worlds.workspace import Workspace

__all__ = ["Base", "base_of", "load_model", "load_tokenizer", "locate_base", "resolve_base"]

TINY_FOLDER = Path(__file__).resolve().parents[1] / "data" / "tiny"

WAYS_OUT = (
    "Ways to a base model: --base tiny (embedded); `paclm models get smollm2`, then --base smollm2; --base FOLDER with "
    "config.json, tokenizer.json and *.safetensors; --base FILE.gguf; or a Hugging Face name on a machine with "
    "network, whose cache (HF_HOME) can be copied here."
)

_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]


def resolve_base(spec: str) -> Base:
    """Find the base model a user named: `tiny`, `smollm2`, a folder, a .gguf file or a Hugging Face name."""
    folder = locate_base(spec)
    return Base(spec, folder, fingerprint_base(folder))


def base_of(workspace: Workspace) -> Base:
    """The base model of a workspace, found again by its name if it no longer lies where it lay at init."""
    recorded = workspace.base
    if recorded.folder.is_dir():
        return recorded  # checked when the workspace was opened
    found = resolve_base(recorded.name)
    refuse_other_base(workspace.manifest, found.fingerprint)
    return found


def load_tokenizer(base: Base) -> Any:
    """The base model's tokenizer."""
    transformers = _transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(base.folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"The tokenizer of {base.name} in {base.folder} cannot be loaded: {error}") from error


def context_of(base: Base) -> int:
    """Positions the base model can hold, read from its configuration alone."""
    return int(_transformers().AutoConfig.from_pretrained(base.folder, local_files_only=True).max_position_embeddings)


def load_model(base: Base, dtype: torch.dtype) -> torch.nn.Module:
    """The base model on the CPU, frozen and in evaluation mode."""
    transformers = _transformers()
    try:
        with _no_progress_bars(transformers):
            model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
                base.folder, dtype=dtype, local_files_only=True
            )
    except (OSError, ValueError) as error:
        raise ModelError(f"The base model {base.name} in {base.folder} cannot be loaded: {error}") from error
    return model.eval().requires_grad_(False)


def locate_base(spec: str) -> Path:
    """The folder of a base model; fetches from the hub or converts a .gguf file if that was asked for."""
    path = Path(spec).expanduser().absolute()
    if spec == "tiny":
        if not (TINY_FOLDER / "config.json").is_file():
            raise ModelError(f"The embedded base model is missing from this installation ({TINY_FOLDER}). {WAYS_OUT}")
        return TINY_FOLDER
    if spec == "smollm2":
        return fetched_smollm2()
    if path.suffix.lower() == ".gguf":
        return convert_gguf(path)
    if path.is_dir():
        return path
    if _HUB_NAME.fullmatch(spec):
        return _from_hub(spec)
    raise ModelError(f"{spec!r} is neither a folder, a .gguf file nor a Hugging Face name. {WAYS_OUT}")


def _from_hub(name: str) -> Path:
    """The hub's files in the user's Hugging Face cache, fetched if they are not there."""
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise MissingExtra("transformers", "core") from None

    def fetch(weights: str, *, offline: bool) -> Path:
        wanted = [*_HUB_FILES, weights]
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*"], local_files_only=offline))

    for weights in ("*.safetensors", "pytorch_model*.bin"):
        for offline in (True, False):
            try:
                folder = fetch(weights, offline=offline)
            except (OSError, ValueError) as error:
                if offline:
                    continue
                reason = str(error).splitlines()[0]
                raise ModelError(
                    f"The base model {name!r} is no folder, not in the Hugging Face cache, and cannot be fetched "
                    f"({reason}). {WAYS_OUT}"
                ) from None
            if any(folder.glob(weights)):
                return folder
    raise ModelError(f"The Hugging Face repository {name!r} holds no weights (*.safetensors). {WAYS_OUT}")


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingExtra("transformers", "core") from None
    return transformers


@contextmanager
def _no_progress_bars(transformers: Any) -> Iterator[None]:
    bars = transformers.utils.logging
    if not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()
