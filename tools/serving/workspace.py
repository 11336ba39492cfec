"""A workspace to measure with: made for the purpose, or a copy, so that no real budget is spent."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.server import paclm

RANDOM_SMOLLM2 = "random-smollm2"
"""A model of SmolLM2-135M's shape with random weights: as fast, for machines that cannot fetch the real one."""

_SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "initializer_range": 1 / 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
}


def in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call it where torch, its threads and its memory do not outlive the call."""
    pool = multiprocessing.get_context("spawn").Pool(1)
    try:
        return pool.apply(work, arguments)
    finally:
        pool.close()
        pool.join()


def make_workspace(
    path: Path, base: str, worlds: int, records: int, spread: float, tokenizer: Path | None, layers: str = "all"
) -> None:
    """A workspace over synthetic notes whose adapters are random: speed does not depend on training, votes do."""
    if (path / "adapters" / "worlds.safetensors").exists():
        return
    if base == RANDOM_SMOLLM2:
        if tokenizer is None:
            raise SystemExit(f"--base {RANDOM_SMOLLM2} needs --tokenizer FOLDER, with the tokenizer of SmolLM2.")
        base = str(path.absolute().with_name(RANDOM_SMOLLM2))
        if not Path(base, "config.json").exists():
            in_own_process(_save_random_model, base, tokenizer)
    paclm("init", path, "--corpus", f"clinic:{records}", "--base", base, "--worlds", str(worlds))
    in_own_process(_draw_adapters, path, spread, layers)


def _save_random_model(folder: str, tokenizer: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**_SHAPE)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def _draw_adapters(path: Path, spread: float, layers: str) -> None:
    """One A for all worlds, as coupled training starts; B normal, its own in each world."""
    import torch

    from paclm.engine.adapters import AdapterStack, find_targets
    from paclm.engine.base_model import base_of, load_model
    from paclm.engine.training import adapter_spec
    from paclm.worlds.layout import SETTINGS_FILE, WORLDS_FILE
    from paclm.worlds.settings import write_settings
    from paclm.worlds.workspace import Workspace

    write_settings(path / SETTINGS_FILE, "training", {"layers": layers})
    workspace = Workspace.open(path)
    base, spec = base_of(workspace), adapter_spec(workspace.training)
    targets = find_targets(load_model(base, torch.float32), spec)
    start = AdapterStack.initial(targets, spec, workspace.num_worlds, 3, base.fingerprint)
    generator = torch.Generator().manual_seed(5)
    B = {layer: torch.empty_like(b).normal_(0.0, spread, generator=generator) for layer, b in start.B.items()}
    AdapterStack(spec, base.fingerprint, start.A, B).save(workspace.adapters_path / WORLDS_FILE)
    workspace.with_adapters(WORLDS_FILE)


def copy_workspace(source: Path, target: Path, mechanism: dict[str, Any], runtime: dict[str, Any]) -> None:
    """The same worlds with a secret and ledger of their own; settings that are not named stay as they are."""
    from paclm.worlds.settings import write_settings

    os.environ["PACLM_STATE_DIR"] = str(target.parent / "state")  # not noted on this machine as a deployment
    left_out = shutil.ignore_patterns("curator", "study", ".training*")
    shutil.copytree(source, target, ignore=left_out, copy_function=_link_or_copy)
    (target / "curator").mkdir(mode=0o700)
    write_settings(target / "paclm.toml", "mechanism", mechanism)
    write_settings(target / "paclm.toml", "runtime", runtime)  # type: ignore[arg-type]


def _link_or_copy(source: str, target: str) -> None:
    if source.endswith(".safetensors"):  # large, and never written again
        Path(target).symlink_to(Path(source).absolute())
    else:
        shutil.copy2(source, target)


def words_of(path: Path) -> list[str]:
    """Words of its records, to make prompts of."""
    from paclm.worlds.workspace import Workspace

    return " ".join(record.text for record in Workspace.open(path).records("train")).split()
