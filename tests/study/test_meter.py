"""The dissent meter: what bills and tokens say about the corpus, from a small workspace to rows."""

import numpy as np
import pytest

from paclm.privacy.belief import uniform_belief
from paclm.privacy.releases import rule_named
from paclm.study.regimes import meter
from paclm.worlds.settings import write_settings
from study.rehearsal import build_trainable_workspace
from study.small_lab import open_lab, rows_of

SCALE = meter.MeterScale(records=24, tokens=20, draws=4, shadows=0, shadow_worlds=2, sequences=16)


def scores_of(rows):
    return {(row["source"], row["attack"]): row for row in rows if row["part"] == "score"}


def test_plurality_is_the_release_of_that_name():
    votes = np.random.default_rng(0).integers(3, size=(2, 40, 8)) + 5
    votes[:, :5] = 7
    noiseless = rule_named("plurality")
    own = [noiseless(row, uniform_belief(8), 0, 1.0, _no_noise()).token for row in votes.reshape(-1, 8)]
    assert meter.plurality(votes).ravel().tolist() == own
    assert not meter.is_dissent(votes)[:, :5].any()


def _no_noise():
    from paclm.privacy.randomness import ResearchNoise

    return ResearchNoise(0)


@pytest.fixture(scope="module")
def random_worlds(study_template, tmp_path_factory):
    lab = open_lab(study_template, tmp_path_factory.mktemp("meter") / "random")
    return scores_of(rows_of(lab, meter.REGIME, SCALE))


def test_worlds_that_saw_no_record_say_nothing(random_worlds):
    """Random adapters: members and others are alike. |z| > 4 in 16 scores: a false alarm in 1,000."""
    for (source, attack), row in random_worlds.items():
        assert abs(row["auc"] - 0.5) <= 4.0 * row["auc_stderr"], (source, attack)


def test_a_bill_of_tokens_and_that_of_a_free_release_are_the_same_for_every_record(random_worlds):
    for source in ("bill, tokens × budget", "bill, plurality"):
        row = random_worlds[source, "rate"]
        assert row["is_constant"]
        assert (row["auc"], row["auc_stderr"]) == (0.5, 0.0)
        assert row["rate_members"] == row["rate_others"] == float(source == "bill, tokens × budget")
    assert not random_worlds["bill, gaussian", "rate"]["is_constant"]


def test_worlds_that_learnt_their_records_by_heart_say_so_by_their_bill(tmp_path, texts, small_base):
    built = build_trainable_workspace(tmp_path / "clinic", texts[:60], small_base)
    write_settings(built / "paclm.toml", "training", {"learning_rate": 0.02, "epochs": 12})
    lab = open_lab(built, tmp_path / "lab")
    lab.workspace = lab.train("worlds", lab.workspace)
    rows = scores_of(rows_of(lab, meter.REGIME, SCALE))
    bill = rows["bill, gaussian", "rate"]
    assert bill["auc"] - 0.5 > 4.0 * bill["auc_stderr"]
    assert rows["bill, tokens × budget", "rate"]["auc"] == 0.5
