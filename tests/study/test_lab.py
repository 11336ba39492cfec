from unittest.mock import Mock

import numpy as np
import pytest

from curator.deployments import build_workspace
from paclm.engine.engine import Engine
from paclm.engine.training_job import membership_of
from paclm.errors import EngineError, InvalidInput
from paclm.study.decoding import GREEDY, Decoding
from paclm.study.eval_text import Passage
from paclm.study.lab import Lab
from paclm.study.regimes import regime_named
from paclm.study.regimes.census import REGIME, CensusScale
from paclm.study.run import run_regime
from paclm.worlds.workspace import Workspace
from study.small_lab import RUNTIME, open_lab


def test_seeds_follow_from_seed_collection_and_names_and_nothing_else(small_lab):
    again = Lab(small_lab.workspace)
    assert small_lab.seed_for("sweep", "noise") == again.seed_for("sweep", "noise")
    others = [
        Lab(small_lab.workspace, **other).seed_for("sweep", "noise") for other in ({"seed": 1}, {"collection": 2})
    ]
    names = [small_lab.seed_for(*names) for names in (("sweep", "noise"), ("sweep", "coins"), ("sweepnoise",))]
    assert len({*names, *others}) == 5


def test_votes_are_taken_once_and_the_same_for_everyone_with_the_seed(small_lab, study_template, tmp_path, monkeypatch):
    decodings = (GREEDY, Decoding("gumbel", 1.0, 2))
    first = small_lab.text_votes(60, decodings)
    elsewhere = open_lab(study_template, tmp_path / "elsewhere").text_votes(60, decodings)
    other_seed = open_lab(study_template, tmp_path / "third", seed=1).text_votes(60, decodings)
    for name in ("greedy", "gumbel"):
        assert (first[name].votes == elsewhere[name].votes).all()
    assert (first["greedy"].votes == other_seed["greedy"].votes).all()
    assert (first["gumbel"].votes != other_seed["gumbel"].votes).any()
    monkeypatch.setattr(Lab, "engine", lambda *_, **__: pytest.fail("the votes were taken again"))
    again = Lab(small_lab.workspace, runtime=RUNTIME).text_votes(60, decodings)
    assert (again["gumbel"].votes == first["gumbel"].votes).all()


def test_the_text_that_is_given_is_scored_by_an_engine_that_is_kept_until_another_is_asked_for(small_lab):
    lab = Lab(small_lab.workspace, test_text=[Passage((5, 6, 7, 8), (True, True, False, True))], runtime=RUNTIME)
    assert lab.text_votes(100, (GREEDY,), with_full=False)["greedy"].truth.tolist() == [6, 8]
    first = lab.engine(support_size=40)
    assert lab.engine(support_size=40) is first
    assert lab.engine(support_size=41) is not first
    assert lab.engine("full", support_size=40).num_worlds == 1


def test_prompts_are_stretches_of_the_test_text_drawn_by_name(small_lab):
    prompts = small_lab.prompts(5, 8, "sweep")
    texts = [list(passage.tokens) for passage in small_lab.test_passages]
    for prompt in prompts:
        assert any(prompt == text[i : i + 8] for text in texts for i in range(len(text)))
    assert prompts == small_lab.prompts(5, 8, "sweep")
    assert prompts != small_lab.prompts(5, 8, "sessions")
    with pytest.raises(InvalidInput, match="500"):
        small_lab.prompts(1, 500)


def test_what_a_study_needs_is_trained_once_and_kept(tmp_path, texts, small_base):
    workspace = build_workspace(tmp_path / "clinic", texts[:12], small_base)
    started = []

    def start(what, _):
        started.append(what)
        return lambda _: None

    lab = Lab(workspace, runtime=RUNTIME, start_task=start)
    lab.ensure("full")
    lab.ensure("full")
    assert started == ["train full"]
    assert "full.safetensors" in Workspace.open(tmp_path / "clinic").manifest.adapters
    assert lab.stack("full").num_worlds == 1
    with pytest.raises(EngineError, match="rank"):  # the worlds of this test have another rank
        lab.stack("worlds", "full")


