"""A tokenizer read from tokenizer.json alone gives the ids and texts that Transformers gives."""

import json
import random
import shutil
import subprocess
import sys

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from paclm.engine.base_model import TINY_FOLDER, load_tokenizer, resolve_base
from paclm.engine.tokenizer import PlainTokenizer, read_tokenizer
from paclm.worlds.blocks import encode_texts

ODD = [
    "",
    " ",
    "\n\n  \t",
    "naïve café — 12,345.67",
    "日本語 and 🩺🩺",
    "a<|end|>b <|endoftext|>",
    "x" * 3000,
    "\x00\u200b",
]
TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {{- "<|start|>" + message.role + " " + message.content + "<|stop|>" }}
{%- endfor %}
{%- if messages[-1].role != "user" %}{{ raise_exception("A conversation ends with the user.") }}{% endif %}
{%- if add_generation_prompt %}{{ eos_token + "<|start|>assistant" }}{% endif %}
"""


@pytest.fixture(params=["small", "tiny"])
def folder(request, small_base):
    return small_base if request.param == "small" else TINY_FOLDER


@pytest.fixture
def copied(small_base, tmp_path):
    return shutil.copytree(small_base, tmp_path / "base")


def change(path, **settings):
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_ids_offsets_and_texts_are_those_of_transformers(folder, texts):
    plain, reference = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    documents = [*ODD, *texts[:40]]
    assert encode_texts(plain, documents) == encode_texts(reference, documents)
    options = {"add_special_tokens": False, "verbose": False}
    rng = random.Random(0)
    for text in documents:
        ids = reference.encode(text, **options)
        assert plain.encode(text, **options) == ids
        with_offsets = {**options, "return_offsets_mapping": True}
        assert plain(text, **with_offsets)["offset_mapping"] == reference(text, **with_offsets)["offset_mapping"]
        some = [*ids, reference.eos_token_id, *(rng.randrange(len(reference)) for _ in range(20))]
        for skip in (True, False):
            choice = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert plain.decode(some, **choice) == reference.decode(some, **choice)
    for name in ("eos_token_id", "bos_token_id", "all_special_ids", "chat_template"):
        assert getattr(plain, name) == getattr(reference, name), name
    assert len(plain) == len(reference)


def test_templates_and_more_special_tokens_are_those_of_transformers(copied):
    marks = ["<|start|>", "<|stop|>"]
    reference = AutoTokenizer.from_pretrained(copied, extra_special_tokens=marks, chat_template=TEMPLATE)
    reference.save_pretrained(copied)
    assert (copied / "chat_template.jinja").exists()
    plain, reference = read_tokenizer(copied), AutoTokenizer.from_pretrained(copied)
    assert plain.chat_template == reference.chat_template == TEMPLATE
    assert plain.all_special_ids == reference.all_special_ids
    assert len(plain.all_special_ids) == 3
    said = [{"role": role, "content": f"{role}: <b>\n"} for role in ("system", "user", "assistant", "user")]
    for messages, is_open in ((said, True), (said[1:], False)):
        options = {"tokenize": False, "add_generation_prompt": is_open}
        text = plain.apply_chat_template(messages, **options)
        assert text == reference.apply_chat_template(messages, **options)
        assert text.endswith("<|end|><|start|>assistant") == is_open
        assert plain.encode(text) == reference.encode(text, add_special_tokens=False)
    with pytest.raises(TemplateError, match="ends with the user"):
        plain.apply_chat_template(said[:3], add_generation_prompt=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": None},
        {"chat_template": [{"name": "default", "template": "{{ messages }}"}]},
        {"extra_special_tokens": ["<|more|>"]},
        {"extra_special_tokens": {"image_token": "<|end|>"}},
        {"eos_token": "<|unknown|>"},
        {"add_prefix_space": True},
        {"split_special_tokens": True},
    ],
)
def test_settings_that_transformers_acts_on_are_left_to_it(copied, settings):
    assert isinstance(read_tokenizer(copied), PlainTokenizer)
    change(copied / "tokenizer_config.json", **settings)
    assert read_tokenizer(copied) is None


def test_other_families_files_and_broken_ones_are_left_to_transformers(copied):
    for name in ("special_tokens_map.json", "added_tokens.json"):
        (copied / name).write_text("{}")
        assert read_tokenizer(copied) is None
        (copied / name).unlink()
    assert isinstance(load_tokenizer(resolve_base(str(copied))), PlainTokenizer)
    change(copied / "tokenizer.json", added_tokens=[])
    assert read_tokenizer(copied) is None
    change(copied / "config.json", model_type="qwen2")
    assert read_tokenizer(copied) is None
    (copied / "tokenizer.json").write_text("{}")
    assert read_tokenizer(copied) is None


def test_tokenizer_streams_and_settings_need_neither_torch_nor_transformers():
    program = """
import sys
import paclm.config, paclm.curator.streams
from paclm.engine.base_model import load_tokenizer, resolve_base
tokenizer = load_tokenizer(resolve_base("tiny"))
ids = paclm.curator.streams.encode_prompt(tokenizer, "The patient")
assert paclm.curator.streams.TextStream(tokenizer, ids[:1]).push(ids[1]) == " patient"
sys.exit(", ".join({"torch", "transformers"} & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-600:]
