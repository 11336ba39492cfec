"""Base models: find the folder that --base names, check it, and load its tokenizer and model.

A base model is public; knows nothing of records, adapters or worlds. Torch and Transformers are imported only when
something is loaded, so that finding a model is quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paclm.config import in_shell
from paclm.engine.download import convert_gguf, fetched_smollm2
from paclm.engine.tokenizer import read_tokenizer
from paclm.errors import MissingExtra, ModelError
from paclm.worlds.fingerprints import Base, fingerprint_base
from paclm.worlds.manifest import refuse_other_base

if TYPE_CHECKING:
    import torch

    from paclm.worlds.student_folder import StudentFolder
    from paclm.worlds.workspace import Workspace

TINY_FOLDER = Path(__file__).resolve().parents[1] / "data" / "tiny"

WAYS_OUT = (
    "Base models: --base tiny (embedded); `paclm models get smollm2`, then --base smollm2; --base FOLDER with "
    "config.json, tokenizer.json and *.safetensors; --base FILE.gguf; or a Hugging Face name on a machine with "
    "network, whose cache (HF_HOME) can be copied here."
)

_CHANGED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_PUBLISHED_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""`tiny`, or a name of the hub: what a student.json may lead to."""
_DECODER = re.compile(r"(ForCausalLM|LMHeadModel)$")
_LONGEST_REASON = 240
_HUB_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")
_HUB_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]


def resolve_base(spec: str) -> Base:
    """Find the base model a user named: `tiny`, `smollm2`, a folder, a .gguf file or a Hugging Face name."""
    folder = locate_base(spec)
    return Base(spec, folder, fingerprint_base(folder))


def base_of(workspace: Workspace) -> Base:
    """The base model of a workspace, found again by its name if its folder is gone."""
    recorded = workspace.base
    if recorded.folder.is_dir():
        return recorded  # checked when the workspace was opened
    found = resolve_base(recorded.name)
    refuse_other_base(workspace.manifest, found.fingerprint)
    return found


def base_of_student(student: StudentFolder, named: str | None = None) -> Base:
    """The base model of a student: the one named here, or found by the name in its student.json; hashed in full."""
    wanted, way_out = student.base, f"paclm serve {in_shell(student.path)} --base MODEL"
    if named is None and not _PUBLISHED_NAME.fullmatch(wanted["name"]):  # a path would be of the publisher's choice
        raise ModelError(
            f"The base model of the student {student.path} is given by a path. To say where it is: {way_out}"
        )
    try:
        found = resolve_base(named or wanted["name"])
    except ModelError as error:
        if named:
            raise
        raise ModelError(
            f"{error} To say where the base model {wanted['name']} of this student is: {way_out}"
        ) from None
    if found.fingerprint != wanted["fingerprint"]:
        raise ModelError(
            f"The student {student.path} was trained on {wanted['name']} with the fingerprint "
            f"{wanted['fingerprint'][:12]}…; {found.name} in {found.folder} has {found.fingerprint[:12]}…, and the "
            f"adapter does not fit it. To name another: {way_out}"
        )
    return found


def check_base(base: Base) -> None:
    """Raise if a base model could not be trained or served, before anything is made from it."""
    config = config_of(base)
    architectures = list(getattr(config, "architectures", None) or [])
    if config.is_encoder_decoder or (architectures and not any(map(_DECODER.search, architectures))):
        raise ModelError(
            f"The base model {base.name} is a {', '.join(architectures) or config.model_type}, and worlds need a "
            f"decoder that continues text (…ForCausalLM). {WAYS_OUT}"
        )
    context_of(base)
    unfit = changed_logits(config)
    for path in sorted(base.folder.glob("*.safetensors")):
        try:
            with _import("safetensors").safe_open(path, framework="numpy") as weights:
                unfit = unfit or ("lm_head.bias" if "lm_head.bias" in weights.keys() else None)  # noqa: SIM118
        except _import("safetensors").SafetensorError as error:
            raise ModelError(f"{path} is damaged ({error}). Fetch the base model again.") from None
    if unfit is not None:
        raise ModelError(
            f"The base model {base.name} changes its logits after the output layer ({unfit}), which paclm does "
            f"not support. {WAYS_OUT}"
        )


