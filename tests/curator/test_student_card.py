"""What is published about a student: the promise, its limits and its figures; no dissent, no path, no prompt."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from paclm.config import TrainingConfig
from paclm.curator.distill import DistilledText, TextSettings
from paclm.curator.student_card import StudentFacts, _public_name, describe_student, render_student_card
from paclm.curator.transcript import ReleasedText
from paclm.engine.student_training import HeldOut, Recipe
from paclm.privacy.accounting import nats_up, units_up
from paclm.worlds.fingerprints import Base
from paclm.worlds.layout import WORLDS_FILE
from paclm.worlds.manifest import Manifest

PRICE = units_up(2.0**-16)
PROMPT = 48_151_623
"""A token of a prompt that no other number on the card contains."""
DISSENT = 31
"""Of 200 tokens."""
HASHES = {"adapter_config.json": "c" * 64, "adapter_model.safetensors": "a" * 64}
HALF = {"spent_nats": 0.25, "total_nats": 0.5, "mia_bound": 0.838, "world_id_bound": 0.1234, "remaining_tokens": 77}
CORPUS = {"epsilon": 7.5, "delta": 1e-5, "unit": "record", "mia_bound": 0.778, "is_promised": True}


def facts_of(promise, release="gaussian", is_charged_by_dissent=True, heldout=True):
    is_half = promise == "half"
    settings = TextSettings(
        promise=promise, release=release, temperature=0.7, support_size=40, length=100, prompts=((PROMPT,),)
    )
    price = PRICE if is_half and release == "gaussian" else 0
    text = DistilledText(
        settings=settings,
        texts=[ReleasedText((PROMPT,), seed, 0.7, [9] * 100, 100 * price) for seed in (1, 2)],
        charged_nats=nats_up((DISSENT if is_charged_by_dissent else 200) * price),
        figures=HALF if is_half else CORPUS,
        committed_nats=0.5 if is_half else None,
    )
    manifest = Manifest(
        format=1, id="", created="", versions={}, arguments={"worlds": 128}, summary={}, files={}, base={}
    )
    return StudentFacts(
        base=Base("/home/quetzal/secret/model-7", Path("/home/quetzal/secret/model-7"), "f" * 64),
        text=text,
        beginnings="3 public prompts",
        training=TrainingConfig(rank=4, alpha=8.0),
        recipe=Recipe(),
        manifest=manifest,
        heldout=HeldOut(1234, 2.718281828, 2.236067977, 0.414213562, 0.442719099) if heldout else None,
        num_heldout=12,
    )


def published(facts):
    return render_student_card(facts, HASHES), describe_student(facts, HASHES)


def words(card):
    return " ".join(card.split())


@pytest.mark.parametrize("promise", ["half", "corpus"])
def test_neither_path_nor_prompt_nor_dissent_is_published(promise):
    card, about = published(facts_of(promise))
    content = card + json.dumps(about)
    for private in ("quetzal", "/home", str(PROMPT), f"{nats_up(DISSENT * PRICE):.4g}", str(DISSENT * PRICE)):
        assert private not in content
    assert "model-7" in content


def test_the_charge_rule_and_how_often_worlds_dissented_change_nothing_that_is_published():
    some, all_of_them = (published(facts_of("half", is_charged_by_dissent=is_some)) for is_some in (True, False))
    assert some[0] == all_of_them[0]
    assert {**some[1], "created": ""} == {**all_of_them[1], "created": ""}
    assert some[1]["nats"] == nats_up(200 * PRICE)


def test_what_is_spent_so_far_is_not_published():
    card, about = published(facts_of("half"))
    assert "spent_nats" not in about
    assert not re.search(r"\b0\.25\b", card)


def test_under_half_the_card_has_the_bounds_at_the_committed_total_and_the_limits():
    card, about = published(facts_of("half"))
    for expected in (
        "committed total of 0.5 nats",
        "more than 83.80% of the time",
        "1/128",
        "was, or will be, served from the same secret",
        "nothing about the realized one",
        "whether a record is in the corpus",
        "no bound on emission",
        "200 tokens",
        "at most 0.00305176 nats",
        "12 held-out records (1,234 tokens)",
        "| 2.72 | 2.24 |",
        "| 0.414 | 0.443 |",
        "no promise covers them",
        HASHES["adapter_model.safetensors"],
        "f" * 64,
    ):
        assert expected.lower() in words(card).lower()
    assert (about["mia_bound"], about["world_id_bound"], about["committed_nats"]) == (0.838, 0.1234, 0.5)
    assert (about["epsilon"], about["delta"], about["worlds"]) == (None, None, 128)
    assert about["voting"] == {"decoder": "gumbel", "temperature": 0.7, "support_size": 40}
    assert about["heldout"]["loss_student"] == 2.24


@pytest.mark.parametrize(("release", "is_free"), [("gaussian", False), ("plurality", True), ("mixture", True)])
def test_a_release_that_does_not_read_the_secret_is_named_as_free(release, is_free):
    card, about = published(facts_of("half", release))
    assert ("does not read the secret" in words(card)) == is_free
    assert (about["nats"] == 0.0) == is_free


def test_under_corpus_nothing_about_held_out_records_is_published():
    """How many there are would say whether one of them is in the corpus."""
    card, about = published(facts_of("corpus", "dp"))
    assert about["heldout"] is None
    for figure in ("12 held-out", "1,234", "2.72", "2.24"):
        assert figure not in card


def test_no_more_than_the_committed_total_is_called_charged():
    """Under the charge `dissent` a text may be longer than the total pays for at the full price."""
    facts = facts_of("half")
    facts = replace(facts, text=replace(facts.text, committed_nats=nats_up(150 * PRICE)))
    assert published(facts)[1]["nats"] == nats_up(150 * PRICE)


def test_imported_worlds_are_the_operators_word():
    facts = facts_of("half")
    imported = replace(facts.manifest, adapters={WORLDS_FILE: {"imported": {"at": "2026-11-18"}}})
    cards = [published(replace(facts, manifest=manifest))[0] for manifest in (facts.manifest, imported)]
    assert ["operator's word" in card for card in cards] == [False, True]


def test_under_corpus_the_card_has_epsilon_and_delta_and_no_nats():
    card, about = published(facts_of("corpus", "dp"))
    for expected in ("ε = 7.5", "δ = 1e-05", "one unit: record", "77.80%", "later one adds", "nothing is charged"):
        assert expected in words(card)
    assert "realized" not in card
    assert (about["epsilon"], about["delta"], about["mia_bound"]) == (7.5, 1e-5, 0.778)
    assert (about["world_id_bound"], about["committed_nats"], about["worlds"]) == (None, None, None)


def test_greedy_text_and_a_student_without_held_out_records_have_a_card():
    facts = facts_of("half", heldout=False)
    settings = replace(facts.text.settings, temperature=0.0)
    card, about = published(replace(facts, text=replace(facts.text, settings=settings)))
    assert "held-out" not in card
    assert (about["heldout"], about["voting"]["decoder"]) == (None, "greedy")


@pytest.mark.parametrize(
    ("name", "folder", "public"),
    [
        ("gpt2", "/cache/models--gpt2/snapshots/ab12", "gpt2"),
        ("org/model", "/cache/models--org--model/snapshots/ab12", "org/model"),
        ("tiny", "/site-packages/paclm/data/tiny", "tiny"),
        ("/srv/models/own", "/srv/models/own", "own"),
        ("models/own", "/srv/models/own", "own"),
        ("../own", "/srv/models/own", "own"),
        ("~/own", "/home/someone/own", "own"),
        ("weights/own.gguf", "/cache/converted/ab12", "own.gguf"),
    ],
)
def test_a_base_model_is_named_without_a_path_of_this_machine(name, folder, public):
    assert _public_name(Base(name, Path(folder), "f")) == public
