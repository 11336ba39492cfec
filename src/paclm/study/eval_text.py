"""The text a study is scored on: windows of tokens, which of them count, and reading a file of the user's own.

A file is plain text, records as `paclm init` reads them, or WikiText's token files. WikiText separates punctuation by
spaces, writes ` @-@ ` inside words and `<unk>` for rare ones: the spacing is undone as far as possible, and no token
that overlaps an `<unk>` is scored, because it is not text. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paclm.errors import InvalidInput
from paclm.worlds.readers import DAMAGE, is_record_file, open_text, read_corpus

UNKNOWN = "<unk>"
STRETCH = 64
"""Fewest positions that are taken from one window."""
_GOLDEN = 0.6180339887498949  # its multiples spread evenly over [0, 1)

_WIKITEXT = re.compile(r" @[-,.]@ |^ ?= .+ = ?$", re.MULTILINE)
_HEADING = re.compile(r"^ ?(?P<level>(?:= )+)(?P<title>.+?)(?: =)+ ?$")
_BETWEEN_DOCUMENTS = re.compile(r"\n[ \t]*\n[ \t]*\n\s*")


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive tokens of one record, and whether each of them is scored as a target."""

    tokens: tuple[int, ...]
    is_scored: tuple[bool, ...]  # as long as tokens; the first token is never a target
    document: int = 0  # the record or document it is from: windows of one document are not independent samples

    @classmethod
    def of(cls, tokens: Iterable[int]) -> Passage:
        """A passage that is scored throughout."""
        kept = tuple(tokens)
        return cls(kept, (True,) * len(kept))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_scored(self) -> int:
        """Targets that count."""
        return sum(self.is_scored[1:])


def cut_passages(passages: Iterable[Passage], window: int) -> list[Passage]:
    """Windows of at most `window` tokens; a rest of fewer than two tokens is dropped.

    Windows overlap by one token, so that every token but a record's first is a target once. The first windows of all
    documents come first.
    """
    if window < 2:
        raise InvalidInput(f"A window must hold at least 2 tokens (a token and its successor), not {window}.")
    windows = [
        (start, Passage(passage.tokens[start : start + window], passage.is_scored[start : start + window], document))
        for document, passage in enumerate(passages)
        for start in range(0, len(passage) - 1, window - 1)
    ]
    return [passage for _, passage in sorted(windows, key=lambda found: found[0])]


def take_positions(passages: Sequence[Passage], num_positions: int) -> list[Passage]:
    """This many targets from as many windows as possible: one stretch of each, at a place that varies with the window.

    A stretch has at least `STRETCH` targets, since all text before it has to be read too; few positions therefore
    come from some of the windows, evenly spaced. The choice depends on the windows and the number alone.
    """
    windows = [passage for passage in passages if passage.num_scored]
    if num_positions >= sum(passage.num_scored for passage in windows):
        return windows
    count = min(len(windows), max(1, num_positions // STRETCH))
    while True:
        some = [windows[i * len(windows) // count] for i in range(count)]
        ends = np.cumsum([0, *(passage.num_scored for passage in some)])
        if ends[-1] >= num_positions:
            break
        count = min(len(windows), 2 * count)
    shares = np.diff(ends * num_positions // ends[-1]).tolist()
    return [_stretch(passage, share, i) for i, (passage, share) in enumerate(zip(some, shares, strict=True)) if share]


def _stretch(passage: Passage, length: int, number: int) -> Passage:
    """The passage up to the end of a stretch of `length` targets, which alone is scored."""
    targets = [i for i, is_scored in enumerate(passage.is_scored) if is_scored and i > 0]
    first = int((number * _GOLDEN % 1.0) * (len(targets) - length + 1))
    chosen = set(targets[first : first + length])
    end = targets[first + length - 1] + 1
    return Passage(passage.tokens[:end], tuple(i in chosen for i in range(end)), passage.document)


def read_test_text(path: Path, tokenizer: Any) -> list[Passage]:
    """The documents of a file as passages; tokens of unknown words are marked as not scored."""
    if is_record_file(path):
        documents = [record.text for record in read_corpus(str(path)).records]
    else:
        text = read_text(
            path,
            "Check the path after --test-text or --public-text; without the first the held-out records are scored.",
        )
        documents = list(wikitext_documents(text) if _WIKITEXT.search(text) else plain_documents(text))
    passages = [_encode(document, tokenizer) for document in documents]
    kept = [passage for passage in passages if passage.num_scored]
    if not kept:
        raise InvalidInput(f"{path} holds no text to score: every document is shorter than two tokens, or unknown.")
    return kept


def plain_documents(text: str) -> Iterator[str]:
    """Documents of a plain text, separated by two or more empty lines."""
    for part in _BETWEEN_DOCUMENTS.split(text.replace("\r\n", "\n")):
        if part.strip():
            yield part.strip("\n")


def wikitext_documents(text: str) -> Iterator[str]:
    """Articles of a WikiText file, each starting with its title, in ordinary spelling."""
    lines: list[str] = []
    for line in text.splitlines():
        heading = _HEADING.match(line)
        if heading and heading["level"].count("=") == 1 and lines:
            yield "\n".join(lines)
            lines = []
        if heading:
            lines.append(detokenise(heading["title"]))
        elif line.strip():
            lines.append(detokenise(line))
    if lines:
        yield "\n".join(lines)


def detokenise(line: str) -> str:
    """A line of WikiText in its original spelling, as far as possible: spaces around punctuation are removed."""
    line = re.sub(r" @([-,.])@ ", r"\1", line.strip())
    line = re.sub(r'(?<!\S)"\s+(.*?)\s*(?<=\s)"(?!\S)', r'"\1"', line)  # in pairs; an unpaired one stays
    line = re.sub(r" ([,.;:!?%)\]}])(?=[\s\"]|$)", r"\1", line)
    line = re.sub(r"(?:(?<=\s)|(?<=^)|(?<=\"))([(\[{$£€]) ", r"\1", line)
    return re.sub(r" ('(?:s|t|re|ve|ll|d|m))(?=[\s,.;:!?)]|$)", r"\1", line)


def read_text(path: Path, if_missing: str) -> str:
    """A UTF-8 text, plain or compressed; `if_missing` says what to do where there is no such file."""
    try:
        with open_text(path) as file:
            return file.read()
    except FileNotFoundError:
        raise InvalidInput(f"There is no file {path}. {if_missing}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not UTF-8 text. Convert it first, for example with iconv.") from None
    except (OSError, *DAMAGE) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.") from None


def _encode(document: str, tokenizer: Any) -> Passage:
    unknown = [match.span() for match in re.finditer(f" ?{re.escape(UNKNOWN)}", document)]  # with the space before it
    if not unknown:
        return Passage.of(tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"])
    encoded = tokenizer(document, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens: list[int] = encoded["input_ids"]
    offsets: list[tuple[int, int]] = encoded["offset_mapping"]
    scored = [not any(first < end and start < last for first, last in unknown) for start, end in offsets]
    return Passage(tuple(tokens), tuple(scored))
