"""A newcomer's desk: files to do something wrong with, and what every error must look like."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SECRET_WORDS = "zinnober quetzal"
"""Stands for private text: no error may repeat it."""


INIT = "init w --base model --worlds 4 --corpus"


@dataclass(frozen=True)
class Said:
    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Desk:
    """A folder with a corpus, a base model, a new workspace and a trained one with a budget."""

    folder: Path
    base: Path

    def write(self, name: str, content: str | bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def other_base(self, name: str, **changes: object) -> Path:
        """A copy of the base model with other entries in its config.json."""
        folder = self.folder / name
        shutil.copytree(self.base, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    def mechanism(self, text: str) -> None:
        self.write("clinic/paclm.toml", f"[mechanism]\n{text}\n[runtime]\ncontext = 64\n")


def nothing(desk: Desk) -> None:
    pass


def write(name: str, content: str | bytes) -> Callable[[Desk], None]:
    return lambda desk: desk.write(name, content)


def split(command: str) -> list[str]:
    return [word if word != "''" else "" for word in command.split(" ")]


def check(said: Said, expected: str) -> None:
    assert said.status == 2, said
    assert said.out == ""
    assert re.search(expected, said.err.replace("\n", " ")), said.err
    assert "Traceback" not in said.err
    assert "[transformers]" not in said.err
    assert SECRET_WORDS.split()[0] not in said.err
    assert said.err.count("Error: ") == 1
