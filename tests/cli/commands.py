"""Run commands in this process, and a folder of files for the mistakes that a user makes."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from paclm.cli.main import app

SECRET_WORDS = "zinnober quetzal"
"""Stands for private text: no error may repeat it."""
INIT = "init w --base model --worlds 4 --corpus"


def invoke(*arguments, **options):
    """Run a command. An error that the entry point would print is raised instead."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def figures_of(*arguments):
    """The JSON object that a command prints."""
    return json.loads(invoke(*arguments, "--json").stdout)


def spawn(*arguments, **options):
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "paclm", *map(str, arguments)]
    done = subprocess.run(command, **{"capture_output": True, "text": True, "check": False, **options})
    return Outcome(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit status, standard output, standard error."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Desk:
    """A folder with a corpus, a base model and a trained workspace with a budget."""

    folder: Path
    base: Path

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def edit(self, name, old, new):
        self.write(name, (self.folder / name).read_text().replace(old, new))

    def other_base(self, name, **changes):
        """A copy of the base model with other entries in its config.json."""
        folder = self.folder / name
        shutil.copytree(self.base, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder


def split(command):
    return [word if word != "''" else "" for word in command.split(" ")]


def check(outcome, *words):
    """Exactly one error with these words, no traceback, nothing private and nothing on standard output."""
    assert (outcome.status, outcome.out) == (2, ""), outcome
    assert [word for word in words if word not in outcome.err] == [], outcome.err
    assert outcome.err.count("Error: ") == 1
    for unwanted in ("Traceback", "[transformers]", SECRET_WORDS.split()[0]):
        assert unwanted not in outcome.err
