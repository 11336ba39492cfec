"""Marks of dissent and of terms, in colours and in brackets, in two columns and one after the other."""

import pytest

from paclm.cli.side_by_side import MarkedText, Screen, find_terms

TERMS = {"Alder", "Alder Ward", "Cordival"}
PIECES = [(" to", "agreed"), (" Al", "disputed"), ("der", "disputed"), (" Ward on", "agreed"), (" Cordival", "agreed")]


def test_the_longest_term_is_found_and_only_as_a_whole_word():
    text = "Alder Ward, Alderley, Alder."
    assert [text[start:end] for start, end in find_terms(text, TERMS)] == ["Alder Ward", "Alder"]
    assert find_terms(text, ()) == []


def test_dissent_and_terms_are_marked_where_they_overlap_and_not_in_the_prompt():
    text = MarkedText.of("From Alder", PIECES, TERMS)
    assert text.bracketed() == "From Alder to «⟨Alder⟩ Ward» on «Cordival»"
    assert text.continuation == " to Alder Ward on Cordival"
    assert text.terms == ["Alder Ward", "Cordival"]


def test_a_term_that_begins_in_the_prompt_is_marked_as_a_whole():
    assert MarkedText.of("On Alder", [(" Ward.", "disputed")], TERMS).bracketed() == "On «Alder ⟨Ward»." + "⟩"


def test_tokens_of_the_public_model_are_marked_and_blank_ones_are_not():
    text = MarkedText.of("A", [("\n", "disputed"), (" b", "public"), (" c", "public")], ())
    assert text.bracketed() == "A\n ⟨public: b c⟩"


def shown(monkeypatch, capsys, columns, **environment):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40", **environment}.items():
        monkeypatch.setenv(name, value)
    screen = Screen()
    pair = MarkedText.of("Sent", [(" home.", "agreed")], TERMS), MarkedText.of("Sent", PIECES, TERMS)
    screen.compare(("public", "private"), [pair])
    screen.legend({"disputed": "worlds differ", "term": "own words"})
    return capsys.readouterr().out


@pytest.mark.parametrize(("columns", "is_beside"), [(99, False), (100, True)])
def test_a_wide_terminal_shows_both_texts_in_one_line(monkeypatch, capsys, columns, is_beside):
    out = shown(monkeypatch, capsys, columns, FORCE_COLOR="1")
    line = next(line for line in out.splitlines() if "home." in line)
    assert ("Cordival" in line) is is_beside
    assert "⟨" not in out
    assert "\x1b[1;4;33mAlder" in out  # a term on which worlds differ: both styles


@pytest.mark.parametrize(
    "environment", [{}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, {"FORCE_COLOR": "1", "TERM": "dumb"}]
)
def test_without_colours_there_are_brackets(monkeypatch, capsys, environment):
    out = shown(monkeypatch, capsys, 120, **environment)
    assert "«⟨Alder⟩ Ward» on «Cordival»" in out
    assert "⟨worlds differ⟩, «own words»" in out
    assert "\x1b[33m" not in out
