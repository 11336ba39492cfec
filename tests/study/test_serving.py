from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from paclm.errors import EngineError, InvalidInput
from paclm.privacy.belief import uniform_belief
from paclm.privacy.randomness import Coins, ResearchNoise
from paclm.privacy.releases import rule_named
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.decoding import GREEDY, GUMBEL, Decoding
from paclm.study.serving import EngineStreams, carry_on, continue_by, count_distinct, draw_secrets, engine_for, play
from study.small_lab import ScriptedStreams, open_lab

GAUSSIAN = rule_named("gaussian")
LENGTH = 12


@pytest.fixture(scope="module")
def lab(study_template, tmp_path_factory):
    return open_lab(study_template, tmp_path_factory.mktemp("serving") / "lab")


@pytest.fixture
def engine(lab):
    return lab.engine(sequences=6, context=32)


def sessions(count, per_token=2.0**-8, seed=3):
    return ResearchSessions.seeded(8, GAUSSIAN, per_token, seed, count)


def coins(count, first=0):
    return [Coins(first + i) for i in range(count)]


def same(one, other):
    return all(np.array_equal(one.arrays()[name], other.arrays()[name]) for name in one.arrays())


def test_a_sequence_is_the_same_alone_and_beside_others(lab):
    engine = lab.engine("worlds", "full", sequences=6, context=32)
    prompts = lab.prompts(6, 8, "test")
    together = play(EngineStreams(engine, GUMBEL, coins(6), with_full=True), prompts, sessions(6), LENGTH)
    assert 0.02 < (together.distinct > 1).mean() < 0.98  # otherwise this shows nothing
    for i in range(6):
        seeds = np.random.SeedSequence(3).spawn(6)[i]
        own = ResearchSessions(8, GAUSSIAN, 2.0**-8, [ResearchNoise(seeds)])
        alone = play(EngineStreams(engine, GUMBEL, coins(1, i), with_full=True), prompts[i : i + 1], own, LENGTH)
        assert alone.tokens[0].tolist() == together.tokens[i].tolist()
        assert alone.full[0].tolist() == together.full[i].tolist()
        assert alone.distinct[0].tolist() == together.distinct[i].tolist()


def test_without_noise_the_realized_world_is_followed(lab, engine):
    found = play(EngineStreams(engine, GREEDY, coins(6)), lab.prompts(6, 8), sessions(6, np.inf), LENGTH)
    assert np.array_equal(found.tokens, found.realized)
    noisy = play(EngineStreams(engine, GREEDY, coins(6)), lab.prompts(6, 8), sessions(6, 2.0**-30), LENGTH)
    assert not np.array_equal(noisy.tokens, noisy.realized)
    assert np.array_equal(noisy.tokens[noisy.distinct == 1], noisy.realized[noisy.distinct == 1])
    assert np.array_equal(noisy.information > 0, noisy.distinct > 1)


def test_one_model_continues_by_its_own_votes(lab):
    engine = lab.engine("full", sequences=6, context=32)
    prompts = lab.prompts(6, 8)
    by_public = continue_by(EngineStreams(engine, GREEDY, coins(6)), prompts, LENGTH, lambda panel: panel.public)
    text = [*prompts[0], *by_public[0, :3].tolist()]
    assert engine.ballot(text).public[0] == by_public[0, 3]
    by_full = continue_by(EngineStreams(engine, GREEDY, coins(6)), prompts, LENGTH, lambda panel: panel.worlds[:, 0])
    assert not np.array_equal(by_full, by_public)


@pytest.mark.parametrize("coupling", ["hybrid", "independent"])
def test_other_rules_of_voting_are_played(lab, engine, coupling):
    prompts = lab.prompts(6, 8)
    decoding = Decoding(coupling, 1.0, coupling=coupling, threshold=0.0)
    found = play(EngineStreams(engine, decoding, coins(6)), prompts, sessions(6), LENGTH)
    again = play(EngineStreams(engine, decoding, coins(6)), prompts, sessions(6), LENGTH)
    coupled = play(EngineStreams(engine, GUMBEL, coins(6)), prompts, sessions(6), LENGTH)
    assert same(found, again)
    assert not same(found, coupled)
    if coupling == "independent":
        assert found.distinct.mean() > coupled.distinct.mean()
    else:  # with a threshold never reached it is the coupled rule
        never = EngineStreams(engine, replace(decoding, threshold=1.1), coins(6))
        assert same(play(never, prompts, sessions(6), LENGTH), coupled)
    with pytest.raises(InvalidInput, match=coupling):
        EngineStreams(engine, decoding, coins(6), with_full=True)


def test_a_session_carried_on_in_two_goes_equals_one_go():
    secrets = draw_secrets(8, seed=1, count=4)
    assert secrets.tolist() == draw_secrets(8, seed=1, count=6)[:4].tolist()

    def queries(numbers, beliefs, streams):
        for query in numbers:
            some = carry_on(GAUSSIAN, 2.0**-6, 1, 0, secrets, query, beliefs)
            play(streams, [[1]] * 4, some, 20)
            beliefs = some.beliefs
        return beliefs

    start = np.tile(uniform_belief(8), (4, 1))
    one_go = queries(range(2), start, ScriptedStreams(8, 0.5, seed=4))
    streams = ScriptedStreams(8, 0.5, seed=4)
    assert np.array_equal(queries([1], queries([0], start, streams), streams), one_go)
    assert np.array_equal(start, np.tile(uniform_belief(8), (4, 1)))  # nothing is written into what was handed in


def test_prompts_must_match_sessions_and_coins(engine):
    with pytest.raises(InvalidInput, match="3 sessions"):
        play(ScriptedStreams(8, 0.5, 0), [[1]] * 2, sessions(3), 1)
    with pytest.raises(InvalidInput, match="3 sources"):
        EngineStreams(engine, GUMBEL, coins(3)).start([[1]] * 2, 1)


def test_an_engine_that_does_not_fit_is_asked_for_half_as_many(lab, monkeypatch):
    asked = []

    def engine(*adapters, sequences, context, support_size):
        asked.append(sequences)
        if sequences > 3:
            raise EngineError("does not fit")
        return SimpleNamespace(num_together=lambda num_tokens: min(sequences, 64 // num_tokens))

    monkeypatch.setattr(lab, "engine", engine)
    assert engine_for(lab, sequences=10, context=16)[1] == 3
    assert asked == [10, 5, 3]
    assert engine_for(lab, sequences=3, context=32)[1] == 2  # what its cache holds
    with pytest.raises(EngineError, match="65 tokens"):
        engine_for(lab, sequences=1, context=65)
    monkeypatch.setattr(lab, "engine", lambda *_, **__: (_ for _ in ()).throw(EngineError("never")))
    with pytest.raises(EngineError, match="never"):
        engine_for(lab, sequences=2, context=32)


def test_distinct_votes_are_counted():
    assert count_distinct(np.array([[3, 3, 3], [1, 2, 1], [7, 5, 6]])).tolist() == [1, 2, 3]
