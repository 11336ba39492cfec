"""Forced choice against free text: the votes are those of a masked engine step, and what they say about the corpus."""

import dataclasses

import numpy as np
import pytest
import torch

from paclm.curator.grammar import Grammars, choice_grammar
from paclm.errors import InvalidInput
from paclm.privacy.randomness import Coins
from paclm.study.attacks import record_scores
from paclm.study.attacks.prefix_queries import Seen, excess_over
from paclm.study.attacks.record_scores import difference, separate
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.regimes import choices
from paclm.study.results import Result
from study.small_lab import build_study_workspace, open_lab, rows_of

SCALE = choices.ChoicesScale(
    records=40, tokens=18, stride=4, draws=2, choices=(4,), margins=(1.0,), words=4, sequences=40
)


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_scores, "RESAMPLES", 200)
        yield


@pytest.fixture(scope="module")
def template(tmp_path_factory, texts, small_base):
    return build_study_workspace(tmp_path_factory.mktemp("choices") / "template", texts[:80], small_base, holdout=40)


@pytest.fixture(scope="module")
def random_worlds(template):
    return rows_of(open_lab(template, template.parent / "random"), choices.REGIME, SCALE)


def distance(row, name="auc", guess=0.5):
    """How far a figure is from a guess, in standard errors."""
    return (row[name] - guess) / max(row[f"{name}_stderr"], 1e-12)


def result_of(rows):
    return Result(regime="choices", preset="quick", seed=0, scale={}, rows=rows, seconds=0.0)


