"""Mistakes of users: one error with the value and the next step, exit status 2, nothing half-made, no traceback.

Each command runs through the real entry point in this process; a few, which are about the process, in one of their own.
The wording is in the snapshot of all messages; here each error must name the value it is about, or what to type next.
"""

import os
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save_file

from cli.commands import INIT, SECRET_WORDS, Outcome, check, spawn, split
from paclm.errors import EXTRAS
from paclm.worlds.storage import only_one

BASE = "init w --corpus notes.jsonl --worlds 4 --base"
GENERATE = "generate clinic --prompt x --max-tokens"
BUDGETS = 'per_token = "2^-16"\ntotal = "2^-4"'


def write(name, content):
    return lambda desk: desk.write(name, content)


def settings(text):
    return write("clinic/paclm.toml", f"[mechanism]\n{text}\n[runtime]\ncontext = 64\n")


def base(**changes):
    return lambda desk: desk.other_base("b", **changes)


def without_tokenizer(desk):
    for path in desk.other_base("b").glob("tokenizer*"):
        path.unlink()


def with_bias(desk):
    save_file({"lm_head.bias": np.zeros(4, dtype=np.float32)}, desk.other_base("b") / "model-2.safetensors")


def cut_weights(desk):
    os.truncate(desk.other_base("b") / "model.safetensors", 3000)


