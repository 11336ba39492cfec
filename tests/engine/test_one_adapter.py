"""An engine over a single adapter in the place of the public model: ordinary decoding of the model it makes."""

import numpy as np
import pytest
import torch

from paclm.config import RuntimeConfig
from paclm.engine.determinism import check_repeatable
from paclm.engine.engine import Engine
from paclm.engine.generic import GenericModel
from paclm.engine.loading import build_engine, plan_engine

SUPPORT = 12
RUNTIME = RuntimeConfig(device="cpu", max_sequences=3, context=48, prefill_chunk=7)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="Needs a CUDA device.")


def text(length, seed=5):
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


@pytest.fixture
def stack(family, build_model, make_stack):
    return make_stack(build_model(family), 1)


@pytest.fixture(params=["stacked", "generic"])
def engine(request, family, build_model, stack):
    if request.param == "generic":
        return Engine(GenericModel(build_model(family), stack.as_public(), 4, 48), SUPPORT, RUNTIME.prefill_chunk)
    return build_engine(build_model(family), stack.as_public(), RUNTIME, SUPPORT, "test")


def test_support_token_and_log_probabilities_are_those_of_the_adapted_model(engine, family, stack, peft_logits):
    tokens, lengths, temperatures = text(17), [9, 3, 17], [0.0, 0.7, 1.0]
    reference = peft_logits(family, stack, torch.tensor([tokens]))[0, 0]  # (length, vocabulary)
    coins = np.random.default_rng(0).gumbel(size=(3, SUPPORT))
    ballot = engine.step([engine.add(tokens[:length], 4) for length in lengths], coins, temperatures)
    assert (engine.num_worlds, ballot.votes.shape) == (0, (3, 0))
    for i, length in enumerate(lengths):
        logits = reference[length - 1]
        assert ballot.support[i].tolist() == torch.argsort(logits, descending=True)[:SUPPORT].tolist()
        inside = logits[ballot.support[i]].numpy()
        assert ballot.public[i] == ballot.support[i][np.argmax(inside + temperatures[i] * coins[i])]
        expected = torch.log_softmax(logits, -1)[ballot.support[i]].numpy()  # at temperature 1, over all tokens
        assert np.abs(ballot.logprobs[i] - expected).max() < 1e-4
    engine.clear()
    check_repeatable(engine)


def test_an_engine_over_worlds_gives_out_no_probability(build_model, make_stack):
    engine = build_engine(build_model("gpt2"), make_stack(build_model("gpt2"), 1), RUNTIME, SUPPORT, "test")
    assert engine.num_worlds == 1
    assert engine.ballot(text(5)).logprobs is None


def test_no_memory_is_planned_for_a_public_model_beside_it(build_model, make_stack):
    model = build_model("llama")
    alone, beside = (
        plan_engine(model, stack, RUNTIME, SUPPORT, 2**40)
        for stack in (make_stack(model, 1).as_public(), make_stack(model, 1))
    )
    assert (2 * alone.adapters, 2 * alone.cache) == (beside.adapters, beside.cache)


@needs_cuda
def test_a_gpu_decodes_as_the_cpu_does(family, build_model, stack):
    """Tokens of whole answers, and log-probabilities; in float32, where near ties are rare."""
    coins = np.random.default_rng(0).gumbel(size=(20, 3, SUPPORT))
    answers = []
    for device in ("cpu", "cuda"):
        runtime = RuntimeConfig(device=device, dtype="float32", max_sequences=3, context=48)
        engine = build_engine(build_model(family), stack.as_public(), runtime, SUPPORT, "test")
        handles = [engine.add(text(length, length), 20) for length in (1, 9, 17)]
        ballots = []
        for drawn in coins:
            ballots.append(engine.step(handles, drawn, [0.0, 0.7, 1.0]))
            for handle, token in zip(handles, ballots[-1].public.tolist(), strict=True):
                engine.append(handle, token)
        answers.append(ballots)
    for cpu, gpu in zip(*answers, strict=True):
        assert gpu.public.tolist() == cpu.public.tolist()
        assert np.abs(gpu.logprobs - cpu.logprobs).max() < 1e-3
