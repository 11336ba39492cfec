"""The servers that clients are pointed at: real `paclm serve`.

`half` has an ordinary key, which is then required. `corpus` has none, so on loopback it takes any client. Both are on
the embedded model with a chat template, which follows a schema and not an instruction. `instruct`, with a key, is on
smollm2, which follows some, and allows forced choices, which `half` refuses by default.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.server import Server, new_key, paclm

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_BUDGET = {"per_token": "2^-40", "total": "2^-10"}


@dataclass(frozen=True)
class _Kind:
    """What to set, how to train, how to serve."""

    settings: dict[str, dict[str, Any]]
    base: str = "tiny"
    training: tuple[str, ...] = ()
    serving: tuple[str, ...] = ()


_KINDS = {
    "half": _Kind({"mechanism": _BUDGET}),
    "corpus": _Kind({"dp": {"steps": 4}}, training=("--what", "dp:8"), serving=("--promise", "corpus")),
    "instruct": _Kind(
        {
            "mechanism": _BUDGET,
            "training": {"epochs": 1, "block_tokens": 256, "layers": "top:4"},
            "runtime": {"context": 1024},
            "server": {"default_max_tokens": 128, "forced_choice": True},
        },
        base="smollm2",
    ),
}


@contextmanager
def running(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Start all, made from nothing in this folder; yields what a client is told of them and the port."""
    bases = {"tiny": _base_with_template(folder), "smollm2": "smollm2"}
    paclm("models", "get", "smollm2")
    with ExitStack() as servers:
        yield [servers.enter_context(_one(folder, bases[kind.base], name)) for name, kind in _KINDS.items()]


@contextmanager
def _one(folder: Path, base: Path | str, name: str) -> Iterator[dict[str, Any]]:
    from paclm.worlds.settings import write_settings

    kind = _KINDS[name]
    os.environ["PACLM_STATE_DIR"] = str(folder / f"state-{name}")  # none knows of another's records
    os.environ["OMP_NUM_THREADS"] = "1"
    path = folder / f"clinic-{name}"
    paclm("init", path, "--corpus", "clinic:60", "--base", base, "--worlds", "4")
    short = {"training": {"epochs": 1}, "server": {"default_max_tokens": 16}}
    for section, changes in {**short, **kind.settings}.items():
        write_settings(path / "paclm.toml", section, changes)  # type: ignore[arg-type]
    paclm("train", path, *kind.training)
    admin = new_key(path, "admin", "--admin")
    key = "EMPTY" if name == "corpus" else new_key(path, "client")
    with Server(path, folder / f"{name}.log", *kind.serving) as server:
        root = f"http://127.0.0.1:{server.port}"
        yield {"root": root, "model": path.name, "key": key, "admin": admin, "port": server.port}


def _base_with_template(folder: Path) -> Path:
    from paclm.engine.base_model import TINY_FOLDER

    base = folder / "tiny-chat"
    shutil.copytree(TINY_FOLDER, base)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    return base
