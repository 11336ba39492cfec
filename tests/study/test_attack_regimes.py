"""The regimes about attackers, from a small workspace to rows; tables and figures: test_rehearsal."""

import math
from dataclasses import replace

import numpy as np
import pytest

from paclm.study.continuations import Continuations
from paclm.study.quality import score_targets
from paclm.study.regimes import canaries, capacity, coupling, regime_named, tokens_only, universe
from paclm.study.regimes.canaries import choose_forced, imagined_canaries, planted_canaries, trigger_votes
from paclm.study.results import Result
from paclm.study.run import run_regime
from paclm.study.tables import all_tables, table_named
from paclm.worlds.workspace import Workspace
from study.rehearsal import build_trainable_workspace
from study.small_lab import build_study_workspace, open_lab

SCALES = {
    "canaries": canaries.CanariesScale(trials=60, trials_outside=10, draws=4, imagined=12),
    "capacity": capacity.CapacityScale(4, 40, 2, (1, 64)),
    "coupling": coupling.CouplingScale(60, 2, 20),
    "tokens_only": tokens_only.TokensOnlyScale(60, 2, sessions=4, tokens=12, particles=6),
    "universe": universe.UniverseScale(records=4, tokens=24, prompt=8, released=4, sequences=3),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory, texts, small_base):
    return build_trainable_workspace(tmp_path_factory.mktemp("study") / "clinic", texts[:60], small_base)


@pytest.fixture(scope="module")
def lab(template):
    return open_lab(template, template.parent / "lab")


@pytest.fixture(scope="module")
def result_of(lab):
    """Each regime is run once, when first asked for."""
    kept = {}

    def run(name):
        if name not in kept:
            kept[name] = run_regime(lab, regime_named(name), "quick", scale=SCALES[name])
        return kept[name]

    return run


@pytest.fixture(scope="module")
def planted(tmp_path_factory, texts, small_base):
    """A workspace whose worlds (random, not trained) hold canaries."""
    return build_study_workspace(tmp_path_factory.mktemp("planted") / "clinic", texts[:40], small_base, num_canaries=8)


@pytest.mark.parametrize("name", ["tokens_only", "universe"])
def test_the_same_seed_gives_the_same_rows_and_another_seed_others(template, tmp_path, result_of, name):
    rows = [
        run_regime(open_lab(template, tmp_path / str(seed), seed), regime_named(name), "quick", scale=SCALES[name]).rows
        for seed in (0, 1)
    ]
    assert repr(result_of(name).rows) == repr(rows[0])
    assert repr(rows[0]) != repr(rows[1])


def test_the_audit_of_the_universe_is_the_same_in_whatever_batches(template, tmp_path, result_of):
    lab = open_lab(template, tmp_path / "lab")
    other = run_regime(lab, universe.REGIME, "quick", scale=replace(SCALES["universe"], sequences=5))
    assert other.rows == result_of("universe").rows


