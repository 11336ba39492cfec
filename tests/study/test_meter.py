"""The dissent meter: what bills and tokens say about the corpus, from a small workspace to rows."""

import dataclasses

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.privacy.belief import uniform_belief
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import rule_named
from paclm.study.regimes import meter
from paclm.worlds.workspace import Workspace
from study.small_lab import build_study_workspace, open_lab, rows_of

SCALE = meter.MeterScale(records=60, tokens=24, draws=4, shadows=0, shadow_worlds=2, sequences=16)


def scores_of(rows):
    return {(row["source"], row["attack"]): row for row in rows if row["part"] == "score"}


def distance(row):
    """How far the AUC is from a guess, in standard errors; at least one of a few records."""
    return (row["auc"] - 0.5) / max(row["auc_stderr"], 1e-12)


@pytest.fixture(scope="module")
def template(tmp_path_factory, texts, small_base):
    return build_study_workspace(tmp_path_factory.mktemp("meter") / "template", texts[:100], small_base, holdout=50)


@pytest.fixture(scope="module")
def random_worlds(template):
    return scores_of(rows_of(open_lab(template, template.parent / "random"), meter.REGIME, SCALE))


def test_plurality_is_the_release_of_that_name():
    votes = np.random.default_rng(0).integers(3, size=(2, 40, 8)) + 5
    votes[:, :5] = 7
    rule = rule_named("plurality")
    own = [rule(row, uniform_belief(8), 0, 1.0, ResearchNoise(0)).token for row in votes.reshape(-1, 8)]
    assert meter.plurality(votes).ravel().tolist() == own
    assert not meter.is_dissent(votes)[:, :5].any()


def test_worlds_that_saw_no_record_say_nothing(random_worlds):
    """Random adapters: members and others are alike. 14 scores at |z| > 4: a false alarm in 1,000."""
    assert len(random_worlds) == 2 + 4 * 3
    for key, row in random_worlds.items():
        assert abs(distance(row)) < 4.0, key


def test_a_bill_of_tokens_and_that_of_a_free_release_are_the_same_for_every_record(random_worlds):
    for source in ("bill, tokens × budget", "bill, plurality"):
        row = random_worlds[source, "rate"]
        assert row["is_constant"]
        assert (row["auc"], row["auc_stderr"]) == (0.5, 0.0)
        assert row["rate_members"] == row["rate_others"] == float(source == "bill, tokens × budget")
    assert not random_worlds["bill, gaussian", "rate"]["is_constant"]


def test_worlds_that_differ_on_their_own_records_say_so_by_their_bill_until_it_is_closed(
    template, tmp_path, monkeypatch
):
    """One world votes for another token on a third of the positions of members, which no held-out record has."""
    lab, collect = open_lab(template, tmp_path / "lab"), meter.collect_votes
    known = {record.text for record in lab.workspace.records("train")}

    def dissenting(engine, passages, *given):
        votes = collect(engine, passages, *given)["gumbel"]
        starts = [lab.tokenizer.decode(passage.tokens) for passage in passages]
        is_member = np.array([any(text.startswith(start) for text in known) for start in starts])
        changed = is_member[votes.passage] & (votes.position % 3 == 0)
        own = votes.votes.copy()
        own[changed, 0] = own[changed, 0] + 1
        return {"gumbel": dataclasses.replace(votes, votes=own)}

    monkeypatch.setattr(meter, "collect_votes", dissenting)
    rows = scores_of(rows_of(lab, meter.REGIME, SCALE))
    for attack in ("rate", "calibrated", "likelihood"):
        assert distance(rows["bill, gaussian", attack]) > 4.0, attack
    assert rows["bill, gaussian", "likelihood"]["auc"] > 0.9
    assert rows["bill, tokens × budget", "rate"]["auc"] == 0.5
    assert abs(distance(rows["tokens, full", "likelihood"])) < 4.0, "the full adapter's tokens were left alone"


def test_shadow_corpora_are_halves_of_all_records_and_are_trained_once(template, tmp_path):
    lab = open_lab(template, tmp_path / "lab")
    scale = dataclasses.replace(SCALE, shadows=2, shadow_worlds=2, draws=2, tokens=16)
    name, corpora = meter._train_shadows(lab, scale)
    held_out = len(lab.workspace.records("heldout"))
    assert corpora.shape == (len(lab.workspace.records("train")) + held_out, 2)
    assert (corpora.sum(axis=1) == 1).all()
    assert 0 < corpora[-held_out:, 0].sum() < held_out
    entry = Workspace.open(lab.workspace.path).manifest.adapters[f"{name}.safetensors"]
    assert entry["worlds"] == 4
    rows = scores_of(rows_of(lab, meter.REGIME, scale))
    assert {attack for source, attack in rows if source == "bill, gaussian"} == {
        *("rate", "calibrated", "likelihood", "calibrated, shadows", "likelihood, shadows")
    }
    assert Workspace.open(lab.workspace.path).manifest.adapters[f"{name}.safetensors"] == entry
    with pytest.raises(InvalidInput, match="even"):
        meter._train_shadows(lab, dataclasses.replace(scale, shadows=3))