MISTAKES = {
    "no workspace": (None, "generate gone --prompt x --max-tokens 2", ["gone"]),
    "a file for a workspace": (None, "train notes.jsonl", ["notes.jsonl"]),
    "serve elsewhere": (None, "serve model", ["model", "paclm init"]),
    "ledger elsewhere": (None, "ledger show model", ["model"]),
    "keys elsewhere": (None, "keys list model", ["model"]),
    "another format": (
        lambda desk: desk.edit("clinic/manifest.json", '"format": 1', '"format": 9'),
        f"{GENERATE} 2",
        ["format 9", "format 1"],
    ),
    "broken settings": (write("clinic/paclm.toml", "[mechanism\n"), f"{GENERATE} 2", ["TOML", "line 1"]),
    "loose settings": (write("clinic/paclm.toml", "total = 1"), f"{GENERATE} 2", ["total in ", "paclm.toml"]),
    "unknown setting": (settings("totl = 1"), f"{GENERATE} 2", ["totl", "[mechanism]", "total"]),
    "wrong kind": (settings(f"{BUDGETS}\nsupport_size = 'x'"), f"{GENERATE} 2", ["support_size", "200", '"x"']),
    "no budget": (settings(""), f"{GENERATE} 2", ["paclm plan", "--write", "per_token ="]),
    "half a budget": (settings('per_token = "2^-9"'), f"{GENERATE} 2", ["total", "paclm plan"]),
    "budget zero": (settings('per_token = "2^-9"\ntotal = 0'), f"{GENERATE} 2", ["total: ", "not 0", "paclm plan"]),
    "budget negative": (settings("per_token = -1\ntotal = 1"), f"{GENERATE} 2", ["per_token: ", "not -1"]),
    "budget nan": (settings("per_token = nan\ntotal = 1"), f"{GENERATE} 2", ["per_token: ", "not nan"]),
    "budget a list": (settings("per_token = [1]\ntotal = 1"), f"{GENERATE} 2", ["per_token: ", "not [1]"]),
    "budget true": (settings("per_token = true\ntotal = 1"), f"{GENERATE} 2", ["per_token: ", "not True"]),
    "budget inf": (settings("per_token = 1\ntotal = inf"), f"{GENERATE} 2", ["inf", "[mechanism]"]),
    "no tokens": (None, f"{GENERATE} 0", ["--max-tokens", "not 0"]),
    "adapters are gone": (
        lambda desk: (desk.folder / "clinic/adapters/worlds.safetensors").unlink(),
        f"{GENERATE} 2",
        ["worlds.safetensors"],
    ),
    "port out of range": (None, "serve clinic --port 99999", ["port", "65535", "99999"]),
    "no such host": (None, "serve clinic --host gone.invalid --port 0", ["gone.invalid", "127.0.0.1"]),
    "a host of another machine": (None, "serve clinic --host 203.0.113.7 --port 0", ["203.0.113.7"]),
    "open without keys": (None, "serve clinic --host 0.0.0.0 --port 0", ["paclm keys add clinic NAME"]),
    "unknown regime": (None, "study run clinic censsus", ["'censsus'", "census"]),
    "no collections": (None, "study run clinic census --collections 0", ["--collections", "not 0"]),
    "report before results": (None, "study report clinic", ["paclm study run clinic all"]),
    "unknown training": (None, "train clinic --what frob", ["worlds", "'frob'"]),
    "no votes": (None, "replay gone.npz --per-token 1", ["gone.npz", "paclm votes"]),
    "bad votes": (write("v.npz", "x"), "replay v.npz --per-token 1", ["v.npz", "paclm votes"]),
    "half a plan": (None, "plan --mia 51%", ["paclm plan --mia 51% --tokens"]),
    "no text": (None, "votes clinic --text gone.txt --out v.npz", ["gone.txt", "No such file"]),
    # corpora
    "no such file": (None, f"{INIT} gone.jsonl", ["gone.jsonl", "clinic:2000"]),
    "no corpus": (None, f"{INIT} ''", ["--corpus"]),
    "an address": (None, f"{INIT} https://x.example/n.jsonl", ["https://x.example/n.jsonl"]),
    "clinic without a number": (None, f"{INIT} clinic:many", ["clinic:many", "clinic:2000"]),
    "an empty folder": (lambda desk: (desk.folder / "texts").mkdir(), f"{INIT} texts", ["texts"]),
    "a folder of other files": (write("pile/a.pdf", ""), f"{INIT} pile", ["a.pdf", ".txt"]),
    "a folder with a table": (write("pile/a.csv", ""), f"{INIT} pile", ["--corpus pile/a.csv"]),
    "an empty file": (write("n.jsonl", ""), f"{INIT} n.jsonl", ["n.jsonl"]),
    "a JSON file": (write("n.json", "[]"), f"{INIT} n.json", [".jsonl", "jq -c"]),
    "a text file": (write("n.txt", "x"), f"{INIT} n.txt", ["n.txt"]),
    "not UTF-8": (write("n.jsonl", b'{"text": "\xff"}\n' * 9), f"{INIT} n.jsonl", [" 9 ", "UTF-8", "iconv"]),
    "wrong field": (None, f"{INIT} notes.jsonl --text-field note", [" 200 ", "'note'", "text, patient"]),
    "wrong column": (write("n.csv", "id,body\n1,x\n"), f"{INIT} n.csv", ["'text'", "id, body", "--text-field"]),
    "a table without header": (write("n.csv", f"1,{SECRET_WORDS}\n"), f"{INIT} n.csv", ["'text'"]),
    "private field names": (write("n.jsonl", f'{{"{SECRET_WORDS}": 1}}\n'), f"{INIT} n.jsonl", ["'text'"]),
    "no gzip": (write("n.jsonl.gz", SECRET_WORDS), f"{INIT} n.jsonl.gz", ["n.jsonl.gz", "gzip"]),
    "too few records": (write("n.jsonl", '{"text": "a"}\n'), f"{INIT} n.jsonl", [" 1 ", " 8 "]),
    "everything held out": (None, f"{INIT} notes.jsonl --holdout 199", ["--holdout", " 1 "]),
    "odd worlds": (None, f"{INIT} notes.jsonl --worlds 3", ["worlds", "not 3"]),
    "no worlds": (None, f"{INIT} notes.jsonl --worlds 0", ["worlds", "not 0"]),
    "too many worlds": (None, f"{INIT} notes.jsonl --worlds 1000000", ["65,536", "not 1,000,000"]),
    "negative holdout": (None, f"{INIT} notes.jsonl --holdout -1", ["--holdout", "not -1"]),
    "negative canaries": (None, f"{INIT} notes.jsonl --canaries -1", ["--canaries", "not -1"]),
    "negative seed": (None, f"{INIT} notes.jsonl --seed -1", ["seed", "not -1"]),
    "records of one token": (None, f"{INIT} notes.jsonl --max-record-tokens 1", ["at least 2", "not 1"]),
    "unknown group": (None, f"{INIT} notes.jsonl --group-by who", ["'who'", "text, patient"]),
    "empty texts": (write("n.jsonl", '{"text": ""}\n'), f"{INIT} n.jsonl", ["n.jsonl:1: "]),
    "half a JSON object": (write("n.jsonl", '{"text": "x"\n'), f"{INIT} n.jsonl", ["n.jsonl:1: ", "JSON"]),
    # base models
    "a model not to fetch": (None, "models get tiny", ["'tiny'"]),
    "an unknown model": (None, "models get gpt5", ["'gpt5'"]),
    "no base": (None, f"{BASE} ''", ["--base tiny"]),
    "no such folder": (None, f"{BASE} ./gone", ["'./gone'", "--base tiny"]),
    "smollm2 is not fetched": (None, f"{BASE} smollm2", ["paclm models get smollm2"]),
    "a file for a base": (None, f"{BASE} notes.jsonl", ["notes.jsonl"]),
    "no such gguf": (None, f"{BASE} gone.gguf", ["gone.gguf"]),
    "a folder of something else": (None, f"{BASE} clinic", ["config.json", "--base tiny"]),
    "no tokenizer": (without_tokenizer, f"{BASE} b", ["tokenizer.json", "config.json"]),
    "unknown architecture": (base(model_type="frob"), f"{BASE} b", ["Transformers", "frob"]),
    "an encoder": (
        base(model_type="bert", architectures=["BertForMaskedLM"]),
        f"{BASE} b",
        ["BertForMaskedLM", "ForCausalLM"],
    ),
    "a model without positions": (base(model_type="mamba", architectures=["MambaForCausalLM"]), f"{BASE} b", ["mamba"]),
    "capped logits": (
        base(model_type="gemma2", architectures=["Gemma2ForCausalLM"]),
        f"{BASE} b",
        ["final_logit_softcapping", "--base tiny"],
    ),
    "a bias of the logits": (with_bias, f"{BASE} b", ["lm_head.bias", "--base tiny"]),
    "truncated weights": (cut_weights, f"{BASE} b", ["model.safetensors"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_error_that_names_it_and_makes_nothing(desk, paclm, mistake):
    prepare, command, words = MISTAKES[mistake]
    if prepare is not None:
        prepare(desk)
    check(paclm(*split(command)), *words)
    assert not (desk.folder / "w").exists()


def test_weights_that_the_base_lacks_are_never_drawn_at_random(desk, paclm):
    desk.other_base("b", n_layer=3)
    assert paclm(*split(f"{BASE} b")).status == 0
    check(paclm("train", "w", "--dry-run"), " 12 ", "transformer.h.2")


def test_every_command_that_needs_worlds_names_the_command_that_trains_them(desk, paclm):
    assert paclm(*split(f"{INIT} notes.jsonl")).status == 0
    untrained = ("generate w --prompt x --max-tokens 2", "serve w", "votes w --prompt x", "export w --peft p")
    for command in (*untrained, "study run w all"):
        check(paclm(*split(command)), "paclm train w")


def test_a_training_that_runs_is_not_taken_for_one_that_was_stopped(desk, paclm):
    paclm(*split(f"{INIT} notes.jsonl"))
    desk.write("w/adapters/.training-worlds/run.json", "{}")
    check(paclm("train", "w"), "paclm train w --resume")
    with only_one(desk.folder / "w" / ".training.lock", "The other training"):
        check(paclm("train", "w"), f"process {os.getpid()}")


def test_settings_changed_after_training_stop_the_first_token_and_studies(desk, paclm):
    paclm(*split(f"{INIT} notes.jsonl"))
    desk.write("w/paclm.toml", f"[mechanism]\n{BUDGETS}\n[training]\nlearning_rate = 0.005\n[runtime]\ncontext = 64\n")
    assert paclm("train", "w").status == 0
    generate = split("generate w --prompt x --max-tokens 2")
    desk.edit("w/paclm.toml", "0.005", "0.004")
    change = "learning_rate was 0.005, now 0.004"
    check(paclm(*generate), "[training]", change, "paclm train ", " --again")
    check(paclm("study", "run", "w", "census"), "[training]", change, "paclm train w --again")
    desk.edit("w/paclm.toml", "0.004", "0.005")
    outcome = paclm(*generate)
    assert (outcome.status, "Warning" in outcome.err) == (0, False)
    desk.edit("w/paclm.toml", "0.005", "0.004")  # the ledger is bound to these worlds by now: a warning only
    outcome = paclm(*generate)
    assert (outcome.status, "Warning: [training]" in outcome.err) == (0, True)
    assert "--again" not in paclm("study", "run", "w", "census").err


def test_errors_of_the_system_are_printed_as_errors(desk, paclm, monkeypatch):
    load = "paclm.study.recorded_votes.RecordedVotes.load"
    monkeypatch.setattr(load, Mock(side_effect=OSError(28, "No space left on device", "/disk/votes.npz")))
    check(paclm("replay", "v.npz", "--per-token", "1"), "/disk/votes.npz: No space left on device")
    monkeypatch.setattr(load, lambda _: bytearray(2**62))
    check(paclm("replay", "v.npz", "--per-token", "1"), "memory")


WITHOUT = """
import sys

class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in packages else self.finder.find_spec(name, *more)
    def __getattr__(self, name): return getattr(self.finder, name)

packages = sys.argv.pop(1).split(",")
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from paclm.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("torch", "core", f"{GENERATE} 2"),
        ("torch", "core", "train clinic"),
        ("torch", "core", "demo d"),
        ("cryptography", "core", f"{GENERATE} 2"),
        ("fastapi", "serve", "serve clinic"),
        ("uvicorn", "serve", "serve clinic"),
        ("matplotlib", "report", "study report clinic"),
    ],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(desk, package, extra, command):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, *command.split()], capture_output=True, text=True, check=False
    )
    check(Outcome(done.returncode, done.stdout, done.stderr), f"'{package}'", "pip install", f"[{extra}]'")


def test_without_any_extra_a_plan_is_written_into_a_workspace(desk):
    command = ["plan", "--mia", "60%", "--tokens", "100", "--write", "clinic"]
    absent = ",".join(set(EXTRAS) - {"pydantic"})  # which typer needs
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, absent, *command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "per_token" in done.stdout


def test_no_warning_of_a_library_precedes_the_error(desk):
    desk.other_base("odd", bos_token_id=50256)  # Transformers would warn of it
    desk.write("few.jsonl", '{"text": "a"}\n')
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = spawn(*split("init w --corpus few.jsonl --base odd --worlds 4"), env=environment)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("Error: ")


def test_ctrl_c_ends_with_status_130_and_what_is_kept(desk, paclm, monkeypatch):
    stop = Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr("paclm.worlds.creation.create_workspace", stop)
        outcome = paclm(*split(f"{INIT} notes.jsonl"))
    assert (outcome.status, outcome.out, outcome.err.split()[0]) == (130, "", "Stopped.")
    assert not (desk.folder / "w").exists()
    assert paclm(*split(f"{INIT} notes.jsonl")).status == 0
    monkeypatch.setattr("paclm.engine.training.GroupTraining.step", stop)
    outcome = paclm("train", "w")
    assert (outcome.status, "paclm train w --resume" in outcome.err) == (130, True)


def test_a_reader_that_leaves_early_gets_no_traceback(desk):
    reading, writing = os.pipe()
    os.close(reading)  # closed before anything is written
    with os.fdopen(writing, "w"):
        command = split("plan --mia 51% --tokens 1000")
        done = spawn(*command, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    assert (done.status, done.err) == (1, "")
