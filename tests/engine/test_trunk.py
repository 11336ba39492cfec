"""Layers below the first adapted one: computed and cached once, with the votes of computing them for every world."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paclm.config import RuntimeConfig
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.loading import build_engine, plan_engine
from paclm.engine.memory import token_bytes
from paclm.engine.stacked import StackedModel
from paclm.engine.weights import take_apart

WORLDS, SUPPORT = 5, 12
SPEC = AdapterSpec(rank=4, alpha=8.0, top=1)  # of two layers
RUNTIME = RuntimeConfig(device="cpu", max_sequences=3, context=48, prefill_chunk=7)


def text(length, seed=5):
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def with_lower_layers(model, stack, size):
    """The same adapters, and others of this size in the layers below: nothing is shared any more."""
    below = AdapterStack.initial(
        find_targets(model, AdapterSpec(rank=4, alpha=8.0)), stack.spec, stack.num_worlds, 9, stack.base
    )
    generator = torch.Generator().manual_seed(2)
    B = {layer: torch.empty_like(b).normal_(0.0, 1.0, generator=generator) * size for layer, b in below.B.items()}
    return AdapterStack(stack.spec, stack.base, {**below.A, **stack.A}, {**B, **stack.B}, stack.is_public)


@pytest.fixture
def model(family, build_model):
    return build_model(family)


@pytest.fixture
def stack(model, make_stack):
    return make_stack(model, WORLDS, SPEC)


def everything(engine):
    """Logits and votes of three sequences: prompts longer than a chunk and a page, then three steps."""
    coins = np.random.default_rng(0).gumbel(size=(3, SUPPORT))
    prompts = [text(19, 1), text(2, 2), text(40, 3)]
    read = [torch.cat([engine.restricted(hidden)[1] for _, hidden in engine.hidden_states(p)]) for p in prompts]
    handles, votes = [engine.add(prompt, 4) for prompt in prompts], []
    for _ in range(3):
        ballot = engine.step(handles, coins)
        votes.append(np.concatenate([ballot.votes, ballot.public[:, None]], 1))
        for handle, token in zip(handles, ballot.public, strict=True):
            engine.append(handle, int(token))
    _, logits = engine.scores(handles)
    return torch.cat([*(each.flatten() for each in read), logits.flatten()]), np.stack(votes)


def test_votes_equal_those_of_computing_every_layer_for_every_world(family, build_model, stack):
    assert stack.trunk == 1
    shared = build_engine(build_model(family), stack, RUNTIME, SUPPORT)
    whole = with_lower_layers(build_model(family), stack, 0.0)
    assert whole.trunk == 0
    logits, votes = everything(shared)
    expected, same = everything(build_engine(build_model(family), whole, RUNTIME, SUPPORT))
    assert (logits - expected).abs().max() < 2e-5
    assert np.array_equal(votes, same)
    assert len(np.unique(votes[..., :-1], axis=-1)) > 1  # worlds differ


def test_the_comparison_notices_an_adapter_in_the_trunk(family, build_model, stack):
    logits, _ = everything(build_engine(build_model(family), stack, RUNTIME, SUPPORT))
    adapted = with_lower_layers(build_model(family), stack, 1e-3)
    other, _ = everything(build_engine(build_model(family), adapted, RUNTIME, SUPPORT))
    assert (logits - other).abs().max() > 2e-4


def test_one_row_gives_the_same_bits(family, build_model, make_stack):
    one = make_stack(build_model(family), 1, SPEC).as_public()
    shared = build_engine(build_model(family), one, RUNTIME, SUPPORT)
    whole = build_engine(build_model(family), with_lower_layers(build_model(family), one, 0.0), RUNTIME, SUPPORT)
    logits, votes = everything(shared)
    expected, same = everything(whole)
    assert torch.equal(logits, expected)
    assert np.array_equal(votes, same)


def test_logits_equal_peft(family, build_model, stack, peft_logits):
    engine = build_engine(build_model(family), stack, RUNTIME, SUPPORT, "test")
    tokens = text(19)
    expected = peft_logits(family, stack, torch.tensor([tokens]))[:, 0]  # (m, length, vocabulary)
    for start, hidden in engine.hidden_states(tokens):
        support, logits = engine.restricted(hidden)
        own = expected[:, start : start + len(support)].transpose(0, 1)  # (n, m, vocabulary)
        reference = own.gather(2, support.unsqueeze(1).expand(-1, WORLDS, -1))
        assert (logits[:, :-1] - reference).abs().max() < 1e-4


def test_the_trunk_is_cached_once(model, stack):
    cache = StackedModel(take_apart(model, stack, 48), 3, page=16).cache
    assert [len(keys[0]) for keys in cache.keys] == [1, WORLDS + 1] == [len(values[0]) for values in cache.values]


def test_the_plan_counts_the_trunk_once(model, stack):
    shared, whole = (token_bytes(model.config, WORLDS + 1, torch.float32, trunk) for trunk in (1, 0))
    assert shared * 2 * (WORLDS + 1) == whole * (WORLDS + 2)
    built = StackedModel(take_apart(model, stack, 48), 3, page=16)
    held = sum(each.nbytes for each in (*built.cache.keys, *built.cache.values))
    assert held == 3 * 16 * shared
    limited = RuntimeConfig(device="cpu", context=48, cache_gib=1 / 2**9)
    room = [
        build_engine(model, each, limited, SUPPORT).capacity for each in (stack, with_lower_layers(model, stack, 0.0))
    ]
    assert room[0] > 1.5 * room[1]
    assert (
        plan_engine(model, stack, RUNTIME, SUPPORT, 2**30).cache
        < plan_engine(model, with_lower_layers(model, stack, 0.0), RUNTIME, SUPPORT, 2**30).cache
    )


def test_adapters_in_scattered_layers_share_what_is_below_the_first(make_stack):
    def build():
        torch.manual_seed(1)
        shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "max_position_embeddings": 48}
        return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=4, num_attention_heads=4)).eval()

    full = make_stack(build(), WORLDS)
    chosen = {layer: a for layer, a in full.A.items() if ".1." in layer or ".3." in layer}
    stack = AdapterStack(full.spec, full.base, chosen, {layer: full.B[layer] for layer in chosen})
    assert stack.trunk == 1
    logits, votes = everything(build_engine(build(), stack, RUNTIME, SUPPORT))
    zeros = {layer: b if layer in chosen else torch.zeros_like(b) for layer, b in full.B.items()}
    whole = AdapterStack(full.spec, full.base, full.A, zeros)
    expected, same = everything(build_engine(build(), whole, RUNTIME, SUPPORT))
    assert (logits - expected).abs().max() < 2e-5
    assert np.array_equal(votes, same)
