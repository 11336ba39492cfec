import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets, linear_layers
from paclm.engine.loading import join_stacks
from paclm.errors import EngineError, InvalidInput


def test_gpt2_small_has_the_known_parameter_counts():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    for spec, expected in ((AdapterSpec(), 811_008), (AdapterSpec(attention_only=True), 442_368)):
        assert AdapterStack.initial(find_targets(model, spec), spec, 1, 0, "").num_parameters == expected


def test_llama_like_models_adapt_attention_and_down_projection(build_model):
    names = [target.name for target in find_targets(build_model("llama"), AdapterSpec())]
    assert [name.rsplit(".", 1)[-1] for name in names[:5]] == ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    assert len(names) == 10


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (AdapterSpec(targets=("c_attm", "c_proj")), r"c_attm.*c_attn, c_fc, c_proj"),
        (AdapterSpec(targets=("c_fc",), attention_only=True), r"c_fc.*attention_only"),
    ],
)
def test_targets_that_match_no_layer_and_unknown_families_without_targets_are_refused(build_model, spec, named):
    with pytest.raises(EngineError, match=named):
        find_targets(build_model("gpt2"), spec)
    with pytest.raises(EngineError, match=r"'Sequential'.*: 0"):
        find_targets(nn.Sequential(nn.Linear(3, 4)), AdapterSpec())


def test_only_the_last_decoder_layers_carry_adapters_where_the_spec_says_so(family, build_model):
    model = build_model(family)  # two layers
    everywhere = [target.name for target in find_targets(model, AdapterSpec())]
    last = [target.name for target in find_targets(model, AdapterSpec(top=1))]
    assert last == [name for name in everywhere if ".1." in name]
    assert [target.name for target in find_targets(model, AdapterSpec(top=2))] == everywhere
    with pytest.raises(EngineError, match=r'"top:3" in \[training\].*has 2 decoder layers.*all'):
        find_targets(model, AdapterSpec(top=3))
    with pytest.raises(EngineError, match=r"last 1 of this model's 2 decoder layers.*other targets"):
        find_targets(model, AdapterSpec(top=1, targets=(everywhere[0],)))


def test_a_file_says_which_layers_and_that_of_all_is_as_before(tmp_path, build_model, make_stack):
    for top, words in ((None, ""), (1, ', "top": 1')):
        path = tmp_path / f"{top}.safetensors"
        make_stack(build_model("gpt2"), 1, AdapterSpec(rank=4, alpha=8.0, top=top)).save(path)
        with safe_open(path, "pt") as file:
            spec = file.metadata()["spec"]
        before = '"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": [], "attention_only": false'
        assert spec == f"{{{before}{words}}}"
        assert (AdapterStack.load(path).spec.top, AdapterStack.load(path).trunk) == (top, top or 0)


def test_stacks_that_differ_do_not_run_together_and_the_error_says_in_what(build_model, make_stack):
    model = build_model("llama")
    worlds = make_stack(model, 3)
    assert join_stacks([worlds, make_stack(model, 1)]).num_worlds == 4
    for spec, named in (
        (AdapterSpec(rank=4, alpha=8.0, top=1), "layers"),
        (AdapterSpec(rank=8, alpha=16.0), "rank"),
        (AdapterSpec(rank=4, alpha=16.0, top=1), "layers, scale"),
    ):
        with pytest.raises(EngineError, match=rf"differ in {named} and.*paclm train WORKSPACE --what full --again"):
            join_stacks([worlds, make_stack(model, 1, spec)])


@pytest.mark.parametrize("bad", [{"rank": 0}, {"alpha": 0.0}, {"alpha": float("nan")}, {"dropout": 1.0}])
def test_a_spec_outside_its_rule_is_refused(bad):
    with pytest.raises(InvalidInput):
        AdapterSpec(**bad)


def test_one_file_keeps_every_number_spec_and_base_and_some_worlds_can_be_read_alone(tmp_path, build_model, make_stack):
    stack, path = make_stack(build_model("llama"), 5), tmp_path / "adapters" / "worlds.safetensors"
    stack.save(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    again, some = AdapterStack.load(path), AdapterStack.load(path, worlds=slice(1, 3))
    assert (again.spec, again.base, again.num_worlds, some.num_worlds) == (stack.spec, stack.base, 5, 2)
    assert again.num_parameters == stack.num_parameters
    assert set(again.layers) == set(stack.layers)
    for layer in stack.layers:
        for read, expected in ((again, stack), (some, stack.worlds([1, 2]))):
            assert torch.equal(read.A[layer], expected.A[layer])
            assert torch.equal(read.B[layer], expected.B[layer])


def test_layers_come_back_in_model_order(tmp_path):
    names = [f"h.{i}.c_attn" for i in range(12)]
    shapes = {name: torch.zeros(2, 8, 4) for name in names}, {name: torch.zeros(2, 6, 8) for name in names}
    AdapterStack(AdapterSpec(), "x", *shapes).save(tmp_path / "w.safetensors")
    assert list(AdapterStack.load(tmp_path / "w.safetensors").layers) == names


def test_a_file_that_is_no_stack_and_unequal_shapes_are_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\x00" * 64)
    for name in ("foreign", "broken", "missing"):
        with pytest.raises(EngineError, match=name):
            AdapterStack.load(tmp_path / f"{name}.safetensors")
    with pytest.raises(EngineError, match=r"\(2, 8, 4\) and \(3, 6, 8\)"):
        AdapterStack(AdapterSpec(), "x", {"a": torch.zeros(2, 8, 4)}, {"a": torch.zeros(3, 6, 8)})


def test_adapters_of_another_base_are_refused(build_model, make_stack):
    stack = make_stack(build_model("gpt2"), 2)
    stack.check_fits(linear_layers(build_model("gpt2")), "test")
    with pytest.raises(EngineError, match="another"):
        stack.check_fits(linear_layers(build_model("gpt2")), "another")
    with pytest.raises(EngineError, match="c_attn"):
        stack.check_fits(linear_layers(build_model("llama")))


def test_coupled_worlds_start_equal_and_uncoupled_ones_do_not(build_model):
    targets = find_targets(build_model("gpt2"), AdapterSpec())
    together = AdapterStack.initial(targets, AdapterSpec(), 3, 1, "x")
    apart = AdapterStack.initial(targets, AdapterSpec(), 3, 1, "x", coupled=False)
    layer = targets[0].name
    assert torch.equal(together.A[layer][0], together.A[layer][2])
    assert not torch.equal(apart.A[layer][0], apart.A[layer][2])
    assert not together.B[layer].any()


def test_the_public_world_is_a_zero_adapter_at_the_end(build_model, make_stack):
    stack = make_stack(build_model("gpt2"), 2)
    wide = stack.with_public()
    layer = stack.layers[0]
    assert wide.num_worlds == 3
    assert torch.equal(wide.A[layer][:2], stack.A[layer])
    assert not wide.A[layer][2].any()
    assert not wide.B[layer][2].any()
