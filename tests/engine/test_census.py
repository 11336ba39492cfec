from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paclm.config import RuntimeConfig
from paclm.engine.adapters import AdapterStack
from paclm.engine.census import take_census
from paclm.engine.loading import build_engine

WORLDS, SUPPORT = 4, 12


def test_the_census_equals_what_peft_logits_give(
    build_model: Callable[[str], PreTrainedModel],
    make_stack: Callable[..., AdapterStack],
    peft_logits: Callable[[str, AdapterStack, Tensor], Tensor],
) -> None:
    tokens = np.random.default_rng(0).integers(0, 97, 20).tolist()
    stack = make_stack(build_model("gpt2"), WORLDS)
    runtime = RuntimeConfig(device="cpu", max_sequences=1, context=48, prefill_chunk=6)
    engine = build_engine(build_model("gpt2"), stack, runtime, SUPPORT)
    census = take_census(engine, tokens, window=20, temperature=0.8)
    logits = peft_logits("gpt2", stack, torch.tensor([tokens]))[:, 0, :-1].double()  # (m, n, V)
    with torch.no_grad():
        public = build_model("gpt2")(input_ids=torch.tensor([tokens])).logits[0, :-1]
    assert census.ceiling.shape == (19,)
    for i in range(19):
        support = torch.topk(public[i], SUPPORT).indices
        beta = torch.softmax(logits[:, i, support] / 0.8, -1).amin(0).sum()
        assert census.ceiling[i] == pytest.approx(float(beta), abs=1e-4)
        favourite = logits[:, i].argmax(-1)
        assert census.argmax_coverage[i] == pytest.approx(float(torch.isin(favourite, support).double().mean()))
        mass = torch.softmax(logits[:, i], -1)[:, support].sum(-1).mean()
        assert census.mass_coverage[i] == pytest.approx(float(mass), abs=1e-4)
    assert 0.0 < census.ceiling.min() < census.ceiling.max() < 1.0
    assert census.argmax_coverage.min() < 1.0, "a support that covers everything would prove nothing"