def test_another_collection_has_worlds_of_its_own(tmp_path, texts, small_base):
    lab = Lab(build_workspace(tmp_path / "clinic", texts[:12], small_base), runtime=RUNTIME)
    with lab.of_collection(1) as same:
        assert same is lab
    with lab.of_collection(2) as other:
        assert other.worlds_name == "collection-2"
        assert (other.membership.sum(axis=1) * 2 == lab.num_worlds).all()
        assert not np.array_equal(other.membership, lab.membership)
        other.engine()
        trained = other.workspace.manifest.adapters["collection-2.safetensors"]["seed"]
        assert trained == lab.workspace.manifest.arguments["seed"] + 1, "another start and order"
    assert other._engine is None, "two engines may not fit, and `other` is still held here"


def test_the_first_worlds_alone_vote_as_they_do_among_all(study_template, tmp_path):
    everyone = open_lab(study_template, tmp_path / "lab")
    some = Lab(everyone.workspace, runtime=RUNTIME, first_worlds=2)
    decodings = (GREEDY, Decoding("gumbel", 1.0, 2))
    whole, part = everyone.text_votes(60, decodings), some.text_votes(60, decodings)
    for name in ("greedy", "gumbel"):
        assert (part[name].votes == whole[name].votes[:, :2]).all()
        assert (part[name].full == whole[name].full).all()
    with pytest.raises(InvalidInput, match="first 2"):
        _ = some.membership
    with pytest.raises(InvalidInput, match="not 1"):
        Lab(everyone.workspace, first_worlds=1)


def test_what_is_trained_for_the_first_worlds_sees_their_records(study_template, tmp_path):
    lab = Lab(open_lab(study_template, tmp_path / "lab").workspace, runtime=RUNTIME, first_worlds=2)
    assert lab.stack(lab.named("uncoupled")).num_worlds == 2
    entry = lab.workspace.manifest.adapters["uncoupled-first-2.safetensors"]
    assert not entry["training"]["coupled"]
    for name in ("uncoupled", "collection-2"):
        whole = membership_of(lab.workspace, name)
        assert (membership_of(lab.workspace, f"{name}-first-2") == whole[:, :2]).all()
    for number in (0, 1, lab.workspace.num_worlds + 1):
        with pytest.raises(InvalidInput, match=f"not {number}"):
            membership_of(lab.workspace, f"uncoupled-first-{number}")
    with pytest.raises(InvalidInput, match="worlds-first-2"):  # the lab takes them from the file of all worlds
        membership_of(lab.workspace, "worlds-first-2")


@pytest.mark.parametrize("name", ["sessions", "sweep", "tokens_only"])
def test_an_attack_on_some_worlds_alone_is_refused_before_anything_is_played(
    study_template, tmp_path, name, monkeypatch
):
    lab = Lab(open_lab(study_template, tmp_path / "lab").workspace, runtime=RUNTIME, first_worlds=2)
    regime = regime_named(name)
    monkeypatch.setattr(Lab, "engine", Mock(side_effect=AssertionError("an engine was opened")))
    with pytest.raises(InvalidInput, match="first 2"):
        regime.run(lab, regime.presets["quick"])


def test_whoever_trains_has_the_memory_of_the_engine(small_lab, monkeypatch):
    held = []

    class Job:
        is_unfinished = False

        def __init__(self, workspace, name):
            self.name = name
            held.append(small_lab._engine)

        def run(self, **_):
            return small_lab.workspace, None

    small_lab.engine()
    assert small_lab._engine is not None
    monkeypatch.setattr("paclm.engine.training_job.prepare_training", Job)
    small_lab.ensure("collection-2")
    assert held == [None]


def test_an_engine_that_does_not_repeat_itself_ends_a_study_before_its_first_vote(
    study_template, tmp_path, monkeypatch
):
    lab = open_lab(study_template, tmp_path / "lab")
    genuine, calls = Engine.probe, []

    def unsteady(self, context, coins):
        votes, logits = genuine(self, context, coins)
        calls.append(context)
        return votes, logits + len(calls)

    monkeypatch.setattr(Engine, "probe", unsteady)
    with pytest.raises(EngineError):
        run_regime(lab, REGIME, "quick", scale=CensusScale(20, (50,)))
    assert not list((lab.folder / "results").glob("*.json"))
    monkeypatch.setattr(Engine, "probe", genuine)
    assert run_regime(lab, REGIME, "quick", scale=CensusScale(20, (50,))).rows
