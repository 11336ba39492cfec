"""Notes outside of workspaces: who else has a ledger over these records. They warn, and never stop anything."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from paclm.worlds.records import Corpus, ReadOptions, SourceRow, collect_records
from paclm.worlds.registry import (
    find_overlaps,
    ledgers_noted,
    note_place,
    overlap_sentence,
    remember_ledger,
    remember_workspace,
    sketch_texts,
)


def corpus_of(texts):
    return collect_records("notes", (SourceRow(f"n:{i}", {"text": t}) for i, t in enumerate(texts)), ReadOptions())


def give_ledger(created):
    """As a first token leaves it: the file, and the note that it was made."""
    (created.workspace.curator_path / "ledger.sqlite").touch()
    remember_ledger(created.workspace.manifest.id, "ledger of it")
    return created.workspace.path


def test_a_second_workspace_over_the_same_records_is_cautioned(make):
    first = make("one")
    assert make("two").cautions == ()  # as long as the first has no ledger nothing was spent on these records
    ledger = first.workspace.curator_path / "ledger.sqlite"
    ledger.touch()
    assert len(make("without-a-note").cautions) == 1
    ledger.unlink()
    path = give_ledger(first)
    (caution,) = make("three").cautions
    assert f"{path} (the same corpus)." in caution
    assert make("three").cautions == ()  # repeating is no further workspace
    for number in range(4):
        give_ledger(make(f"number-{number}"))
    (caution,) = make("last").cautions
    assert caution.count("the same corpus") == 3
    assert "and 2 more" in caution


def test_a_workspace_killed_before_it_was_noted_is_noted_when_init_is_repeated(make, state_folder):
    first = make("one")
    shutil.rmtree(state_folder)
    make("one")
    give_ledger(first)
    assert len(make("two").cautions) == 1


def test_a_corpus_that_shares_some_records_is_recognized_and_others_are_not(make, texts):
    give_ledger(make("one", corpus=corpus_of(texts), group_by=None))
    more = [f"something else entirely {number}" for number in range(200)]
    (caution,) = make("two", corpus=corpus_of([*texts[:150], *more[:50]]), group_by=None).cautions
    assert "about 60% of the same records" in caution  # 150 shared of 250
    assert make("three", corpus=corpus_of(more[50:]), group_by=None).cautions == ()


def test_a_workspace_that_was_deleted_still_counts_if_it_ever_had_a_ledger(make):
    shutil.rmtree(give_ledger(make("one")))
    shutil.rmtree(make("never-served").workspace.path)
    for place in ("one", "two"):  # also where another one takes its place
        (caution,) = make(place).cautions
        assert "(the same corpus; deleted" in caution


def test_a_workspace_that_was_moved_is_named_by_its_new_place_once_it_was_opened_there(make):
    created = make("one")
    moved = give_ledger(created).rename(created.workspace.path.with_name("moved"))
    note_place(created.workspace.manifest.id, moved)
    (caution,) = make("two").cautions
    assert f"{moved} (the same corpus)." in caution


def test_a_place_is_noted_only_for_a_workspace_that_was_noted_and_synthetic_ones_never_are(
    make, tmp_path, state_folder, corpus
):
    for identifier in ("never-noted", "../outside"):
        note_place(identifier, tmp_path)
    synthetic = Corpus(corpus.name, corpus.records, corpus.report, is_synthetic=True)
    make("one", corpus=synthetic)
    assert make("two", corpus=synthetic).cautions == ()
    assert not state_folder.exists()


def test_the_notes_keep_hashes_only_and_for_their_owner_only(make, state_folder, texts):
    give_ledger(make())
    for folder in ("workspaces", "ledgers"):
        (note,) = (state_folder / folder).iterdir()
        assert stat.S_IMODE(note.stat().st_mode) == 0o600
        assert stat.S_IMODE(note.parent.stat().st_mode) == 0o700
        assert not any(text in note.read_text() for text in texts)


def test_a_large_overlap_is_estimated_well_and_a_damaged_note_is_passed_over(state_folder):
    ours = [f"record {number}" for number in range(20_000)]
    others = ours[5000:] + [f"other {number}" for number in range(5000)]
    remember_workspace("other", Path("/elsewhere"), sketch_texts(others))
    remember_ledger("other", "its ledger")
    (state_folder / "workspaces" / "damaged.json").write_text("{")
    (sighting,) = find_overlaps(sketch_texts(ours), own_id="mine")
    # 15,000 of 25,000 shared; a share of 256 draws has standard deviation 0.031: off by 0.15 has chance 1e-6
    assert abs(sighting.shared - 0.6) < 0.15
    assert "/elsewhere (about " in overlap_sentence([sighting])
    assert find_overlaps(sketch_texts(ours), own_id="other") == []


def test_ledgers_are_noted_in_their_order_where_they_can_be(state_folder, monkeypatch):
    assert ledgers_noted("w") == []
    for name in ("one", "two"):
        remember_ledger("w", name)
    assert [note.ledger for note in ledgers_noted("w")] == ["one", "two"]
    (state_folder / "ledgers" / "w.json").write_text('{"ledgers": 3}')
    assert ledgers_noted("w") == []
    for place in (f"{os.devnull}/state", "/proc/state", "~nobody-of-this-name/state"):  # where nothing can be noted
        monkeypatch.setenv("PACLM_STATE_DIR", place)
        remember_ledger("w", "one")
        assert ledgers_noted("w") == []


@pytest.mark.parametrize("identifier", ["../../victim", "/victim", "a\0b", "\ud800", "", "x" * 500])
def test_an_id_that_somebody_else_wrote_leads_nowhere(state_folder, identifier):
    victim = state_folder.parent / "victim.json"
    victim.write_text("mine")
    remember_ledger(identifier, "one")
    assert ledgers_noted(identifier) == []
    assert victim.read_text() == "mine"
