"""The regime `worlds`: votes of fewer worlds, drawn from recorded ones, and designs of fewer worlds."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from paclm.engine.training_job import membership_of
from paclm.errors import InvalidInput
from paclm.privacy.bounds import nats_for, success_bound
from paclm.study.lab import Lab
from paclm.study.recorded_votes import RecordedVotes, TextVotes
from paclm.study.regimes import accuracy, worlds
from paclm.study.regimes.worlds import REGIME, WorldsScale
from paclm.study.run import run_regime
from paclm.worlds.workspace import Workspace
from study.rehearsal import build_trainable_workspace
from study.small_lab import open_lab

FOLDER = Path(__file__).parent.parent / "fixtures" / "votes"


def votes_of(name):
    votes = RecordedVotes.load(FOLDER / f"{name}.npz")
    position = np.arange(votes.num_positions)
    return TextVotes(**votes.columns(), passage=position // 256, position=position)


@pytest.fixture
def real_votes(monkeypatch):
    votes = {decoder: votes_of(f"wikipedia-{decoder}") for decoder in ("greedy", "gumbel")}
    monkeypatch.setattr(Lab, "text_votes", lambda *_, **__: votes)
    monkeypatch.setattr(Lab, "num_worlds", 128)
    return votes


def test_fewer_worlds_dissent_less_and_keep_more(small_lab, real_votes):
    """Subsets differ by 0.013 at most (standard deviation): the mean of 8 is within 0.02 but once in 70,000 seeds."""
    result = run_regime(small_lab, REGIME, "quick", scale=WorldsScale(32768, 1, sizes=(8, 128), subsets=8))
    for decoder, *kept in (("greedy", 0.868, 0.750), ("gumbel", 0.860, 0.798)):
        few, many = (result.one(decoder=decoder, worlds=m) for m in (8, 128))
        assert few["dissent"] < many["dissent"]
        assert [row["retained_gain_at_32"] for row in (few, many)] == pytest.approx(kept, abs=0.02)
        assert few["retained_gain_at_32"] > many["retained_gain_at_32"] + 0.04  # beyond both errors
        change = few["retained_gain_at_32"] - many["retained_gain_at_32"]
        assert few["kept_change_at_32"] == pytest.approx(change)
        assert 0.0 < few["kept_change_at_32_stderr"] < few["retained_gain_at_32_stderr"] * 1.5
        # what one world keeps does not depend on how many there are
        assert few["retained_gain_noiseless"] == pytest.approx(many["retained_gain_noiseless"], abs=0.02)
    assert len(result.rows) == 4
    assert len(REGIME.in_short(result)) == 2


def test_all_worlds_give_the_numbers_of_the_accuracy_regime(small_lab, monkeypatch):
    votes = votes_of("smollm2-wiki-greedy")
    monkeypatch.setattr(Lab, "text_votes", lambda *_, **__: {"greedy": votes})
    (row,) = worlds._of_columns(small_lab, votes, 128, 3, partial(worlds._tight_hits, votes))
    rows = accuracy.run(small_lab, accuracy.AccuracyScale(4096, 1)).rows
    for budget, end in (("2^-8", "at_8"), ("2^-16", "at_16"), ("2^-32", "at_32"), ("inf", "noiseless")):
        (other,) = (one for one in rows if one["budget"] == budget)
        for name in ("retained_gain", "retained_gain_stderr"):
            assert row[name.replace("gain", f"gain_{end}")] == other[name]
    assert (row["design"], row["subsets"], row["record_prior_sd"]) == ("all trained", 1, 0.0)
    assert (row["kept_change_at_32"], row["kept_change_at_32_stderr"]) == (0.0, 0.0)  # paired with itself


def test_subsets_are_said_to_be_no_design(small_lab, real_votes):
    votes = real_votes["gumbel"]
    (row,) = worlds._of_columns(small_lab, votes, 8, 2, partial(worlds._tight_hits, votes))
    assert row["design"] == "columns"
    rng = np.random.default_rng(0)
    shares = [(rng.permutation(128)[:8] < 64).mean() for _ in range(4000)]  # a record in half of 128 worlds
    # the standard deviation of 4,000 samples has an error of 1.1 %: 5 % is beyond four of them
    assert row["record_prior_sd"] == pytest.approx(np.std(shares), rel=0.05)
    assert row["record_prior_sd"] != pytest.approx(math.sqrt(1 / 4 / 16), rel=0.05)
    assert row["world_prior"] == 1 / 8
    assert row["world_bound"] == success_bound(nats_for(0.51, 0.5), 1 / 8)
    assert row["leak_per_token"] == pytest.approx(2.0**-32 * row["dissent"])
    assert row["retained_gain_between"] > 0.0


def test_draws_of_other_worlds_differ_more_than_overlapping_subsets():
    """The standard deviation of 4,000 subsets has an error of 1.1 %: 5 % is beyond four of them."""
    rng = np.random.default_rng(5)
    worlds_keep = rng.normal(size=128)
    for size in (8, 64):
        shares = [float(rng.permutation(worlds_keep)[:size].mean()) for _ in range(4000)]
        expected = worlds_keep.std(ddof=1) / math.sqrt(size)
        assert worlds.between_draws(shares, size, 128) == pytest.approx(expected, rel=0.05)
    assert np.std(shares) < 0.8 * expected  # subsets of 64 share half of their worlds


def test_a_design_is_balanced_where_the_first_columns_are_not(study_template):
    workspace = Workspace.open(study_template)
    design = membership_of(workspace, "design-4")
    assert design.shape == (len(workspace.membership), 4)
    assert set(design.sum(axis=1)) == {2}
    assert len(set(workspace.membership[:, :4].sum(axis=1))) > 1
    assert np.array_equal(membership_of(workspace, "design:4"), design)
    with pytest.raises(InvalidInput):
        membership_of(workspace, "design-3")


def test_designs_are_trained_and_vote_on_the_same_text(tmp_path, texts, small_base):
    lab = open_lab(build_trainable_workspace(tmp_path / "template", texts[:40], small_base), tmp_path / "lab")
    result = run_regime(lab, REGIME, "quick", scale=WorldsScale(40, 1, sizes=(4, 8, 16), subsets=2, designs=(4,)))
    kinds = {(row["decoder"], row["worlds"], row["design"]) for row in result.rows}
    assert kinds == {
        (decoder, *kind)
        for decoder in ("greedy", "gumbel")
        for kind in ((4, "columns"), (8, "all trained"), (4, "balanced"))
    }
    assert "design-4.safetensors" in Workspace.open(lab.workspace.path).manifest.adapters
