"""A training that is killed, interrupted or resumed ends with the same bits, or says why it cannot."""

import itertools
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.small_training import SETTINGS, largest_difference, plan, train
from paclm.engine import checkpoint, training, training_pass
from paclm.engine.checkpoint import RUN_FILE, Checkpoints, HeldInterrupt
from paclm.errors import EngineError


class KilledError(Exception):
    pass


@pytest.mark.parametrize("kill_at", [3, 17, 30])
def test_a_killed_run_goes_on_where_it_stopped_and_ends_with_the_same_bits(kill_at, build_model, tmp_path):
    whole = train(build_model("gpt2"), worlds_per_step=2).stack

    def kill(progress):
        if progress.step == kill_at:
            raise KilledError

    folder = tmp_path / "run"
    with pytest.raises(KilledError):
        train(build_model("gpt2"), worlds_per_step=2, folder=folder, on_progress=kill, checkpoint_seconds=0.0)
    seen = []
    resumed = train(
        build_model("gpt2"), worlds_per_step=1, folder=folder, resume=True, on_progress=seen.append
    )  # the grouping of the first run holds
    assert seen[0].step == kill_at, "the step whose report was the last is taken again, no other"
    assert largest_difference(whole, resumed.stack) == 0.0


def test_a_process_killed_outright_can_be_resumed(build_model, tmp_path):
    folder = tmp_path / "run"
    script = (
        "import os, signal, sys; sys.path[:0] = [sys.argv[2]]\n"
        "import conftest, small_training as t\n"
        "from pathlib import Path\n"
        "def kill(progress):\n"
        "    if progress.step == 8: os.kill(os.getpid(), signal.SIGKILL)\n"
        "t.train(conftest.build('gpt2'), folder=Path(sys.argv[1]), on_progress=kill, checkpoint_seconds=0.0)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", script, str(folder), str(Path(__file__).parent)]
    finished = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert finished.returncode == -signal.SIGKILL, finished.stderr.decode()
    assert Checkpoints(folder).load_position(0) is not None
    resumed = train(build_model("gpt2"), folder=folder, resume=True)
    assert largest_difference(train(build_model("gpt2")).stack, resumed.stack) < 1e-6


def interrupt_call(monkeypatch, owner, name, number):
    """Press Ctrl-C at the start of this call, counted from 1."""
    original, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*arguments, **options):
        if next(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    ("owner", "name"), [(checkpoint, "_read"), (training.GroupTraining, "restore"), (training, "make_forward")]
)
def test_ctrl_c_while_a_run_goes_back_to_its_place_loses_nothing(owner, name, build_model, tmp_path, monkeypatch):
    for where, call, options in (((training, "make_batch"), 6, {}), ((owner, name), 1, {"resume": True})):
        with monkeypatch.context() as patch:
            interrupt_call(patch, *where, call)
            with pytest.raises(KeyboardInterrupt):
                train(build_model("gpt2"), folder=tmp_path, **options)
        assert Checkpoints(tmp_path).load_position(0).num_steps == 6


@pytest.mark.parametrize(
    ("owner", "name", "call", "num_kept"),
    [
        (training, "make_batch", 6, 6),  # at the start of a step
        (training_pass, "world_means", 6, 6),  # after its backward pass
        (torch.Tensor, "addcdiv_", 6, 6),  # the moments have moved, the adapters have not
        (training.StepLoss, "wait", 6, 7),  # a step is read while the next one is under way
        (training.StepLoss, "wait", int(plan().num_steps.max()), None),  # the last step of the group is read
        (training, "measure_improvement", 1, None),  # all steps are taken
    ],
)
def test_ctrl_c_keeps_every_step_and_the_run_ends_with_the_same_bits(
    owner, name, call, num_kept, build_model, tmp_path, monkeypatch
):
    whole = train(build_model("gpt2"), worlds_per_step=2).stack
    seen = []
    with monkeypatch.context() as patch:
        interrupt_call(patch, owner, name, call)
        with pytest.raises(KeyboardInterrupt):
            train(build_model("gpt2"), worlds_per_step=2, folder=tmp_path, on_progress=seen.append)
    kept = Checkpoints(tmp_path).load_position(0)
    assert kept.num_steps == (num_kept or plan().num_steps.max()) == seen[-1].step
    resumed = train(build_model("gpt2"), worlds_per_step=2, folder=tmp_path, resume=True, on_progress=seen.append)
    assert [now.step for now in seen] == list(range(1, seen[-1].num_steps + 1)), "no step is taken twice"
    assert largest_difference(whole, resumed.stack) == 0.0


def test_a_second_ctrl_c_in_the_middle_of_a_step_keeps_nothing_that_is_torn(build_model, tmp_path, monkeypatch):
    whole = train(build_model("gpt2")).stack
    with monkeypatch.context() as patch:
        interrupt_call(patch, training, "make_batch", 6)
        interrupt_call(patch, torch.Tensor, "addcdiv_", 6)
        with pytest.raises(KeyboardInterrupt):
            train(build_model("gpt2"), folder=tmp_path)
    assert Checkpoints(tmp_path).load_position(0) is None
    resumed = train(build_model("gpt2"), folder=tmp_path, resume=True)
    assert largest_difference(whole, resumed.stack) == 0.0


def test_an_interrupt_raised_by_the_program_keeps_no_step_whose_loss_is_unread(build_model, tmp_path):
    def stop(progress):
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(build_model("gpt2"), folder=tmp_path, on_progress=stop)
    assert Checkpoints(tmp_path).load_position(0) is None, "the fourth step is taken and not read"


def test_a_run_with_other_settings_is_not_resumed_and_a_fresh_one_forgets_the_one_before(build_model, tmp_path):
    train(build_model("gpt2"), folder=tmp_path / "run")
    for change in ({"learning_rate": 1e-3}, {"layers": "top:1"}):
        with pytest.raises(EngineError, match="--again"):
            train(build_model("gpt2"), replace(SETTINGS, **change), folder=tmp_path / "run", resume=True)
    seen = []
    train(build_model("gpt2"), folder=tmp_path / "run", on_progress=seen.append)
    assert seen[0].step == 1
    assert not list((tmp_path / "run").glob("*.partial"))


def test_a_run_of_an_older_version_can_be_resumed(build_model, tmp_path):
    train(build_model("gpt2"), folder=tmp_path)
    run = "7c6a19cb0c48c050739e98c5fa5179db13953b00ad31f7c9266aaeff6e6edddc"  # of commit 2584f3a, without `layers`
    assert json.loads((tmp_path / RUN_FILE).read_text())["run"] == run


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_the_first_ctrl_c_waits_until_it_is_released_or_the_end_and_the_second_does_not():
    with HeldInterrupt() as interrupt:
        interrupt.release()  # nothing came yet
        press_ctrl_c()
        assert interrupt.came
        with pytest.raises(KeyboardInterrupt):
            interrupt.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), HeldInterrupt():
        press_ctrl_c()
    with HeldInterrupt() as interrupt:
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
        interrupt.came = False


def test_another_error_is_not_hidden_by_a_ctrl_c_that_came_before_it():
    with pytest.raises(ValueError, match="first"), HeldInterrupt():  # noqa: PT012
        press_ctrl_c()
        raise ValueError("first")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_with_a_handler_of_its_own_keeps_it():
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with HeldInterrupt() as interrupt:
            press_ctrl_c()
        assert (seen, interrupt.came) == ([signal.SIGINT], False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_is_held():
    def work():
        with HeldInterrupt() as interrupt:
            return interrupt.came

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() is False
