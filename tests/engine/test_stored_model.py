"""Weights read straight from the files of a base model are those that Transformers loads, bit for bit."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.conftest import CONTEXT, SHAPE
from paclm.engine.adapters import AdapterSpec, linear_layers
from paclm.engine.base_model import TINY_FOLDER, load_model
from paclm.engine.loading import plan_engine
from paclm.engine.stored_model import StoredModel, read_model
from paclm.engine.weights import take_apart
from paclm.worlds.fingerprints import Base, fingerprint_base

SPEC = AdapterSpec(rank=4, alpha=8.0)
TYPES = (torch.float32, torch.bfloat16)


def loaded(folder, dtype):
    return load_model(Base(folder.name, folder, fingerprint_base(folder)), dtype)


def tensors_of(part, path="weights"):
    """Every value of nested dataclasses and tuples, by its path."""
    if dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from tensors_of(getattr(part, field.name), f"{path}.{field.name}")
    elif isinstance(part, tuple):
        for place, one in enumerate(part):
            yield from tensors_of(one, f"{path}.{place}")
    elif not callable(part) or isinstance(part, torch.Tensor):
        yield path, part


def assert_same_weights(found, expected):
    found, expected = dict(tensors_of(found)), dict(tensors_of(expected))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[path].dtype == value.dtype, path
            assert found[path].stride() == value.stride(), path  # the order of a product's sums may depend on it
            assert torch.equal(found[path], value), path
        else:
            assert found[path] == value, path


@pytest.fixture
def saved(family, build_model, tmp_path):
    build_model(family).save_pretrained(tmp_path / family)
    return tmp_path / family


@pytest.fixture
def llama(tmp_path):
    """Makes a folder with a Llama of random weights and these settings."""

    def make(**settings):
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **settings}))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.2)
        model.save_pretrained(tmp_path / "llama")
        return tmp_path / "llama"

    return make


def change_config(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


def check(folder, dtype, make_stack, context=CONTEXT):
    model, stored = loaded(folder, dtype), read_model(folder, dtype)
    assert stored is not None
    assert linear_layers(stored) == linear_layers(model)
    stack = make_stack(model, 3, SPEC)
    assert_same_weights(take_apart(stored, stack, context), take_apart(model, stack, context))


@pytest.mark.parametrize("dtype", TYPES)
def test_every_family_is_read_as_transformers_loads_it(saved, dtype, make_stack):
    check(saved, dtype, make_stack)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_embedded_base_is_read_as_transformers_loads_it(dtype, make_stack):
    check(TINY_FOLDER, dtype, make_stack)


def test_biases_a_tied_head_and_one_key_head_per_query_head_are_read(llama, make_stack):
    check(llama(attention_bias=True, mlp_bias=True), torch.float32, make_stack)
    check(llama(tie_word_embeddings=True, num_key_value_heads=4, head_dim=16), torch.float32, make_stack)
    folder = llama(rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    check(folder, torch.float32, make_stack)
    change_config(folder, rope_parameters=None, rope_theta=700.0)  # as files were written before
    check(folder, torch.float32, make_stack)


def test_several_files_and_the_first_names_of_gpt2_are_read(tmp_path, build_model, make_stack):
    build_model("gpt2").save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    check(tmp_path / "parts", torch.float32, make_stack)
    build_model("gpt2").save_pretrained(tmp_path / "first")
    table = torch.ones(1, 1, CONTEXT, CONTEXT)

    def rename(tensors):
        short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return {**short, "h.0.attn.bias": table}

    change_tensors(tmp_path / "first", rename)
    check(tmp_path / "first", torch.float32, make_stack)


def test_rotary_positions_are_not_rounded_with_the_weights(llama, make_stack):
    folder = llama(max_position_embeddings=512)
    model = loaded(folder, torch.float32)
    places = torch.arange(512).unsqueeze(0)
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1, dtype=torch.bfloat16), places)
    stack = make_stack(model, 2, SPEC)
    for source in (read_model(folder, torch.bfloat16), model.to(torch.bfloat16)):
        found = take_apart(source, stack, 512).rotary
        assert torch.equal(found[0], cos[0])
        assert torch.equal(found[1], sin[0])


def test_the_memory_plan_is_the_same_for_both(saved, make_stack):
    from paclm.config import RuntimeConfig

    model = loaded(saved, torch.float32)
    stack = make_stack(model, 3, SPEC)
    plans = [plan_engine(one, stack, RuntimeConfig(), 50, 2**40) for one in (model, read_model(saved, torch.float32))]
    assert plans[0] == plans[1]


def test_a_file_that_changes_after_it_was_read_changes_no_weight(saved):
    stored = read_model(saved, torch.float32)
    before = {name: tensor.clone() for name, tensor in stored.tensors.items()}
    path = saved / "model.safetensors"
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(content) // 2)
        file.write(bytes(len(content) - len(content) // 2))
    assert path.read_bytes() != content
    assert all(torch.equal(stored.tensors[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "gpt_neox"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"auto_map": {"AutoModelForCausalLM": "own.Model"}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"hidden_size": 64},
        {"vocab_size": None},
    ],
)
def test_what_is_not_plain_is_left_to_transformers(llama, settings):
    folder = llama()
    assert isinstance(read_model(folder, torch.float32), StoredModel)
    change_config(folder, **settings)
    assert read_model(folder, torch.float32) is None


def test_damaged_or_unknown_weights_are_left_to_transformers(llama, tmp_path):
    folder = llama()
    changes = [
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"},
        lambda tensors: {**tensors, "lm_head.bias": torch.zeros(SHAPE["vocab_size"])},
        lambda tensors: {**tensors, "model.norm.weight": tensors["model.norm.weight"].int()},
        lambda tensors: {**tensors, "model.norm.weight": torch.ones(7)},
    ]
    for number, change in enumerate(changes):
        damaged = shutil.copytree(folder, tmp_path / f"damaged-{number}")
        change_tensors(damaged, change)
        assert read_model(damaged, torch.float32) is None
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    assert read_model(folder, torch.float32) is None
    (folder / "model.safetensors").unlink()
    assert read_model(folder, torch.float32) is None
