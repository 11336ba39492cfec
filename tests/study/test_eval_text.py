"""Reading a text of the user's own. The sentences here are ours."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paclm.errors import InvalidInput
from paclm.study.eval_text import detokenise, plain_documents, read_test_text, wikitext_documents

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
def test_spacing_around_punctuation_is_undone(tokenised: str, written: str) -> None:
    assert detokenise(tokenised) == written


def test_wikitext_becomes_articles_with_their_headings() -> None:
    first, second = wikitext_documents(WIKITEXT)
    assert first.splitlines() == [
        "Old mill",
        "The mill-house, built in 1,204, has a <unk> roof.",
        "Later years",
        "It \"burned\" twice; the owner's son (a miller) didn't mind.",
    ]
    assert second.splitlines() == ["River Ash", "A river of 3.5 km."]


def test_no_token_that_overlaps_an_unknown_word_is_scored_and_all_others_are(
    tmp_path: Path, small_tokenizer: Any
) -> None:
    path = tmp_path / "wiki.tokens.xz"
    path.write_bytes(lzma.compress(WIKITEXT.encode()))
    passage = read_test_text(path, small_tokenizer)[0]
    hidden = small_tokenizer.decode([t for t, s in zip(passage.tokens, passage.is_scored, strict=True) if not s])
    shown = small_tokenizer.decode([t for t, s in zip(passage.tokens, passage.is_scored, strict=True) if s])
    assert hidden.strip() == "<unk>"
    assert "<unk>" not in shown
    assert "roof" in shown


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_plain_text_is_split_at_two_empty_lines_and_scored_throughout(
    tmp_path: Path, small_tokenizer: Any, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    text = "The first note.\n\nIts second paragraph.\n\n\nThe second note: x = y.\n"
    assert list(plain_documents(text)) == ["The first note.\n\nIts second paragraph.", "The second note: x = y."]
    path = tmp_path / f"notes.txt{suffix}"
    path.write_bytes(compress(text.encode()))
    passages = read_test_text(path, small_tokenizer)
    assert [small_tokenizer.decode(list(p.tokens)) for p in passages] == list(plain_documents(text))
    assert all(all(passage.is_scored) for passage in passages)


def test_records_are_read_as_init_reads_them(tmp_path: Path, small_tokenizer: Any) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps({"text": f"a note, number {n}"}) + "\n" for n in range(3)))
    assert len(read_test_text(path, small_tokenizer)) == 3


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path, small_tokenizer: Any) -> None:
    with pytest.raises(InvalidInput, match="There is no file"):
        read_test_text(tmp_path / "missing.txt", small_tokenizer)
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="not UTF-8"):
        read_test_text(broken, small_tokenizer)
    for name, content in {"cut.xz": lzma.compress(b"hello")[:-9], "cut.bz2": bz2.compress(b"hello")[:-9]}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidInput, match="cannot be read"):
            read_test_text(tmp_path / name, small_tokenizer)
    (tmp_path / "empty.txt").write_text("\n\n\n")
    with pytest.raises(InvalidInput, match="no text to score"):
        read_test_text(tmp_path / "empty.txt", small_tokenizer)
