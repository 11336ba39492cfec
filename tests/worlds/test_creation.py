"""Making a workspace: repeated, refused, interrupted."""

import os
import signal
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from paclm.errors import InvalidInput, WorkspaceError
from paclm.worlds import creation
from paclm.worlds.assignment import draw_holdout, number_units
from paclm.worlds.fingerprints import Base
from paclm.worlds.records import ReadOptions, SourceRow, collect_records
from paclm.worlds.workspace import Workspace

FIXTURES = Path(__file__).parents[1] / "fixtures"


def corpus_of(texts, name="notes"):
    return collect_records(name, (SourceRow(f"n:{i}", {"text": text}) for i, text in enumerate(texts)), ReadOptions())


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_repeating_with_the_same_arguments_changes_nothing_and_elsewhere_gives_the_same_worlds(make):
    first = make()
    before = contents(first.workspace.path)
    again = make()
    assert (first.is_new, again.is_new) == (True, False)
    assert contents(first.workspace.path) == before
    here, there = first.workspace.manifest, make("two").workspace.manifest
    assert (here.files, here.digest) == (there.files, there.digest)
    assert here.id != there.id


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_worlds": 16}, r"--worlds \(was 8, now 16\)"),
        ({"seed": 7}, r"--seed \(was 101, now 7\)"),
        ({"holdout": 3}, r"--holdout \(was 40, now 3\)"),
        ({"num_canaries": 2}, r"--canaries \(was 0, now 2\)"),
        ({"group_by": None}, r"--group-by \(was patient, now None\)"),
        ({"max_record_tokens": 64}, r"--max-record-tokens \(was 2048, now 64\)"),
        ({"base": Base("other", Path("/nowhere"), "f" * 64)}, r"the base model \(was small, "),
    ],
    ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
)
def test_repeating_with_other_arguments_names_the_difference(make, changes, named):
    path = make().workspace.path
    before = contents(path)
    with pytest.raises(WorkspaceError, match=named):
        make(**changes)
    assert contents(path) == before


def test_a_changed_corpus_is_refused_with_its_counts(make, texts):
    make(corpus=corpus_of(texts), group_by=None)
    with pytest.raises(WorkspaceError, match=r"200 then, 199 now"):
        make(corpus=corpus_of(texts[1:]), group_by=None)
    with pytest.raises(WorkspaceError, match="200 then and now"):
        make(corpus=corpus_of([*texts[1:], "another"]), group_by=None)


def grouped(texts, group_by):
    fields = {"clinic": "north", "folder": "."}
    rows = [{"text": text, "patient": f"p{i // 2}", "ward": f"w{i % 20}", **fields} for i, text in enumerate(texts)]
    return collect_records(
        "notes", (SourceRow(f"n:{i}", row) for i, row in enumerate(rows)), ReadOptions(group_by=group_by)
    )


def test_other_groups_of_the_same_texts_are_no_other_records(make, texts):
    make(corpus=grouped(texts, "patient"))
    for group_by in ("ward", None):
        with pytest.raises(WorkspaceError, match=rf": --group-by \(was patient, now {group_by}\)\."):
            make(corpus=grouped(texts, group_by), group_by=group_by)
    with pytest.raises(WorkspaceError, match=r": --holdout \(was 40, now 3\); --group-by \(was patient, now ward\)\."):
        make(corpus=grouped(texts, "ward"), group_by="ward", holdout=3)
    with pytest.raises(WorkspaceError, match=r"200 then and now.*; --group-by"):
        make(corpus=grouped([*texts[1:], "another"], "ward"), group_by="ward")
    with pytest.raises(WorkspaceError, match=r"200 then and now[^;]*\."):
        make(corpus=grouped(texts, "ward"), group_by="patient")  # the groups changed, and not by an option


@pytest.mark.parametrize(("group_by", "remedy"), [("folder", "sub-folder per person"), ("clinic", "clinic per person")])
def test_a_single_group_is_refused(make, texts, group_by, remedy):
    with pytest.raises(InvalidInput, match=f"200 .*{group_by}.*--group-by.*{remedy}"):
        make(corpus=grouped(texts, group_by), group_by=group_by)


def test_an_occupied_place_is_never_written_over(make, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("full", "file", "file/clinic"):
        with pytest.raises(WorkspaceError, match=name):
            make(name)
    assert contents(tmp_path / "full") == {"thesis.txt": b"mine"}
    assert make("empty").is_new
    assert make("new/parents/clinic").is_new
    assert make("odd [name] *").is_new
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkspaceError, match="current folder"):
        make(".")


