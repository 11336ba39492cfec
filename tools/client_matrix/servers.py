"""The two servers that clients are pointed at: real `paclm serve`, on the embedded model with a chat template.

`half` has an ordinary key, which is then required. `corpus` has none, so on loopback it takes any client.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from serving.server import Server, new_key, paclm

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_PROMISES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "half": ({"mechanism": {"per_token": "2^-40", "total": "2^-10"}}, (), ()),
    "corpus": ({"dp": {"steps": 4}}, ("--what", "dp:8"), ("--promise", "corpus")),
}
"""What to set, how to train, how to serve."""


@contextmanager
def running(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Start both, made from nothing in this folder; yields what a client is told of them and the port."""
    base = _base_with_template(folder)
    with ExitStack() as servers:
        yield [servers.enter_context(_one(folder, base, promise)) for promise in _PROMISES]


@contextmanager
def _one(folder: Path, base: Path, promise: str) -> Iterator[dict[str, Any]]:
    from paclm.worlds.settings import write_settings

    settings, training, serving = _PROMISES[promise]
    os.environ["PACLM_STATE_DIR"] = str(folder / f"state-{promise}")  # neither knows of the other's records
    os.environ["OMP_NUM_THREADS"] = "1"
    path = folder / f"clinic-{promise}"
    paclm("init", path, "--corpus", "clinic:60", "--base", base, "--worlds", "4")
    for section, changes in {"training": {"epochs": 1}, "server": {"default_max_tokens": 16}, **settings}.items():
        write_settings(path / "paclm.toml", section, changes)  # type: ignore[arg-type]
    paclm("train", path, *training)
    admin = new_key(path, "admin", "--admin")
    key = new_key(path, "client") if promise == "half" else "EMPTY"
    with Server(path, folder / f"{promise}.log", *serving) as server:
        root = f"http://127.0.0.1:{server.port}"
        yield {"root": root, "model": path.name, "key": key, "admin": admin, "port": server.port}


def _base_with_template(folder: Path) -> Path:
    from paclm.engine.base_model import TINY_FOLDER

    base = folder / "tiny-chat"
    shutil.copytree(TINY_FOLDER, base)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    return base
