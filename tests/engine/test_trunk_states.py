"""Stored states of the trunk: training with them gives what training without them gives, and nothing else would."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.small_training import SEED, SETTINGS, WORLDS, largest_difference, members, text_blocks
from paclm.config import DpConfig
from paclm.engine import dp_training, training, training_plan, trunk_states
from paclm.engine.checkpoint import Checkpoints
from paclm.engine.training import make_schedule, train_worlds
from paclm.engine.training_forward import OwnForward, make_forward
from paclm.engine.training_plan import plan_training
from paclm.engine.trunk_states import TrunkStates, choose_place, compute_group, groups_of
from paclm.engine.weights import output_layer
from paclm.errors import EngineError

TOP = replace(SETTINGS, layers="top:1")
PLACES = ["device", "host", "disk"]


class KilledError(Exception):
    pass


def schedule(settings=TOP):
    """Two records are canaries, which a world sees several times in an epoch."""
    blocks = text_blocks()
    repeated = np.where(np.isin(blocks.records, (3, 17)), 3, 1)
    return make_schedule(replace(blocks, repetitions=repeated), members(), settings, SEED)


def train(model, **options):
    arguments = {"base": "test", "worlds_per_step": WORLDS} | options
    return train_worlds(model, schedule(), TOP, **arguments)


def stored_in(monkeypatch, place):
    monkeypatch.setattr(training, "choose_place", lambda *_: place)


@pytest.fixture(params=["gpt2", "llama"])
def without(request, build_model, monkeypatch):
    """The family, and a training that computes the trunk in every step."""
    with monkeypatch.context() as patch:
        stored_in(patch, None)
        return request.param, train(build_model(request.param))


@pytest.mark.parametrize("worlds_per_step", [WORLDS, 3, 1])
def test_stored_states_train_the_same_adapters(without, worlds_per_step, build_model, monkeypatch, tmp_path):
    family, expected = without
    for place in PLACES if worlds_per_step == WORLDS else ["device"]:
        stored_in(monkeypatch, place)
        found = train(build_model(family), worlds_per_step=worlds_per_step, folder=tmp_path / place)
        assert largest_difference(found.stack, expected.stack) < 2e-5
        assert found.improvement.public == pytest.approx(expected.improvement.public, abs=1e-5)
        assert found.improvement.trained == pytest.approx(expected.improvement.trained, abs=1e-5)
    assert found.stack.trunk == 1


def of_another_block(at):
    return lambda self, places: at(self, places + 16)


def of_another_layer(at):
    return lambda self, places: at(self, places)._replace(layer=0)


@pytest.mark.parametrize("wrong", [of_another_block, of_another_layer])
def test_states_of_another_block_or_layer_would_be_noticed(without, wrong, build_model, monkeypatch):
    family, expected = without
    monkeypatch.setattr(TrunkStates, "at", wrong(TrunkStates.at))
    found = train(build_model(family), must_improve=False)
    assert largest_difference(found.stack, expected.stack) > 1e-3


def test_states_are_those_of_the_models_own_code(family, build_model):
    model = build_model(family)
    blocks, forward, head = text_blocks(), make_forward(model), output_layer(model)
    states = TrunkStates.compute(forward, head, blocks, 1, "device").states
    assert states.shape == (len(blocks.tokens), 32)
    for block in range(len(blocks)):
        with torch.no_grad():
            expected = model(torch.from_numpy(blocks[block])[None], output_hidden_states=True).hidden_states[1][0]
        assert (states[blocks.starts[block] : blocks.starts[block + 1]] - expected).abs().max() < 1e-5


def test_a_layer_of_the_trunk_that_is_adapted_cannot_begin_above_it(family, build_model, make_stack):
    model = build_model(family)
    with torch.no_grad():  # every norm has weights of its own
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(0, 1, len(parameter)) if "1" in name else 0.5)
    ids = torch.randint(0, 97, (WORLDS, 9), generator=torch.Generator().manual_seed(1))
    forward, all_layers = make_forward(model), make_stack(model, WORLDS)
    top = make_stack(model, WORLDS, replace(all_layers.spec, top=1))
    for stack, is_same in ((top, True), (all_layers, False)):
        adapters = stack.A, stack.B, stack.spec.scale
        distance = (forward(ids, *adapters) - forward(ids, *adapters, stream=forward.stream(ids, 1))).abs().max()
        assert (distance < 1e-4) == is_same


@pytest.mark.parametrize(("first", "then"), [("device", "disk"), ("disk", "device"), (None, "device")])
def test_a_resumed_run_ends_with_the_same_bits_wherever_its_states_are(first, then, build_model, monkeypatch, tmp_path):
    def stop(progress):
        if progress.step == 9:
            raise KilledError

    stored_in(monkeypatch, first)
    whole = train(build_model("gpt2"), worlds_per_step=2, folder=tmp_path / "whole").stack
    options = {"worlds_per_step": 2, "folder": tmp_path / "run", "checkpoint_seconds": 0.0}
    with pytest.raises(KilledError):
        train(build_model("gpt2"), on_progress=stop, **options)
    stored_in(monkeypatch, then)
    seen = []
    resumed = train(build_model("gpt2"), resume=True, on_progress=seen.append, **options).stack
    assert seen[0].step == 9
    assert largest_difference(whole, resumed) == 0.0


def test_a_run_whose_states_have_no_more_room_is_not_resumed_without_them(build_model, monkeypatch, tmp_path):
    stored_in(monkeypatch, "device")
    train(build_model("gpt2"), folder=tmp_path)
    stored_in(monkeypatch, None)
    with pytest.raises(EngineError, match="--again"):
        train(build_model("gpt2"), folder=tmp_path, resume=True)
    assert Checkpoints(tmp_path).load_group(0) is not None


def mapped(folder):
    """The last words of this process's memory mappings that are files in the folder."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line}


