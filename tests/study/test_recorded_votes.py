"""Recorded votes: the files, votes taken along a text, and the decodings they come from."""

import math
from dataclasses import replace

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.study.decoding import GREEDY, Decoding
from paclm.study.eval_text import Passage, cut_passages
from paclm.study.recorded_votes import RecordedVotes, collect_votes


@pytest.fixture
def engine(small_lab):
    return small_lab.engine(support_size=40)


def test_what_is_saved_is_read_again_and_the_same_votes_give_the_same_bytes(tmp_path):
    every = np.array([[1, 2, 9], [3, 3, 8]], dtype=np.int32)
    recorded = RecordedVotes(every[:, :2], truth=np.array([1, -1]), public=every[:, 2])  # also from a wider array
    assert (recorded.num_positions, recorded.num_worlds) == (2, 2)
    assert recorded.is_dissent.tolist() == [True, False]
    np.savez(tmp_path / "v.npz", votes=every[:, :2], extra=np.zeros(3))
    assert RecordedVotes.load(tmp_path / "v.npz").public is None  # other arrays are ignored
    recorded.save(tmp_path / "v.npz")
    found = RecordedVotes.load(tmp_path / "v.npz")
    assert found.votes.tolist() == [[1, 2], [3, 3]]
    assert found.votes.dtype == np.int32
    assert (found.truth.tolist(), found.public.tolist(), found.full) == ([1, -1], [9, 8], None)
    found.save(tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "v.npz").read_bytes()
    assert (tmp_path / "v.npz").stat().st_mode & 0o077 == 0  # votes tell about the records: for the owner alone


@pytest.mark.parametrize("content", [None, b"", b"not a zip", b"PK\x03\x04 broken", "no votes"])
def test_a_missing_or_broken_file_or_one_without_votes_is_refused(tmp_path, content):
    path = tmp_path / "v.npz"
    if content == "no votes":
        np.savez(path, truth=np.array([1]))
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=str(path)):
        RecordedVotes.load(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"votes": np.zeros((3, 4))}, "float64"),
        ({"votes": np.zeros(4, int)}, r"shape \(4,\)"),
        ({"votes": np.zeros((0, 4), int)}, r"shape \(0, 4\)"),
        ({"votes": np.zeros((3, 5), int)}, "5"),
        ({"votes": np.zeros((3, 4), int), "truth": np.zeros(2, int)}, r"truth.*\(3,\)"),
        ({"votes": np.zeros((3, 4), int), "full": np.zeros(3)}, "full"),
    ],
)
def test_arrays_of_the_wrong_kind_are_refused(arrays, message):
    with pytest.raises(InvalidInput, match=message):
        RecordedVotes(**arrays)


def test_greedy_votes_are_those_the_engine_casts_along_the_text(small_lab, engine):
    passages = small_lab.passages(50)
    votes = collect_votes(engine, passages, [GREEDY], [0], with_full=False)["greedy"]
    ballots = [ballot for p in passages for ballot in engine.teacher_forced(p.tokens, len(p))]
    keep = np.concatenate([passage.is_scored[1:] for passage in passages])
    assert (votes.votes == np.concatenate([ballot.votes for ballot in ballots])[keep]).all()
    assert (votes.public == np.concatenate([ballot.public for ballot in ballots])[keep]).all()
    assert votes.truth.tolist() == np.concatenate([passage.tokens[1:] for passage in passages])[keep].tolist()


def test_draws_repeat_positions_with_coins_of_their_own(small_lab, engine):
    passages = small_lab.passages(40)
    votes = collect_votes(engine, passages, [Decoding("gumbel", 1.0, 3)], [7], with_full=False)["gumbel"]
    assert votes.num_positions == 120
    assert (votes.position[:40] == votes.position[40:80]).all()
    assert (votes.passage[:40] == votes.passage[80:]).all()
    first, second = votes.votes[:40], votes.votes[40:80]
    assert (first != second).any()


def test_what_is_not_scored_is_read_but_not_counted(small_lab, engine):
    passage = Passage.of(small_lab.test_passages[0].tokens[:13])
    some = Passage(passage.tokens, tuple(i % 2 == 0 for i in range(len(passage))))
    whole, part = (collect_votes(engine, [p], [GREEDY], [0], with_full=False)["greedy"] for p in (passage, some))
    keep = np.asarray(some.is_scored[1:])
    assert (part.votes == whole.votes[keep]).all()
    assert part.truth.tolist() == whole.truth[keep].tolist()


def test_with_the_full_adapter_it_looks_on_and_is_no_world(small_lab):
    engine = small_lab.engine("worlds", "full", support_size=40)
    votes = collect_votes(engine, small_lab.passages(20), [GREEDY], [0], with_full=True)["greedy"]
    assert votes.num_worlds == small_lab.num_worlds
    assert (votes.full == votes.votes[:, 0]).all()  # the first world's adapter stands in for it here
    with pytest.raises(InvalidInput, match="full"):
        replace(votes, full=None).column("full")


def test_errors_are_over_documents_and_not_over_their_windows(small_lab, engine):
    passage = small_lab.test_passages[0]
    windows = cut_passages([Passage.of(passage.tokens[:9]), Passage.of(passage.tokens)], 5)
    votes = collect_votes(engine, windows, [GREEDY], [0], with_full=False)["greedy"]
    assert len(windows) > 2
    assert np.bincount(votes.passage).tolist() == [8, len(passage) - 1]


@pytest.mark.parametrize(("name", "value"), [("temperature", x) for x in (-0.5, math.nan, math.inf)] + [("draws", 0)])
def test_a_decoding_needs_a_finite_temperature_and_a_draw(name, value):
    with pytest.raises(InvalidInput, match=name):
        Decoding(**{"name": "gumbel", "temperature": 1.0} | {name: value})


def test_other_couplings_than_the_coupled_one_cannot_vote_on_a_text():
    with pytest.raises(InvalidInput, match="apart"):
        collect_votes(None, [], [Decoding("apart", 1.0, coupling="independent")], [0], False)
