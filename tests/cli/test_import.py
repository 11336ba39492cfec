"""`paclm import` as a user types it: worlds that were trained elsewhere."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.commands import figures_of, invoke
from paclm.engine.adapters import AdapterStack, decoder_layer
from paclm.engine.peft_io import export_peft
from paclm.errors import EngineError, InvalidInput, WorkspaceError
from paclm.worlds.layout import WORLDS_FILE
from paclm.worlds.workspace import Workspace

ROOT = Path(__file__).parents[2]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def exported(template, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "peft"
    invoke("export", template, "--peft", folder)
    return folder


@pytest.fixture
def peft(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "peft")


@pytest.fixture
def untrained(clinic, tmp_path):
    """A copy of the workspace from before it was trained."""
    folder = shutil.copytree(clinic, tmp_path / "untrained")
    (folder / "adapters" / WORLDS_FILE).unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "adapters": {}}))
    return folder


def stack_of(workspace):
    return AdapterStack.load(workspace / "adapters" / WORLDS_FILE)


def test_exported_worlds_come_back_with_the_same_bits_and_votes(clinic, untrained, peft):
    found = figures_of("import", untrained, "--peft", peft, "--yes")
    before, after = stack_of(clinic), stack_of(untrained)
    assert all(torch.equal(before.A[layer], after.A[layer]) for layer in before.layers)
    assert all(torch.equal(before.B[layer], after.B[layer]) for layer in before.layers)
    assert set(before.layers) == set(after.layers)
    opened = Workspace.open(untrained, verify_in_full=True)
    assert opened.manifest.worlds_sha256 == before.hashes() == after.hashes()
    asked = ("--prompt", "the patient reports", "--seed", 7)
    assert figures_of("votes", untrained, *asked) == figures_of("votes", clinic, *asked)
    assert found["imported"] == opened.manifest.imported
    assert (found["worlds"], found["rank"], found["alpha"]) == (8, 2, 4.0)
    assert found["base_named"] == str(opened.base.folder)
    assert "vouched" in opened.manifest.adapters[WORLDS_FILE]["imported"]


def test_adapters_in_the_last_layers_only_come_back_with_their_trunk(clinic, untrained, tmp_path):
    whole = stack_of(clinic)
    A, B = ({layer: pair[layer] for layer in whole.layers if decoder_layer(layer) == 1} for pair in (whole.A, whole.B))
    top = AdapterStack(replace(whole.spec, top=1), whole.base, A, B)
    export_peft(top, tmp_path / "top", "small", conv1d=True)
    found = figures_of("import", untrained, "--peft", tmp_path / "top", "--yes")
    again = stack_of(untrained)
    assert (found["trunk"], again.trunk, again.spec.top) == (1, 1, 1)
    assert again.hashes() == top.hashes() != whole.hashes()


def test_the_operator_vouches_or_nothing_happens(untrained, peft):
    before = (untrained / "manifest.json").read_bytes()
    with pytest.raises(InvalidInput, match="--yes"):
        invoke("import", untrained, "--peft", peft)
    refused = invoke("import", untrained, "--peft", peft, input="n\n")
    assert refused.exit_code == 1
    assert "membership.npz" in refused.stderr
    assert (untrained / "manifest.json").read_bytes() == before
    assert not (untrained / "adapters" / WORLDS_FILE).exists()
    assert invoke("import", untrained, "--peft", peft, input="y\n").exit_code == 0
    assert Workspace.open(untrained).manifest.imported is not None


def test_worlds_and_an_unfinished_training_are_replaced_only_on_request(clinic, untrained, peft):
    for workspace in (clinic, untrained):
        if workspace == untrained:
            (workspace / "adapters" / ".training-worlds").mkdir()
        with pytest.raises(WorkspaceError, match="--replace"):
            invoke("import", workspace, "--peft", peft, "--yes")
        invoke("import", workspace, "--peft", peft, "--yes", "--replace")
        assert Workspace.open(workspace).manifest.imported is not None
        assert not (workspace / "adapters" / ".training-worlds").exists()


def test_every_start_says_that_worlds_were_imported_and_then_they_cannot_be_replaced(clinic, untrained, peft):
    ask = ("--prompt", "the patient", "--max-tokens", 2)
    assert "imported" not in invoke("generate", clinic, *ask).stderr
    invoke("import", untrained, "--peft", peft, "--yes")
    assert "imported on" in invoke("generate", untrained, *ask).stderr
    before = (untrained / "adapters" / WORLDS_FILE).read_bytes()
    for command in (("import", untrained, "--peft", peft, "--replace", "--yes"), ("train", untrained, "--again")):
        with pytest.raises(WorkspaceError, match="served"):
            invoke(*command)
    (untrained / "curator" / "ledger.sqlite").rename(untrained / "elsewhere")  # the secret alone is enough
    with pytest.raises(WorkspaceError, match="served"):
        invoke("import", untrained, "--peft", peft, "--replace", "--yes")
    assert (untrained / "adapters" / WORLDS_FILE).read_bytes() == before


def configure(name, **changes):
    def change(folder):
        path = folder / name / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def configure_all(**changes):
    def change(folder):
        for path in folder.iterdir():
            configure(path.name, **changes)(folder)

    return change


def tensors(change, name="world-003"):
    def rewrite(folder):
        path = folder / name / WEIGHTS
        found = load_file(path)
        save_file(change(found) or found, path)

    return rewrite


def break_one(found):
    next(iter(found.values())).view(-1)[3] = float("nan")


def zero(found):
    return {key: value * ("lora_A" in key) for key, value in found.items()}


def drop_a_layer(found):
    layer = sorted(found)[0].partition(".lora_")[0]
    return {key: value for key, value in found.items() if not key.startswith(layer + ".")}


def drop_everywhere(folder):
    for path in folder.iterdir():
        tensors(drop_a_layer, path.name)(folder)


def rename_everywhere(folder):
    for path in folder.iterdir():
        tensors(lambda found: {key.replace(".h.1.", ".h.7."): value for key, value in found.items()}, path.name)(folder)


def pickle_instead(folder):
    (folder / "world-002" / WEIGHTS).rename(folder / "world-002" / "adapter_model.bin")


def copy_one(folder):
    shutil.copy(folder / "world-001" / WEIGHTS, folder / "world-006" / WEIGHTS)


WRONG = {
    "no folder": (shutil.rmtree, "no folder"),
    "a world is missing": (lambda folder: shutil.rmtree(folder / "world-007"), "world-007"),
    "one too many": (lambda folder: shutil.copytree(folder / "world-000", folder / "world-008"), "world-008"),
    "other names": (lambda folder: (folder / "world-000").rename(folder / "world-0"), "world-0"),
    "a pickle": (pickle_instead, r"adapter_model\.bin.*can run code"),
    "a damaged file": (lambda folder: (folder / "world-004" / WEIGHTS).write_bytes(b"\x08" * 40), "damaged"),
    "broken settings": (lambda folder: (folder / "world-004" / CONFIG).write_text("[1]"), "settings"),
    "no rank": (configure("world-004", r=None), "world-004"),
    "a number that is none": (tensors(break_one), "world-003.*not finite"),
    "another type": (tensors(lambda found: {k: v.double() for k, v in found.items()}), "float64"),
    "an untrained world": (tensors(zero), "world-003.*not trained"),
    "the same world twice": (copy_one, "world-001 and world-006"),
    "a layer less in one world": (tensors(drop_a_layer), "world-003"),
    "a layer less": (drop_everywhere, "has no adapter"),
    "a layer that the base has not": (rename_everywhere, r"h\.7"),
    "a target less": (configure_all(target_modules=["c_attn"]), "no target module names"),
    "another rank": (configure("world-005", r=4), "world-005.*rank=4"),
    "another alpha": (configure("world-005", lora_alpha=5), "world-005.*alpha=5"),
    "another base model": (configure("world-005", base_model_name_or_path="gpt2"), "world-005.*'gpt2'"),
    "another start": (configure("world-005", init_lora_weights="gaussian"), "world-005.*gaussian"),
    "no base model": (configure_all(base_model_name_or_path=None), "names no base model"),
    "a start that changes the base": (configure_all(init_lora_weights="pissa"), "pissa"),
    "a setting of a later version": (configure_all(new_trick={"a": 1}), "new_trick"),
    "a module beside": (configure_all(modules_to_save=["lm_head"]), "modules_to_save"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_the_worlds_is_refused_and_nothing_changes(untrained, peft, wrong):
    change, complaint = WRONG[wrong]
    change(peft)
    before = {path: path.read_bytes() for path in untrained.rglob("*") if path.is_file() and path.suffix != ".lock"}
    with pytest.raises(EngineError, match=complaint):
        invoke("import", untrained, "--peft", peft, "--yes")
    after = {path: path.read_bytes() for path in untrained.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert after == before


def test_worlds_with_the_same_records_may_be_the_same(untrained, peft, monkeypatch):
    copy_one(peft)
    same = Workspace.open(untrained).membership.copy()
    same[:, 6] = same[:, 1]
    monkeypatch.setattr(Workspace, "membership", same)
    invoke("import", untrained, "--peft", peft, "--yes")


def test_half_precision_is_widened_exactly(untrained, peft):
    for path in peft.iterdir():
        tensors(lambda found: {key: value.bfloat16() for key, value in found.items()}, path.name)(peft)
    invoke("import", untrained, "--peft", peft, "--yes")
    stack, layer = stack_of(untrained), stack_of(untrained).layers[0]
    expected = load_file(peft / "world-005" / WEIGHTS)[f"base_model.model.{layer}.lora_B.weight"]
    assert stack.B[layer].dtype == torch.float32
    assert torch.equal(stack.B[layer][5], expected.float())


def test_the_recipe_of_the_guide_trains_each_world_on_its_own_records_and_comes_in(
    tmp_path, texts, small_base, small_tokenizer, monkeypatch
):
    """The code of docs/guide/training.md, run as it stands, but for its three names."""
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:16]))
    monkeypatch.chdir(tmp_path)
    invoke("init", "clinic", "--corpus", "notes.jsonl", "--base", small_base, "--worlds", 4)
    page = (ROOT / "docs" / "guide" / "training.md").read_text()
    (code,) = re.findall(r"```python\n(import json\n.*?)```", page, flags=re.S)
    assert len(code.splitlines()) <= 30
    seen = []
    real = torch.nn.Module.__call__

    def watch(self, *arguments, **options):
        if "labels" in options and type(self).__name__.startswith("Peft"):
            seen.append(options["labels"][0].tolist())
        return real(self, *arguments, **options)

    monkeypatch.setattr(torch.nn.Module, "__call__", watch)
    exec(compile(code.replace('"base-model"', repr(str(small_base))), "recipe", "exec"), {})
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    opened = Workspace.open("clinic")
    epochs = 2
    assert len(seen) == epochs * opened.membership.sum()
    by_world = np.split(np.arange(len(seen)), np.cumsum(epochs * opened.membership.sum(axis=0))[:-1])
    encoded = [small_tokenizer.encode(record.text)[:64] for record in opened.members()]
    for world, steps in enumerate(by_world):
        own = [encoded[row] for row in np.flatnonzero(opened.membership[:, world])]
        assert sorted(seen[step] for step in steps) == sorted(own * epochs)
    invoke("import", "clinic", "--peft", "trained", "--yes")
    votes = figures_of("votes", "clinic", "--prompt", "the patient")
    assert len(votes["votes"]) == 4
    assert len(set(Workspace.open("clinic").manifest.worlds_sha256)) == 4
