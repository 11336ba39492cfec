"""What a newcomer does wrong, and what paclm says: one sentence with the value and the next step, and no traceback.

Each command runs through the real entry point, in this process; a few, whose point is the process, in one of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from cli.newcomers import INIT, Desk, Said, check, nothing, split, write
from paclm.cli import main as entry
from paclm.worlds.storage import only_one

GENERATE = "generate clinic --prompt x --max-tokens"


def settings(text: str) -> Callable[[Desk], None]:
    return lambda desk: desk.mechanism(text)


def edited(name: str, old: str, new: str) -> Callable[[Desk], None]:
    return lambda desk: desk.write(name, (desk.folder / name).read_text().replace(old, new))


BUDGETS = 'per_token = "2^-16"\ntotal = "2^-4"'
WORKSPACE_MISTAKES: dict[str, tuple[Callable[[Desk], object], str, str]] = {
    "no workspace": (
        nothing,
        "generate gone --prompt x --max-tokens 2",
        "gone is not a workspace: there is no such fol",
    ),
    "a file for a workspace": (nothing, "train notes.jsonl", r"notes\.jsonl is not a workspace: it is a file"),
    "serve elsewhere": (nothing, "serve model", "model is not a workspace: it has no manifest.*paclm init"),
    "ledger elsewhere": (nothing, "ledger show model", "model is not a workspace"),
    "keys elsewhere": (nothing, "keys list model", "model is not a workspace"),
    "another format": (
        edited("clinic/manifest.json", '"format": 1', '"format": 9'),
        f"{GENERATE} 2",
        "manifest.json has format 9.*format 1",
    ),
    "broken settings": (
        write("clinic/paclm.toml", "[mechanism\n"),
        f"{GENERATE} 2",
        "paclm.toml.*line 1",
    ),
    "loose settings": (
        write("clinic/paclm.toml", "total = 1"),
        f"{GENERATE} 2",
        r"total in .*\[mechanism\]",
    ),
    "unknown setting": (
        settings("totl = 1"),
        f"{GENERATE} 2",
        r"Unknown setting totl in \[mechanism\].*Known: .*total",
    ),
    "wrong kind": (settings(f"{BUDGETS}\nsupport_size = 'x'"), f"{GENERATE} 2", 'support_size.*like 200, not "x"'),
    "no budget": (settings(""), f"{GENERATE} 2", "sets no budget.*paclm plan .*--write.*per_token ="),
    "half a budget": (settings('per_token = "2^-9"'), f"{GENERATE} 2", "needs total: there is no default.*paclm plan"),
    "budget zero": (
        settings('per_token = "2^-9"\ntotal = 0'),
        f"{GENERATE} 2",
        "total: A budget is.*not 0.*paclm plan",
    ),
    "budget negative": (settings("per_token = -1\ntotal = 1"), f"{GENERATE} 2", "per_token: A budget is.*not -1"),
    "budget nan": (settings("per_token = nan\ntotal = 1"), f"{GENERATE} 2", "per_token: A budget is.*not nan"),
    "budget a list": (settings("per_token = [1]\ntotal = 1"), f"{GENERATE} 2", r"per_token: A budget is.*not \[1\]"),
    "budget inf": (settings("per_token = 1\ntotal = inf"), f"{GENERATE} 2", "must be finite.*studies only"),
    "no tokens": (nothing, f"{GENERATE} 0", "--max-tokens must be at least 1, not 0"),
    "adapters are gone": (
        lambda desk: (desk.folder / "clinic/adapters/worlds.safetensors").unlink(),
        f"{GENERATE} 2",
        r"worlds\.safetensors is missing. Restore it from a backup, or make a new workspace",
    ),
    "port out of range": (nothing, "serve clinic --port 99999", "port must lie between 0 and 65535, not 99999"),
    "no such host": (
        nothing,
        "serve clinic --host gone.invalid --port 0",
        "host gone.invalid has no address.*127.0.0.1",
    ),
    "open without keys": (
        nothing,
        "serve clinic --host 0.0.0.0 --port 0",
        "no API key yet.*paclm keys add clinic NAME",
    ),
    "unknown regime": (nothing, "study run clinic censsus", "no regime 'censsus'. There are: census.*or all"),
    "no collections": (nothing, "study run clinic census --collections 0", "--collections must be at least 1, not 0"),
    "report before results": (nothing, "study report clinic", "no results yet.*paclm study run clinic all"),
    "unknown training": (nothing, "train clinic --what frob", "'frob' cannot be trained.*shards:N"),
    "no votes": (nothing, "replay gone.npz --per-token 1", r"no file gone\.npz.*paclm votes"),
    "bad votes": (write("v.npz", "x"), "replay v.npz --per-token 1", r"v\.npz is not an \.npz file.*paclm votes"),
    "half a plan": (nothing, "plan --mia 51%", "needs exactly two of.*paclm plan --mia 51% --tokens"),
    "no text": (nothing, "votes clinic --text gone.txt --out v.npz", r"gone\.txt cannot be read: No such file"),
}


@pytest.mark.parametrize("mistake", WORKSPACE_MISTAKES)
def test_a_workspace_says_what_is_wrong_with_it(desk: Desk, paclm: Callable[..., Said], mistake: str) -> None:
    prepare, command, expected = WORKSPACE_MISTAKES[mistake]
    prepare(desk)
    check(paclm(*split(command)), expected)


UNTRAINED = (
    "generate w --prompt x --max-tokens 2",
    "serve w",
    "votes w --prompt x",
    "export w --peft p",
    "study run w all",
)


def test_every_command_that_needs_worlds_says_how_to_train_them(desk: Desk, paclm: Callable[..., Said]) -> None:
    assert paclm(*split(f"{INIT} notes.jsonl")).status == 0
    for command in UNTRAINED:
        check(paclm(*split(command)), "w has no trained worlds yet. Train them: paclm train w")


def test_a_training_that_runs_is_not_taken_for_one_that_was_stopped(desk: Desk, paclm: Callable[..., Said]) -> None:
    paclm(*split(f"{INIT} notes.jsonl"))
    desk.write("w/adapters/.training-worlds/run.json", "{}")
    check(paclm("train", "w"), "An earlier run of this training was stopped.*paclm train w --resume")
    with only_one(desk.folder / "w" / ".training.lock", "The other training"):
        check(paclm("train", "w"), f"in process {os.getpid()}")


def test_settings_changed_after_training_stop_the_first_token_and_studies(
    desk: Desk, paclm: Callable[..., Said]
) -> None:
    paclm(*split(f"{INIT} notes.jsonl"))
    desk.write("w/paclm.toml", f"[mechanism]\n{BUDGETS}\n[training]\nlearning_rate = 0.005\n[runtime]\ncontext = 64\n")
    assert paclm("train", "w").status == 0
    generate = split("generate w --prompt x --max-tokens 2")
    edited("w/paclm.toml", "0.005", "0.004")(desk)
    changed = r"\[training\].* was changed after the worlds were trained: learning_rate was 0.005, now 0.004"
    check(paclm(*generate), f"{changed}.*paclm train .* --again; or change the settings back")
    check(paclm("study", "run", "w", "census"), f"{changed}.*paclm train w --again")
    edited("w/paclm.toml", "0.004", "0.005")(desk)
    said = paclm(*generate)
    assert said.status == 0
    assert "Caution" not in said.err
    edited("w/paclm.toml", "0.005", "0.004")(desk)  # now the ledger belongs to these worlds: said, not refused
    said = paclm(*generate)
    assert said.status == 0
    assert re.search(r"Caution: \[training\] was changed.*served as they were trained", said.err)
    assert "--again" not in paclm("study", "run", "w", "census").err


def test_what_the_system_refuses_is_one_sentence(
    desk: Desk, paclm: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/disk/votes.npz")

    monkeypatch.setattr("paclm.study.recorded_votes.RecordedVotes.load", full)
    check(paclm("replay", "v.npz", "--per-token", "1"), "/disk/votes.npz: No space left on device. Make room on that")
    monkeypatch.setattr("paclm.study.recorded_votes.RecordedVotes.load", lambda _: bytearray(2**62))
    check(paclm("replay", "v.npz", "--per-token", "1"), "not enough memory")


WITHOUT = """
import sys

