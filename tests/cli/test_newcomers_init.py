"""What a newcomer does wrong when a workspace is made, and what paclm says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cli.newcomers import INIT, SECRET_WORDS, Desk, Said, check, nothing, split, write

INIT_MISTAKES: dict[str, tuple[Callable[[Desk], None], str, str]] = {
    "no such file": (nothing, f"{INIT} gone.jsonl", r"no file or folder gone\.jsonl .*clinic:2000"),
    "no name": (nothing, f"{INIT} ''", "--corpus is empty"),
    "an address": (nothing, f"{INIT} https://x.example/n.jsonl", "https://x.example/n.jsonl is a URL"),
    "clinic without a number": (nothing, f"{INIT} clinic:many", "clinic:many .*clinic:2000"),
    "an empty folder": (lambda desk: (desk.folder / "texts").mkdir(), f"{INIT} texts", "texts is empty"),
    "a folder of other files": (write("pile/a.pdf", ""), f"{INIT} pile", r"a\.pdf.*as \.txt"),
    "a folder with a table": (write("pile/a.csv", ""), f"{INIT} pile", r"Name the file itself: --corpus pile/a\.csv"),
    "an empty file": (write("n.jsonl", ""), f"{INIT} n.jsonl", "holds no record: it has no rows"),
    "a JSON file": (write("n.json", "[]"), f"{INIT} n.json", r"rename it to \.jsonl.*jq -c"),
    "a text file": (write("n.txt", "x"), f"{INIT} n.txt", r"n\.txt.*Name its folder"),
    "not UTF-8": (write("n.jsonl", b'{"text": "\xff"}\n' * 9), f"{INIT} n.jsonl", "None of the 9 rows.*UTF-8.*iconv"),
    "wrong field": (
        nothing,
        f"{INIT} notes.jsonl --text-field note",
        r"None of the 200 rows.*'note' \(fields: text, p",
    ),
    "wrong column": (
        write("n.csv", "id,body\n1,x\n"),
        f"{INIT} n.csv",
        "no column 'text'.*are: id, body.*--text-field",
    ),
    "a table without header": (write("n.csv", f"1,{SECRET_WORDS}\n"), f"{INIT} n.csv", "first row is not shown"),
    "private field names": (write("n.jsonl", f'{{"{SECRET_WORDS}": 1}}\n'), f"{INIT} n.jsonl", "fields are not shown"),
    "no gzip": (write("n.jsonl.gz", SECRET_WORDS), f"{INIT} n.jsonl.gz", "is not a gzip file"),
    "too few records": (write("n.jsonl", '{"text": "a"}\n'), f"{INIT} n.jsonl", "leave 1 for .* 8 "),
    "everything held out": (nothing, f"{INIT} notes.jsonl --holdout 199", "leave 1 for.*Lower --holdout"),
    "odd worlds": (nothing, f"{INIT} notes.jsonl --worlds 3", "number of worlds must be even.*not 3"),
    "no worlds": (nothing, f"{INIT} notes.jsonl --worlds 0", "number of worlds must be.*at least 2, not 0"),
    "too many worlds": (nothing, f"{INIT} notes.jsonl --worlds 1000000", "at most 65,536, not 1,000,000"),
    "negative holdout": (nothing, f"{INIT} notes.jsonl --holdout -1", "--holdout must be.*not -1"),
    "negative canaries": (nothing, f"{INIT} notes.jsonl --canaries -1", "--canaries must be.*not -1"),
}


BASE_MISTAKES: dict[str, tuple[Callable[[Desk], object], str]] = {
    "no name": (lambda desk: "", "--base is empty.*--base tiny"),
    "no such folder": (lambda desk: "./gone", "'./gone' is neither a folder.*--base tiny"),
    "smollm2 is not here yet": (lambda desk: "smollm2", "paclm models get smollm2"),
    "a file": (lambda desk: "notes.jsonl", r"notes\.jsonl is a file.*--base tiny"),
    "no such gguf": (lambda desk: "gone.gguf", r"There is no file .*gone\.gguf"),
    "a folder of something else": (lambda desk: "clinic", "holds no base model.*config.json.*--base tiny"),
    "no tokenizer": (lambda desk: _without_tokenizer(desk), "has no tokenizer.*tokenizer.json beside config.json"),
    "unknown architecture": (lambda desk: desk.other_base("b", model_type="frob"), "Transformers.*`frob`.*--base tiny"),
    "an encoder": (
        lambda desk: desk.other_base("b", model_type="bert", architectures=["BertForMaskedLM"]),
        "is a BertForMaskedLM.*ForCausalLM",
    ),
    "a model without positions": (
        lambda desk: desk.other_base("b", model_type="mamba", architectures=["MambaForCausalLM"]),
        r"\(mamba\).*max_position_embeddings",
    ),
    "logits bent": (
        lambda desk: desk.other_base("b", model_type="gemma2", architectures=["Gemma2ForCausalLM"]),
        r"\(final_logit_softcapping\).*--base tiny",
    ),
    "a bias of the logits": (
        lambda desk: _with_bias(desk),
        r"\(lm_head\.bias\).*--base tiny",
    ),
    "weights cut off": (lambda desk: _cut_weights(desk), r"model\.safetensors is damaged .*Fetch the base model again"),
}


def _without_tokenizer(desk: Desk) -> Path:
    folder = desk.other_base("b")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    return folder


def _with_bias(desk: Desk) -> Path:
    folder = desk.other_base("b")
    save_file({"lm_head.bias": np.zeros(4, dtype=np.float32)}, folder / "model-2.safetensors")
    return folder


def _cut_weights(desk: Desk) -> Path:
    folder = desk.other_base("b")
    os.truncate(folder / "model.safetensors", 3000)
    return folder


@pytest.mark.parametrize("mistake", INIT_MISTAKES)
def test_init_says_what_is_wrong_and_makes_nothing(desk: Desk, paclm: Callable[..., Said], mistake: str) -> None:
    prepare, command, expected = INIT_MISTAKES[mistake]
    prepare(desk)
    check(paclm(*split(command)), expected)
    assert not (desk.folder / "w").exists()


@pytest.mark.parametrize("mistake", BASE_MISTAKES)
def test_init_refuses_a_base_that_could_not_be_trained(desk: Desk, paclm: Callable[..., Said], mistake: str) -> None:
    prepare, expected = BASE_MISTAKES[mistake]
    check(paclm("init", "w", "--corpus", "notes.jsonl", "--worlds", "4", "--base", str(prepare(desk))), expected)
    assert not (desk.folder / "w").exists()


def test_weights_that_the_base_lacks_are_never_drawn_at_random(desk: Desk, paclm: Callable[..., Said]) -> None:
    base = desk.other_base("b", n_layer=3)
    assert paclm("init", "w", "--corpus", "notes.jsonl", "--worlds", "4", "--base", str(base)).status == 0
    check(paclm("train", "w", "--dry-run"), r"lack 12 of the tensors .*transformer\.h\.2.*Fetch the base model again")
