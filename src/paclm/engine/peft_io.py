"""Export and import PEFT folders, one per world, as `peft` writes them. Does not need `peft`.

A folder holds `adapter_config.json` and `adapter_model.safetensors`. Published adapters expose their training data; no
guarantee of paclm covers them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from paclm.engine.adapters import AdapterSpec, AdapterStack
from paclm.errors import EngineError
from paclm.worlds.storage import make_private_folder, write_private

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN_START = (True, False, "gaussian", "orthogonal", "eva")  # pissa and others change the base model, too
_UNDERSTOOD = {
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "target_modules", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern", "fan_in_fan_out"),
}
_WITHOUT_EFFECT = {
    *("task_type", "inference_mode", "peft_version", "auto_mapping", "revision", "megatron_core", "qalora_group_size"),
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What float32 holds exactly."""


def export_peft(stack: AdapterStack, folder: Path, base_name: str, conv1d: bool) -> list[Path]:
    """Write one PEFT folder per world under `folder` (world-000, world-001, …) and return them.

    All or none: on a full disk or Ctrl-C the written folders are removed.
    `conv1d`: the adapted layers are GPT-2's transposed Conv1D, PEFT's `fan_in_fan_out`.
    """
    if folder.exists() and any(folder.iterdir()):
        raise EngineError(f"{folder} is not empty. Name a folder that does not exist yet.")
    places = world_folders(folder, stack.num_worlds)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    make_private_folder(folder)
    try:
        for world, place in enumerate(places):
            make_private_folder(place)
            write_peft(stack, world, place, base_name, conv1d)
    except BaseException:  # an incomplete export could be taken for a complete one
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # the first error is the one to report
                folder.rmdir()
        raise
    return places


def write_peft(
    stack: AdapterStack,
    world: int,
    place: Path,
    base_name: str,
    conv1d: bool,
    *,
    mode: int = 0o600,
    mark: Mapping[str, str] | None = None,
) -> None:
    """Write one world's adapter into an existing folder, with files of this mode; `mark` goes into the metadata."""
    config = json.dumps(_peft_config(stack, base_name, conv1d), indent=2, ensure_ascii=False) + "\n"
    write_private(place / CONFIG, config.encode(), mode)
    metadata = {"format": "pt", **(mark or {})}
    write_private(place / WEIGHTS, _in_order(save(_peft_tensors(stack, world), metadata=metadata)), mode)


def _in_order(content: bytes) -> bytes:
    """Safetensors with sorted metadata: the library writes them in any order, and files would differ by that alone."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    return len(written).to_bytes(8, "little") + written + content[8 + size :]


def world_folders(folder: Path, num_worlds: int) -> list[Path]:
    """The PEFT folders of all worlds under `folder`, by name: world-000, world-001, …"""
    digits = max(3, len(str(num_worlds - 1)))
    return [folder / f"world-{world:0{digits}d}" for world in range(num_worlds)]


def import_peft(folders: Sequence[Path], base: str, num_layers: int | None = None) -> AdapterStack:
    """Stack PEFT folders, one world each, in the order given; they must agree in shape and settings.

    With the base model's number of decoder layers, the stack's spec says where only the last of them are adapted.
    Numbers are float32, as training makes them. Only safetensors are read: another file could run code.
    """
    if not folders:
        raise EngineError("No PEFT folder was given to import.")
    configs = [read_config(folder) for folder in folders]
    specs = [_read_spec(folder, config) for folder, config in zip(folders, configs, strict=True)]
    worlds = [_read_tensors(folder) for folder in folders]
    for folder, spec, tensors in zip(folders, specs, worlds, strict=True):
        if spec != specs[0]:
            raise EngineError(f"{folder} has other adapter settings ({spec}) than {folders[0]} ({specs[0]}).")
        if {key: value.shape for key, value in tensors.items()} != {k: v.shape for k, v in worlds[0].items()}:
            raise EngineError(f"{folder} adapts other layers or sizes than {folders[0]}.")
    for folder, config in zip(folders, configs, strict=True):
        _check_layers(folder, config, worlds[0])
        if other := [name for name in sorted(_UNDERSTOOD) if _value(config, name) != _value(configs[0], name)]:
            raise EngineError(
                f"{folder} has another {other[0]} ({config.get(other[0])!r}) than {folders[0]} "
                f"({configs[0].get(other[0])!r}). All worlds must be trained alike."
            )
    stacked = {key: torch.stack([tensors[key] for tensors in worlds]) for key in worlds[0]}
    A = {key.removesuffix(".lora_A.weight"): value for key, value in stacked.items() if key.endswith(".lora_A.weight")}
    B = {key.removesuffix(".lora_B.weight"): value for key, value in stacked.items() if key.endswith(".lora_B.weight")}
    stack = AdapterStack(specs[0], base, A, B)
    if num_layers is None or not stack.trunk or stack.decoder_layers != list(range(stack.trunk, num_layers)):
        return stack
    return replace(stack, spec=replace(stack.spec, top=num_layers - stack.trunk))


def _peft_config(stack: AdapterStack, base_name: str, conv1d: bool) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": stack.spec.rank,
        "lora_alpha": stack.spec.alpha,
        "lora_dropout": stack.spec.dropout,
        "target_modules": list(stack.layers),  # full names: PEFT then adapts these layers and no others
        "fan_in_fan_out": conv1d,
        "bias": "none",
        "init_lora_weights": True,
        **_layers_config(stack),
    }


def _layers_config(stack: AdapterStack) -> dict[str, Any]:
    """PEFT's settings of which decoder layers are adapted; none if all are, or others than decoder layers too."""
    numbers = stack.decoder_layers
    if numbers[0] < 0 or (stack.spec.top is None and numbers == list(range(len(numbers)))):
        return {}
    before = [re.search(r"([^.]+)\.\d+\.", name) for name in stack.layers]  # the list of layers: `h`, `layers`
    patterns = sorted({found[1] for found in before if found is not None})
    pattern = patterns[0] if len(patterns) == 1 else patterns
    return {"layers_to_transform": numbers, **({"layers_pattern": pattern} if patterns else {})}


