"""One promise per corpus: each is refused where the other was served, here or elsewhere, unless that is accepted."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

from paclm.curator import promises
from paclm.curator.promises import claim_corpus, claim_half, is_corpus_promised, trainings_elsewhere
from paclm.errors import LedgerBusy, LedgerTampered, PromiseConflict
from paclm.ledger.dp_log import DpLog
from paclm.ledger.recovery import backup
from paclm.worlds.layout import dp_log_path
from paclm.worlds.registry import remember_training, remember_workspace, sketch_texts
from paclm.worlds.workspace import Workspace

TRAINING = {"sampling_rate": 0.5, "noise_multiplier": 2.064, "steps": 40}


@pytest.fixture
def notes(no_notes, tmp_path, monkeypatch):
    """A folder for the notes of this machine."""
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "notes"))


@pytest.fixture
def other(make, notes, texts):
    """Other workspaces of this machine, over these texts."""

    def other(name, own_texts=texts[:60]):
        path = make(name).path
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "id": name}))
        remember_workspace(name, path, sketch_texts(own_texts))
        return Workspace.open(path)

    return other


def use_half(workspace, open_curator, tokens=3, **options):
    with open_curator(workspace, **options) as curator:
        if tokens:
            curator.generate("the", tokens)
        return curator.cautions


def events(workspace):
    return [event["kind"] for event in DpLog(dp_log_path(workspace.path)).events()]


def test_each_promise_is_refused_where_the_other_was_served(make, open_curator):
    half, corpus = make("half"), make("corpus")
    use_half(half, open_curator)
    with pytest.raises(PromiseConflict, match=r"half was served.*--mix-promises"):
        claim_corpus(half)
    assert events(half) == []
    claim_corpus(corpus)
    assert events(corpus) == ["served"]
    with pytest.raises(PromiseConflict, match=r"corpus was served.*--mix-promises"):
        use_half(corpus, open_curator)
    claim_corpus(corpus)  # the same promise again, also after the refusal
    use_half(half, open_curator)
    assert (is_corpus_promised(half), is_corpus_promised(corpus)) == (False, True)


def test_a_ledger_without_a_token_is_no_release(make, open_curator):
    workspace = make()
    use_half(workspace, open_curator, tokens=0)
    claim_corpus(workspace)
    assert is_corpus_promised(workspace)


@pytest.mark.parametrize("what", ["copy", "restored", "backup"])
def test_a_copy_of_the_ledger_from_before_the_first_token_does_not_hide_it(other, open_curator, tmp_path, what):
    workspace = other("one")
    use_half(workspace, open_curator, tokens=0)
    copy = Path(shutil.copytree(workspace.path, tmp_path / "copy"))
    if what == "backup":
        backup(workspace.ledger_path, tmp_path / "backup.sqlite")
    use_half(Workspace.open(copy) if what == "copy" else workspace, open_curator)
    if what == "restored":
        shutil.rmtree(workspace.path)
        copy.rename(workspace.path)
    elif what == "backup":
        shutil.rmtree(os.environ["PACLM_STATE_DIR"])
        workspace.ledger_path.unlink()
        (tmp_path / "backup.sqlite").rename(workspace.ledger_path)
    with pytest.raises(PromiseConflict, match="half was served"):
        claim_corpus(workspace)
    assert not is_corpus_promised(workspace)


def test_that_promises_were_mixed_is_in_the_logs_of_all_workspaces(other, open_curator, tmp_path, monkeypatch):
    """The one that serves `corpus` may be moved to where nothing is noted."""
    half, corpus = other("half"), other("corpus")
    claim_corpus(corpus)
    with pytest.warns(UserWarning, match="Nothing is promised"):
        use_half(half, open_curator, mix_promises=True)
    assert events(half) == ["mixed"]
    assert events(corpus) == ["served", "mixed"]
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "other machine"))
    assert not is_corpus_promised(corpus)
    with pytest.raises(PromiseConflict, match="--mix-promises"):
        claim_corpus(corpus)
    claim_corpus(corpus, mix_promises=True)


def test_a_few_records_out_of_a_large_corpus_count(other, open_curator):
    """900 of 100,000: about 37 of them are among the noted hashes of the large one, none with chance 1e-16."""
    records = [f"record {number}" for number in range(100_000)]
    few, many = other("few", records[:900]), other("many", records)
    use_half(few, open_curator)
    with pytest.raises(PromiseConflict, match=r"few \(.*of the same records"):
        claim_corpus(many)


@pytest.mark.parametrize("first", ["half", "corpus"])
def test_once_both_are_accepted_nothing_is_promised_for_good(make, open_curator, first):
    workspace = make()
    if first == "half":
        use_half(workspace, open_curator)
        (caution,) = [c for c in claim_corpus(workspace, mix_promises=True) if "PACLM_STATE_DIR" not in c]
    else:
        claim_corpus(workspace, mix_promises=True)  # nothing to mix yet
        assert is_corpus_promised(workspace)
        with pytest.warns(UserWarning, match="Nothing is promised"):
            (caution,) = use_half(workspace, open_curator, tokens=0, mix_promises=True)
    assert promises.NOTHING_PROMISED in caution
    assert sorted(events(workspace)) == ["mixed", "served"]
    assert not is_corpus_promised(workspace)
    assert promises.NOTHING_PROMISED in claim_corpus(workspace)[0]  # accepted once: said at every start
    with pytest.warns(UserWarning, match="Nothing is promised"):
        use_half(workspace, open_curator)
    assert events(workspace).count("mixed") == 1


def test_a_curator_that_has_not_released_yet_keeps_the_other_promise_out(make, other, open_curator):
    workspace, beside = other("one"), other("two")
    with open_curator(workspace):
        for refused in (workspace, beside):
            with pytest.raises(PromiseConflict, match=str(workspace.path)):
                claim_corpus(refused)
        assert is_corpus_promised(beside)  # no token has left
    claim_corpus(beside)


def test_workspaces_over_the_same_records_count_and_others_do_not(other, open_curator, texts):
    half, beside, apart = other("half"), other("beside"), other("apart", texts[100:])
    use_half(half, open_curator)
    with pytest.raises(PromiseConflict, match=str(half.path)):
        claim_corpus(beside)
    claim_corpus(apart)
    corpus = other("corpus", texts[100:])
    with pytest.raises(PromiseConflict, match=str(apart.path)):
        use_half(corpus, open_curator)
    use_half(half, open_curator)
    assert not is_corpus_promised(beside)


def test_a_workspace_that_came_from_another_machine_finds_the_others_by_its_records(other, open_curator):
    half, moved = other("half"), other("moved")
    use_half(half, open_curator)
    (Path(os.environ["PACLM_STATE_DIR"]) / "workspaces" / "moved.json").unlink()
    with pytest.raises(PromiseConflict, match=str(half.path)):
        claim_corpus(moved)


def test_deleted_workspaces_count(other, open_curator, texts):
    half = other("half")
    use_half(half, open_curator)
    shutil.rmtree(half.path)
    with pytest.raises(PromiseConflict, match="deleted"):
        claim_corpus(other("beside"))
    corpus = other("corpus", texts[100:])
    claim_corpus(corpus)
    shutil.rmtree(corpus.path)
    with pytest.raises(PromiseConflict, match="deleted"):
        use_half(other("another", texts[100:]), open_curator)


def test_mixing_in_one_workspace_ends_the_promise_of_another(other, open_curator):
    corpus, half = other("corpus"), other("half")
    claim_corpus(corpus)
    assert is_corpus_promised(corpus)
    with pytest.warns(UserWarning, match="Nothing is promised"):
        use_half(half, open_curator, mix_promises=True)
    assert not is_corpus_promised(corpus)
    with pytest.raises(PromiseConflict, match=str(half.path)):
        claim_corpus(corpus)


def test_removing_files_does_not_bring_a_promise_back(other, open_curator):
    half = other("half")
    use_half(half, open_curator)
    for name in ("ledger.sqlite", "ledger.lock", "secret.json"):  # the note on this machine remains
        (half.curator_path / name).unlink()
        with pytest.raises(PromiseConflict):
            claim_corpus(half)
    corpus = other("corpus", ["another corpus"])
    claim_corpus(corpus)
    dp_log_path(corpus.path).unlink()
    with pytest.raises(PromiseConflict):
        use_half(corpus, open_curator)


def test_without_notes_a_secret_without_its_ledger_is_enough_and_a_damaged_ledger_too(make, open_curator):
    workspace = make()
    use_half(workspace, open_curator, tokens=0)
    ledger = workspace.ledger_path.read_bytes()
    workspace.ledger_path.write_bytes(ledger[:5000])
    with pytest.raises(PromiseConflict):
        claim_corpus(workspace)
    workspace.ledger_path.unlink()
    with pytest.raises(PromiseConflict):
        claim_corpus(workspace)


def test_a_log_that_was_changed_lets_neither_promise_start(make, open_curator):
    workspace = make()
    claim_corpus(workspace)
    path = dp_log_path(workspace.path)
    path.write_text(path.read_text().replace("served", "trained"))
    for start in (claim_corpus, claim_half):
        with pytest.raises(LedgerTampered):
            start(workspace)


def test_a_machine_without_notes_is_a_caution(make, notes):
    workspace = make()
    assert claim_corpus(workspace) == []
    os.environ["PACLM_STATE_DIR"] = f"{os.devnull}/state"  # `notes` restores it
    (caution,) = claim_corpus(workspace)
    assert "PACLM_STATE_DIR" in caution


def test_nothing_starts_between_check_and_record(other, open_curator, monkeypatch):
    """The check of `corpus` is held up right after it found nothing: no curator may start there or beside."""
    workspace, beside = other("one"), other("two")
    found, refusals = promises._releases_of_half, []

    def start_beside():
        with pytest.raises(PromiseConflict):
            claim_half(beside)
        refusals.append("beside")

    thread = threading.Thread(target=start_beside)

    def held_up(checked):
        answer = found(checked)
        with pytest.raises(LedgerBusy):
            open_curator(workspace)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()  # it waits for the notes
        return answer

    monkeypatch.setattr(promises, "_releases_of_half", held_up)
    claim_corpus(workspace)
    thread.join()
    assert refusals == ["beside"]


STARTER = """
import sys, warnings
from curator.deployments import ScriptedEngine
from paclm import Curator
from paclm.curator.promises import claim_corpus
from paclm.engine.base_model import base_of, load_tokenizer
from paclm.errors import PaclmError
from paclm.worlds.workspace import Workspace