def mask_of(tokens, vocabulary):
    mask = np.zeros((1, -(-vocabulary // 32)), dtype=np.uint32)
    for token in tokens:
        mask[0, token // 32] |= np.uint32(1 << (token % 32))
    return mask


@pytest.mark.parametrize("decoding", [GREEDY, GUMBEL], ids=lambda decoding: decoding.name)
def test_votes_of_a_forced_choice_are_those_of_a_masked_step(small_lab, decoding):
    engine = small_lab.engine(small_lab.worlds_name, sequences=1, context=32)
    tokens = list(small_lab.test_passages[0].tokens[:13])
    for prefixes in list(choices._prefixes(engine, 0, tokens, 4)):
        for query in choices.forced_queries(prefixes.log_public, prefixes.truth, 4, 0.5, 2):
            own = choices.restricted_votes(engine, prefixes.hidden, query.support, decoding, Coins(5))
            step = Coins(5)
            for row, length in enumerate(prefixes.length.tolist()):
                coins = step.gumbel(engine.support_size)[None] if decoding.temperature else None
                mask = mask_of(query.support[row].tolist(), engine.vocabulary)
                handle = engine.add(tokens[:length], 1)
                ballot = engine.step([handle], coins, decoding.temperature, allowed=mask)
                engine.remove(handle)
                assert ballot.support[0, :4].tolist() == query.support[row].tolist()
                assert [*ballot.votes[0].tolist(), int(ballot.public[0])] == own[row].tolist()


def test_decoys_are_as_likely_as_the_true_token_and_others_in_every_draw():
    log_public = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    truth = log_public.topk(20).indices[:, -1]
    for margin in (0.0, 1.0):
        first, second = choices.forced_queries(log_public, truth, 3, margin, 2)
        for row in range(6):
            assert not set(first.support[row].tolist()) & set(second.support[row].tolist()) - {int(truth[row])}
            ahead = log_public[row, first.support[row]] - log_public[row, truth[row]] - margin
            decoys = ahead[first.support[row] != truth[row]]
            assert len(decoys) == 2
            assert decoys.abs().max() < 0.5
            assert (log_public[row, first.support[row]].diff() <= 0).all()


def test_one_token_decides_between_two_texts(small_lab):
    engine = small_lab.engine(small_lab.worlds_name, sequences=1, context=64)
    grammars = Grammars(small_lab.tokenizer, engine.vocabulary)
    record = list(small_lab.test_passages[0].tokens)
    true, false = (small_lab.tokenizer.decode(record[at : at + 4]) for at in (6, 20))
    mask, decides = choices.first_tokens(grammars, true, false)
    _, against = choices.first_tokens(grammars, false, true)
    answers, num_decided = set(), 0
    for seed in range(12):
        state, coins, out = grammars.start(choice_grammar([true, false])), Coins(seed), []
        assert (state.allowed == mask).all()
        handle = engine.add(record[:6], 30)
        while not state.is_complete:
            drawn = coins.gumbel(engine.support_size)[None]
            out.append(int(engine.step([handle], drawn, allowed=state.allowed[None]).votes[0, 0]))
            state.advance(out[-1])
            engine.append(handle, out[-1])
        engine.remove(handle)
        answers.add(text := small_lab.tokenizer.decode(out))
        assert text in (true, false)
        num_decided += out[0] in (*decides, *against)  # the others begin both texts
        assert text == true if out[0] in decides else text == false or out[0] not in against
    assert answers == {true, false}
    assert num_decided > 0


def test_worlds_that_saw_no_record_say_nothing(random_worlds):
    """Random adapters: members and others are alike. 240 scores at |z| > 4.5: a false alarm in 600."""
    assert {row["asked"] for row in random_worlds} == {
        *("free text", "4 tokens", "2 tokens, decoy 1 nats ahead", "2 texts", "boolean")
    }
    assert {row["source"] for row in random_worlds} == {
        *("gaussian", "plurality", "mixture", "channel", "full", "public")
    }
    for row in random_worlds:
        assert abs(distance(row)) < 4.5, row
        assert row["queries"] == pytest.approx(8, abs=1)
        assert ("gain" in row) == (row["asked"] != "free text") or row["attack"] in ("calibrated", "likelihood")


def test_a_choice_that_only_a_forced_answer_shows_beats_free_text(template, tmp_path, monkeypatch):
    """Worlds that pick the true one of two tokens on members, and whose free text is left alone."""
    lab, vote, prefixes = open_lab(template, tmp_path / "lab"), choices.restricted_votes, choices._prefixes
    known = {tuple(lab.tokenizer.encode(record.text)[:8]) for record in lab.workspace.records("train")}
    now, members = {}, set()

    def watch(engine, number, tokens, stride):
        now["is_member"] = tuple(tokens[:8]) in known
        members.add(number) if now["is_member"] else None
        for now["prefixes"] in prefixes(engine, number, tokens, stride):
            yield now["prefixes"]

    def remembering(engine, hidden, support, decoding, coins):
        votes, truth = vote(engine, hidden, support, decoding, coins), now["prefixes"].truth[:, None]
        is_known = (support == truth).any(1).numpy() & (support.shape[1] == 2) & now["is_member"]
        return np.where(is_known[:, None], truth.numpy(), votes)

    monkeypatch.setattr(choices, "_prefixes", watch)
    monkeypatch.setattr(choices, "restricted_votes", remembering)
    rows = rows_of(lab, choices.REGIME, dataclasses.replace(SCALE, choices=(2,), margins=()))
    assert len(members) == rows[0]["members"]
    for row in rows:
        if row["asked"] == "2 tokens":
            assert row["auc"] > 0.95, row
            assert distance(row, "gain", 0.0) > 4.0 if "gain" in row else row["attack"] != "rate"
        elif row["asked"] != "2 texts":
            assert abs(distance(row)) < 4.5, row
    assert any(line.startswith("ALARM") for line in choices.REGIME.verdicts(result_of(rows)))  # the null remembers, too


def test_the_difference_of_two_scores_is_that_of_their_areas():
    rng = np.random.default_rng(0)
    is_member, clusters = np.arange(200) < 100, np.arange(200)
    weak, strong = rng.normal(size=200) + 0.3 * is_member, rng.normal(size=200) + 2.0 * is_member
    gain = difference(strong, weak, is_member, clusters, rng)
    areas = [separate(scores, is_member, clusters, rng).auc.mean for scores in (strong, weak)]
    assert gain.mean == pytest.approx(areas[0] - areas[1])
    assert gain.mean > 4 * gain.stderr > 0
    assert difference(weak, weak, is_member, clusters, rng) == (0.0, 0.0)


def test_the_reference_score_counts_what_the_public_model_does_not_expect():
    seen = Seen(np.array([2, 2, 0, 1]), 2, np.array([0, 0, 1, 1]))
    scores = excess_over(seen, np.array([0.5, 0.5, 0.5, 0.5]))
    assert scores.tolist() == [2.0, -1.0]
    assert (excess_over(seen, np.array([1.0, 1.0, 0.0, 0.5])) == 0.0).all()


def test_alarms_are_raised_by_a_null_that_separates_and_by_a_broken_dp_bound():
    row = {"source": "public", "auc": 0.52, "auc_stderr": 0.03}
    bounded = {"source": "dp", "auc": 0.6, "auc_stderr": 0.03, "auc_bound": 0.9}
    result = result_of([row, bounded])
    assert not any(line.startswith("ALARM") for line in choices.REGIME.verdicts(result))
    for broken in (row | {"auc": 0.7}, bounded | {"auc_bound": 0.45}):
        others = [one for one in (row, bounded) if one["source"] != broken["source"]]
        lines = choices.REGIME.verdicts(dataclasses.replace(result, rows=[broken, *others]))
        assert sum(line.startswith("ALARM") for line in lines) == 1


def test_a_choice_of_one_is_refused(small_lab):
    with pytest.raises(InvalidInput, match="at least 2"):
        choices.run(small_lab, dataclasses.replace(SCALE, choices=(1,)))
