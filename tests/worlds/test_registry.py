"""Notes outside of workspaces: who else has a ledger over these records. They warn, and never stop anything."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paclm.worlds.records import Corpus, ReadOptions, SourceRow, collect_records
from paclm.worlds.registry import (
    find_overlaps,
    find_workspaces,
    is_serving_noted,
    ledgers_noted,
    lock_notes,
    note_place,
    overlap_sentence,
    remember_ledger,
    remember_serving,
    remember_training,
    remember_workspace,
    sketch_noted,
    sketch_texts,
    trainings_noted,
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


TRAINING = {"sampling_rate": 0.5, "noise_multiplier": 2.064, "steps": 40}


def test_trainings_and_serving_are_noted_beside_each_other(state_folder):
    assert (trainings_noted("w"), is_serving_noted("w")) == ({}, False)
    assert remember_training("w", "run-1", TRAINING)
    with lock_notes() as has_notes:
        assert has_notes
        assert remember_serving("w")
    assert remember_training("w", "run-2", {**TRAINING, "steps": 60})
    assert is_serving_noted("w")
    assert trainings_noted("w") == {"run-1": TRAINING, "run-2": {**TRAINING, "steps": 60}}
    assert (trainings_noted("other"), is_serving_noted("other")) == ({}, False)
    assert stat.S_IMODE((state_folder / "dp" / "w.json").stat().st_mode) == 0o600


def test_where_nothing_can_be_noted_callers_are_told(monkeypatch):
    monkeypatch.setenv("PACLM_STATE_DIR", f"{os.devnull}/state")
    assert not remember_training("w", "run-1", TRAINING)
    with lock_notes() as has_notes:
        assert not has_notes
        assert not remember_serving("w")
    assert (trainings_noted("w"), is_serving_noted("w"), sketch_noted("w")) == ({}, False, None)


def test_workspaces_over_the_same_records_are_found_with_or_without_a_ledger(make, texts):
    first = make("one").workspace
    sketch = sketch_noted(first.manifest.id)
    assert sketch == sketch_texts(texts)
    second = make("two").workspace
    make("three", corpus=corpus_of([f"something else {number}" for number in range(200)]), group_by=None)
    (sighting,) = find_workspaces(sketch, own_id=first.manifest.id)
    assert (sighting.identifier, sighting.path, sighting.is_gone) == (second.manifest.id, second.path, False)
    shutil.rmtree(second.path)
    (sighting,) = find_workspaces(sketch, own_id=first.manifest.id)
    assert sighting.is_gone
    assert find_overlaps(sketch, own_id=first.manifest.id) == []


def test_a_workspace_over_records_that_were_trained_on_with_dp_is_cautioned(make, texts):
    first = make("one").workspace
    remember_training(first.manifest.id, "run-1", TRAINING)
    shutil.rmtree(first.path)
    (caution,) = make("two").cautions
    assert "DP trainings over these records" in caution
    assert str(first.path) in caution
    apart = corpus_of([f"something else {number}" for number in range(200)])
    assert make("three", corpus=apart, group_by=None).cautions == ()


def test_processes_that_note_at_once_lose_nothing(state_folder):
    code = (
        "import sys; from paclm.worlds.registry import remember_training\n"
        "for number in range(20): remember_training('w', f'{sys.argv[1]}-{number}', {})"
    )
    workers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert len(trainings_noted("w")) == 60