def test_states_on_disk_have_no_name_and_nothing_stays(build_model, monkeypatch, tmp_path):
    folder, seen = tmp_path / "run", set()
    stored_in(monkeypatch, "disk")
    train(
        build_model("gpt2"),
        folder=folder,
        on_progress=lambda _: seen.update(mapped(folder), (path.name for path in folder.iterdir())),
        checkpoint_seconds=0.0,
    )
    assert seen == {"run.json", "current-0000.safetensors", "(deleted)"}
    assert not mapped(folder)


def test_a_full_disk_is_an_error_before_anything_is_written(build_model, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    stored_in(monkeypatch, "disk")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match="No space left"):
        train(build_model("gpt2"), folder=tmp_path / "run")


def test_recorded_passes_read_the_states_of_their_own_batch(build_model, graphs, monkeypatch):
    recorded = train(build_model("llama")).stack
    assert sum(graph.num_replays for graph in graphs) > schedule().num_steps.max() / 2
    monkeypatch.undo()
    assert largest_difference(recorded, train(build_model("llama")).stack) < 1e-4


def test_the_fastest_place_with_room_is_chosen(build_model, monkeypatch, tmp_path):
    model, blocks = build_model("llama"), text_blocks()
    forward, size = make_forward(model), trunk_states.num_bytes(text_blocks(), output_layer(model))
    assert size == len(blocks.tokens) * 32 * 4
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    head = SimpleNamespace(weight=weight, in_features=32)
    free = {"cuda": 100 * size, "cpu": 100 * size}
    monkeypatch.setattr(trunk_states, "free_bytes", lambda device: free[device.type])
    monkeypatch.setattr(trunk_states.shutil, "disk_usage", lambda _: SimpleNamespace(free=free["disk"]))
    folder = tmp_path / "not" / "yet"
    assert choose_place(forward, head, blocks, 1, folder) == "device"
    free["cuda"] = 3 * size
    assert choose_place(forward, head, blocks, 1, folder) == "host"
    free["cpu"], free["disk"] = size, 3 * size
    assert choose_place(forward, head, blocks, 1, folder) == "disk"
    assert choose_place(forward, head, blocks, 1, None) is None
    free["disk"] = size
    assert choose_place(forward, head, blocks, 1, folder) is None
    free["cuda"] = 100 * size
    assert choose_place(forward, head, blocks, 0, folder) is None, "there is no trunk"
    assert choose_place(OwnForward(model), head, blocks, 1, folder) is None, "unknown code"


