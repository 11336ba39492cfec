"""Training with workers, in real processes: the bits of one process, whoever trains what and whoever dies."""

import os
import shutil
import signal
import threading
from functools import partial

import pytest
import torch

from curator.deployments import build_workspace, without_notes
from curator.joined import joined
from engine.small_training import largest_difference
from paclm.engine import training, training_job
from paclm.engine.adapters import AdapterStack
from paclm.engine.launch import start_workers
from paclm.engine.training import GroupTraining
from paclm.engine.training_job import prepare_training
from paclm.engine.training_queue import GroupQueue
from paclm.errors import EngineError, InvalidInput
from paclm.worlds.workspace import Workspace

SETTINGS = '[training]\nlearning_rate = 0.005\nrank = 2\nepochs = 1\n\n[runtime]\ndevice = "cpu"\nthreads = 1\n'
TOGETHER = 2  # of 8 worlds: 4 groups
SECONDS = 60.0


@pytest.fixture(scope="module")
def template(tmp_path_factory, texts, small_base):
    with without_notes():
        path = build_workspace(tmp_path_factory.mktemp("shared") / "clinic", texts[:60], small_base).path
    (path / "paclm.toml").write_text(SETTINGS)
    return path


@pytest.fixture(scope="module", autouse=True)
def threads_of_the_tests():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(template, tmp_path_factory):
    """The adapters as one process trains them."""
    path = tmp_path_factory.mktemp("alone") / "clinic"
    shutil.copytree(template, path)
    return train(path, workers=1)


@pytest.fixture
def clinic(tmp_path, template):
    shutil.copytree(template, tmp_path / "clinic")
    return tmp_path / "clinic"


class Watch:
    """Who takes and finishes which group. Rank 0 waits for a worker to take one: it would be done too soon."""

    def __init__(self, monkeypatch):
        self.helped = threading.Event()
        self.stops = False
        """Whether all ends when a worker has finished a group, before rank 0 takes one."""
        self.finished = {"main": set(), "worker": set()}
        take, finish, stop = GroupQueue.take, GroupQueue.finish, GroupQueue.stop

        def watched_take(queue):
            if not is_worker():
                assert self.helped.wait(SECONDS)
            number = take(queue)
            if is_worker() and not self.stops:
                self.helped.set()
            return number

        def watched_finish(queue, number, done):
            finish(queue, number, done)
            self.finished["worker" if is_worker() else "main"].add(number)
            if is_worker() and self.stops:
                raise KeyboardInterrupt

        def watched_stop(queue, failure):
            stop(queue, failure)
            self.helped.set()

        monkeypatch.setattr(GroupQueue, "stop", watched_stop)
        monkeypatch.setattr(GroupQueue, "take", watched_take)
        monkeypatch.setattr(GroupQueue, "finish", watched_finish)


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(training_job, "train_worlds", partial(training.train_worlds, checkpoint_seconds=0.0))
    return Watch(monkeypatch)


def is_worker():
    """Whether the thread that asks speaks for a worker."""
    return threading.current_thread() is not threading.main_thread()


def train(path, workers=2, group=None, **options):
    with without_notes():
        job = prepare_training(Workspace.open(path), dtype="float32", workers=workers, processes=workers)
        job.run(TOGETHER, group=group, **options)
    return AdapterStack.load(path / "adapters" / "worlds.safetensors")


def test_two_workers_train_the_same_bits_as_one_process(clinic, alone, watch):
    seen = []
    with start_workers(clinic, 2, timeout=SECONDS) as group:
        trained = train(clinic, group=group, on_progress=seen.append)
    assert largest_difference(trained, alone) == 0.0
    assert watch.finished["worker"]
    assert watch.finished["main"] | watch.finished["worker"] == set(range(4))
    steps = [now.step for now in seen]
    assert steps == sorted(steps), "the bar is of all together"
    assert not (clinic / "adapters" / ".training-worlds").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_continue_where_a_lost_worker_was(how, clinic, alone, watch, monkeypatch):
    lost, said, continued = [], [], []
    save, restore = GroupQueue.save, GroupTraining.restore

    def lose_the_worker(queue, position):
        save(queue, position)
        if is_worker() and position.num_steps == 2 and not lost:
            lost.append(position.group)
            group.timeout = 3.0  # only now: starting may take longer
            os.kill(group._processes[1].pid, how)

    def note_begin(training, position):
        continued.append(position and (position.group, position.num_steps))
        restore(training, position)

    monkeypatch.setattr(GroupQueue, "save", lose_the_worker)
    monkeypatch.setattr(GroupTraining, "restore", note_begin)
    with start_workers(clinic, 2, timeout=SECONDS, announce=said.append) as group:
        trained = train(clinic, group=group)
    assert largest_difference(trained, alone) == 0.0
    assert watch.finished == {"main": {0, 1, 2, 3}, "worker": set()}
    (begun,) = filter(None, continued)
    assert begun[0] == lost[0]
    assert begun[1] >= 2, "its work is not done again"
    (news,) = said
    assert str(news).startswith("Worker 1 was lost (")


def test_a_stopped_run_is_resumed_by_one_process_with_what_workers_had_done(clinic, alone, watch):
    watch.stops = True
    with start_workers(clinic, 2, timeout=SECONDS) as group, pytest.raises(KeyboardInterrupt):
        train(clinic, group=group)
    assert group._processes[1].poll() is not None, "a worker ends with rank 0"
    (done,) = watch.finished["worker"]
    assert largest_difference(train(clinic, workers=1, resume=True), alone) == 0.0
    assert watch.finished["main"] == {0, 1, 2, 3} - {done}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("weight_decay = 0.02", "Worker 1 holds other records, worlds, settings or seed than this workspace"),
        ("block_tokens = 4096", r"Worker 1 cannot work here: block_tokens = 4096 is longer"),
    ],
)
def test_a_worker_with_another_workspace_is_refused(setting, says, clinic, tmp_path, watch):
    other = tmp_path / "other"
    shutil.copytree(clinic, other)
    (other / "paclm.toml").write_text(SETTINGS.replace("[training]\n", f"[training]\n{setting}\n"))
    with joined(Workspace.open(other), timeout=SECONDS) as group, pytest.raises(EngineError, match=says):
        train(clinic, group=group)
    assert not watch.finished["worker"]


def test_more_workers_than_adapters_are_refused(clinic):
    for what, workers, most in (("full", 2, 1), ("worlds", 9, 8), ("worlds", 0, 8)):
        with pytest.raises(InvalidInput, match=f"between 1 and {most}, the number of adapters of {what}"):
            prepare_training(Workspace.open(clinic), what, workers=workers, processes=workers)
