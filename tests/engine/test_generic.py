import warnings
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
import transformers
from transformers import Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM

from engine import small_training
from paclm.config import RuntimeConfig
from paclm.engine import generic
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.engine import Engine
from paclm.engine.generic import GenericModel, attach, attached_layers, detach
from paclm.engine.loading import build_engine, plan_engine
from paclm.engine.peft_io import export_peft
from paclm.engine.training import adapter_spec
from paclm.engine.training_forward import OwnForward
from paclm.engine.training_order import NOTHING
from paclm.engine.weights import output_layer, unsupported
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


DEEP = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
LONG = DEEP | {"intermediate_size": 56, "max_position_embeddings": 48}
GROUPED = LONG | {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SLIDING = GROUPED | {"sliding_window": 6}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
SHARING = {
    "GPTNeoX": (LONG, ("query_key_value", "dense_4h_to_h")),
    "OPT": (DEEP | {"ffn_dim": 56, "max_position_embeddings": 48, "word_embed_proj_dim": 32}, ("v_proj", "fc2")),
    "Mistral": (SLIDING, ("v_proj", "down_proj")),
    "Starcoder2": (SLIDING, ("v_proj", "c_proj")),
    "Gemma3": (SLIDING | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, ("o_proj",)),
    "Olmo2": (GROUPED, ("q_proj", "down_proj")),
    "Qwen2Moe": (GROUPED | EXPERTS, ("q_proj", "v_proj")),
    "Falcon": (DEEP | {"alibi": True, "max_position_embeddings": 48}, ("query_key_value",)),
}
UNSHARING = {  # code that reshapes by the batch size of the input ids, and code that checks it
    "Bloom": ({"vocab_size": 97, "hidden_size": 32, "n_layer": 4, "n_head": 4}, ("query_key_value",)),
    "XGLM": (
        {"vocab_size": 97, "d_model": 32, "ffn_dim": 56, "num_layers": 4, "attention_heads": 4}
        | {"max_position_embeddings": 48},
        ("v_proj", "fc2"),
    ),
}
TEXT = tokens(1, 20)


def build_of(name):
    """A random model of this architecture, the same every time."""
    torch.manual_seed(7)
    kind = {"Gemma3": "Gemma3Text"}.get(name, name)
    config = getattr(transformers, f"{kind}Config")(**(SHARING | UNSHARING)[name][0])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    return model.eval()


def top_spec(name, top=2):
    return AdapterSpec(rank=4, alpha=8.0, targets=(SHARING | UNSHARING)[name][1], top=top)


def states(model):
    """Hidden states (W, length, d) of a text that is read in parts, the last of them one token."""
    return torch.cat([hidden for _, hidden in Engine(model, 12, 19).hidden_states(TEXT[0].tolist())], 1)


def states_by_peft(name, stack, folder):
    """Hidden states of each world by PEFT, one world at a time, and of the base model."""
    found = []
    for place in export_peft(stack, folder, "test", conv1d=False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(peft.PeftModel.from_pretrained(build_of(name), place).base_model.model)
    with torch.no_grad():
        return torch.cat(
            [one.eval().get_decoder()(input_ids=TEXT).last_hidden_state for one in [*found, build_of(name)]]
        )


def unshared(monkeypatch, *arguments):
    with monkeypatch.context() as patch:
        patch.setattr(GenericModel, "_share", lambda *_: None)
        return GenericModel(*arguments)


@pytest.mark.parametrize("name", SHARING)
def test_layers_below_the_first_adapted_one_run_and_cache_once(name, make_stack, monkeypatch, tmp_path):
    stack = make_stack(build_of(name), WORLDS, top_spec(name))
    model = GenericModel(build_of(name), stack, 4, 48)
    assert unsupported(build_of(name)) is not None
    assert model.trunk == 2
    found = states(model)
    plain = unshared(monkeypatch, build_of(name), stack, 4, 48)
    assert plain.trunk == 0
    assert (found - states(plain)).abs().max() < 1e-4
    assert (found - states_by_peft(name, stack, tmp_path / "peft")).abs().max() < 1e-4
    assert (found[0] - found[1]).abs().max() > 0.1, "worlds that agree would prove nothing"
    (cache,) = [cache for cache in model._caches if cache.get_seq_length()]
    assert [len(layer.keys) for layer in cache.layers] == [1, 1, WORLDS + 1, WORLDS + 1]
    shared, separate = Engine(model, 12, 7), Engine(plain, 12, 7)
    coins = np.random.default_rng(0).gumbel(size=(2, 12))
    for engine in (shared, separate):
        for length in (9, 4):
            engine.add(TEXT[0, :length].tolist(), 4)
    for token in (5, 40, 7):
        one, other = shared.step(None, coins), separate.step(None, coins)
        assert one.votes.tolist() == other.votes.tolist()
        assert one.support.tolist() == other.support.tolist()
        for handle in (0, 1):
            shared.append(handle, token)
            separate.append(handle, token)


@pytest.mark.parametrize("name", UNSHARING)
def test_code_that_needs_all_rows_from_the_start_gets_them(name, make_stack, tmp_path):
    stack = make_stack(build_of(name), WORLDS, top_spec(name))
    with pytest.warns(UserWarning, match="Error"):
        model = GenericModel(build_of(name), stack, 4, 48)
    assert model.trunk == 0
    assert (states(model) - states_by_peft(name, stack, tmp_path)).abs().max() < 1e-4


def test_code_that_counts_rows_is_found_out(make_stack, monkeypatch):
    """Its result is another one with one row below: no error, and wrong votes if nobody compared."""
    stack, model = make_stack(build_of("GPTNeoX"), WORLDS, top_spec("GPTNeoX")), build_of("GPTNeoX")
    read = model.gpt_neox.layers[0].mlp.forward
    monkeypatch.setattr(model.gpt_neox.layers[0].mlp, "forward", lambda x: read(x) * len(x))
    with pytest.warns(UserWarning, match="off"):
        counting = GenericModel(model, stack, 4, 48)
    assert counting.trunk == 0
    assert len(states(counting)) == WORLDS + 1


def test_an_adapted_layer_is_never_taken_for_a_shared_one(make_stack, monkeypatch, tmp_path):
    stack = make_stack(build_of("GPTNeoX"), WORLDS, top_spec("GPTNeoX", 3))
    expected = states_by_peft("GPTNeoX", stack, tmp_path)
    monkeypatch.setattr(generic, "first_adapted", lambda model, stack: model.gpt_neox.layers[2])
    with pytest.warns(UserWarning, match="EngineError"):
        model = GenericModel(build_of("GPTNeoX"), stack, 4, 48)
    assert model.trunk == 0
    assert (states(model) - expected).abs().max() < 1e-4
    monkeypatch.undo()
    above = [layer for layer in stack.layers if ".1." not in layer]
    cut = replace(stack, A={layer: stack.A[layer] for layer in above}, B={layer: stack.B[layer] for layer in above})
    too_large = GenericModel(build_of("GPTNeoX"), cut, 4, 48)
    assert too_large.trunk == 2
    assert (states(too_large) - expected)[:-1].abs().amax((1, 2)).min() > 0.1, "a difference that tests would see"


def test_nothing_is_shared_where_there_is_nothing_to_share(make_stack):
    for top, worlds in ((4, 2), (2, 1)):
        model = build_of("GPTNeoX")
        stack = make_stack(model, worlds, top_spec("GPTNeoX", top))
        wide = GenericModel(model, stack.as_public(), 2, 48)
        assert wide.trunk == 0
        assert not any(layer._forward_pre_hooks for layer in model.gpt_neox.layers)


def test_a_detached_model_is_as_before(make_stack):
    model, expected = build_of("GPTNeoX"), build_of("GPTNeoX")
    assert GenericModel(model, make_stack(model, WORLDS, top_spec("GPTNeoX")), 2, 48).trunk == 2
    generic.detach(model)
    assert torch.equal(model(TEXT).logits, expected(TEXT).logits)
    again = make_stack(model, 2, top_spec("GPTNeoX"))
    found = states(GenericModel(model, again, 2, 48))
    assert torch.equal(found, states(GenericModel(expected, again, 2, 48)))


def test_no_hook_outlives_a_read_even_one_that_runs_out_of_memory(make_stack, monkeypatch):
    model = build_of("GPTNeoX")
    stack = make_stack(model, WORLDS, top_spec("GPTNeoX"))
    wide = GenericModel(model, stack, 2, 48)
    states(wide)
    assert wide.trunk == 2
    assert not any(layer._forward_pre_hooks for layer in model.gpt_neox.layers)

    def fail(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(GenericModel, "_repeat", fail)
    other = build_of("GPTNeoX")
    with pytest.raises(torch.OutOfMemoryError):
        GenericModel(other, stack, 2, 48)
    assert not any(layer._forward_pre_hooks for layer in other.gpt_neox.layers)


def test_adapters_outside_the_decoder_layers_share_nothing(make_stack):
    model = build_of("GPTNeoX")
    stack = make_stack(model, 2, top_spec("GPTNeoX"))
    assert generic.first_adapted(model, stack) is model.gpt_neox.layers[2]
    for outside in ("embed_out", "gpt_neox.other.3.dense"):
        A, B = ({outside: next(iter(side.values()))} for side in (stack.A, stack.B))
        assert generic.first_adapted(model, replace(stack, A=stack.A | A, B=stack.B | B)) is None
        assert generic.first_adapted(model, replace(stack, A=A | stack.A, B=B | stack.B)) is None


def test_an_engine_is_built_over_a_model_that_shares(make_stack):
    stack = make_stack(build_of("GPTNeoX"), WORLDS, top_spec("GPTNeoX"))
    runtime = RuntimeConfig(device="cpu", max_sequences=3, context=48, prefill_chunk=7)
    engine = build_engine(build_of("GPTNeoX"), stack, runtime, 12)
    alone = Engine(GenericModel(build_of("GPTNeoX"), stack, 4, 48), 12, 7)
    assert engine.votes(TEXT[0].tolist()).tolist() == alone.votes(TEXT[0].tolist()).tolist()


@pytest.mark.parametrize("name", ["GPTNeoX", "XGLM"])
def test_memory_is_planned_for_code_that_may_not_share(name, make_stack):
    whole, above = (make_stack(build_of(name), WORLDS, top_spec(name, top)) for top in (4, 2))
    runtime = RuntimeConfig(device="cpu", max_sequences=3, context=48)
    plans = [plan_engine(build_of(name), stack, runtime, 12, 2**40) for stack in (whole, above)]
    assert plans[0].cache == plans[1].cache


def test_fewer_layers_are_advised_where_the_plan_would_be_smaller(build_model, make_stack):
    runtime = RuntimeConfig(device="cpu", max_sequences=3, context=48, cache_gib=2.0**30)
    many = make_stack(build_model("gpt2"), WORLDS)
    neox = make_stack(build_of("GPTNeoX"), WORLDS, top_spec("GPTNeoX"))
    cases = (
        (build_model("gpt2"), many, True),
        (build_model("gpt2"), many.worlds([0]).as_public(), False),
        (build_of("GPTNeoX"), neox, False),
    )
    for model, stack, is_advised in cases:
        with pytest.raises(EngineError, match="cache_gib") as error:
            build_engine(model, stack, runtime, 12)
        assert ("top:D" in str(error.value)) == is_advised


def test_training_by_the_models_own_code_builds_no_graph_below_the_first_adapted_layer(make_stack):
    model = build_of("GPTNeoX")
    stack = make_stack(model, WORLDS, top_spec("GPTNeoX", 1)).map(torch.Tensor.requires_grad_)
    seen = []
    for layer in model.gpt_neox.layers:
        layer.register_forward_hook(lambda _, args, result: seen.append((args[0].requires_grad, result.requires_grad)))
    forward = OwnForward(model)
    forward(tokens(WORLDS * 2, 9), stack.A, stack.B, stack.spec.scale).sum().backward()
    assert seen == [(False, False)] * 3 + [(False, True)]
    assert all(b.grad.abs().sum() for b in stack.B.values())


def test_training_the_last_layer_equals_peft_with_layers_to_transform():
    settings = replace(small_training.SETTINGS, targets=("query_key_value",), layers="top:1")
    spec, schedule = adapter_spec(settings), small_training.plan(settings)
    trained = small_training.train(build_of("GPTNeoX"), settings).stack
    assert trained.layers == ("gpt_neox.layers.3.attention.query_key_value",)
    start = AdapterStack.initial(find_targets(build_of("GPTNeoX"), spec), spec, 4, small_training.SEED, "test")
    for world in (0, 3):
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query_key_value"], layers_to_transform=[3])
        model = peft.get_peft_model(build_of("GPTNeoX"), lora).eval()
        (A, B) = adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.no_grad():
            A.copy_(start.A[trained.layers[0]][world])
        optimizer = torch.optim.AdamW(adapters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        for picks in schedule.batches([world])[0][: schedule.num_steps[world]]:
            rows = [torch.from_numpy(schedule.blocks[int(block)]) for block in picks if block != NOTHING]
            pad = torch.nn.utils.rnn.pad_sequence
            labels = pad(rows, batch_first=True, padding_value=-100)
            optimizer.zero_grad()
            model(input_ids=pad(rows, batch_first=True), labels=labels).loss.backward()
            optimizer.step()
        for mine, reference in ((trained.A, A), (trained.B, B)):
            assert (mine[trained.layers[0]][world] - reference).abs().max() < 1e-4
        assert B.abs().max() > 1e-2, "training that moves nothing would prove nothing"
