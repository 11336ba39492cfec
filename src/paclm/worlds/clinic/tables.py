"""The corpus's own text files: blocks that begin with `== title`, indented lines continue the one before."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files


def read_blocks(name: str) -> Iterator[tuple[str, list[str]]]:
    """Each block of a data file: its title and its lines."""
    text = files("paclm.worlds.clinic").joinpath(f"data/{name}.txt").read_text(encoding="utf-8")
    for block in text.split("== ")[1:]:
        title, *raw = block.splitlines()
        lines: list[str] = []
        for line in filter(str.strip, raw):
            if line.startswith("    "):
                lines[-1] += ("" if lines[-1].endswith("|") else " ") + line.strip()
            else:
                lines.append(line.strip())
        yield title.strip(), lines


def read_rules(name: str) -> dict[str, str]:
    """A data file of grammar rules: every line holds one alternative, or several with `|` between them."""
    return {title: "|".join(line.strip("| ") for line in lines) for title, lines in read_blocks(name)}


def read_lines(name: str) -> list[str]:
    """A data file of one block, its title naming the columns."""
    return next(read_blocks(name))[1]
