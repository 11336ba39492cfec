"""The shipped `tiny`, its figures and its card agree."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from paclm.worlds.clinic import PRIVATE_SEED
from tiny.card import hash_weights, read_facts, render
from tiny.check import PASSAGE_CHARS, UNSEEN, note_sets, probe_notes, take_passages
from tiny.evaluate import Reader, hash_texts
from tiny.tokenizer import end_of_text_id

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHIPPED = ROOT / "src" / "paclm" / "data" / "tiny"
TOLERANCE = 1e-3
MAKE_AGAIN = "run `python tools/tiny card` to measure the notes and write the card again"


@pytest.fixture(scope="module")
def facts():
    return read_facts(DOCS)


def test_the_shipped_weights_are_those_of_the_card(facts):
    assert hash_weights(SHIPPED) == facts["weights_sha256"]


def test_the_note_generator_writes_the_notes_the_card_was_measured_on(facts):
    figures = facts["figures"]["tiny"]
    notes = [text for texts in note_sets().values() for text in texts]
    for name, texts in (("notes", notes), ("probe_notes", probe_notes())):
        assert hash_texts(texts) == figures[name]["text_sha256"], f"the generator has changed: {MAKE_AGAIN}"


def test_the_shipped_weights_reproduce_the_figure_of_the_card_and_slightly_different_ones_do_not(facts):
    notes, reader = probe_notes(), Reader.load(SHIPPED)
    recorded = facts["figures"]["tiny"]["probe_notes"]["all"]
    measured = reader.score(notes).figures()
    assert measured["bits_per_byte"] == pytest.approx(recorded["bits_per_byte"], abs=TOLERANCE)
    assert measured["num_tokens"] == recorded["num_tokens"]
    with torch.no_grad():
        for block in reader.model.transformer.h:
            block.mlp.c_proj.weight.mul_(0.7)
    measured = reader.score(notes).figures()
    assert abs(measured["bits_per_byte"] - recorded["bits_per_byte"]) > TOLERANCE


@pytest.mark.parametrize(
    ("template", "page"),
    [("card.md", DOCS / "research" / "tiny.md"), ("readme.md", SHIPPED / "README.md")],
    ids=["card", "readme"],
)
def test_the_pages_say_what_was_measured(facts, template, page):
    assert page.read_text() == render(template, facts), MAKE_AGAIN


def test_tiny_beats_the_five_gram_model_clearly_on_every_text(facts):
    ours, theirs = facts["figures"]["tiny"], facts["figures"]["ngram"]
    for group in ("passages", "held_out"):
        for part, figures in theirs[group].items():
            if part not in ("text_sha256", "all"):  # all that tiny held out includes notes
                assert ours[group][part]["bits_per_byte"] < 0.9 * figures["bits_per_byte"]


def test_the_private_hospital_is_as_new_to_tiny_as_any_other(facts):
    notes = facts["figures"]["tiny"]["notes"]
    others = [notes[str(seed)]["bits_per_byte"] for seed in UNSEEN]
    assert 0.9 * min(others) < notes[str(PRIVATE_SEED)]["bits_per_byte"] < 1.1 * max(others)
    assert notes["seen"]["bits_per_byte"] > 0.7 * min(others), "tiny knows hospitals by heart: train on more of them"


def test_all_models_of_the_card_read_the_same_passages(facts):
    assert len({figures["passages"]["text_sha256"] for figures in facts["figures"].values()}) == 1
    assert len({figures["passages"]["all"]["num_bytes"] for figures in facts["figures"].values()}) == 1


def test_the_model_is_readable_by_all_and_fits_the_package():
    files = [path for path in SHIPPED.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 25_000_000
    assert {path.name for path in files} >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    for path in files:
        assert path.stat().st_mode & 0o444 == 0o444, f"{path.name} is not readable by all"


def test_transformers_loads_the_same_tokenizer():
    from transformers import AutoTokenizer

    reader = Reader.load(SHIPPED)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED, local_files_only=True)
    text = "Seen on 14 March 2019 – BP 142/88; she’s “well”.\n\n  Plan: naïve 2.5 mg b.d."
    assert tokenizer(text)["input_ids"] == reader.tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == end_of_text_id(reader.tokenizer) == reader.model.config.eos_token_id


def test_passages_lie_at_even_distances_and_short_texts_come_whole():
    texts = ["a" * PASSAGE_CHARS + "b" * 10, "c" * 30, "d" * (2 * PASSAGE_CHARS)]
    assert take_passages(texts) == ["a" * PASSAGE_CHARS, "b" * 10, "c" * 30, "d" * PASSAGE_CHARS, "d" * PASSAGE_CHARS]
    assert take_passages(texts, 2) == ["a" * PASSAGE_CHARS, "c" * 30]