def test_a_stopped_audit_of_the_universe_goes_on_and_ends_with_the_same_numbers(
    template, tmp_path, result_of, monkeypatch
):
    lab, asked = open_lab(template, tmp_path / "lab"), []
    scored = universe.score_targets
    monkeypatch.setattr(universe, "score_targets", lambda *given: asked.append(1) or scored(*given))
    with monkeypatch.context() as late:
        late.setattr(Continuations, "alone", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_regime(lab, universe.REGIME, "quick", scale=SCALES["universe"])
    rows = run_regime(lab, universe.REGIME, "quick", scale=SCALES["universe"]).rows
    assert rows == result_of("universe").rows
    assert len(asked) == rows[0]["members"] + rows[0]["others"], "no loss was computed twice"


def test_the_table_of_the_universe_names_the_second_collection(result_of):
    result = result_of("universe")
    second = [{**row, "collection": 2} for row in result.rows]
    (table,) = (table for table in all_tables() if table.regimes == ("universe",))
    rows = table.build({"universe": replace(result, rows=[*result.rows, *second])}).rows
    assert len(rows) == 2 * len(table.build({"universe": result}).rows)
    assert sum(", collection 2" in row[0] for row in rows) == len(rows) // 2


def test_without_canaries_the_regime_says_so_and_forces_made_up_ones(result_of):
    result = result_of("canaries")
    assert "--canaries 16" in result.notes[0]
    assert not result.select(part="organic")
    assert result.select(part="forced")


def test_canaries_of_the_workspace_are_measured_where_they_were_planted(planted, tmp_path):
    lab = open_lab(planted, tmp_path / "clinic")
    found = planted_canaries(lab)
    assert [one.canary.id for one in found] == [canary.id for canary in lab.workspace.canaries()]
    assert all((one.is_member == row).all() for one, row in zip(found, lab.workspace.membership[-8:], strict=True))
    result = run_regime(lab, canaries.REGIME, "quick", scale=SCALES["canaries"])
    organic = result.select(part="organic")
    assert [row["repetitions"] for row in organic] == [1, 1, 2, 2, 4, 4, 8, 8]
    first, row = found[1], organic[1]
    engine = lab.engine()
    tokens = [*first.canary.trigger_ids, *first.canary.payload_ids]
    own = score_targets(engine, tokens).log_probability[:-1, len(first.canary.trigger_ids) - 1]
    assert row["gap_nats"] == pytest.approx(own[first.is_member].mean() - own[~first.is_member].mean())


def test_what_lies_outside_the_support_is_never_emitted(result_of):
    rows = result_of("canaries").select(part="out-of-support")
    assert {row["budget"] for row in rows} == {"inf", "2^-4", "2^-8", "2^-16"}
    assert all(row["emitted"] == 0 for row in rows if not row["in_support"])


def test_votes_at_a_trigger_are_those_of_the_engine(lab):
    engine = lab.engine(support_size=40)
    (one, *_) = imagined_canaries(lab, 2)
    greedy = trigger_votes(engine, one.canary, 3, 0.0, 0)
    ballot = engine.ballot(one.canary.trigger_ids)
    assert (greedy.votes == ballot.votes).all()
    assert (greedy.support == ballot.support[0]).all()
    drawn = trigger_votes(engine, one.canary, 150, 1.0, 4)
    assert drawn.votes.shape == (150, lab.num_worlds)
    assert np.isin(drawn.votes, drawn.support).all()
    assert len(np.unique(drawn.votes[:, 0])) > 1
    chosen = choose_forced(engine, imagined_canaries(lab, 12), 2)
    assert all(one.canary.kind == "C-COMMON" for one in chosen)


def test_scores_of_targets_agree_with_the_model_itself(lab):
    """The public model is the last row: log softmax of the base model, position by position."""
    import torch

    from paclm.engine.base_model import base_of, load_model

    tokens = list(lab.test_passages[0].tokens[:30])
    scores = score_targets(lab.engine(), tokens)
    with torch.inference_mode():
        logits = load_model(base_of(lab.workspace), torch.float32)(torch.tensor([tokens])).logits[0, :-1]
    targets = torch.tensor(tokens[1:])
    exact = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()
    assert scores.log_probability[-1] == pytest.approx(exact, abs=1e-4)
    assert (scores.rank[-1] == (logits > logits.gather(1, targets[:, None])).sum(1).numpy()).mean() > 0.9
    later = score_targets(lab.engine(), tokens, first=20)
    assert later.log_probability == pytest.approx(scores.log_probability[:, 19:], abs=1e-5)


def test_a_repeated_canary_is_learnt_by_the_adapter_that_holds_it(result_of):
    rows = result_of("capacity").select(rank=32)
    few, many = ([row for row in rows if row["repetitions"] == count] for count in (1, 64))
    for one, other in zip(few, many, strict=True):
        assert other["gap_nats"] > one["gap_nats"]
        assert other["gap_nats"] > 0.0


def test_coupling_trains_the_other_worlds_and_keeps_them(lab, result_of):
    assert {row["training"] for row in result_of("coupling").rows} == {"coupled", "uncoupled", "difference"}
    assert "uncoupled.safetensors" in Workspace.open(lab.workspace.path).manifest.adapters


@pytest.mark.parametrize("decoder", ["greedy", "gumbel"])
def test_what_coupling_adds_is_the_difference_of_both_ways_with_an_error_over_the_same_positions(result_of, decoder):
    one, two, added = (
        result_of("coupling").one(training=way, decoder=decoder, collection=1)
        for way in ("coupled", "uncoupled", "difference")
    )
    for column in coupling.PAIRED:
        assert added[column] == pytest.approx(one[column] - two[column], abs=1e-12)
        apart = math.hypot(one[f"{column}_stderr"], two[f"{column}_stderr"])
        assert 0.0 <= added[f"{column}_stderr"] <= 1.5 * apart  # as if independent, and room for few passages


def test_the_table_of_coupling_shows_differences_where_a_result_has_them(result_of):
    build = table_named("tab:coupling").build
    result = result_of("coupling")
    assert "greedy, difference" in build({"coupling": result}).columns
    earlier = replace(result, rows=[row for row in result.rows if row["training"] != "difference"])
    assert [name for name in build({"coupling": earlier}).columns if "difference" in name] == []


def test_an_attack_above_its_bound_raises_an_alarm_and_guesses_are_not_tested():
    """A row of 400 sessions that name the world half of the time, where one in ten is proven."""
    row = {"collection": 1, "attack": "own", "release": "gaussian", "budget": "2^-8", "sessions": 400, "horizon": 100}
    row |= {"membership_rate": 0.5, "membership_stderr": 0.01, "membership_bound": 0.6}
    row |= {"world_rate": 0.09, "world_stderr": 0.02, "world_bound": 0.1}
    guess = row | {"budget": None, "membership_stderr": 0.0, "membership_bound": 0.5}
    guess |= {"world_rate": 0.125, "world_stderr": 0.0, "world_bound": 0.125}
    for rate, is_alarm in ((0.09, False), (0.5, True)):
        rows = [row | {"world_rate": rate}, guess]
        result = Result(regime="attacks", preset="quick", seed=0, scale={}, rows=rows, seconds=0.0)
        (line,) = regime_named("attacks").verdicts(result)
        assert line.startswith("ALARM") == is_alarm
        assert "in 2 tests" in line
