"""Released text on disk: sealed, in order, durable, and readable by its key alone."""

import os
import resource
import shutil

import pytest

from paclm.curator.master_key import MasterKeys
from paclm.curator.redacted import Redacted
from paclm.curator.transcript import ReleasedText, SealedTranscript
from paclm.errors import CuratorError, WorkspaceError

KEY = MasterKeys.derived(Redacted(b"k" * 32))
OTHER = MasterKeys.derived(Redacted(b"o" * 32))
PROMPT = (4242424, 5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "distill-0123.sealed"


def read(path, *keys):
    with SealedTranscript.open(path, keys or [KEY]) as transcript:
        return transcript


def write(path, num_steps=3, keys=(KEY,)):
    """Two texts; each step adds a token to both, and the first one is charged."""
    with SealedTranscript.open(path, keys) as transcript:
        for _ in range(num_steps):
            begun = [] if transcript.texts else [ReleasedText(PROMPT, 2**127 + 1, 1.0), ReleasedText((7,), 0, 0.0)]
            last = transcript.num_tokens
            transcript.append(begun, [(0, 1000 + last), (1, 1001 + last)], units=3, price=4)
    return path


def tokens_of(transcript):
    return [text.tokens for text in transcript.texts]


def test_what_was_appended_is_read_again(path):
    write(path, 2)
    write(path, 1)
    found = read(path)
    assert tokens_of(found) == [[1000, 1002, 1004], [1001, 1003, 1005]]
    assert [(text.prompt, text.coins_seed, text.temperature) for text in found.texts] == [
        (PROMPT, 2**127 + 1, 1.0),
        ((7,), 0, 0.0),
    ]
    assert (found.num_tokens, found.charged_units) == (6, 9)
    assert [text.most_units for text in found.texts] == [12, 12]  # at the highest price, whatever was charged


def test_the_file_is_private_and_shows_neither_prompt_nor_token(path):
    content = write(path).read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert all(str(token).encode() not in content for token in (PROMPT[0], *range(1000, 1006)))
    path.chmod(0o644)
    with pytest.raises(WorkspaceError):
        read(path)


def test_a_link_is_refused(path, tmp_path):
    path.symlink_to(write(tmp_path / "elsewhere"))
    with pytest.raises(WorkspaceError):
        read(path)


def test_wherever_the_last_line_is_cut_off_the_lines_before_it_stay(path, tmp_path):
    content = write(path).read_bytes()
    before = content.rindex(b"\n", 0, len(content) - 1) + 1
    for end in range(before, len(content)):
        path.write_bytes(content[:end])
        assert read(path).num_tokens == 4
        assert path.read_bytes() == content[:before]
    write(path, 1)
    assert tokens_of(read(path)) == [[1000, 1002, 1004], [1001, 1003, 1005]]


def test_every_changed_byte_of_a_complete_line_is_found(path):
    content = write(path, 2).read_bytes()
    first = content.index(b"\n")
    for place in (*range(0, first, 7), first):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(CuratorError):
            read(path)
    assert len(path.read_bytes()) == len(content)  # an error changes nothing


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (1, 2), (0, 0, 1, 2), (0, 1, 1)])
def test_lines_that_were_moved_removed_or_repeated_are_found(path, order):
    lines = write(path).read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(CuratorError):
        read(path)


def test_lines_of_two_histories_do_not_mix(path, tmp_path):
    """A copy that went on for itself has the same beginning, file name and key."""
    write(path, 1)
    (tmp_path / "copy").mkdir()
    copy = shutil.copy(path, tmp_path / "copy" / path.name)
    ours, theirs = (write(one, 2).read_bytes().splitlines(keepends=True) for one in (path, copy))
    path.write_bytes(b"".join([*ours[:3], theirs[3]]))
    with pytest.raises(CuratorError):
        read(path)


def test_lines_of_another_file_or_key_are_found(path, tmp_path):
    shutil.copy(write(path), tmp_path / "distill-4567.sealed")
    with pytest.raises(CuratorError):
        read(tmp_path / "distill-4567.sealed")
    with pytest.raises(CuratorError) as refused:
        read(path, OTHER)
    assert OTHER.name in str(refused.value)


def test_after_a_rotation_old_lines_are_read_with_the_retired_key_and_new_ones_sealed_with_the_new(path):
    write(path, 2)
    write(path, 1, keys=(OTHER, KEY))
    assert read(path, OTHER, KEY).num_tokens == 6
    for alone in (OTHER, KEY):
        with pytest.raises(CuratorError):
            read(path, alone)


def test_a_retired_key_seals_nothing_after_a_line_of_the_new_one(path):
    write(path, 1)
    with SealedTranscript.open(write(path, 1, keys=(OTHER, KEY)), [OTHER, KEY]) as transcript:
        transcript._keys = KEY
        transcript.append([], [(0, 1)], units=0, price=0)
    with pytest.raises(CuratorError):
        read(path, OTHER, KEY)


def test_a_full_disk_loses_one_step_and_keeps_the_lines_before_it(path):
    size = write(path, 2).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SealedTranscript.open(path, [KEY]) as transcript:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))  # a part of the line is written
        try:
            for _ in range(2):  # and no second one may follow that part
                with pytest.raises(CuratorError):
                    transcript.append([], [(0, 1)], units=0, price=0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert transcript.num_tokens == 4
    assert path.stat().st_size == size + 10
    assert read(path).num_tokens == 4


def test_a_line_is_on_disk_before_append_returns(path, monkeypatch):
    done, sync = [], os.fsync
    with SealedTranscript.open(path, [KEY]) as transcript:
        monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(path.stat().st_size) or sync(descriptor))
        transcript.append([ReleasedText((1,), 0, 0.0)], [(0, 1)], units=0, price=0)
        assert done == [path.stat().st_size]
