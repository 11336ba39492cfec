from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paclm.engine.adapters import AdapterSpec, AdapterStack
from paclm.engine.layers import attach, attached_layers, detach
from paclm.engine.peft_io import export_peft
from paclm.errors import EngineError

Build = Callable[[str], PreTrainedModel]
MakeStack = Callable[..., AdapterStack]
PeftLogits = Callable[[str, AdapterStack, Tensor], Tensor]

WORLDS = 3


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(5))


def test_every_world_in_one_batch_equals_peft_one_by_one(
    family: str, build_model: Build, make_stack: MakeStack, peft_logits: PeftLogits
) -> None:
    text = tokens(2, 11)
    stack = make_stack(build_model(family), WORLDS)
    expected = peft_logits(family, stack, text)
    model = build_model(family)
    attach(model, stack, fingerprint="test")
    with torch.no_grad():
        together = model(input_ids=text.repeat(WORLDS, 1)).logits.reshape(expected.shape)
    assert (together - expected).abs().max() < 1e-4
    assert (expected[0] - expected[1]).abs().max() > 0.1, "worlds that agree would prove nothing"


def test_attention_only_leaves_the_mlp_alone(
    build_model: Build, make_stack: MakeStack, peft_logits: PeftLogits
) -> None:
    stack = make_stack(build_model("gpt2"), 2, AdapterSpec(rank=2, attention_only=True))
    assert all(".attn." in layer for layer in stack.layers)
    model = build_model("gpt2")
    attach(model, stack)
    with torch.no_grad():
        together = model(input_ids=tokens(1, 9).repeat(2, 1)).logits
    assert (together.unsqueeze(1) - peft_logits("gpt2", stack, tokens(1, 9))).abs().max() < 1e-4


def test_gradients_equal_those_of_each_world_trained_alone_with_peft(
    tmp_path: Path, family: str, build_model: Build, make_stack: MakeStack
) -> None:
    text = tokens(WORLDS * 2, 8)
    stack = make_stack(build_model(family), WORLDS)
    model = build_model(family)
    layers = attach(model, stack, trainable=True)
    logits = model(input_ids=text).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
    losses.backward()
    for world, folder in enumerate(export_peft(stack, tmp_path / "out", "x", conv1d=family == "gpt2")):
        alone = peft.PeftModel.from_pretrained(build_model(family), folder, is_trainable=True).eval()
        own = text[2 * world : 2 * world + 2]
        torch.nn.functional.cross_entropy(
            alone(input_ids=own).logits[:, :-1].flatten(0, 1), own[:, 1:].flatten(), reduction="sum"
        ).backward()
        for name, layer in layers.items():
            for kind, parameter in (("lora_A", layer.A), ("lora_B", layer.B)):
                reference = alone.get_parameter(f"base_model.model.{name}.{kind}.default.weight")
                assert reference.grad is not None
                assert parameter.grad is not None
                assert (parameter.grad[world] - reference.grad).abs().max() < 1e-3 * (1 + reference.grad.abs().max())


def test_only_adapters_are_trainable(build_model: Build, make_stack: MakeStack) -> None:
    model = build_model("llama")
    attach(model, make_stack(model, 2), trainable=True)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable
    assert all(name.endswith((".A", ".B")) for name in trainable)


def test_a_batch_that_worlds_cannot_share_is_refused(build_model: Build, make_stack: MakeStack) -> None:
    model = build_model("gpt2")
    attach(model, make_stack(model, 3))
    with pytest.raises(EngineError, match="batch of 4 rows cannot be shared evenly by 3 worlds"):
        model(input_ids=tokens(4, 5))


def test_detaching_gives_the_base_model_back(build_model: Build, make_stack: MakeStack) -> None:
    model = build_model("gpt2")
    with torch.no_grad():
        before = model(input_ids=tokens(1, 7)).logits
        stack = make_stack(model, 2)
        attach(model, stack)
        assert set(attached_layers(model)) == set(stack.layers)
        detach(model)
        after = model(input_ids=tokens(1, 7)).logits
    assert torch.equal(before, after)
    assert not attached_layers(model)


def test_the_adapters_in_the_model_are_those_attached(build_model: Build, make_stack: MakeStack) -> None:
    model = build_model("llama")
    stack = make_stack(model, 2)
    attach(model, stack, trainable=True)
    layers = attached_layers(model)
    assert set(layers) == set(stack.layers)
    assert all(torch.equal(layers[name].A, stack.A[name]) for name in stack.layers)
    assert all(torch.equal(layers[name].B, stack.B[name]) for name in stack.layers)


def test_dropout_acts_only_while_training(build_model: Build, make_stack: MakeStack) -> None:
    model = build_model("gpt2")
    attach(model, make_stack(model, 1, AdapterSpec(rank=2, dropout=0.5)))
    text = tokens(1, 6)
    with torch.no_grad():
        assert torch.equal(model(input_ids=text).logits, model(input_ids=text).logits)
        for layer in attached_layers(model).values():
            layer.train()
        assert not torch.equal(model(input_ids=text).logits, model(input_ids=text).logits)
