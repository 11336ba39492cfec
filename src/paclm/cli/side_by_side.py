"""Texts of two models beside each other: dissent and words of one's own in colour, or in brackets without colours.

Knows nothing of models: takes finished texts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paclm.cli.console import print_wrapped

MARGIN = 3
SIDE_BY_SIDE = 100  # columns of a terminal from which on two texts stand side by side

SpanMark = Literal["disputed", "public", "term"]
STYLES: dict[SpanMark, str] = {"disputed": "yellow", "public": "blue", "term": "bold underline"}
BRACKETS: dict[SpanMark, tuple[str, str]] = {"disputed": ("⟨", "⟩"), "public": ("⟨public: ", "⟩"), "term": ("«", "»")}


class Span(NamedTuple):
    """Characters `start` to `end` of a text, and what they are."""

    start: int
    end: int
    mark: SpanMark


@dataclass(frozen=True, slots=True)
class MarkedText:
    """The continuation of a prompt and what is marked in it; spans count from the beginning of the prompt."""

    prompt: str
    continuation: str
    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, prompt: str, pieces: Iterable[tuple[str, str]], terms: Collection[str]) -> MarkedText:
        """From the pieces (text, mark of its token) of an answer; terms are marked where they are whole words."""
        text, spans = prompt, list[Span]()
        for mark, run in groupby(pieces, key=itemgetter(1)):
            new = "".join(piece for piece, _ in run)
            if new.strip() and (mark == "disputed" or mark == "public"):
                start = len(text) + len(new) - len(new.lstrip())
                spans.append(Span(start, len(text) + len(new.rstrip()), mark))
            text += new
        found = (Span(start, end, "term") for start, end in find_terms(text, terms) if end > len(prompt))
        return cls(prompt, text[len(prompt) :], (*spans, *found))

    @property
    def terms(self) -> list[str]:
        """What is marked as a term, in order, each once."""
        text = self.prompt + self.continuation
        return list(dict.fromkeys(text[span.start : span.end] for span in self.spans if span.mark == "term"))

    def styled(self) -> Text:
        """In colours."""
        text = Text(self.prompt, style="")
        text.stylize("dim", 0, len(self.prompt))
        text.append(self.continuation)
        for span in self.spans:
            text.stylize(STYLES[span.mark], span.start, span.end)
        return text

    def bracketed(self) -> str:
        """In brackets."""
        return bracket(self.prompt + self.continuation, self.spans)


def find_terms(text: str, terms: Collection[str]) -> list[tuple[int, int]]:
    """Where terms stand as whole words, the longest at each place."""
    if not terms:
        return []
    longest_first = sorted(terms, key=lambda term: (-len(term), term))
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
    return [found.span() for found in re.finditer(pattern, text)]


def bracket(text: str, spans: Sequence[Span]) -> str:
    """A text with brackets around its spans."""
    edges: list[tuple[int, int, int, int, str]] = []  # position; ends first; longer spans outside
    for number, span in enumerate(spans):
        begin, end = BRACKETS[span.mark]
        edges.append((span.start, 1, -span.end, -number, begin))
        edges.append((span.end, 0, -span.start, number, end))
    parts, done = [], 0
    for at, *_, symbol in sorted(edges):
        parts += [text[done:at], symbol]
        done = at
    return "".join([*parts, text[done:]])


def shortened(path: Path) -> Path:
    """A path relative to the current folder, if it lies there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class Screen:
    """Where a demo prints: standard output, or standard error if its figures go to standard output as JSON."""

    def __init__(self, err: bool = False) -> None:
        self.err = err
        self._console = Console(stderr=err, highlight=False, markup=False)

    @property
    def is_coloured(self) -> bool:
        return self._console.is_terminal and self._console.color_system is not None and not self._console.no_color

    def head(self, number: int, title: str) -> None:
        """The heading of a step."""
        self.line()
        self._show(Text(f"{number}. {title}", style="bold"), 0)

    def say(self, text: str, column: int = MARGIN) -> None:
        """Sentences."""
        print_wrapped(f"{' ' * column}{text}", err=self.err, column=column)

    def line(self, text: str = "") -> None:
        """A line as it is, without a margin."""
        typer.echo(text, err=self.err)

    def fields(self, rows: dict[str, str], width: int = 42) -> None:
        """One line `name  figure` each."""
        for name, figure in rows.items():
            self.line(f"{' ' * MARGIN}{name:<{width}} {figure}")

    def legend(self, words: dict[SpanMark, str]) -> None:
        """What the marks mean."""
        sample = Text("Marked: ")
        for number, (mark, word) in enumerate(words.items()):
            sample.append(", " * bool(number))
            sample.append(*((word, STYLES[mark]) if self.is_coloured else (word.join(BRACKETS[mark]),)))
        self._show(sample)

    def compare(self, titles: tuple[str, str], pairs: Sequence[tuple[MarkedText, MarkedText]]) -> None:
        """Pairs of texts: in two columns where the terminal is wide enough, else one after the other."""
        if not (self._console.is_terminal and self._console.width >= SIDE_BY_SIDE):
            for pair in pairs:
                for title, text in zip(titles, pair, strict=True):
                    self.line(f"{' ' * MARGIN}{title}:")
                    self._show(self._marked(text), MARGIN + 2)
            return
        table = Table(box=box.ROUNDED, expand=True, show_lines=True, header_style="bold", border_style="dim")
        for title in titles:
            table.add_column(title, ratio=1, overflow="fold")
        for pair in pairs:
            table.add_row(*map(self._marked, pair))
        self._show(table)

    def _marked(self, text: MarkedText) -> Text:
        return text.styled() if self.is_coloured else Text(text.bracketed())

    def _show(self, what: RenderableType, margin: int = MARGIN) -> None:
        if isinstance(what, Text) and not self._console.is_terminal:  # a file has no width to wrap at
            for line in what.plain.split("\n"):
                self.line(f"{' ' * margin}{line}".rstrip())
        else:
            self._console.print(Padding(what, (0, 0, 0, margin)))
