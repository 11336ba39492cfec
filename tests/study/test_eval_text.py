"""Reading a text of the user's own. The sentences here are ours."""

import bz2
import gzip
import json
import lzma

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.study.eval_text import (
    STRETCH,
    Passage,
    cut_passages,
    detokenise,
    plain_documents,
    read_test_text,
    take_positions,
    wikitext_documents,
)

WIKITEXT = """
 = Old mill = 

 The mill @-@ house , built in 1 @,@ 204 , has a <unk> roof . 

 = = Later years = = 

 It " burned " twice ; the owner 's son ( a miller ) didn 't mind . 

 = River Ash = 

 A river of 3 @.@ 5 km . 
"""  # noqa: W291


@pytest.mark.parametrize(
    ("tokenised", "written"),
    [
        ("a guest @-@ house , 1 @,@ 000 m , 2 @.@ 5 % .", "a guest-house, 1,000 m, 2.5%."),
        ('he said " no " and " never . "', 'he said "no" and "never."'),
        ("the owner 's ( late ) son won 't", "the owner's (late) son won't"),
        ('a lone " stays', 'a lone " stays'),
        ("it cost £ 5 [ then ] !", "it cost £5 [then]!"),
        ("1990 – 1995 : a / b", "1990 – 1995: a / b"),
    ],
)
def test_spacing_around_punctuation_is_undone(tokenised, written):
    assert detokenise(tokenised) == written


def test_wikitext_becomes_articles_with_their_headings():
    first, second = wikitext_documents(WIKITEXT)
    assert first.splitlines() == [
        "Old mill",
        "The mill-house, built in 1,204, has a <unk> roof.",
        "Later years",
        "It \"burned\" twice; the owner's son (a miller) didn't mind.",
    ]
    assert second.splitlines() == ["River Ash", "A river of 3.5 km."]


def test_no_token_that_overlaps_an_unknown_word_is_scored_and_all_others_are(tmp_path, small_tokenizer):
    path = tmp_path / "wiki.tokens.xz"
    path.write_bytes(lzma.compress(WIKITEXT.encode()))
    passage = read_test_text(path, small_tokenizer)[0]
    tokens, is_scored = np.array(passage.tokens), np.array(passage.is_scored)
    hidden, shown = small_tokenizer.decode(tokens[~is_scored]), small_tokenizer.decode(tokens[is_scored])
    assert hidden.strip() == "<unk>"
    assert "<unk>" not in shown
    assert "roof" in shown


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_plain_text_is_split_at_two_empty_lines_and_scored_throughout(tmp_path, small_tokenizer, suffix, compress):
    text = "The first note.\n\nIts second paragraph.\n\n\nThe second note: x = y.\n"
    assert list(plain_documents(text)) == ["The first note.\n\nIts second paragraph.", "The second note: x = y."]
    path = tmp_path / f"notes.txt{suffix}"
    path.write_bytes(compress(text.encode()))
    passages = read_test_text(path, small_tokenizer)
    assert [small_tokenizer.decode(list(p.tokens)) for p in passages] == list(plain_documents(text))
    assert all(all(passage.is_scored) for passage in passages)


def test_records_are_read_as_init_reads_them_and_what_cannot_be_read_is_refused_by_its_name(tmp_path, small_tokenizer):
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps({"text": f"a note, number {n}"}) + "\n" for n in range(3)))
    assert len(read_test_text(path, small_tokenizer)) == 3
    cut = {"cut.xz": lzma.compress(b"hello")[:-9], "cut.bz2": bz2.compress(b"hello")[:-9]}
    files = {"missing.txt": None, "broken.txt": b"\xff\xfe\x00", "empty.txt": b"\n\n\n", **cut}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidInput, match=name):
            read_test_text(tmp_path / name, small_tokenizer)


def test_every_token_but_the_first_is_a_target_exactly_once_and_scored_if_it_was():
    passage = Passage(tuple(range(23)), tuple(i % 3 != 0 for i in range(23)))
    windows = cut_passages([passage], 8)
    assert [token for window in windows for token in window.tokens[1:]] == list(range(1, 23))
    assert max(map(len, windows)) == 8
    assert sum(window.num_scored for window in windows) == passage.num_scored == 15
    assert [len(window) for window in cut_passages([Passage.of(range(8)), Passage.of([1])], 8)] == [8]  # no target
    with pytest.raises(InvalidInput, match="1"):
        cut_passages([passage], 1)


@pytest.mark.parametrize("wanted", [1, 6, 7, 8, 20])
def test_as_many_positions_are_taken_as_asked_for_and_not_one_more(wanted):
    passages = cut_passages([Passage(tuple(range(30)), tuple(i % 2 == 0 for i in range(30)))], 8)
    taken = take_positions(passages, wanted)
    assert sum(passage.num_scored for passage in taken) == min(wanted, 14)
    assert all(passage.num_scored for passage in taken)


def test_positions_come_from_all_documents_as_one_stretch_each():
    windows = cut_passages([Passage.of(range(1000 * i, 1000 * i + 300)) for i in range(5)], 300)
    taken = take_positions(windows, 5 * STRETCH + 3)
    assert [passage.document for passage in taken] == [0, 1, 2, 3, 4]
    assert sum(passage.num_scored for passage in taken) == 5 * STRETCH + 3
    starts = []
    for passage in taken:
        scored = np.flatnonzero(passage.is_scored)
        assert (np.diff(scored) == 1).all()
        assert len(passage) == scored[-1] + 1, "text after the stretch is not read"
        assert passage.tokens == windows[passage.document].tokens[: len(passage)]
        starts.append(scored[0])
    assert len(set(starts)) == 5, "the same place in every document would say little about the others"
    assert take_positions(windows, 5 * STRETCH + 3) == taken


def test_few_positions_come_from_few_documents_since_all_text_before_them_is_read():
    windows = cut_passages([Passage.of(range(300)) for _ in range(20)], 300)
    windows = [Passage(p.tokens, p.is_scored, i) for i, p in enumerate(windows)]
    assert [passage.document for passage in take_positions(windows, 4 * STRETCH)] == [0, 5, 10, 15]


def test_short_documents_give_all_they_have_before_positions_are_missing():
    windows = [Passage.of(range(5)) for _ in range(30)]
    for wanted in (1, 63, 64, 65, 119, 120, 121):
        assert sum(passage.num_scored for passage in take_positions(windows, wanted)) == min(wanted, 120)
