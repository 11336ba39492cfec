"""The README's picture, text and block of the demo are from one run."""

import html
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
from paclm.cli.side_by_side import MarkedText, Screen
print("bar", file=sys.stderr)
private = MarkedText.of("A", [(" big", "disputed")], ["big"])
Screen().compare(("public", "private"), [(MarkedText("A", " b"), private)])
"""


def load_tool():
    spec = importlib.util.spec_from_file_location("record_demo", ROOT / "tools" / "record_demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def test_the_readme_shows_the_figures_of_the_record():
    record, readme = tool.RECORD.read_text(), tool.README.read_text()
    assert tool.with_block(readme, record) == readme, "run: python tools/record_demo.py"
    assert "public model" in tool.block_of(record)
    assert tool.with_block(readme, record.replace("%", "‰")) != readme


def test_the_picture_shows_the_figures_of_the_record():
    drawn = html.unescape(re.sub(r"<[^>]*>", " ", tool.PICTURE.read_text()))
    figures = re.findall(r"\d[\d.,^-]*%|\d\.\d\d\d+", tool.RECORD.read_text())
    assert len(figures) > 10
    assert [figure for figure in figures if figure not in drawn] == []


def test_a_session_is_recorded_in_a_terminal_and_colours_become_brackets(tmp_path):
    session = tool.run_in_terminal([sys.executable, "-c", PROGRAM], tmp_path)
    assert "\x1b[" in session
    assert "bar" not in session
    row = next(line for line in tool.in_brackets(session).splitlines() if "A" in line)
    assert [cell.strip() for cell in row.strip().strip("│").split("│")] == ["A b", "A «⟨big⟩»"]
    assert "big" in tool.draw(session, "demo")