def _peft_tensors(stack: AdapterStack, world: int) -> dict[str, Tensor]:
    tensors = {}
    for layer in stack.layers:
        tensors[f"{_PREFIX}{layer}.lora_A.weight"] = stack.A[layer][world].detach().cpu().contiguous()  # (r, in)
        tensors[f"{_PREFIX}{layer}.lora_B.weight"] = stack.B[layer][world].detach().cpu().contiguous()  # (out, r)
    return tensors


def read_config(folder: Path) -> dict[str, Any]:
    """The adapter_config.json of a PEFT folder."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder} is not a PEFT folder: its {CONFIG} cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise EngineError(f"{folder} is not a PEFT folder: its {CONFIG} holds no settings.")
    return config


def _value(config: dict[str, Any], name: str) -> Any:
    """A setting to compare: PEFT writes sets as lists, in any order."""
    value = config.get(name)
    return sorted(map(str, value)) if isinstance(value, list) else value


def _read_spec(folder: Path, config: dict[str, Any]) -> AdapterSpec:
    if config.get("peft_type") != "LORA":
        raise EngineError(f"{folder} holds a {config.get('peft_type')!r} adapter; paclm stacks LORA adapters only.")
    set_otherwise = [name for name in config if name not in _UNDERSTOOD | _WITHOUT_EFFECT and config[name] != "none"]
    if changed := [name for name in set_otherwise if config[name]]:  # also what a later PEFT has and paclm has not
        raise EngineError(
            f"{folder} sets {changed[0]} to {config[changed[0]]!r}, which paclm does not support: a plain LoRA adapter "
            "is needed, without it."
        )
    if config.get("init_lora_weights", True) not in _PLAIN_START:
        raise EngineError(
            f"{folder} was started by init_lora_weights = {config['init_lora_weights']!r}, which changes the base "
            "model too. Train with PEFT's default, or save the adapter converted for the unchanged base model."
        )
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        raise EngineError(f"{folder} names its target modules by the pattern {targets!r}; a list is needed.")
    try:
        return AdapterSpec(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout", 0.0)),
            targets=tuple(sorted(map(str, targets))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{folder / CONFIG} is not one of a LoRA adapter: {error!r}. Save it again.") from None


def _check_layers(folder: Path, config: dict[str, Any], tensors: Iterable[str]) -> None:
    """Refuse tensors of other decoder layers than those that `layers_to_transform` names; PEFT takes [] for all."""
    wanted, patterns = (_as_list(config.get(name)) for name in ("layers_to_transform", "layers_pattern"))
    if not wanted:
        return
    before = "|".join(map(re.escape, map(str, patterns))) or "[^.]+"
    places = (re.search(rf"(?:^|\.)(?:{before})\.(\d+)\.", name) for name in tensors)
    found = {"none" if place is None else place[1] for place in places}
    if found != set(map(str, wanted)):
        raise EngineError(
            f"{folder} names the layers {wanted} in layers_to_transform, but its {WEIGHTS} has adapters in "
            f"{', '.join(sorted(found))}. Save the adapter with PEFT's save_pretrained again."
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        raise EngineError(
            f"{folder} has no {WEIGHTS}. Save the adapter with PEFT's save_pretrained and try again. Files of other "
            "formats, such as adapter_model.bin, are never read: they can run code."
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise EngineError(f"{path} is damaged ({error}). Copy or save it again.") from None
    strange = [key for key in tensors if not key.endswith((".lora_A.weight", ".lora_B.weight"))]
    if strange:
        raise EngineError(f"{path} holds {strange[0]}, which is not a plain LoRA tensor.")
    for key, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise EngineError(f"{path} holds {key} as {tensor.dtype}; save it as float32, bfloat16 or float16.")
        if not bool(torch.isfinite(tensor).all()):
            raise EngineError(f"{path} holds numbers in {key} that are not finite: that training diverged.")
    return {key.removeprefix(_PREFIX): tensor.float() for key, tensor in tensors.items()}