class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *more):
        return None if name.partition(".")[0] == package else self.finder.find_spec(name, *more)
    def __getattr__(self, name): return getattr(self.finder, name)

package = sys.argv.pop(1)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from paclm.cli.main import main
main()
"""


def test_a_missing_extra_is_named_with_the_command_that_brings_it(desk: Desk) -> None:
    for package, extra, command in (
        ("torch", "core", f"{GENERATE} 2"),
        ("torch", "core", "train clinic"),
        ("torch", "core", "demo d"),
        ("cryptography", "core", f"{GENERATE} 2"),
        ("fastapi", "serve", "serve clinic"),
        ("matplotlib", "report", "study report clinic"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, package, *command.split()], capture_output=True, text=True, check=False
        )
        check(
            Said(done.returncode, done.stdout, done.stderr), rf"the package '{package}'.*pip install 'paclm\[{extra}\]'"
        )


def test_no_warning_of_a_library_comes_before_the_sentence(desk: Desk) -> None:
    shutil.copytree(desk.base, desk.folder / "odd")
    config = desk.folder / "odd" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token_id": 50256}))  # Transformers would mind
    desk.write("few.jsonl", '{"text": "a"}\n')
    command = [sys.executable, "-m", "paclm", "init", "w", "--corpus", "few.jsonl", "--base", "odd", "--worlds", "4"]
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: 1 records with 0 held out")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_with_status_130_and_what_is_kept(
    desk: Desk, paclm: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paclm.worlds.creation.create_workspace", stop)
    said = paclm(*split(f"{INIT} notes.jsonl"))
    assert (said.status, said.out) == (130, "")
    assert said.err == "Stopped. Nothing was made; repeat the command when you like.\n"
    monkeypatch.undo()
    monkeypatch.chdir(desk.folder)
    monkeypatch.setattr(sys, "argv", ["paclm", *split(f"{INIT} notes.jsonl")])
    monkeypatch.setattr("paclm.engine.training.GroupTraining.step", stop)
    with pytest.raises(SystemExit):
        entry.main()
    said = paclm("train", "w")
    assert said.status == 130
    assert "Stopped. What it did is kept. To go on: paclm train w --resume" in said.err


def test_a_reader_that_leaves_early_gets_no_traceback(desk: Desk) -> None:
    command = [sys.executable, "-m", "paclm", "plan", "--mia", "51%", "--tokens", "1000"]
    reading, writing = os.pipe()
    os.close(reading)  # it has left before there is anything to read
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
