"""`paclm records find`, for deletion requests."""

import json
from functools import partial

import pytest

from cli.commands import figures_of, invoke
from paclm.errors import InvalidInput
from paclm.worlds.workspace import Workspace

find = partial(invoke, "records", "find")
figures = partial(figures_of, "records", "find")
WORLDS = 8


@pytest.fixture(scope="module")
def letters(tmp_path_factory, texts, small_base):
    """Sixty letters by thirty authors, two of them word for word alike, and two canaries."""
    folder = tmp_path_factory.mktemp("records")
    rows = [{"id": f"l{i}", "text": text, "author": f"a{i // 2}"} for i, text in enumerate(texts[:60])]
    rows[1]["text"] = rows[0]["text"]
    corpus = folder / "letters.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "letters"
    command = ["init", path, "--corpus", corpus, "--base", small_base, "--worlds", WORLDS]
    invoke(*command, "--group-by", "author", "--holdout", "10", "--canaries", "2")
    return path


def test_a_record_is_found_in_the_worlds_that_were_trained_on_it(letters):
    workspace = Workspace.open(letters)
    num_train = len(workspace.records("train"))
    for row, record in enumerate(workspace.members()):
        if row in (0, 7) or row >= num_train:
            found = figures(letters, record.id)
            assert found["in_worlds"] == workspace.membership[row].nonzero()[0].tolist()
            assert (len(found["in_worlds"]), found["worlds"]) == (WORLDS // 2, WORLDS)
            assert found["part"] == ("train" if row < num_train else "canaries")
    held_out = workspace.records("heldout")[0].id
    assert figures(letters, held_out)["in_worlds"] == []
    assert "in no world" in find(letters, held_out).stdout


def test_the_group_and_copies_are_named_and_the_text_never(letters):
    workspace = Workspace.open(letters)
    found, shown = figures(letters, "l0"), find(letters, "l0").stdout
    assert (found["group"], found["group_members"], found["same_text"]) == ("a0", ["l0", "l1"], ["l1"])
    assert "group a0, all in the same worlds: l0, l1" in shown
    for record in [*workspace.members(), *workspace.records("heldout")]:
        assert record.text not in shown
        assert record.text not in json.dumps(found)


@pytest.mark.parametrize(("identifier", "words"), [("l99", "'l99'"), ("a3", "'a3' .*: l6, l7")])
def test_an_unknown_id_is_refused_and_a_group_lists_its_records(letters, identifier, words):
    with pytest.raises(InvalidInput, match=words):
        find(letters, identifier)
