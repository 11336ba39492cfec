import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from engine.conftest import SHAPE
from paclm.config import RuntimeConfig
from paclm.engine.adapters import AdapterSpec, decoder_layer
from paclm.engine.loading import build_engine
from paclm.engine.peft_io import CONFIG, export_peft, import_peft
from paclm.errors import EngineError
from paclm.worlds.storage import write_private


def test_folders_written_and_read_again_hold_the_same_numbers(tmp_path, family, build_model, make_stack):
    stack = make_stack(build_model(family), 3)
    folders = export_peft(stack, tmp_path / "out", "somewhere", conv1d=family == "gpt2")
    assert [folder.name for folder in folders] == ["world-000", "world-001", "world-002"]
    again = import_peft(folders, base="test")
    assert all(torch.equal(again.A[layer], stack.A[layer]) for layer in stack.layers)
    assert all(torch.equal(again.B[layer], stack.B[layer]) for layer in stack.layers)
    assert again.spec.scale == stack.spec.scale


def test_a_folder_saved_by_peft_itself_can_be_imported(tmp_path, build_model):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(build_model("llama"), config)
    adapted.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
    stack = import_peft([tmp_path / "saved"], base="test")
    own = dict(adapted.named_parameters())
    layer = "model.layers.1.self_attn.q_proj"
    assert torch.equal(stack.A[layer][0], own[f"base_model.model.{layer}.lora_A.default.weight"].detach())
    assert stack.spec == AdapterSpec(rank=4, alpha=8.0, targets=("o_proj", "q_proj"))


