"""Train a student, or write the public model's beginnings, where nothing private can be read. Prints what it made.

    python public_training.py ARGUMENTS.json OUT PRIVATE right|beginnings|adapter|corpus|ledger

PRIVATE is where the workspace was; it has been moved away. Whoever opens a file there, looks at it or connects to a
database ends the process with status 77, whether or not it would have gone on without. The last three are trainers that
peek.
"""

import json
import os
import sqlite3
import sys
from pathlib import Path

from paclm.config import RuntimeConfig, TrainingConfig
from paclm.curator.beginnings import find_beginnings
from paclm.curator.distill import train
from paclm.curator.transcript import ReleasedText
from paclm.engine.adapters import AdapterStack
from paclm.engine.peft_io import write_peft
from paclm.engine.student_training import Recipe
from paclm.worlds.fingerprints import Base
from paclm.worlds.student_folder import MARK

TOUCHED = 77


def forbid(private):
    def touch(event, arguments):
        is_database = event.startswith(("sqlite3.connect", "socket.connect"))
        if is_database or ((event == "open" or event.startswith("os.")) and private in repr(arguments)):
            os._exit(TOUCHED)

    sys.addaudithook(touch)


def main():
    arguments, out, private, how = json.loads(Path(sys.argv[1]).read_text()), *sys.argv[2:]
    base = Base(arguments["base"]["name"], Path(arguments["base"]["folder"]), arguments["base"]["fingerprint"])
    runtime, support_size = RuntimeConfig(**arguments["runtime"]), arguments["support_size"]
    texts = [ReleasedText(**{**text, "prompt": tuple(text["prompt"])}) for text in arguments["texts"]]
    forbid(private)
    if how == "beginnings":
        print(json.dumps(find_beginnings(base, runtime, "public", support_size).tokens))
        return
    if how == "adapter":
        AdapterStack.load(Path(private) / "adapters" / "worlds.safetensors", slice(0, 1))
    if how == "corpus":
        (Path(private) / "corpus" / "heldout.jsonl").read_bytes()
    if how == "ledger":
        sqlite3.connect(f"{private}/curator/ledger.sqlite")
    settings = TrainingConfig(**arguments["settings"])
    _, student = train(base, texts, settings, Recipe(**arguments["recipe"]), runtime, support_size)
    Path(out).mkdir()
    write_peft(student, 0, Path(out), "small", conv1d=True, mark=MARK)


if __name__ == "__main__":
    main()
