from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from paclm.engine.adapters import AdapterSpec, AdapterStack
from paclm.engine.layers import attach, attached_layers
from paclm.engine.product import _joined
from paclm.engine.training_forward import OwnForward, PlainForward, make_forward

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


def test_the_models_own_code_with_adapted_layers_is_the_same_function(
    family: str, build_model: Build, make_stack: MakeStack
) -> None:
    model = build_model(family)
    stack = make_stack(model, WORLDS)
    ids = torch.randint(0, 97, (WORLDS, 9), generator=torch.Generator().manual_seed(1))
    plain, own = PlainForward(model, compiled=False), OwnForward(model)
    with torch.no_grad():
        adapted = own(ids, stack.A, stack.B, stack.spec.scale)
        assert (adapted - plain(ids, stack.A, stack.B, stack.spec.scale)).abs().max() < 1e-4
        some = {layer: a[:1] for layer, a in stack.A.items()}, {layer: b[:1] for layer, b in stack.B.items()}
        alone = own(ids[:1], *some, stack.spec.scale)  # other worlds, other number of worlds: no leftovers
        assert (alone - adapted[:9]).abs().max() < 1e-4
        public = own(ids, {}, {}, 1.0)
        assert (public - plain(ids, {}, {}, 1.0)).abs().max() < 1e-4
        assert (public - adapted).abs().max() > 0.1
    own(ids, stack.A, stack.B, stack.spec.scale)
    own.close()
    assert not attached_layers(model)


def test_joined_parts_are_the_same_adapters() -> None:
    generator = torch.Generator().manual_seed(3)
    up = [torch.randn(2, 4, width, generator=generator) for width in (6, 3, 5)]
    columns = [(0, 6), (6, 9), (11, 16)]
    inner = torch.randn(2, 7, 12, generator=generator)
    ((span,), (joined,)) = _joined(columns, up)
    assert span == (0, 16)
    together = inner @ joined
    for part, ((first, last), B) in enumerate(zip(columns, up, strict=True)):
        assert torch.allclose(together[..., first:last], inner[..., 4 * part : 4 * part + 4] @ B, atol=1e-5)


def test_a_model_of_another_family_is_trained_by_its_own_code() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    assert isinstance(make_forward(GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=97, **shape))), OwnForward)
