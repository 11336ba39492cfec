"""The accuracy regime on votes that follow a script, where every share is known, and what it says about them."""

from dataclasses import replace

import numpy as np
import pytest

from paclm.privacy.releases import rule_named
from paclm.study.expectation import ExpectedReleases
from paclm.study.recorded_votes import TextVotes
from paclm.study.regimes import accuracy, releases
from paclm.study.regimes.accuracy import REGIME, AccuracyScale
from paclm.study.run import run_regime
from paclm.study.streams import play_sessions
from paclm.study.table import to_markdown
from paclm.study.tables import table_named
from study.small_lab import open_lab


def scripted(positions, seed, split, is_clustered=True):
    """The public model is right in 30 % of passages of 20, the full-corpus one and all worlds in 50 %.

    split: half of the worlds vote for something wrong instead. is_clustered: whether the errors know of the passages.
    """
    rng = np.random.default_rng(seed)
    passage = np.arange(positions) // 20
    drawn = rng.random(passage.max() + 1)[passage]
    public, full = np.where(drawn < 0.3, 1, 2), np.where(drawn < 0.5, 1, 2)
    votes = np.tile(full[:, None], (1, 8))
    if split:
        votes[:, ::2] = 3
    truth, position = np.ones(positions, dtype=int), np.arange(positions)
    cluster = passage if is_clustered else position
    return TextVotes(votes, truth=truth, public=public, full=full, passage=cluster, position=position)


def test_the_retained_gain_has_the_error_that_repeated_samples_show(small_lab):
    """Sixty independent samples: their spread has an error of 9 %, and the stated one must be within 40 % of it."""

    def rows(count, is_clustered):
        some = [scripted(1600, seed, split=True, is_clustered=is_clustered) for seed in range(count)]
        return [accuracy._at(small_lab, votes, ExpectedReleases(votes), 2.0**-32) for votes in some]

    found = rows(60, is_clustered=True)
    spread = np.std([row["retained_gain"] for row in found], ddof=1)
    # for a fresh seed, false alarm < 1e-4
    assert np.mean([row["retained_gain_stderr"] for row in found]) == pytest.approx(spread, rel=0.4)
    naive = rows(3, is_clustered=False)  # the twin: as if the positions of a passage were independent
    assert max(row["retained_gain_stderr"] for row in naive) < 0.5 * spread


def test_both_regimes_give_a_share_of_a_gain_and_never_of_a_loss_or_of_nothing(small_lab):
    votes = scripted(400, 0, split=False)
    cases = (
        (votes, 1.0),
        (replace(votes, public=votes.full, full=votes.public), None),
        (replace(votes, full=votes.public), None),
    )
    for some, share in cases:  # the worlds vote as the full corpus; then it loses; then it is no better
        expected, rule = ExpectedReleases(some), rule_named("gaussian")
        of_releases = releases._scores(small_lab, some, expected, np.zeros(400), rule, 2.0**-32)
        for row in (accuracy._at(small_lab, some, expected, 2.0**-32), of_releases):
            assert (row["retained_gain"], row["retained_gain_stderr"]) == (share, None if share is None else 0.0)


def test_more_sessions_on_the_same_text_do_not_make_its_error_smaller(small_lab):
    votes = scripted(1600, 3, split=True)

    def row(sessions):
        streams = list(play_sessions(votes, rule_named("mixture"), 2.0**-32, sessions, 1600, 1))
        return releases._in_sessions(small_lab, votes, streams)

    assert row(50)["accuracy_sessions_stderr"] > 0.5 * row(2)["accuracy_sessions_stderr"]


def test_the_lead_is_over_the_papers_release(small_lab):
    votes = scripted(1600, 3, split=True)
    expected = ExpectedReleases(votes)
    paper = expected.under(rule_named("gaussian"), 2.0**-32).hits
    own, other = (
        releases._scores(small_lab, votes, expected, paper, rule_named(name), 2.0**-32)
        for name in ("gaussian", "plurality")
    )
    assert own["lead_points"] == 0.0
    assert other["lead_points"] == pytest.approx(other["accuracy"] - own["accuracy"])
    assert abs(other["lead_points"]) > 0.01


@pytest.fixture(scope="module")
def result(study_template, tmp_path_factory):
    lab = open_lab(study_template, tmp_path_factory.mktemp("accuracy") / "workspace")
    return run_regime(lab, REGIME, "quick", scale=AccuracyScale(60, 2))


def changed(result, **columns):
    return replace(result, rows=[{**row, **columns} for row in result.rows])


def test_the_table_says_how_many_positions_each_decoder_has_and_shows_the_error_of_the_share(result):
    shown = changed(result, retained_gain=0.5, retained_gain_stderr=0.04)
    text = to_markdown(table_named("tab:accuracy").build({"accuracy": shown}))
    assert "on 60 (greedy) and 120 (Gumbel) positions" in text
    assert "50.00% ± 4.00%" in text


def test_the_setup_names_the_layers_where_they_are_not_all(result):
    def adapters(training):
        origin = {**result.provenance, "training": training}
        shown = table_named("tab:setup").build({"accuracy": replace(result, provenance=origin)})
        return next(row[1] for row in shown.rows if row[0] == "adapters")

    training = result.provenance["training"]
    earlier = {name: value for name, value in training.items() if name != "layers"}  # of an earlier version
    assert adapters({**training, "layers": "top:4"}) == f"{adapters(training)}, decoder layers top:4"
    assert adapters(earlier) == adapters(training)


def test_the_setup_shows_how_many_records_are_held_out_and_not_how_many_were_asked_for(result):
    def held_out(**origin):
        shown = table_named("tab:setup").build(
            {"accuracy": replace(result, provenance={**result.provenance, **origin})}
        )
        return next(row[1] for row in shown.rows if row[0] == "held out")

    assert result.provenance["held_out"] == 3  # of 4 that were asked for
    assert held_out() == "3 records"
    assert held_out(held_out=5) == "5 records"
    assert held_out(held_out=None) == "4 records"  # a result of an earlier version
