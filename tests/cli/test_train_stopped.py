"""`paclm train` and Ctrl-C: what is printed is true, and its commands work when pasted."""

import json
import re
import shlex
import signal
from unittest.mock import Mock

import pytest
import torch

from paclm.cli.console import STOP_MESSAGE
from paclm.engine.adapters import AdapterStack
from paclm.engine.checkpoint import Checkpoints
from paclm.engine.training import GroupTraining
from paclm.engine.training_job import TrainingJob

STOPPED_AT = 3


@pytest.fixture
def spaced(tmp_path, clinic):
    """A trained workspace at a path that a shell would take for two arguments."""
    path = tmp_path / "my dir" / "my clinic"
    path.parent.mkdir()
    settings = clinic / "paclm.toml"
    settings.write_text(f"{settings.read_text()}\n[training]\nlearning_rate = 0.005\n")
    return clinic.rename(path)


@pytest.fixture
def stop(paclm, monkeypatch):
    """Run a command and press Ctrl-C in the third step of training."""
    step = GroupTraining.step

    def press_ctrl_c(group, picks):
        if group.optimizer.num_steps == STOPPED_AT - 1:
            signal.raise_signal(signal.SIGINT)
        return step(group, picks)

    def run(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(GroupTraining, "step", press_ctrl_c)
            return paclm(*arguments)

    return run


def adapters(path):
    return AdapterStack.load(path / "adapters" / "worlds.safetensors")


def are_equal(one, other):
    return all(torch.equal(one.B[layer], other.B[layer]) for layer in one.layers)


def commands_in(text):
    """Every command of paclm in a text, as a shell would split it."""
    return [shlex.split(found)[1:] for found in re.findall(r"paclm (?:train|plan|generate|votes)[^;\n]*", text)]


def test_a_stopped_retraining_continues_by_the_command_it_printed(spaced, paclm, stop):
    before = adapters(spaced)
    stopped = stop("train", str(spaced), "--again", "--dtype", "float32")
    assert stopped.status == 130
    kept = Checkpoints(spaced / "adapters" / ".training-worlds").load_position(0)
    assert kept.num_steps == STOPPED_AT
    assert are_equal(adapters(spaced), before), "until it is done, the old ones stay"

    refused = paclm("train", str(spaced), "--dtype", "float32")
    assert refused.status == 2
    assert "worlds.safetensors" in refused.err
    same = ["train", str(spaced), "--dtype", "float32"]  # of another dtype it would be another run
    assert commands_in(refused.err) == [[*same, "--resume"], [*same, "--again"]]

    (command,) = commands_in(stopped.err)
    assert command == [*same, "--resume"]
    resumed = paclm(*command)
    assert resumed.status == 0, resumed.err
    ends = adapters(spaced)
    assert not are_equal(ends, before)
    assert paclm("train", str(spaced), "--again", "--dtype", "float32").status == 0
    assert are_equal(ends, adapters(spaced)), "the same bits as a run that was never stopped"


def test_ctrl_c_before_training_began_promises_nothing(clinic, paclm, monkeypatch):
    STOP_MESSAGE.set("")
    monkeypatch.setattr(TrainingJob, "run", Mock(side_effect=KeyboardInterrupt))
    stopped = paclm("train", str(clinic), "--again")
    assert (stopped.status, stopped.err.strip().splitlines()[-1]) == (130, "Stopped.")


@pytest.mark.parametrize("has_budget", [False, True])
def test_the_next_commands_after_training_work_as_printed(spaced, paclm, has_budget):
    settings = spaced / "paclm.toml"
    if not has_budget:
        settings.write_text(re.sub(r"(?m)^(per_token|total) = .*$", "", settings.read_text()))
    done = paclm("train", str(spaced), "--again", "--dtype", "float32")
    assert done.status == 0, done.err
    commands = commands_in(done.out[done.out.index("Next") :].replace(". For research", ";"))
    assert [command[0] for command in commands] == (
        ["generate", "votes"] if has_budget else ["plan", "generate", "votes"]
    )
    for command in commands:
        assert paclm(*command).status == 0, command


def test_init_prints_a_command_that_can_be_pasted(tmp_path, small_base, paclm):
    notes = tmp_path / "notes.jsonl"
    notes.write_text("".join(json.dumps({"text": f"note {number} about a patient"}) + "\n" for number in range(40)))
    path = str(tmp_path / "my dir" / "my ws")
    made = paclm("init", path, "--corpus", str(notes), "--base", str(small_base), "--worlds", "4", "--holdout", "4")
    assert made.status == 0, made.err
    assert commands_in(made.out) == [["train", path], ["train", path, "--what", "dp:8"]]
    untrained = paclm("generate", path, "--prompt", "x", "--max-tokens", "2")
    assert commands_in(untrained.err) == [["train", path]]


def test_far_too_many_threads_are_an_error_and_a_few_too_many_a_warning(clinic, paclm, monkeypatch):
    monkeypatch.setattr("paclm.engine.cores.usable_cores", lambda: 1)
    settings, before = clinic / "paclm.toml", torch.get_num_threads()
    written = settings.read_text()
    assert "\n[runtime]\n" in written
    try:
        for threads, status, word in ((5000, 2, "Error"), (2, 0, "Warning")):
            settings.write_text(written.replace("[runtime]\n", f"[runtime]\nthreads = {threads}\n"))
            for command in (
                ["generate", "--prompt", "x", "--max-tokens", "1"],
                ["train", "--what", "full", "--dry-run"],
            ):
                said = paclm(command[0], str(clinic), *command[1:])
                assert said.status == status, said.err
                assert f"{word}: threads = {threads} in [runtime]" in said.err
    finally:
        torch.set_num_threads(before)