def test_a_full_disk_leaves_nothing_behind(make, tmp_path, monkeypatch):
    monkeypatch.setattr(creation.storage, "write_private", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(WorkspaceError, match=r"clinic.*No space left on device"):
        make()
    assert not list(tmp_path.glob("*clinic*"))


def test_few_records_are_cautioned_and_worlds_without_records_refused(make, texts):
    created = make("few", corpus=corpus_of(texts[:20]), group_by=None, holdout=0)
    assert " 20 " in created.cautions[0]
    with pytest.raises(InvalidInput, match=r"8 .* 4096 worlds"):
        make("fewer", corpus=corpus_of(texts[:8]), group_by=None, holdout=0, num_worlds=4096)


def test_cut_records_are_counted(make):
    summary = make(max_record_tokens=16).workspace.manifest.summary
    assert summary["num_tokens_dropped"] > 0
    assert 0 < summary["held_out_cut"] < summary["num_records_cut"]
    whole = make("whole").workspace.manifest.summary
    assert whole["num_records_cut"] == whole["held_out_cut"] == 0


def test_a_long_record_is_counted_as_cut_in_whatever_part_it_comes_to_lie(make, texts):
    cuts = set()
    for number in range(10):
        corpus = corpus_of([*texts[:40], f"{number} " + "word " * 3000])
        summary = make(f"long-{number}", corpus=corpus, group_by=None, holdout=20).workspace.manifest.summary
        assert summary["num_records_cut"] == 1
        assert summary["num_tokens_dropped"] > 0
        cuts.add(summary["held_out_cut"])
    assert cuts == {0, 1}  # the same seed: it lay in both parts


def sides(workspace):
    return {record.text: part for part in ("train", "heldout") for record in workspace.records(part)}


def test_the_constants_of_dp_training_are_fixed_at_init(make, corpus, texts):
    arguments = make(num_canaries=2).workspace.manifest.arguments
    assert (arguments["units"], arguments["split"]) == (len({record.group for record in corpus.records}) + 2, "hash")
    copies = make("copies", corpus=corpus_of([*texts, texts[0]]), group_by=None, holdout=40).workspace
    assert copies.manifest.arguments["units"] == 201  # all copies are kept, each its own unit
    assert len(copies.records("train")) + len(copies.records("heldout")) == 201


def test_at_a_fixed_rate_one_record_more_changes_no_side_on_disk(make, texts):
    small = make("small", corpus=corpus_of(texts[:100]), group_by=None, holdout=20, num_canaries=2).workspace
    large = make("large", corpus=corpus_of(texts[50:] + texts[:50]), group_by=None, holdout=40, num_canaries=2)
    before, after = sides(small), sides(large.workspace)
    assert {text: after[text] for text in before} == before  # 0.2 both times
    assert small.canaries() == large.workspace.canaries()


def test_no_holdout_holds_nothing_out_and_more_than_there_are_is_refused(make, texts):
    assert len(make(holdout=0).workspace.records("heldout")) == 0
    with pytest.raises(InvalidInput, match="leave 0 "):
        make("none", holdout=500)
    with pytest.raises(InvalidInput, match=r"holdout.*-1"):
        make("negative", holdout=-1)


def test_a_record_that_would_be_one_unit_with_a_canary_is_refused(make, texts):
    rows = [SourceRow(f"n:{i}", {"text": text, "id": f"canary-{i:03d}"}) for i, text in enumerate(texts)]
    corpus = collect_records("notes", rows, ReadOptions())
    with pytest.raises(InvalidInput, match="canary-000"):
        make(corpus=corpus, group_by=None, num_canaries=2)
    assert make(corpus=corpus, group_by=None).is_new


def test_a_workspace_of_an_earlier_version_is_found_again_and_keeps_its_split(tmp_path, state_folder, small_tokenizer):
    with tarfile.open(FIXTURES / "workspace-adfd882" / "workspace.tar.gz") as archive:
        archive.extractall(tmp_path, filter="tar")
    older = Workspace.open(tmp_path / "workspace")
    assert not {"units", "split"} & set(older.manifest.arguments)
    before = contents(older.path)
    records = sorted([*older.records("train"), *older.records("heldout")], key=lambda r: int(r.source.split(":")[1]))
    again = {"base": older.base, "tokenizer": small_tokenizer, "num_worlds": 8, "holdout": 4}
    repeated = creation.create_workspace(older.path, corpus=corpus_of([r.text for r in records]), **again)
    assert not repeated.is_new
    assert contents(older.path) == before
    is_out = draw_holdout(records, number_units(records), 4 / 16, 101)
    held_out = {record for record, out in zip(records, is_out, strict=True) if out}
    assert held_out != set(older.records("heldout"))  # one drawn again would be seen


WORKER = """
import os, signal, sys
from pathlib import Path
from paclm.worlds import creation
from paclm.worlds.fingerprints import Base, fingerprint_base
from paclm.worlds.records import ReadOptions, SourceRow, collect_records

class Words:
    all_special_ids = []
    def __len__(self): return 10
    def __call__(self, text, **options): return {"input_ids": [[0] * len(t.split()) for t in text]}

target, folder, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
publish = creation._publish
def slow_publish(site, target):
    print("built", flush=True)
    if how == "wait": sys.stdin.read()
    publish(site, target)
creation._publish = slow_publish
touches = 0
def touch(event, arguments):
    global touches
    if (event == "open" or event.startswith("os.")) and str(target.parent) in repr(arguments):
        touches += 1
        if str(touches) == how: os.kill(os.getpid(), signal.SIGKILL)
rows = (SourceRow(f"n:{i}", {"text": f"private note {i} " * 20}) for i in range(3000))
corpus = collect_records("notes", rows, ReadOptions())
base = Base("small", folder, fingerprint_base(folder))
sys.addaudithook(touch)
creation.create_workspace(target, corpus=corpus, base=base, tokenizer=Words(), num_worlds=64)
print("touches", touches, flush=True)
"""


def start(target, base, how):
    """An init that waits for ever before the end, or is killed before so many touches of the disk, or goes through."""
    command = [sys.executable, "-c", WORKER, str(target), str(base.folder), how]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert how != "wait" or worker.stdout.readline() == "built\n"
    return worker


def num_records(path):
    return sum(len(Workspace.open(path).records(part)) for part in ("train", "heldout"))


def end_of(worker):
    return worker.communicate()[0], worker.returncode


def test_an_init_killed_just_before_the_end_can_be_repeated(state_folder, base, tmp_path):
    target = tmp_path / "clinic"
    worker = start(target, base, "wait")
    worker.kill()
    assert end_of(worker) == ("", -signal.SIGKILL)
    assert not target.exists()
    (left,) = tmp_path.glob(".clinic.init-*")  # complete, hidden, private
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    assert end_of(start(target, base, "go"))[1] == 0
    assert num_records(target) == 3000
    assert not list(tmp_path.glob(".clinic.init-*"))


def test_an_init_killed_at_any_touch_of_the_disk_leaves_all_or_nothing(state_folder, base, tmp_path):
    num_touches = int(end_of(start(tmp_path / "whole", base, "go"))[0].split()[-1])
    assert num_touches > 20
    target, is_there = tmp_path / "clinic", []
    for part in range(5):  # the first touch, some on the way, and one of the last
        assert end_of(start(target, base, str(1 + (num_touches - 3) * part // 4)))[1] == -signal.SIGKILL
        is_there.append(target.exists())
        if is_there[-1]:
            assert num_records(target) == 3000
            break
    assert is_there[:3] == [False] * 3
    assert end_of(start(target, base, "go"))[1] == 0
    assert num_records(target) == 3000
    assert not list(tmp_path.glob(".clinic.init-*"))


def test_a_running_init_is_not_disturbed_by_a_second_one(make, state_folder, base, tmp_path):
    worker = start(tmp_path / "clinic", base, "wait")
    (site,) = tmp_path.glob(".clinic.init-*")
    before = contents(site)
    assert make().is_new
    assert contents(site) == before
    worker.kill()
    worker.communicate()


def test_two_inits_at_once_do_not_mix(make, tmp_path, monkeypatch):
    publish = creation._publish

    def lose_the_race(site, target):
        monkeypatch.setattr(creation, "_publish", publish)
        make(seed=7)
        publish(site, target)

    monkeypatch.setattr(creation, "_publish", lose_the_race)
    with pytest.raises(WorkspaceError, match="clinic"):
        make()
    assert Workspace.open(tmp_path / "clinic").manifest.arguments["seed"] == 7
    assert not list(tmp_path.glob(".clinic.init-*"))


def test_repetitions_and_sources_survive_the_disk_and_a_missing_note_is_a_caution(make, monkeypatch):
    monkeypatch.setenv("PACLM_STATE_DIR", f"{os.devnull}/state")
    created = make(num_canaries=14)
    assert created.is_new
    assert "PACLM_STATE_DIR" in " ".join(created.cautions)
    repetitions = [r for r in (1, 2, 4, 8, 16, 32, 64) for _ in "ab"]
    assert [canary.repetitions for canary in created.workspace.canaries()] == repetitions
    assert [record.repetitions for record in created.workspace.records("canaries")][-1] == 64
    assert created.workspace.records("train")[0].source.startswith("n:")
