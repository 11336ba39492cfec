import csv
import io
from dataclasses import replace
from pathlib import Path

from paclm.study.results import Result
from paclm.study.table import Cell, TableData, to_csv, to_latex, to_markdown
from paclm.study.tables import all_tables

RESULTS = Path(__file__).parents[2] / "docs" / "research" / "results"
DATA = TableData(
    "A caption with 5 % and β.",
    ["name", "flip | dissent", "n"],
    [
        ["first_line", Cell(0.5, 0.01, 0.25, ".1%", "†"), Cell(1234)],
        ["second", Cell(None, paper=0.1, style=".1%"), "–"],
    ],
    ("† explained.",),
)


def test_markdown_shows_value_error_mark_and_the_papers_value():
    lines = to_markdown(DATA).splitlines()
    assert "| first_line | 50.0%† ± 1.0% [25.0%] | 1,234 |" in lines
    assert "| second | – [10.0%] | – |" in lines
    assert "† explained." in lines
    table = [line for line in lines if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in table} == {4}, "also with bars in headings"


def test_csv_keeps_numbers_unrounded_in_columns_of_their_own():
    rows = list(csv.DictReader(io.StringIO(to_csv(DATA))))
    assert rows[0]["flip | dissent"] == "0.5"
    assert rows[0]["flip | dissent (error)"] == "0.01"
    assert rows[1]["flip | dissent (paper)"] == "0.1"
    assert rows[1]["n"] == "–"


def test_latex_writes_powers_as_powers_and_knows_every_sign_that_tables_use():
    data = TableData("b = 2^-16, 2Φ(√(2b))", ["Σ I ÷ 1 − 1/ā", "a³"], [[Cell(1.3e5, style=".2g"), "≤ 2×10^-4 {x}"]])
    text = to_latex(data, "tab:signs")
    assert "b = $2^{-16}$" in text
    assert r"$1.3\times10^{5}$" in text
    assert r"$\Sigma$ I $\div$ 1 $-$ 1/$\bar{a}$ & a$^3$" in text
    assert r"\{x\}" in text
    assert text.isascii()


def test_a_bound_is_rounded_up_with_a_decimal_more_and_the_papers_left_as_printed():
    bound = Cell(0.500021, paper=0.5, style=".3f", is_bound=True)
    assert f"{bound.ours()} [{bound.theirs()}]" == "0.5001 [0.500]"
    assert Cell(0.500021, style=".3f").ours() == "0.500", "any other value is rounded to the nearest"
    assert Cell(1.0, style=".3f", is_bound=True).ours() == "1.0000"
    assert Cell(None, style=".3f", is_bound=True).ours() == "–"


def test_latex_escapes_sets_minus_signs_names_and_quotes_and_explains_the_marks():
    text = to_latex(DATA, "tab:example")
    assert r"\label{tab:example}" in text
    assert r"first\_line & 50.0\%$^\dagger$ $\pm$ 1.0\% [25.0\%] & 1,234 \\" in text
    assert r"5 \% and $\beta$" in text
    data = TableData('"none" at −1', ["T-5"], [[Cell(-0.5, style=".1f", mark="†")]], ("†: see `a_b`.", "Next."))
    text = to_latex(data, "tab:x")
    assert r"\caption{``none'' at $-$1}" in text
    assert "T-5 \\\\" in text
    assert r"$-$0.5$^\dagger$ \\" in text
    assert "\\footnotesize\n$^\\dagger$: see \\texttt{a\\_b}.\\par\nNext.\n" in text
    text = to_latex(TableData("None.", ["a"], []), "tab:x")
    assert "\\midrule\n\\bottomrule" in text, "no empty line without rows"
    assert "flushleft" not in text


def test_a_study_of_the_first_worlds_says_so_beside_its_figures():
    accuracy = Result.load(RESULTS / "wiki" / "results" / "accuracy.json")
    for worlds, is_said in ((32, True), (128, False)):
        result = replace(accuracy, provenance={**accuracy.provenance, "worlds": worlds})
        (table,) = [table for table in all_tables() if table.label == "tab:accuracy"]
        (setup,) = [table for table in all_tables() if table.label == "tab:setup"]
        notes = " ".join(table.build({"accuracy": result}).notes)
        (line,) = [row[1] for row in setup.build({"accuracy": result}).rows if row[0] == "worlds"]
        assert ("first 32 of 128" in notes) == ("first 32 of 128" in line) == is_said
        assert ("exactly 64" in line) != is_said
