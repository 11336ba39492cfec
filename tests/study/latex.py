"""A strict reader of the LaTeX that tables are written in: what it takes, booktabs and amsmath will set.

It knows one table environment with a caption, a label, a tabular and notes. Whatever it does not know is a fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ENVIRONMENTS = {"table", "tabular", "flushleft"}
LAYOUT = {"centering", "toprule", "midrule", "bottomrule", "footnotesize", "par"}
TEXT = {"textbackslash", "texttt", "%", "&", "_", "#", "$", "{", "}", "^", "'"}
MATH = {
    *("pm", "times", "div", "cdot", "infty", "surd", "dots", "emptyset", "bar", "le", "ge", "approx", "propto"),
    *("to", "mid", "sim", "dagger", "ddagger", "Delta", "Lambda", "Sigma", "Phi"),
    *("alpha", "beta", "delta", "varepsilon", "lambda", "pi", "sigma", "tau"),
}
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\[^a-zA-Z]|.", flags=re.DOTALL)


class NotLatex(Exception):
    """What is wrong, and where."""


@dataclass
class _Reader:
    tokens: list[str]
    at: int = 0
    open: list[str] = field(default_factory=list)
    """Environments and braces."""
    is_math: bool = False
    commands: list[str] = field(default_factory=list)

    def fail(self, why: str) -> NotLatex:
        near = "".join(self.tokens[max(0, self.at - 25) : self.at + 10])
        return NotLatex(f"{why} near {near!r}")

    def take(self) -> str:
        if self.at >= len(self.tokens):
            raise self.fail("the end is missing")
        self.at += 1
        return self.tokens[self.at - 1]

    def name(self) -> str:
        """A plain argument: {tabular}"""
        if self.take() != "{":
            raise self.fail("an argument is missing")
        found = ""
        while (token := self.take()) != "}":
            if not re.fullmatch(r"[\w:,.-]", token):
                raise self.fail(f"{token!r} in a name")
            found += token
        return found


def read_table(text: str) -> list[int]:
    """Read a table to its end; how many cells each row has, heading first."""
    if not text.isascii():
        raise NotLatex(f"not ASCII: {sorted({sign for sign in text if not sign.isascii()})}")
    reader = _Reader(_TOKEN.findall(text))
    rows, cells, columns, is_row_empty = [], 1, 0, True
    while reader.at < len(reader.tokens):
        token = reader.take()
        inside = reader.open[-1] if reader.open else None
        if token == r"\begin":
            name = reader.name()
            if name not in ENVIRONMENTS:
                raise reader.fail(f"no environment {name!r}")
            reader.open.append(name)
            if name == "table":
                for sign in "[t]":
                    if reader.take() != sign:
                        raise reader.fail("the place of a table is [t]")
            elif name == "tabular":
                columns = len(preamble := reader.name())
                if set(preamble) - set("lcr"):
                    raise reader.fail(f"columns {preamble!r}")
        elif token == r"\end":
            name = reader.name()
            if inside != name or (name == "tabular" and not is_row_empty):
                raise reader.fail(f"\\end{{{name}}} inside {inside}")
            reader.open.pop()
        elif inside is None:
            if not token.isspace():
                raise reader.fail("text outside the table")
        elif token == r"\\":
            if inside != "tabular" or reader.is_math:
                raise reader.fail("a row ends outside a tabular")
            if cells != columns:
                raise reader.fail(f"a row of {cells} cells in {columns} columns")
            rows.append(cells)
            cells, is_row_empty = 1, True
            if re.match(r"\s*[\[*]", "".join(reader.tokens[reader.at : reader.at + 40])):
                raise reader.fail("a row begins like an option of the last one")
        elif token == "&":
            if inside != "tabular" or reader.is_math:
                raise reader.fail("& outside a tabular")
            cells, is_row_empty = cells + 1, False
        elif inside == "tabular" and token == "\n" and reader.tokens[reader.at : reader.at + 1] == ["\n"]:
            raise reader.fail("an empty line is a paragraph in a row")
        else:
            _read_text(reader, token, inside)
            is_row_empty = is_row_empty and (token.isspace() or token[1:] in LAYOUT)
    if reader.open or reader.is_math:
        raise reader.fail(f"still open: {reader.open}")
    for name in ("caption", "label", "toprule", "midrule", "bottomrule"):
        if reader.commands.count(name) != 1:
            raise reader.fail(f"\\{name} {reader.commands.count(name)} times")
    if reader.commands.index("caption") > reader.commands.index("label"):
        raise reader.fail("the label stands before its caption")
    return rows


def _read_text(reader: _Reader, token: str, inside: str) -> None:
    """One token that is no part of the frame."""
    if token == "$":
        if not reader.is_math and reader.tokens[reader.at : reader.at + 1] == ["$"]:
            raise reader.fail("a displayed formula")
        if inside == "math {":
            raise reader.fail("a formula ends inside its braces")
        reader.is_math = not reader.is_math
    elif token == "{":
        reader.open.append("math {" if reader.is_math else "{")
    elif token == "}":
        if inside != ("math {" if reader.is_math else "{"):
            raise reader.fail("a brace too many")
        reader.open.pop()
    elif token in "%#" or (token in "^_~" and not (reader.is_math and token != "~")):
        raise reader.fail(f"{token} is not escaped")
    elif token in '<>|"`' and not reader.is_math and not _is_quote(reader, token):
        raise reader.fail(f"{token} prints as something else")
    elif token[0] == "\\":
        name = token[1:]
        if name in ("caption", "label"):
            reader.commands.append(name)
            if name == "label":
                reader.name()
        elif name in LAYOUT and not reader.is_math:
            reader.commands.append(name)
        elif name not in (MATH if reader.is_math else TEXT):
            raise reader.fail(f"no command {token}{' in a formula' if reader.is_math else ''}")


def _is_quote(reader: _Reader, token: str) -> bool:
    """``as quotes open."""
    return (
        token == "`" and "`" in reader.tokens[reader.at - 2 : reader.at - 1] + reader.tokens[reader.at : reader.at + 1]
    )
