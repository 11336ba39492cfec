from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, OPTConfig, OPTForCausalLM

from paclm.config import RuntimeConfig, TrainingConfig
from paclm.engine import training_plan
from paclm.engine.adapters import AdapterStack, find_targets
from paclm.engine.loading import plan_engine
from paclm.engine.loss import make_batch
from paclm.engine.training import adapter_spec, make_schedule
from paclm.engine.training_job import TrainingJob
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


SHAPE = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}


def neox():
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, num_hidden_layers=2, intermediate_size=56))


@pytest.mark.parametrize(
    ("layers", "targets", "shares"),
    [
        ("all", ("c_attn",), True),
        ("top:1", ("c_attn",), True),
        ("all", ("h.1.attn.c_attn",), True),
        ("top:1", ("query_key_value",), False),
    ],
)
def test_the_cache_of_a_served_token_is_what_an_engine_plans(layers, targets, shares, build_model):
    settings, model = replace(SETTINGS, layers=layers, targets=targets), build_model("gpt2") if shares else neox()
    runtime = RuntimeConfig(device="cpu", max_sequences=1, context=64)
    job = TrainingJob(SimpleNamespace(runtime=runtime), "worlds", model, schedule(), settings)
    found, spec = job.cache_per_token(), adapter_spec(settings)
    stack = AdapterStack.initial(find_targets(model, spec), spec, WORLDS, 0, "")
    blocks_of_64 = 2  # one and the scratch one
    assert plan_engine(model, stack, runtime, 12, 2**40).cache == blocks_of_64 * 64 * found[layers]
    assert list(found) == ["all", "top:1"]
    assert (found["top:1"] < found["all"]) == (shares and len(targets[0]) == len("c_attn"))


def test_adapters_outside_of_the_decoder_layers_are_in_none_of_them():
    config = OPTConfig(**SHAPE, num_hidden_layers=2, ffn_dim=56, word_embed_proj_dim=16)
    plan = plan_training(OPTForCausalLM(config), schedule(), replace(SETTINGS, targets=("q_proj", "project_in")))
    assert (plan.adapted_layers, plan.num_layers, plan.trunk) == (2, 2, 0)
