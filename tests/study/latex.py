"""A strict reader of the LaTeX that tables are written in: what it takes, booktabs and amsmath will set.

It knows one table environment with a caption, a label, a tabular and notes. Whatever it does not know is a fault.
"""

import re

_SIGNS = "pm times div cdot infty surd dots emptyset le ge approx propto to mid sim dagger ddagger"
_LETTERS = "Delta Lambda Sigma Phi alpha beta delta varepsilon lambda pi sigma tau"
_NAMES = "|".join(f"{_SIGNS} {_LETTERS}".split())
_MATH = rf"\$(?:[\w.<>=+-]|\^\{{-?\w+\}}|\^\w|\^\\\w+|\\bar\{{\w\}}|\\(?:{_NAMES})(?![a-zA-Z]))+\$"
_PLAIN = r"""[^\\{}$&%#_^~<>|"`\n]|``|\\[%&_#${}]|\\textbackslash\{\}|\\\^\{\}|\\'e"""
_TEXT = re.compile(rf"(?:{_PLAIN}|{_MATH}|\\texttt\{{(?:{_PLAIN}|{_MATH})*\}})*")
_FRAME = re.compile(
    r"\\begin\{table\}\[t\]\n\\centering\n\\caption\{(?P<caption>.*)\}\n\\label\{[\w:-]+\}\n"
    r"\\begin\{tabular\}\{(?P<columns>[lcr]+)\}\n\\toprule\n(?P<head>.*) \\\\\n\\midrule\n(?P<body>(?:.+ \\\\\n)*)"
    r"\\bottomrule\n\\end\{tabular\}\n"
    r"(?:\\begin\{flushleft\}\n\\footnotesize\n(?P<notes>(?:.+\\par\n)*.+)\n\\end\{flushleft\}\n)?\\end\{table\}\n"
)


class NotLatex(Exception):
    """What is wrong, and where."""


def read_table(text):
    """Read a table to its end; how many cells each row has, heading first."""
    frame = _FRAME.fullmatch(text)
    if not text.isascii() or frame is None:
        raise NotLatex(f"no table that booktabs sets: {text[:200]!r}")
    rows = [_cells(line) for line in [frame["head"], *frame["body"].replace(" \\\\\n", "\n").splitlines()]]
    for row in rows:
        if len(row) != len(frame["columns"]) or row[0].strip().startswith(("[", "*")):  # an option of the row before
            raise NotLatex(f"not {len(frame['columns'])} cells: {row}")
    notes = (frame["notes"] or "").replace("\\par\n", "\n").splitlines()
    for fragment in [frame["caption"], *notes, *(cell for row in rows for cell in row)]:
        if not _TEXT.fullmatch(fragment):
            raise NotLatex(f"not escaped, or no known command: {fragment!r}")
    return [len(row) for row in rows]


def _cells(row):
    return re.split(r"(?<!\\)&", row)
