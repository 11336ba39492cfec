"""Recorded votes: what is read, and what is refused with a sentence."""

from __future__ import annotations

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.study.votes import RecordedVotes


def test_votes_and_columns_are_read(tmp_path):
    path = tmp_path / "v.npz"
    np.savez_compressed(path, votes=np.array([[1, 2], [3, 3]]), truth=np.array([1, -1]), extra=np.zeros(3))
    recorded = RecordedVotes.load(path)
    assert (recorded.num_positions, recorded.num_worlds) == (2, 2)
    assert recorded.is_dissent.tolist() == [True, False]
    assert recorded.public is None


def test_what_is_saved_is_read_again_and_the_same_votes_give_the_same_bytes(tmp_path):
    every = np.array([[1, 2, 9], [3, 3, 8]], dtype=np.int32)
    recorded = RecordedVotes(every[:, :2], truth=np.array([1, -1]), public=every[:, 2])  # also from a wider array
    recorded.save(tmp_path / "v.npz")
    found = RecordedVotes.load(tmp_path / "v.npz")
    assert found.votes.tolist() == [[1, 2], [3, 3]]
    assert found.votes.dtype == np.int32
    assert (found.truth.tolist(), found.public.tolist(), found.full) == ([1, -1], [9, 8], None)
    found.save(tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "v.npz").read_bytes()
    assert (tmp_path / "v.npz").stat().st_mode & 0o077 == 0  # votes tell about the records: for the owner alone


def test_a_missing_file_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(InvalidInput, match="paclm votes WORKSPACE"):
        RecordedVotes.load(tmp_path / "none.npz")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 broken"])
def test_a_broken_file_is_refused(tmp_path, content):
    path = tmp_path / "v.npz"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="not an"):
        RecordedVotes.load(path)


def test_a_file_without_votes_is_refused(tmp_path):
    path = tmp_path / "v.npz"
    np.savez(path, truth=np.array([1]))
    with pytest.raises(InvalidInput, match="no array called votes"):
        RecordedVotes.load(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"votes": np.zeros((3, 4))}, "float64"),
        ({"votes": np.zeros(4, int)}, r"shape \(4,\)"),
        ({"votes": np.zeros((0, 4), int)}, r"shape \(0, 4\)"),
        ({"votes": np.zeros((3, 5), int)}, "even and at least 2, not 5"),
        ({"votes": np.zeros((3, 4), int), "truth": np.zeros(2, int)}, r"truth must be integers \(3,\)"),
        ({"votes": np.zeros((3, 4), int), "full": np.zeros(3)}, "full must be integers"),
    ],
)
def test_arrays_of_the_wrong_kind_are_refused(arrays, message):
    with pytest.raises(InvalidInput, match=message):
        RecordedVotes(**arrays)