def changed_logits(config: Any) -> str | None:
    """The setting by which a model changes its logits; None if it does not."""
    return next((name for name in _CHANGED_LOGITS if getattr(config, name, None) not in (None, 1.0)), None)


def load_tokenizer(base: Base) -> Any:
    """The base model's tokenizer; most need neither Transformers nor torch."""
    tokenizer: Any = read_tokenizer(base.folder)
    if tokenizer is None:
        try:
            tokenizer = _import("transformers").AutoTokenizer.from_pretrained(
                base.folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ModelError(
                f"The tokenizer of {base.name} in {base.folder} cannot be loaded: {_shortly(error)} Fetch it again."
            ) from error
    if len(tokenizer) < 2:  # without files, Transformers makes an empty one silently
        raise ModelError(
            f"The base model {base.name} has no tokenizer. Put its tokenizer.json beside config.json in {base.folder}."
        )
    return tokenizer


def context_of(base: Base) -> int:
    """The context length of the base model, from its configuration."""
    config = config_of(base)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        raise ModelError(
            f"The base model {base.name} ({config.model_type}) has no context length (max_position_embeddings); only "
            f"models with one are supported. {WAYS_OUT}"
        )
    return int(positions)


def config_of(base: Base) -> Any:
    """The configuration of the base model, as Transformers reads it."""
    try:
        return _import("transformers").AutoConfig.from_pretrained(
            base.folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The base model {base.name} in {base.folder} is not known to this version of Transformers: "
            f"{_shortly(error)} {WAYS_OUT}"
        ) from error


def load_model(base: Base, dtype: torch.dtype) -> torch.nn.Module:
    """The base model on the CPU, frozen and in evaluation mode."""
    transformers = _import("transformers")
    try:
        with _no_progress_bars(transformers):
            model: torch.nn.Module
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                base.folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, _import("safetensors").SafetensorError) as error:
        raise ModelError(
            f"The base model {base.name} in {base.folder} cannot be loaded: {_shortly(error)} Fetch it again."
        ) from error
    if lacking := sorted(found["missing_keys"]):  # Transformers would draw them at random in every process
        raise ModelError(
            f"The weights of {base.name} in {base.folder} lack {len(lacking):,} of the tensors its config.json needs, "
            f"such as {lacking[0]}. Fetch the base model again."
        )
    return model.eval().requires_grad_(False)


def locate_base(spec: str) -> Path:
    """The folder of a base model; downloads it from the hub or converts a .gguf file if needed."""
    if not spec.strip():
        raise ModelError(f"--base is empty. {WAYS_OUT}")
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
    if path.is_file():
        raise ModelError(f"{spec} is a file; a base model is a folder or a .gguf file. {WAYS_OUT}")
    if _HUB_NAME.fullmatch(spec):
        return _from_hub(spec)
    raise ModelError(f"{spec!r} is neither a folder, a .gguf file nor a Hugging Face name. {WAYS_OUT}")


def _from_hub(name: str) -> Path:
    """The files of a hub model in the user's Hugging Face cache, downloaded if missing."""
    fetch = partial(_import("huggingface_hub").snapshot_download, name, ignore_patterns=["*/*"])
    for weights in ("*.safetensors", "pytorch_model*.bin"):
        for offline in (True, False):
            try:
                folder = Path(fetch(allow_patterns=[*_HUB_FILES, weights], local_files_only=offline))
            except (OSError, ValueError) as error:
                if offline:
                    continue
                reason = str(error).splitlines()[0]
                raise ModelError(
                    f"The base model {name!r} is not a folder, not in the Hugging Face cache, and cannot be "
                    f"downloaded ({reason}). {WAYS_OUT}"
                ) from None
            if any(folder.glob(weights)):
                return folder
    raise ModelError(f"The Hugging Face repository {name!r} holds no weights (*.safetensors). {WAYS_OUT}")


def _import(package: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError:
        raise MissingExtra("safetensors" if package == "safetensors" else "transformers") from None


def _shortly(error: BaseException) -> str:
    """The first line of a library's message, cut if it is long."""
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON].rpartition(" ")[0] + " …"


@contextmanager
def _no_progress_bars(transformers: Any) -> Iterator[None]:
    bars = transformers.utils.logging
    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()