warnings.simplefilter("ignore")
print("ready", flush=True)
for line in sys.stdin:
    path, curator = line.strip(), None
    try:
        if sys.argv[1] == "half":
            workspace = Workspace.open(path)
            curator = Curator.open(workspace, engine=ScriptedEngine(), tokenizer=load_tokenizer(base_of(workspace)))
        else:
            claim_corpus(Workspace.open(path))
        print("started", flush=True)
    except PaclmError as error:
        print(type(error).__name__, flush=True)
    sys.stdin.readline()
    if curator is not None:
        curator.close()
    print("ended", flush=True)
"""


def test_of_two_processes_that_start_at_once_exactly_one_serves(make, notes, each_store, tmp_path):
    """In one folder; or on two hosts, each with notes and a copy of its own, and one database."""
    promised = ("half", "corpus")
    hosts = promised if each_store == "database" else ("host", "host")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    starters = []
    for promise, host in zip(promised, hosts, strict=True):
        own = {"PYTHONPATH": str(Path(__file__).parents[1]), "PACLM_STATE_DIR": str(tmp_path / host)}
        program = [sys.executable, "-c", STARTER, promise]
        starters.append(subprocess.Popen(program, env={**os.environ, **own}, **pipes))

    def ask(*lines):
        for starter, line in zip(starters, lines, strict=True):
            starter.stdin.write(f"{line}\n")
        return [starter.stdout.readline().strip() for starter in starters]

    try:
        assert [starter.stdout.readline() for starter in starters] == ["ready\n"] * 2
        for number in range(8):
            paths = [make(f"{host}-{number}").path for host in hosts]
            for path in paths:
                manifest = json.loads((path / "manifest.json").read_text())
                (path / "manifest.json").write_text(json.dumps({**manifest, "id": f"round-{number}"}))
            answers = ask(*paths)
            assert answers.count("started") == 1, answers
            assert ask("", "") == ["ended", "ended"]
            if each_store == "database":
                with psycopg.connect(os.environ["PACLM_LEDGER"]) as db:
                    db.execute("DROP SCHEMA paclm CASCADE")
    finally:
        for starter in starters:
            starter.kill()
            starter.communicate()


def test_trainings_of_other_workspaces_and_of_lost_logs_are_known(other, texts):
    own, beside, gone, apart = other("own"), other("beside"), other("gone"), other("apart", texts[100:])
    DpLog(dp_log_path(own.path)).append("training", run="own", **TRAINING)
    remember_training("own", "own", TRAINING)
    remember_training("own", "lost", TRAINING)  # its line is no longer in the log
    DpLog(dp_log_path(beside.path)).append("training", run="beside", **TRAINING)
    remember_training("gone", "gone", TRAINING)
    shutil.rmtree(gone.path)
    remember_training("apart", "apart", TRAINING)
    assert apart.path.exists()
    found = trainings_elsewhere(own)
    assert set(found) == {"lost", "beside", "gone"}
    assert all(TRAINING.items() <= details.items() for details in found.values())


def test_trainings_with_another_unit_do_not_compose(other):
    own, beside = other("own"), other("beside")
    DpLog(dp_log_path(beside.path)).append("training", run="beside", unit="record", **TRAINING)
    assert set(trainings_elsewhere(own)) == {"beside"}
    remember_training("beside", "by patient", {**TRAINING, "unit": "all records of one patient"})
    with pytest.raises(PromiseConflict, match=r"one patient.*: record\..*--group-by"):
        trainings_elsewhere(own)