def test_groups_have_every_block_once_and_do_not_depend_on_the_run():
    blocks = text_blocks()
    groups = list(groups_of(blocks, "cpu"))
    assert sorted(np.concatenate(groups)) == list(range(len(blocks)))


def test_a_model_trained_by_its_own_code_computes_its_trunk_in_every_step(build_model, monkeypatch):
    plain = train(build_model("llama")).stack
    for module in (training, training_plan):
        monkeypatch.setattr(module, "make_forward", OwnForward)
    assert largest_difference(plain, train(build_model("llama")).stack) < 1e-4
    plan = plan_training(build_model("llama"), schedule(), TOP)
    assert (plan.trunk, plan.trunk_bytes, plan.trunk_place) == (1, 0, None)


def test_a_plan_measures_what_training_does(build_model, monkeypatch, tmp_path):
    model = build_model("gpt2")
    whole = plan_training(model, schedule(SETTINGS), SETTINGS, worlds_per_step=2, estimate_time=True)
    assert (whole.trunk, whole.trunk_bytes, whole.trunk_place) == (0, 0, None)
    half = plan_training(model, schedule(), TOP, worlds_per_step=2, estimate_time=True)
    size = len(schedule().blocks.tokens) * 32 * 4
    assert (half.trunk, half.trunk_bytes, half.trunk_place) == (1, size, "device")
    assert half.memory_bytes - size < 0.7 * whole.memory_bytes
    assert half.seconds > 0
    monkeypatch.setattr(training_plan, "choose_place", lambda *_: "disk")
    on_disk = plan_training(model, schedule(), TOP, worlds_per_step=2)
    assert on_disk.disk_bytes - half.disk_bytes == size == half.memory_bytes - on_disk.memory_bytes


def test_dp_training_stores_no_states_and_keeps_nothing_of_the_trunk(build_model, monkeypatch):
    """A state would have been computed among blocks of other units, whose number changes its rounding."""

    class Draws:
        def sample(self, num_units, rate):
            return np.ones(num_units, dtype=bool)

        def normals(self, size):
            return np.zeros(size)

    def refuse(*_):
        pytest.fail("states were stored")

    monkeypatch.setattr(TrunkStates, "compute", refuse)
    monkeypatch.setattr(TrunkStates, "at", refuse)
    model, blocks = build_model("llama"), text_blocks()
    options = {"num_units": 40, "noise_multiplier": 1.0, "base": "test", "seed": 3}
    dp = DpConfig(steps=2)
    trained = dp_training.train_dp(model, blocks, np.arange(40), TOP, dp, draws=Draws(), **options)
    assert trained.trunk == 1
    half, whole = (
        dp_training.plan_dp(model, blocks, np.arange(40), settings, dp, units_per_pass=4)
        for settings in (TOP, SETTINGS)
    )
    assert half.memory_bytes < 0.7 * whole.memory_bytes


def test_a_group_is_computed_like_its_blocks_alone(build_model):
    model, blocks = build_model("gpt2"), text_blocks()
    forward = make_forward(model)
    places, together = compute_group(forward, blocks, 1, np.array([5, 2, 0]), torch.device("cpu"))
    alone = [compute_group(forward, blocks, 1, np.array([block]), torch.device("cpu")) for block in (5, 2, 0)]
    assert np.array_equal(places, np.concatenate([own for own, _ in alone]))
    assert (together - torch.cat([states for _, states in alone])).abs().max() < 1e-5
