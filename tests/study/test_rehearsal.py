"""Every table of a study is LaTeX that a strict reader takes, and no bound in it is printed as less than it is."""

import re

import pytest

from paclm.study.figure import save_figure
from paclm.study.figures import all_figures
from paclm.study.regimes import regime_named
from paclm.study.table import Cell, TableData, to_latex
from paclm.study.tables import all_tables
from study.latex import NotLatex, read_table
from study.rehearsal import open_rehearsal, rehearse

HEAD = "\\begin{table}[t]\n\\centering\n\\caption{Of \\%}\n\\label{tab:x}\n\\begin{tabular}{ll}\n\\toprule\n"
TAIL = "\\bottomrule\n\\end{tabular}\n\\end{table}\n"
GOOD = HEAD + "a & b \\\\\n\\midrule\n  $2^{-16}$$^\\dagger$ & 5\\% \\\\\n" + TAIL


@pytest.fixture(scope="module")
def results(tmp_path_factory, texts, small_base):
    return rehearse(open_rehearsal(tmp_path_factory.mktemp("latex"), texts, small_base))


@pytest.fixture(scope="module")
def built(results):
    return {table.label: table.build(results) for table in all_tables()}


def test_every_table_of_a_rehearsal_is_latex(built):
    for label, data in built.items():
        rows = read_table(to_latex(data, label))
        assert rows == [len(data.columns)] * (1 + len(data.rows)), label


def test_every_figure_of_a_rehearsal_is_drawn_and_every_regime_has_a_summary(results, tmp_path):
    for figure in all_figures():
        assert all(path.stat().st_size > 1000 for path in save_figure(figure, results, tmp_path)), figure.label
    for name, result in results.items():
        lines = regime_named(name).summary(result)
        assert lines, name
        assert not re.search(r"\bnan\b|None", "\n".join(lines)), name


def test_every_bound_is_rounded_up_and_the_papers_is_left_as_printed(built):
    rows = [dict(zip(data.columns, row, strict=True)) for data in built.values() for row in data.rows]
    cells = [(column, cell) for row in rows for column, cell in row.items() if "bound" in column.split()]
    assert len(cells) >= 4 * 4 + 2 * 4  # sweep and sessions
    for column, cell in cells:
        assert isinstance(cell, Cell)
        assert cell.is_bound
        assert cell.value <= float(cell.ours()) < cell.value + 1.001e-4, column


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(
            (r"5\%", bad)
            for bad in ("5%", "5_1", "a~b", "a|b", "5 & 6", r"$\varnothing$", r"\usepackage{x}", r"\dagger")
        ),
        *((r"5\%", bad) for bad in ("{5", "5}", "$5", "5 ±", r"a \\ b", '"a"')),
        (r" & 5\%", ""),
        ("\\midrule\n  $2", "[x] $2"),
        ("\\midrule\n  $2", "\\midrule\n  [x] $2"),
        ("\\midrule\n", "\\midrule\n\n"),
        ("\\midrule\n", ""),
        ("\\end{tabular}\n", ""),
        ("{ll}", "{l|l}"),
        (r"Of \%", "Of $$x$$"),
        (r"Of \%", "Of a & b"),
    ],
)
def test_the_reader_fails_on_what_latex_would_not_set(old, new):
    assert read_table(GOOD) == [2, 2]
    assert old in GOOD
    with pytest.raises(NotLatex):
        read_table(GOOD.replace(old, new))


def test_a_table_whose_sign_is_not_escaped_fails(monkeypatch):
    data = TableData("Share of 5 %", ["a"], [[Cell(0.5, style=".0%")]])
    assert read_table(to_latex(data, "tab:x")) == [1, 1]
    monkeypatch.setattr("paclm.study.table._TEX", {})
    with pytest.raises(NotLatex):
        read_table(to_latex(data, "tab:x"))
