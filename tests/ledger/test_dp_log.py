"""The log of DP trainings: durable, append-only, and refused when its chain is broken."""

import json
import multiprocessing
import os
import stat

import pytest

from paclm.errors import InvalidInput, LedgerTampered, LedgerUnwritable
from paclm.ledger.dp_log import DpLog, mechanism_of
from paclm.privacy.dp import DpMechanism

TRAINING = {"sampling_rate": 0.5, "noise_multiplier": 2.064, "steps": 40, "epsilon": 8.0, "delta": 1e-5}


@pytest.fixture
def log(tmp_path):
    return DpLog(tmp_path / "dp.jsonl")


@pytest.fixture
def filled(log):
    log.append("training", run="a", **TRAINING)
    log.append("trained", run="a", sha256="f" * 64)
    log.append("training", run="b", **{**TRAINING, "steps": 7})
    log.append("served")
    return log


def test_an_empty_log_has_no_file_and_no_trainings(log):
    assert (log.events(), log.mechanisms(), log.has("training")) == ([], [], False)
    assert not log.path.exists()


def test_every_training_that_began_counts_whether_or_not_it_ended(filled):
    assert filled.mechanisms() == [DpMechanism(0.5, 2.064, 40), DpMechanism(0.5, 2.064, 7)]
    assert list(filled.trainings()) == ["a", "b"]
    assert filled.trained() == {"f" * 64: "a"}
    assert filled.has("served")
    assert not filled.has("mixed")
    assert [event["seq"] for event in filled.events()] == [1, 2, 3, 4]
    assert stat.S_IMODE(filled.path.stat().st_mode) == 0o600


def damage(line):
    return line.replace(b'"noise_multiplier": 2.064', b'"noise_multiplier": 9.064')


def reordered(lines):
    return [lines[1], lines[0], *lines[2:]]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [damage(lines[0]), *lines[1:]],
        lambda lines: [*lines[:2], damage(lines[2]), lines[3]],
        lambda lines: lines[1:],
        lambda lines: [lines[0], *lines[2:]],
        reordered,
        lambda lines: [*lines, lines[-1]],
        lambda lines: [lines[0].replace(b'"run": "a"', b'"run": "b"'), *lines[1:]],
        lambda lines: [*lines[:-1], b"{}"],
        lambda lines: [*lines[:-1], b"[]"],
        lambda lines: [*lines[:-1], b"\xff"],
        lambda lines: [b"", *lines],
    ],
)
def test_a_broken_chain_is_refused_by_reading_and_by_writing(filled, change):
    content = b"".join(line + b"\n" for line in change(filled.path.read_bytes().splitlines()))
    filled.path.write_bytes(content)
    for use in (filled.events, filled.mechanisms, lambda: filled.append("served")):
        with pytest.raises(LedgerTampered):
            use()
    assert filled.path.read_bytes() == content


def test_a_torn_last_line_never_began_and_the_next_event_replaces_it(filled):
    """Torn at every length: an append that never returned."""
    content = filled.path.read_bytes()
    whole = content[: content.rstrip(b"\n").rindex(b"\n") + 1]
    for length in range(len(whole), len(content) - 1):
        filled.path.write_bytes(content[:length])
        assert len(filled.events()) == 3
    filled.append("mixed", accepted="corpus")
    assert [event["kind"] for event in filled.events()] == ["training", "trained", "training", "mixed"]


def test_a_last_line_that_lacks_its_end_alone_counts(filled):
    content = filled.path.read_bytes()
    before = filled.events()
    filled.path.write_bytes(content.removesuffix(b"\n"))  # as an editor may leave it
    assert filled.events() == before
    filled.append("mixed", accepted="corpus")
    assert [event["kind"] for event in filled.events()] == [*(event["kind"] for event in before), "mixed"]


def test_a_line_is_synced_before_append_returns(log, monkeypatch):
    synced = []
    fsync = os.fsync

    def note(descriptor):
        fsync(descriptor)
        synced.append((os.path.realpath(f"/proc/self/fd/{descriptor}"), log.path.read_bytes()))

    monkeypatch.setattr(os, "fsync", note)
    log.append("training", run="a", **TRAINING)
    assert [path for path, _ in synced] == [str(log.path), str(log.path.parent)]
    assert all(content == log.path.read_bytes() for _, content in synced)


def test_a_log_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(LedgerUnwritable):
        DpLog(tmp_path / "missing" / "dp.jsonl").append("served")


def test_unknown_events_and_numbers_without_a_meaning_are_refused(log):
    with pytest.raises(InvalidInput):
        log.append("forgotten")
    with pytest.raises(ValueError):
        log.append("training", run="a", noise_multiplier=float("nan"))
    assert log.events() == []


@pytest.mark.parametrize("change", [{"noise_multiplier": 0.0}, {"steps": "many"}, {"sampling_rate": None}])
def test_a_training_that_cannot_be_accounted_for_is_refused(log, change):
    log.append("training", run="a", **{**TRAINING, **change})
    with pytest.raises(LedgerTampered):
        log.mechanisms()
    with pytest.raises(LedgerTampered):
        mechanism_of({})


def append_many(path, name):
    for number in range(20):
        DpLog(path).append("training", run=f"{name}{number}", **TRAINING)


def test_processes_that_append_at_once_lose_nothing(log):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(log.path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(log.mechanisms()) == 40
    assert len({json.loads(line)["hash"] for line in log.path.read_text().splitlines()}) == 40
