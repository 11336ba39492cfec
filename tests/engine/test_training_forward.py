import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paclm.engine.adapters import AdapterSpec
from paclm.engine.generic import attach, attached_layers
from paclm.engine.lora_product import FrozenProduct, block_diagonal, prepare_adapters
from paclm.engine.training_forward import OwnForward, PlainForward, make_forward

WORLDS = 3
SPECS = {
    "default targets": AdapterSpec(rank=4, alpha=8.0),
    "one of the joined layers": AdapterSpec(rank=2, alpha=6.0, targets=("v_proj", "up_proj")),
    "attention only": AdapterSpec(rank=2, attention_only=True),
    "blocks adapted unlike each other": AdapterSpec(
        rank=2, targets=("layers.0.self_attn.v_proj", "layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj")
    ),
}
GPT2_TARGETS = {"one of the joined layers": ("c_fc",), "blocks adapted unlike each other": ("h.0.attn.c_attn", "c_fc")}


@pytest.mark.parametrize("kind", SPECS)
def test_hidden_states_and_gradients_equal_those_of_the_models_own_code(kind, family, build_model, make_stack):
    spec = SPECS[kind]
    if family == "gpt2" and spec.targets:
        spec = AdapterSpec(rank=2, targets=GPT2_TARGETS[kind])
    model = build_model(family)
    stack = make_stack(model, WORLDS, spec)
    ids = torch.randint(0, 97, (WORLDS * 2, 13), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(WORLDS * 2 * 13, 32, generator=torch.Generator().manual_seed(2))
    plain = PlainForward(model, compiled=False)
    A = {layer: a.clone().requires_grad_() for layer, a in stack.A.items()}
    B = {layer: b.clone().requires_grad_() for layer, b in stack.B.items()}
    hidden = plain(ids, A, B, spec.scale)
    found = torch.autograd.grad((hidden * weights).sum(), [*A.values(), *B.values()])

    layers = attach(model, stack)
    for layer in layers.values():
        layer.A.requires_grad_()
        layer.B.requires_grad_()
    reference = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.reshape(hidden.shape)
    expected = torch.autograd.grad(
        (reference * weights).sum(), [layer.A for layer in layers.values()] + [layer.B for layer in layers.values()]
    )
    assert (hidden - reference).abs().max() < 1e-4
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-4 * (1 + other.abs().max())


def test_the_models_own_code_with_adapted_layers_is_the_same_function(family, build_model, make_stack):
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


def operations(function):
    """How many operations of torch a call takes; views count too."""

    class Counter(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            self.seen += 1
            return operation(*args, **(kwargs or {}))

    with Counter() as counter:
        function()
    return counter.seen


def test_adapters_of_many_blocks_are_prepared_in_as_many_operations_as_those_of_one():
    widths = (6, 2, 4)
    names = [(f"{block}.q", f"{block}.k", f"{block}.v") for block in range(9)]
    products = [FrozenProduct(own, torch.zeros(5, 12, dtype=torch.float64), None, widths) for own in names]
    A = {name: torch.full((3, 2, 5), float(block)) for block, own in enumerate(names) for name in own}
    B = {
        name: torch.full((3, width, 2), float(block))
        for block, own in enumerate(names)
        for name, width in zip(own, widths, strict=True)
    }
    of_one = operations(lambda: prepare_adapters(products[:1], A, B, 0.5))
    assert operations(lambda: prepare_adapters(products, A, B, 0.5)) == of_one
    for block, adapter in enumerate(prepare_adapters(products, A, B, 0.5)):
        assert torch.equal(adapter.A, torch.full((3, 6, 5), float(block), dtype=torch.float64))
        assert torch.equal(adapter.B.sum(2), torch.full((3, 12), float(block), dtype=torch.float64)), "2 · 0.5 · block"
    assert prepare_adapters(products, {}, {}, 0.5) == [None] * 9


def test_blocks_of_other_widths_keep_their_own_columns():
    products = [
        FrozenProduct(("0.q", "0.v"), torch.zeros(5, 7), None, (3, 4)),
        FrozenProduct(("1.q", "1.v"), torch.zeros(5, 9), None, (5, 4)),
    ]
    A, B = ({f"{block}.v": torch.ones(shape) for block in (0, 1)} for shape in ((2, 1, 5), (2, 4, 1)))
    for product, adapter in zip(products, prepare_adapters(products, A, B, 1.0), strict=True):
        adapted = product(torch.ones(2, 5), adapter)
        assert (adapted[:, -4:] == 5).all()
        assert (adapted[:, :-4] == 0).all()


def test_a_block_diagonal_part_is_the_same_as_its_parts():
    generator = torch.Generator().manual_seed(3)
    up = [torch.randn(2, width, 4, generator=generator) for width in (6, 3, 5)]
    columns = [(2, 8), (8, 11), (13, 18)]
    inner = torch.randn(2, 7, 12, generator=generator)
    together = inner @ block_diagonal(columns, up).mT
    assert together.shape == (2, 7, 16)
    for part, ((first, last), B) in enumerate(zip(columns, up, strict=True)):
        own = inner[..., 4 * part : 4 * part + 4] @ B.mT
        assert torch.allclose(together[..., first - 2 : last - 2], own, atol=1e-5)
    assert (together[..., 9:11] == 0).all(), "a layer without an adapter between adapted ones"


def test_a_model_of_another_family_is_trained_by_its_own_code():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    assert isinstance(make_forward(GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=97, **shape))), OwnForward)
