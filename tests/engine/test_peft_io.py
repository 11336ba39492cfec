import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

from paclm.engine.adapters import AdapterSpec
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

    def fill_up(path, content):
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        write_private(path, content)

    monkeypatch.setattr("paclm.engine.peft_io.write_private", fill_up)
    with pytest.raises(OSError, match="No space left"):
        export_peft(make_stack(build_model("gpt2"), 3), tmp_path / "out", "x", conv1d=True)
    assert [path.parent.name for path in written] == ["world-000", "world-001"]
    assert list(tmp_path.rglob("*")) == ([tmp_path / "out"] if is_there else [])
