from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from paclm.engine.adapters import AdapterSpec, AdapterStack
from paclm.engine.layers import attach
from paclm.engine.training_forward import PlainForward

Build = Callable[[str], PreTrainedModel]
MakeStack = Callable[..., AdapterStack]

WORLDS = 3
SPECS = {
    "default targets": AdapterSpec(rank=4, alpha=8.0),
    "one of the joined layers": AdapterSpec(rank=2, alpha=6.0, targets=("v_proj", "up_proj")),
    "attention only": AdapterSpec(rank=2, attention_only=True),
}


@pytest.mark.parametrize("kind", SPECS)
def test_hidden_states_and_gradients_equal_those_of_the_models_own_code(
    kind: str, family: str, build_model: Build, make_stack: MakeStack
) -> None:
    spec = SPECS[kind]
    if family == "gpt2" and spec.targets:
        spec = AdapterSpec(rank=2, targets=("c_fc",))
    model = build_model(family)
    stack = make_stack(model, WORLDS, spec)
    ids = torch.randint(0, 97, (WORLDS * 2, 13), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(WORLDS * 2 * 13, 32, generator=torch.Generator().manual_seed(2))
    plain = PlainForward(model, compiled=False)
    A = {layer: a.clone().requires_grad_() for layer, a in stack.A.items()}
    B = {layer: b.clone().requires_grad_() for layer, b in stack.B.items()}
    hidden = plain(ids, A, B, spec.scale)
    found = torch.autograd.grad((hidden * weights).sum(), [*A.values(), *B.values()])

    layers = attach(model, stack, trainable=True)
    reference = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.reshape(hidden.shape)
    expected = torch.autograd.grad(
        (reference * weights).sum(), [layer.A for layer in layers.values()] + [layer.B for layer in layers.values()]
    )
    assert (hidden - reference).abs().max() < 1e-4
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-4 * (1 + other.abs().max())
