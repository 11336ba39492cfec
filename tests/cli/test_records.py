"""`paclm records` as somebody uses it who must delete a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paclm.cli.main import app
from paclm.errors import InvalidInput
from paclm.worlds.workspace import Workspace

WORLDS = 8


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory, texts: list[str], small_base: Path) -> Path:
    """Sixty letters by thirty authors, two of them word for word alike, and two canaries."""
    folder = tmp_path_factory.mktemp("records")
    rows = [{"id": f"l{i}", "text": text, "author": f"a{i // 2}"} for i, text in enumerate(texts[:60])]
    rows[1]["text"] = rows[0]["text"]
    corpus = folder / "letters.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "letters"
    command = ["init", str(path), "--corpus", str(corpus), "--base", str(small_base), "--worlds", str(WORLDS)]
    made = CliRunner().invoke(app, [*command, "--group-by", "author", "--holdout", "10", "--canaries", "2"])
    assert made.exit_code == 0, made.output
    return path


def find(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["records", "find", str(path), *options])


def figures_of(path: Path, identifier: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(find(path, identifier, "--json").stdout)
    return figures


def test_a_record_is_found_in_the_worlds_that_were_trained_on_it(letters: Path) -> None:
    workspace = Workspace.open(letters)
    for row, record in enumerate(workspace.members()):
        figures = figures_of(letters, record.id) if row in (0, 7) or row >= len(workspace.records("train")) else None
        if figures is not None:
            assert figures["in_worlds"] == workspace.membership[row].nonzero()[0].tolist()
            assert (len(figures["in_worlds"]), figures["worlds"]) == (WORLDS // 2, WORLDS)
            assert figures["part"] == ("train" if row < len(workspace.records("train")) else "canaries")


def test_a_record_that_is_held_out_is_in_no_world(letters: Path) -> None:
    record = Workspace.open(letters).records("heldout")[0]
    said = find(letters, record.id)
    assert said.exit_code == 0
    assert "held out: no world has seen it" in said.stdout
    assert figures_of(letters, record.id)["in_worlds"] == []


def test_the_group_and_copies_are_named_and_the_text_never(letters: Path) -> None:
    workspace = Workspace.open(letters)
    figures, said = figures_of(letters, "l0"), find(letters, "l0").stdout
    assert (figures["group"], figures["group_members"], figures["same_text"]) == ("a0", ["l0", "l1"], ["l1"])
    assert "group a0, all in the same worlds: l0, l1" in said
    assert "the same text again: l1" in said
    for record in [*workspace.members(), *workspace.records("heldout")]:
        assert record.text not in said
        assert record.text not in json.dumps(figures)


def test_an_unknown_id_says_what_ids_are_and_a_group_lists_its_records(letters: Path) -> None:
    unknown, group = find(letters, "l99").exception, find(letters, "a3").exception
    assert isinstance(unknown, InvalidInput)
    assert "No record has the id 'l99'. An id is" in str(unknown)
    assert isinstance(group, InvalidInput)
    assert str(group).endswith(": l6, l7.")
