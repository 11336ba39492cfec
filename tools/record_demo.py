"""Record `paclm demo` for the README: a picture, its text, and the README's block, all from one real run.

    python tools/record_demo.py                    # docs/images/demo.svg, docs/images/demo.txt, README.md
    python tools/record_demo.py --from FILE        # the same from a terminal session that was kept with --keep FILE

Runs the command in a terminal of set size and leaves out its progress bars, which go to standard error. In the text,
brackets stand for colours, as the demo prints them where there are none.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

from paclm.cli.side_by_side import STYLES, Span, SpanMark, bracket

ROOT = Path(__file__).parent.parent
PICTURE, RECORD, README = ROOT / "docs/images/demo.svg", ROOT / "docs/images/demo.txt", ROOT / "README.md"
COLUMNS, LINES = 100, 60
BEGIN, END = "<!-- demo: made by tools/record_demo.py -->\n", "<!-- end of demo -->"
WITHOUT_FONTS = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # of the network
STEPS_SHOWN = ("3.", "5.", "6.", "7.")
"""Of the README's text; the picture shows all of them."""


def run_in_terminal(command: list[str], folder: Path) -> str:
    """What a command writes to standard output if that is a terminal of this size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(COLUMNS)}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=theirs) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                new = os.read(ours, 65536)
            except OSError:  # the terminal is closed
                break
            if not new:
                break
            output += new
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}.")
    return output.decode().replace("\r\n", "\n").strip("\n") + "\n"


def draw(session: str, title: str) -> str:
    """The session as a picture of a terminal."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(session), end="")
    drawn = console.export_svg(title=title, theme=MONOKAI, unique_id="demo", code_format=WITHOUT_FONTS)
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def in_brackets(session: str) -> str:
    """The session as plain text, with the demo's brackets for its colours."""
    lines = []
    for line in Text.from_ansi(session).split("\n", allow_blank=True):
        spans = [span for mark in STYLES for span in marked(line, mark)]
        text = bracket(line.plain, spans).rstrip()
        wider = len(text) - len(line.plain.rstrip())
        lines.append(re.sub(rf" {{0,{wider}}}│$", "│", text))  # the table's border stays where it was
    return "\n".join(lines).strip("\n") + "\n"


def marked(line: Text, mark: SpanMark) -> list[Span]:
    """The stretches of a line in the style of this mark, whatever else they are."""
    wanted = Style.parse(STYLES[mark])
    places = set[int]()
    for span in line.spans:
        style = Style.parse(str(span.style))
        has_colour = wanted.color is None or (style.color is not None and style.color.number == wanted.color.number)
        if has_colour and (style.underline or not wanted.underline):
            places.update(range(span.start, span.end))
    starts = sorted(place for place in places if place - 1 not in places)
    ends = sorted(place + 1 for place in places if place + 1 not in places)
    return [Span(start, end, mark) for start, end in zip(starts, ends, strict=True)]


def block_of(record: str) -> str:
    """The README's block: some of the steps of a recorded text."""
    steps = re.findall(r"^\d\. .*(?:\n .*)*", record, re.MULTILINE)
    return "```text\n" + "\n".join(step for step in steps if step.startswith(STEPS_SHOWN)) + "\n```\n"


def with_block(readme: str, record: str) -> str:
    """The README with the block of this record between its markers."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + block_of(record) + END + rest.split(END, 1)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="session", type=Path, help="a session that was kept, instead of a new run")
    parser.add_argument("--keep", type=Path, help="where to keep the session with its control characters")
    parser.add_argument("arguments", nargs="*", help="of paclm demo, after --")
    chosen = parser.parse_args()
    if chosen.session:
        session = chosen.session.read_text()
    else:
        with tempfile.TemporaryDirectory() as folder:
            session = run_in_terminal([sys.executable, "-m", "paclm", "demo", *chosen.arguments], Path(folder))
    if chosen.keep:
        chosen.keep.write_text(session)
    record = in_brackets(session)
    PICTURE.write_text(draw(session, " ".join(["paclm demo", *chosen.arguments])))
    RECORD.write_text(record)
    README.write_text(with_block(README.read_text(), record))


if __name__ == "__main__":
    main()
