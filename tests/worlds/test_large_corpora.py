"""Corpora larger than memory: records in files, work in parts; killed and continued, the same workspace."""

import json
import random
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import asdict
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.engine.training_order import make_blocks
from paclm.errors import CorpusError, InvalidInput, WorkspaceError
from paclm.worlds import blocks, creation, line_files
from paclm.worlds import records as records_module
from paclm.worlds.assignment import assign_groups, units_of
from paclm.worlds.blocks import encode_stream, encode_texts, measure_lengths
from paclm.worlds.line_files import KeyTable, LineWriter
from paclm.worlds.readers import read_corpus
from paclm.worlds.records import ReadOptions, Record, SourceRow, StoredRecords, collect_records, to_line
from paclm.worlds.workspace import Workspace


class Fives:
    """A tokenizer that gives every five characters the same token, and counts the texts it was given."""

    all_special_ids = ()

    def __init__(self, stop_after=None):
        self.num_texts, self.stop_after = 0, stop_after

    def __len__(self):
        return 10

    def __call__(self, text, **options):
        if self.stop_after is not None and self.num_texts >= self.stop_after:
            raise KeyboardInterrupt
        self.num_texts += len(text)
        return {"input_ids": [[0] * (len(one) // 5) for one in text]}


@given(st.lists(st.text(max_size=30)), st.integers(1, 60))
def test_stored_records_are_those_that_were_written(texts, at_once):
    records = [Record(str(i), text, source=f"n:{i}") for i, text in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_files, "_BYTES_AT_ONCE", at_once)
        lines = LineWriter()
        stored = StoredRecords(lines)
        for number, record in enumerate(records):
            lines.append(to_line(record))
            assert stored[number] == stored[-1] == record  # also before all is written
        lines.close()
        assert list(stored) == records
        assert list(zip(stored, stored, strict=True)) == list(zip(records, records, strict=True))
    assert stored[1:-1] == records[1:-1]
    more = StoredRecords(lines, records)
    assert list(more) == more[:] == [*records, *records]
    with pytest.raises(IndexError):
        stored[len(records)]


@given(st.lists(st.integers(0, 20).map(lambda i: (i * 2**60 + i % 3) % 2**64), max_size=60))
def test_numbers_are_found_by_their_key_also_where_slots_collide(keys):
    table, plain = KeyTable(), {}
    for number, key in enumerate(keys):
        table.add(key, number)
        plain.setdefault(key, []).append(number)
    assert {key: list(table.find(key)) for key in {*keys, 5}} == {5: [], **plain}


def test_numbers_are_found_after_the_table_has_grown():
    table = KeyTable()
    for number in range(3000):
        table.add(number % 1700, number)
    assert [list(table.find(key)) for key in (0, 1699, 1700)] == [[0, 1700], [1699], []]


def described(corpus):
    return list(corpus.records), corpus.report, corpus.digest


def test_contents_with_the_same_hash_are_told_apart(tmp_path, monkeypatch):
    rows = [
        {"text": "same"},
        {"text": "same"},
        {"id": "x", "text": "same"},
        {"text": "other"},
        {"id": "x~2", "text": "z"},
    ]
    rows += [{"id": "x", "text": "same"}, {"text": "same"}]
    (tmp_path / "n.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = described(read_corpus(str(tmp_path / "n.jsonl")))
    monkeypatch.setattr(records_module, "_key", lambda content: 7)
    assert described(read_corpus(str(tmp_path / "n.jsonl"))) == found
    assert [record.id for record in found[0]][-4:-1] == [found[0][3].id, "x~2", "x~3"]


def test_a_full_disk_while_reading_is_an_error_with_its_place(tmp_path, monkeypatch):
    (tmp_path / "n.jsonl").write_text('{"text": "x"}\n')

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LineWriter, "append", full)
    with pytest.raises(CorpusError, match=rf"{tmp_path} .*No space left"):
        read_corpus(str(tmp_path / "n.jsonl"), folder=tmp_path)


@pytest.fixture
def in_parts(monkeypatch):
    monkeypatch.setattr(blocks, "_TEXTS_AT_ONCE", 7)
    monkeypatch.setattr(blocks, "_CHARACTERS_AT_ONCE", 900)


def test_parts_give_the_lengths_of_all_at_once_and_are_not_repeated(small_tokenizer, texts, tmp_path, in_parts):
    expected = [len(ids) for ids in encode_texts(small_tokenizer, texts)]
    assert measure_lengths(iter(texts), small_tokenizer, tmp_path, "a").tolist() == expected
    assert list(map(len, encode_stream(small_tokenizer, iter(texts)))) == expected
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > len(texts) // 7
    broken, again, steps = Fives(), Fives(), []
    parts[3].write_bytes(b"\0" * 8 * 100)  # of no part's size
    assert measure_lengths(texts, broken, tmp_path, "a", steps.append).sum() != 0
    assert 0 < broken.num_texts <= 7
    assert sum(steps) == len(texts)
    measure_lengths(texts, again, tmp_path, "b")  # of another tokenizer
    assert again.num_texts == len(texts)


def test_the_workspace_is_that_of_a_plain_creation_in_memory(make, corpus, in_parts):
    workspace = make(num_canaries=3, holdout=30).workspace
    held_out = {record.id for record in workspace.records("heldout")}
    assert 20 < len(held_out) < 40
    train = [record for record in corpus.records if record.id not in held_out]
    parts = {
        "train": [asdict(record) for record in train],
        "heldout": [asdict(record) for record in corpus.records if record.id in held_out],
        "canaries": [asdict(canary) for canary in workspace.canaries()],
    }
    for part, rows in parts.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        assert (workspace.path / "corpus" / f"{part}.jsonl").read_text() == lines
    members = [*train, *workspace.records("canaries")]
    np.testing.assert_array_equal(workspace.membership, assign_groups(units_of(members), 8, 101))
    assert workspace.manifest.summary["groups_in_worlds"] == len({record.group for record in train})


def made(created):
    manifest = created.workspace.manifest
    return manifest.files, manifest.digest, manifest.summary, manifest.arguments


def test_ctrl_c_keeps_lengths_without_texts_and_the_next_init_continues(make, texts, tmp_path, in_parts):
    whole = made(make("whole", tokenizer=Fives()))
    with pytest.raises(KeyboardInterrupt):
        make("clinic", tokenizer=Fives(stop_after=70))
    (site,) = tmp_path.glob(".clinic.init-*")
    assert [path.name for path in site.iterdir()] == [".lengths"]
    assert not any(b"no 0-" in path.read_bytes() for path in site.rglob("*") if path.is_file())
    assert not (tmp_path / "clinic").exists()
    rest = Fives()
    assert made(make("clinic", tokenizer=rest)) == whole
    assert 0 < rest.num_texts <= len(texts) - 70 + 14
    assert not list(tmp_path.glob(".clinic.init-*"))
    assert not list((tmp_path / "clinic").rglob(".lengths"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["stop", "full"])
def test_texts_that_were_written_are_deleted_and_lengths_kept(make, tmp_path, in_parts, monkeypatch, error):
    with monkeypatch.context() as patch:
        patch.setattr(creation.storage, "write_private_arrays", Mock(side_effect=error))  # after the records
        with pytest.raises((KeyboardInterrupt, WorkspaceError)):
            make(tokenizer=Fives())
    (site,) = tmp_path.glob(".clinic.init-*")
    assert [path.name for path in site.iterdir()] == [".lengths"]
    rest = Fives()
    assert make(tokenizer=rest).is_new
    assert rest.num_texts == 0


def test_what_is_refused_is_refused_before_the_slow_part_and_leaves_nothing(make, tmp_path, in_parts, monkeypatch):
    with pytest.raises(InvalidInput):
        make(holdout=500, tokenizer=Fives(stop_after=0))
    assert not list(tmp_path.glob("*clinic*"))

    def lose(site, target):
        raise WorkspaceError("lost")

    monkeypatch.setattr(creation, "_publish", lose)
    with pytest.raises(WorkspaceError, match="lost"):
        make()
    assert not list(tmp_path.glob("*clinic*"))


WORKER = """
import os, signal, sys
from pathlib import Path
from paclm.worlds import blocks, creation
from paclm.worlds.fingerprints import Base, fingerprint_base
from paclm.worlds.readers import read_corpus

blocks._TEXTS_AT_ONCE = 40
class Words:
    all_special_ids, num_texts = [], 0
    def __len__(self): return 10
    def __call__(self, text, **options):
        self.num_texts += len(text)
        return {"input_ids": [[0] * len(t.split()) for t in text]}

corpus, target, folder, kill_at = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
touches = 0
def touch(event, arguments):
    global touches
    if (event == "open" or event.startswith("os.")) and str(target.parent) in repr(arguments):
        touches += 1
        if touches == kill_at: os.kill(os.getpid(), signal.SIGKILL)
base, words = Base("small", folder, fingerprint_base(folder)), Words()
sys.addaudithook(touch)
read = read_corpus(str(corpus), folder=target.parent)
creation.create_workspace(target, corpus=read, base=base, tokenizer=words, num_worlds=16)
print(touches, words.num_texts)
"""


def test_killed_at_random_instants_and_repeated_it_goes_on_and_gives_the_same_workspace(state_folder, base, tmp_path):
    corpus = tmp_path / "notes.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"private note {i} " * (1 + i % 9)}) + "\n" for i in range(2000)))

    def run(name, kill_at=0):
        target = tmp_path / name / "clinic"
        target.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-c", WORKER, corpus, target, base.folder, str(kill_at)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, target, [int(word) for word in done.stdout.split()]

    _, whole, (num_touches, num_texts) = run("whole")
    assert (num_texts, num_touches > 150) == (2000, True)  # at least three for each of 50 parts
    draw = random.Random(3)
    for _ in range(4):
        status, target, _ = run("killed", draw.randrange(12, 80))
        assert status == -signal.SIGKILL
        assert not target.exists()
    status, target, (_, num_texts) = run("killed")
    assert status == 0
    assert 0 < num_texts < 2000  # the rest was done by the runs that were killed
    one, other = Workspace.open(whole), Workspace.open(target)
    assert one.manifest.files == other.manifest.files
    assert one.manifest.summary == other.manifest.summary
    assert [path.name for path in target.parent.iterdir()] == ["clinic"]


def test_memory_does_not_grow_with_the_texts(make, tmp_path, monkeypatch):
    """30 MB of text and 6 million tokens, of which never more than a part are in memory, in init and in training."""
    monkeypatch.setattr(blocks, "_CHARACTERS_AT_ONCE", 1 << 18)
    rows = (SourceRow(f"n:{i}", {"text": f"{i} " + "word " * 20_000}) for i in range(300))
    tracemalloc.start()
    try:
        corpus = collect_records("notes", rows, ReadOptions(), folder=tmp_path)
        workspace = make("large", corpus=corpus, group_by=None, tokenizer=Fives()).workspace
        encoded = encode_stream(Fives(), (record.text for record in workspace.members()))
        cut = make_blocks(encoded, 512, 20_000, folder=tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(cut.tokens) > 4_000_000
    assert peak < 8e6
