import numpy as np
import pytest

from paclm.study.continuations import Continuations
from paclm.study.decoding import GREEDY
from paclm.study.regimes.generation import REGIME, GenerationScale
from paclm.study.run import run_regime
from study.small_lab import interrupt, rows_of

SCALE = GenerationScale(sequences=4, lengths=(4, 8, 16), prompt=8, together=3)


def test_every_text_is_measured_at_every_length_beside_references_of_its_own_decoder(small_lab):
    result = run_regime(small_lab, REGIME, "quick", scale=SCALE)
    sources = {(row["source"], row["decoder"], row["budget"]) for row in result.rows}
    assert len(sources) == 8
    assert len(result.rows) == 24
    for row in result.rows:
        assert 0.0 <= row["rep3"] < 1.0
        assert 0.0 < row["distinct1"] <= 1.0
        assert (row["ratio"] is None) == (row["source"] == "human")
        assert ("unanimity" in row) == (row["source"] == "private")
    for decoder in ("greedy", "gumbel"):  # the reference is its own
        assert result.one(source="full", decoder=decoder, length=8)["ratio"] == 1.0


def test_the_same_seed_gives_the_same_numbers_and_a_stopped_run_goes_on(small_lab, monkeypatch):
    whole = rows_of(small_lab, REGIME, SCALE)
    calls = interrupt(monkeypatch, Continuations, "released", at=2)
    with pytest.raises(KeyboardInterrupt):
        rows_of(small_lab, REGIME, SCALE)
    assert rows_of(small_lab, REGIME, SCALE) == whole
    assert [(given[1].name, given[2]) for given, _ in calls].count(("greedy", 2.0**-16)) == 1


def test_text_too_short_for_a_length_is_said_and_not_made_up(small_lab):
    found = run_regime(small_lab, REGIME, "quick", scale=GenerationScale(sequences=3, lengths=(4, 50), prompt=8))
    assert [row["length"] for row in found.rows if row["source"] == "human"] == [4]
    assert any("no human text of 50" in note for note in found.notes)


def test_a_shorter_text_is_the_beginning_of_a_longer_one(small_lab):
    prompts = small_lab.prompts(4, 8, "generation")
    short, long = (Continuations(small_lab, "generation", 8 + length, 3) for length in (5, 16))
    assert np.array_equal(long.alone(prompts, "full", GREEDY, 16)[:, :5], short.alone(prompts, "full", GREEDY, 5))
    own = [
        texts.released(prompts, GREEDY, 2.0**-6, 1, length)["tokens"][:, :5]
        for texts, length in ((short, 5), (long, 16))
    ]
    assert np.array_equal(*own)
