import numpy as np
import pytest
import torch

from paclm.config import TrainingConfig
from paclm.engine import training_plan
from paclm.engine.loss import make_batch
from paclm.engine.training import make_schedule
from paclm.engine.training_order import make_blocks
from paclm.engine.training_plan import plan_training
from paclm.errors import EngineError
from paclm.worlds.assignment import assign_worlds

SETTINGS = TrainingConfig(rank=4, alpha=8.0, batch_size=4)
WORLDS = 8


def schedule():
    draws = np.random.default_rng(0)
    records = [draws.integers(0, 97, draws.integers(3, 40)).tolist() for _ in range(50)]
    return make_schedule(make_blocks(records, 32, 64), assign_worlds(50, WORLDS, seed=1), SETTINGS, seed=5)


def test_positions_are_those_the_batches_have(build_model):
    plan = plan_training(build_model("llama"), schedule(), SETTINGS, worlds_per_step=3)
    counted = steps = 0
    for worlds in schedule().groups(3):
        picks = schedule().batches(worlds)
        for step in range(picks.shape[1]):
            unfinished = picks[(schedule().num_steps[worlds] > step), step]
            counted += make_batch(schedule().blocks, unfinished).ids.numel()
        steps += picks.shape[1]
    assert plan.num_positions == counted
    assert plan.num_steps == steps
    assert plan.num_tokens == schedule().num_tokens.sum()
    assert plan.seconds is None


def test_memory_grows_with_the_worlds_and_the_length_of_blocks(build_model):
    one, four = (plan_training(build_model("gpt2"), schedule(), SETTINGS, worlds_per_step=worlds) for worlds in (1, 4))
    assert four.memory_bytes == 4 * one.memory_bytes
    longest = 4 * 32 * 32 * 4  # batch · length · width · bytes: the hidden states of one layer, kept once
    assert one.memory_bytes > 4 * longest


def test_as_many_worlds_train_together_as_memory_allows(build_model, monkeypatch):
    model = build_model("gpt2")
    one = plan_training(model, schedule(), SETTINGS, worlds_per_step=1).memory_bytes
    monkeypatch.setattr(training_plan, "SHARE_OF_FREE", 1.0)
    for worlds in (1, 3, 5):
        monkeypatch.setattr(training_plan, "free_bytes", lambda _, worlds=worlds: int(one * (worlds + 0.5)))
        assert plan_training(model, schedule(), SETTINGS).worlds_per_step == worlds
    monkeypatch.setattr(training_plan, "free_bytes", lambda _: 1000 * one)
    assert plan_training(model, schedule(), SETTINGS).worlds_per_step == WORLDS
    monkeypatch.setattr(training_plan, "free_bytes", lambda _: one // 2)
    with pytest.raises(EngineError, match="batch_size"):
        plan_training(model, schedule(), SETTINGS)


def test_time_is_that_of_a_real_step_and_a_broken_one_is_refused(build_model):
    model = build_model("gpt2")
    plan = plan_training(model, schedule(), SETTINGS, estimate_time=True)
    assert plan.seconds > 0
    with torch.no_grad():
        model.lm_head.weight[3] = torch.inf
    with pytest.raises(EngineError, match=r"step 1\."):
        plan_training(model, schedule(), SETTINGS, estimate_time=True)
