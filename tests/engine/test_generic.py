import peft
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM

from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.generic import GenericModel, attach, attached_layers, detach
from paclm.engine.peft_io import export_peft
from paclm.engine.weights import output_layer
from paclm.errors import EngineError, ModelError

WORLDS = 3


def tokens(rows, length):
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("attention_only", [False, True])
def test_every_world_in_one_batch_equals_peft_one_by_one(family, build_model, make_stack, peft_logits, attention_only):
    text, model = tokens(2, 11), build_model(family)
    stack = make_stack(model, WORLDS, AdapterSpec(rank=4, alpha=8.0, attention_only=attention_only))
    assert all("attn" in layer for layer in stack.layers) is attention_only
    expected = peft_logits(family, stack, text)
    attach(model, stack)
    with torch.no_grad():
        together = model(input_ids=text.repeat(WORLDS, 1)).logits.reshape(expected.shape)
    assert (together - expected).abs().max() < 1e-4
    assert (expected[0] - expected[1]).abs().max() > 0.1, "worlds that agree would prove nothing"


def test_gradients_equal_those_of_each_world_trained_alone_with_peft(tmp_path, family, build_model, make_stack):
    text = tokens(WORLDS * 2, 8)
    stack = make_stack(build_model(family), WORLDS)
    model = build_model(family)
    layers = attach(model, stack)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for layer in layers.values():
        layer.A.requires_grad_()
        layer.B.requires_grad_()
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
                assert (parameter.grad[world] - reference.grad).abs().max() < 1e-3 * (1 + reference.grad.abs().max())


def test_a_batch_that_worlds_cannot_share_is_refused(build_model, make_stack):
    model = build_model("gpt2")
    attach(model, make_stack(model, 3))
    with pytest.raises(EngineError, match=r"4 rows .* 3 worlds"):
        model(input_ids=tokens(4, 5))


def test_detaching_gives_the_base_model_back(build_model, make_stack):
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


SHAPE = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("build", "target"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, num_key_value_heads=1, head_dim=8)), "down_proj"),
        (lambda: PhiForCausalLM(PhiConfig(**SHAPE)), "fc1"),
    ],
    ids=["changes its logits", "bias in the output layer"],
)
def test_a_model_whose_logits_are_no_plain_product_is_neither_trained_nor_served(build, target):
    model, spec = build(), AdapterSpec(targets=(target,))
    with pytest.raises(ModelError):
        output_layer(model)
    stack = AdapterStack.initial(find_targets(model, spec), spec, 2, 0, "base")
    with pytest.raises(ModelError):
        GenericModel(model, stack, 2, 8)
