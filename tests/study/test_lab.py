from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from curator.deployments import build_workspace
from paclm.errors import EngineError, InvalidInput
from paclm.study.lab import Lab
from paclm.study.text import Passage
from paclm.study.textvotes import GREEDY, Decoding
from paclm.worlds.workspace import Workspace
from study.small_lab import RUNTIME, open_lab


def test_seeds_follow_from_seed_collection_and_names_and_nothing_else(small_lab: Lab) -> None:
    again = Lab(small_lab.workspace)
    assert small_lab.seed_for("sweep", "noise") == again.seed_for("sweep", "noise")
    others = [
        small_lab.seed_for("sweep", "coins"),
        small_lab.seed_for("sweepnoise"),
        Lab(small_lab.workspace, seed=1).seed_for("sweep", "noise"),
        Lab(small_lab.workspace, collection=2).seed_for("sweep", "noise"),
    ]
    assert len({small_lab.seed_for("sweep", "noise"), *others}) == 5


def test_votes_are_taken_once_and_the_same_for_everyone_with_the_seed(
    small_lab: Lab, study_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decodings = (GREEDY, Decoding("gumbel", 1.0, 2))
    first = small_lab.text_votes(60, decodings)
    elsewhere = open_lab(study_template, tmp_path / "elsewhere").text_votes(60, decodings)
    other_seed = open_lab(study_template, tmp_path / "third", seed=1).text_votes(60, decodings)
    for name in ("greedy", "gumbel"):
        assert (first[name].recorded.votes == elsewhere[name].recorded.votes).all()
    assert (first["greedy"].recorded.votes == other_seed["greedy"].recorded.votes).all()
    assert (first["gumbel"].recorded.votes != other_seed["gumbel"].recorded.votes).any()
    monkeypatch.setattr(Lab, "engine", lambda *_, **__: pytest.fail("the votes were taken again"))
    again = Lab(small_lab.workspace, runtime=RUNTIME).text_votes(60, decodings)
    assert (again["gumbel"].recorded.votes == first["gumbel"].recorded.votes).all()


def test_prompts_are_stretches_of_the_test_text_drawn_by_name(small_lab: Lab) -> None:
    prompts = small_lab.prompts(5, 8, "sweep")
    texts = [list(passage.tokens) for passage in small_lab.test_passages]
    for prompt in prompts:
        assert any(prompt == text[i : i + 8] for text in texts for i in range(len(text)))
    assert prompts == small_lab.prompts(5, 8, "sweep")
    assert prompts != small_lab.prompts(5, 8, "sessions")
    with pytest.raises(InvalidInput, match="No test text is 500 tokens long"):
        small_lab.prompts(1, 500)


def test_the_text_that_is_given_is_the_text_that_is_scored(small_lab: Lab) -> None:
    lab = Lab(small_lab.workspace, test_text=[Passage((5, 6, 7, 8), (True, True, False, True))], runtime=RUNTIME)
    votes = lab.text_votes(100, (GREEDY,), with_full=False)["greedy"]
    assert votes.truth.tolist() == [6, 8]


def test_an_engine_is_kept_until_another_is_asked_for(small_lab: Lab) -> None:
    first = small_lab.engine(support_size=40)
    assert small_lab.engine(support_size=40) is first
    assert small_lab.engine(support_size=41) is not first
    assert small_lab.engine("full", support_size=40).num_worlds == 1


def test_what_a_study_needs_is_trained_once_and_kept(tmp_path: Path, texts: list[str], small_base: Path) -> None:
    workspace = build_workspace(tmp_path / "clinic", texts[:12], small_base)
    told: list[str] = []

    def start(what: str, _: int) -> object:
        told.append(what)
        return lambda _: None

    lab = Lab(workspace, runtime=RUNTIME, start_task=start)  # type: ignore[arg-type]
    lab.ensure("full")
    lab.ensure("full")
    assert told == ["train full"]
    assert "full.safetensors" in Workspace.open(tmp_path / "clinic").manifest.adapters
    assert lab.stack("full").num_worlds == 1
    with pytest.raises(EngineError, match="different settings"):  # the worlds of this test have another rank
        lab.stack("worlds", "full")


def test_another_collection_has_worlds_of_its_own(tmp_path: Path, texts: list[str], small_base: Path) -> None:
    lab = Lab(build_workspace(tmp_path / "clinic", texts[:12], small_base), runtime=RUNTIME)
    with lab.of_collection(1) as same:
        assert same is lab
    with lab.of_collection(2) as other:
        assert other.worlds_name == "collection-2"
        assert (other.membership.sum(axis=1) * 2 == lab.num_worlds).all()
        assert not np.array_equal(other.membership, lab.membership)