def test_a_folder_that_is_not_empty_and_one_without_adapters_are_refused(tmp_path, build_model, make_stack):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(EngineError, match=str(tmp_path)):
        export_peft(make_stack(build_model("gpt2"), 1), tmp_path, "x", conv1d=True)
    for folders, named in (([tmp_path], r"adapter_config\.json"), ([], None)):
        with pytest.raises(EngineError, match=named):
            import_peft(folders, base="test")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"target_modules": ".*attn"}, r"\.\*attn"),
        ({"r": 5}, "rank=5"),
    ],
)
def test_what_cannot_be_stacked_is_refused(tmp_path, build_model, make_stack, change, complaint):
    folders = export_peft(make_stack(build_model("gpt2"), 2), tmp_path / "out", "x", conv1d=True)
    config = json.loads((folders[1] / CONFIG).read_text())
    (folders[1] / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(EngineError, match=complaint):
        import_peft(folders, base="test")


@pytest.mark.parametrize("is_there", [False, True])
def test_a_full_disk_leaves_no_part_of_an_export(tmp_path, build_model, make_stack, monkeypatch, is_there):
    if is_there:
        (tmp_path / "out").mkdir()
    written = []

    def fill_up(path, content, mode):
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        write_private(path, content, mode)

    monkeypatch.setattr("paclm.engine.peft_io.write_private", fill_up)
    with pytest.raises(OSError, match="No space left"):
        export_peft(make_stack(build_model("gpt2"), 3), tmp_path / "out", "x", conv1d=True)
    assert [path.parent.name for path in written] == ["world-000", "world-000", "world-001"]
    assert list(tmp_path.rglob("*")) == ([tmp_path / "out"] if is_there else [])


LAST = AdapterSpec(rank=4, alpha=8.0, top=1)


def adapted_by(model):
    """The layers that carry an adapter in a model of PEFT's."""
    return {
        name.removesuffix(".lora_A") for name, _ in model.base_model.model.named_modules() if name.endswith("lora_A")
    }


def test_peft_adapts_the_last_layers_and_no_others(tmp_path, family, build_model, make_stack, peft_logits):
    stack = make_stack(build_model(family), 2, LAST)
    folders = export_peft(stack, tmp_path / "out", "x", conv1d=family == "gpt2")
    loaded = PeftModel.from_pretrained(build_model(family), folders[0])
    assert loaded.peft_config["default"].layers_to_transform == [1]
    assert loaded.peft_config["default"].layers_pattern == ("h" if family == "gpt2" else "layers")
    assert adapted_by(loaded) == set(stack.layers)
    assert {decoder_layer(name) for name in stack.layers} == {1}
    tokens = [5, 40, 3, 77, 12, 60]
    engine = build_engine(build_model(family), stack, RuntimeConfig(device="cpu", context=16), support_size=10)
    own = torch.cat([engine.whole_logits(hidden) for _, hidden in engine.hidden_states(tokens)], 1)
    expected = peft_logits(family, stack, torch.tensor([tokens]))[:, 0]  # (m, T, V)
    assert float((own[:-1] - expected).abs().max()) < 1e-4


def test_many_layers_of_a_deep_model_are_found_by_peft(tmp_path, make_stack):
    """From 20 names on PEFT shortens them: 1.mlp must not stand for 11.mlp."""
    deep = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": 12}))
    stack = make_stack(deep, 1, AdapterSpec(rank=4, top=5))
    (folder,) = export_peft(stack, tmp_path / "out", "x", conv1d=False)
    assert adapted_by(PeftModel.from_pretrained(deep, folder)) == set(stack.layers)
    assert stack.decoder_layers == [7, 8, 9, 10, 11]


def test_what_peft_is_told_of_layers_comes_back(tmp_path, family, build_model, make_stack):
    stack = make_stack(build_model(family), 2, LAST)
    folders = export_peft(stack, tmp_path / "out", "x", conv1d=family == "gpt2")
    again = import_peft(folders, base="test", num_layers=2)
    assert (again.spec.top, again.trunk, set(again.layers)) == (1, 1, set(stack.layers))
    assert all(torch.equal(again.B[layer], stack.B[layer]) for layer in stack.layers)
    assert import_peft(folders, base="test").spec.top is None, "the last of how many?"
    assert import_peft(folders, base="test", num_layers=3).spec.top is None, "layer 2 follows"
    config = json.loads((folders[0] / CONFIG).read_text())
    assert "layers_to_transform" in config
    whole = export_peft(make_stack(build_model(family), 1), tmp_path / "all", "x", conv1d=family == "gpt2")
    assert "layers_to_transform" not in json.loads((whole[0] / CONFIG).read_text()), "as before"


@pytest.mark.parametrize(
    ("family", "layers", "pattern", "top"),
    [
        ("gpt2", [1], None, 1),
        ("gpt2", 1, "h", 1),
        ("llama", [1], ["layers", "blocks"], 1),
        ("llama", [0], "layers", None),
        ("llama", [1, 0], "layers", None),
    ],
)
def test_a_folder_saved_by_peft_for_some_layers_can_be_imported(tmp_path, build_model, family, layers, pattern, top):
    names = ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "down_proj"]
    config = LoraConfig(
        r=4, target_modules=names, layers_to_transform=layers, layers_pattern=pattern, fan_in_fan_out=family == "gpt2"
    )
    adapted = get_peft_model(build_model(family), config)
    adapted.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
    stack = import_peft([tmp_path / "saved"], base="test", num_layers=2)
    assert set(stack.layers) == adapted_by(adapted)
    assert (stack.spec.top, stack.trunk) == (top, min([layers] if isinstance(layers, int) else layers))


@pytest.mark.parametrize(
    "change",
    [
        *({"layers_to_transform": wrong} for wrong in (0, [0], [0, 1], [1, 7], ["1.5"])),
        {"layers_pattern": "blocks"},
    ],
)
def test_layers_that_are_not_those_of_the_tensors_are_refused(tmp_path, build_model, make_stack, change):
    folders = export_peft(make_stack(build_model("gpt2"), 2, LAST), tmp_path / "out", "x", conv1d=True)
    config = json.loads((folders[1] / CONFIG).read_text())
    (folders[1] / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(EngineError, match=r"world-001 .*layers_to_transform.*adapters in (1|none)\. "):
        import_peft(folders, base="test")
