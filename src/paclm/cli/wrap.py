"""Sentences for people: on a terminal they break at words, in a pipe or a file they stay as they were written.

For lines that a program reads, or that have to be pasted as a whole, there is `typer.echo`.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import TextIO

import typer

_DEFAULT_WIDTH = 80
_LAST_COMMAND = re.compile(r":\s+(paclm .*)$")
_WHOLE = "\0"
"""Stands for each character of a command, in which no line may break and nothing may change."""


def say(text: str, *, err: bool = False, column: int = 0) -> None:
    """Print sentences that begin in this column; what stands before it is a label, or space."""
    width = _width(sys.stderr if err else sys.stdout)
    typer.echo(text if width is None else wrap(text, width, column), err=err)


def wrap(text: str, width: int, column: int = 0) -> str:
    """Break the text from `column` on at words, its own line breaks aside; a command at its end stays as it is."""
    label, sentences, command = text[:column], text[column:].rstrip(), ""
    if found := _LAST_COMMAND.search(sentences):
        sentences, command = sentences[: found.start(1)], found[1]
    place = _WHOLE * len(command)
    words = " ".join([*sentences.split(), place])
    lines = textwrap.wrap(words, max(width - column, 20), break_long_words=False, break_on_hyphens=False)
    wrapped = f"\n{' ' * column}".join(lines)
    return label + (wrapped.replace(place, command) if command else wrapped)


def _width(stream: TextIO) -> int | None:
    """How many characters a line of this terminal has; None for what is no terminal."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_WIDTH
    except OSError:
        return _DEFAULT_WIDTH
