"""Probabilities of continuations: against PEFT and Transformers, against drawing, and where there is none."""

import math
import warnings

import numpy as np
import peft
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from paclm.engine.decode_step import coupled_votes
from paclm.engine.peft_io import export_peft
from paclm.errors import InvalidInput
from paclm.privacy.belief import tally, uniform_belief
from paclm.privacy.channel import optimal_channel
from paclm.privacy.randomness import Coins, ResearchNoise
from paclm.privacy.releases import RULES
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.emission import Continuation, GreedyLaw, MixtureLaw, average_softmax, emissions, law_of

TEXTS = ("the patient reports mild fever since morning", "the old house and the night", "plan rest")
FALSE_ALARM = 1e-6
"""Of every comparison of counts with a law below, for a fresh seed; seeds are fixed, so none occurs by chance."""


@pytest.fixture(scope="module")
def asked(small_tokenizer):
    """Contexts cut at several places, two of them of the same text."""
    ids = [tuple(small_tokenizer(text)["input_ids"]) for text in TEXTS]
    cuts = [(0, 3, 6), (0, 4, 6), (1, 1, 5), (2, 1, 3), (1, 2, 3)]
    return [Continuation(ids[text][:a], ids[text][a:b]) for text, a, b in cuts]


def plain_logits(lab, base, tmp_path, name):
    """tokens → (W, n, V) by Transformers and PEFT, one adapter at a time; without a name: the base model alone."""
    load = AutoModelForCausalLM.from_pretrained
    if name is None:
        models = [load(base).eval()]
    else:
        folders = export_peft(lab.stack(name), tmp_path / name, str(base), conv1d=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models = [peft.PeftModel.from_pretrained(load(base), folder).eval() for folder in folders]

    def logits(tokens):
        with torch.no_grad():
            return np.stack([model(input_ids=torch.tensor([tokens])).logits[0].double().numpy() for model in models])

    return logits


def rows_of(logits, one):
    """(W, n, V) of the positions that predict the continuation."""
    return logits(one.context + one.tokens)[:, len(one.context) - 1 : -1]


@pytest.mark.parametrize(("source", "adapters", "name"), [("public", "worlds-first-1", None), ("full", "full", "full")])
def test_a_model_is_scored_by_its_own_probabilities(small_lab, small_base, tmp_path, asked, source, adapters, name):
    found = emissions(small_lab.engine(adapters), asked, law_of(source, 1.0, None))
    logits = plain_logits(small_lab, small_base, tmp_path, name)
    for one, emission in zip(asked, found, strict=True):
        (plain,) = rows_of(logits, one)
        log_softmax = plain - np.log(np.exp(plain).sum(axis=1, keepdims=True))
        assert math.isclose(
            emission.log_probability, log_softmax[np.arange(len(one.tokens)), one.tokens].sum(), abs_tol=1e-4
        )
        assert emission.is_greedy == (plain.argmax(axis=1) == one.tokens).all()


def test_what_a_model_writes_is_greedy_and_nothing_else_is(small_lab, asked):
    engine = small_lab.engine("worlds-first-1")
    context, written = asked[0].context, []
    for _ in range(4):
        written.append(int(engine.ballot([*context, *written]).public[0]))
    ends = [tuple(written), (*written[:-1], (written[-1] + 1) % 700)]
    right, wrong = emissions(engine, [Continuation(context, end) for end in ends], law_of("public", 1.0, None))
    assert (right.is_greedy, wrong.is_greedy) == (True, False)
    assert right.log_probability > wrong.log_probability


def test_mixture_is_the_average_of_the_worlds_inside_the_support(small_lab, small_base, tmp_path, asked):
    k = 450
    engine = small_lab.engine(support_size=k)
    public, worlds = (plain_logits(small_lab, small_base, tmp_path, name) for name in (None, "worlds"))
    rows = [(one.tokens, rows_of(public, one)[0], rows_of(worlds, one).swapaxes(0, 1)) for one in asked]
    for temperature in (1.0, 0.5):
        found = emissions(engine, asked, law_of("mixture", temperature, None))
        expected = np.zeros(len(asked))
        for i, columns in enumerate(rows):
            for target, base, logits in zip(*columns, strict=True):
                support = np.argsort(-base)[:k]
                inside = np.exp(logits[:, support] / temperature)
                chance = (inside / inside.sum(axis=1, keepdims=True)).mean(axis=0)[support == target].sum()
                expected[i] += math.log(chance) if chance else -math.inf
        assert [one.log_probability for one in found] == pytest.approx(expected, abs=1e-4)
        assert 0 < np.isinf(expected).sum() < len(asked), "texts inside and outside of the support"


def p_value(counts, law):
    """Of counts under a law; small if the law is another. Cells are large enough for a χ² approximation."""
    keep = law * counts.sum() >= 10
    rest = [counts[~keep].sum()], [law[~keep].sum()]
    observed, expected = np.r_[counts[keep], rest[0]], np.r_[law[keep], rest[1]] * counts.sum()
    observed, expected = observed[expected > 0], expected[expected > 0]
    return stats.chisquare(observed, expected).pvalue


def test_mixture_s_law_is_that_of_drawn_tokens_and_another_law_is_told_apart():
    rng, k, draws = np.random.default_rng(5), 12, 10_000
    logits = rng.normal(0.0, 2.0, (1, 8, k))  # worlds that differ much
    coins = np.stack([Coins(3, step=i).gumbel(k) for i in range(draws)])
    support = torch.arange(k).expand(draws, k)
    tau = 0.7
    votes = coupled_votes(torch.from_numpy(logits).expand(draws, 8, k), support, torch.from_numpy(coins), tau).numpy()
    noise, belief = ResearchNoise(11), uniform_belief(8)
    drawn = [RULES["mixture"].release(row, belief, 0, math.inf, noise).token for row in votes]
    counts = np.bincount(drawn, minlength=k)
    assert p_value(counts, average_softmax(logits, tau)[0]) > FALSE_ALARM
    assert p_value(counts, average_softmax(logits, 1.0)[0]) < FALSE_ALARM
    assert p_value(counts, average_softmax(logits.mean(axis=1, keepdims=True), tau)[0]) < FALSE_ALARM


VOTES = np.array([[3, 3, 3, 5, 5, 9, 9, 9], [4, 4, 4, 4, 4, 4, 4, 4], [2, 2, 7, 7, 7, 7, 2, 8]])


TAILS = [np.array([first, 4, last]) for first in (3, 5, 9) for last in (2, 7, 8)]  # every text that can be released


def channel_law(per_token):
    return np.array([np.exp(GreedyLaw("channel", per_token).score((VOTES,), text)[0].sum()) for text in TAILS])


@pytest.mark.parametrize("per_token", [2.0**-8, 0.4, math.inf])
def test_channel_s_law_of_a_text_is_the_sum_over_all_secrets(per_token):
    law = channel_law(per_token)
    assert math.isclose(law.sum(), 1.0, abs_tol=1e-9)
    for text, chance in zip(TAILS, law, strict=True):
        belief, by_secret = uniform_belief(8), np.full(8, 1 / 8)
        for votes, token in zip(VOTES, text, strict=True):
            candidates, choice, mass = tally(votes, belief)
            if candidates.size > 1:
                channel, at = optimal_channel(mass / mass.sum(), per_token), int(np.flatnonzero(candidates == token)[0])
                by_secret = by_secret * [row[at] / sum(row) for row in map(channel.row, choice.tolist())]
                belief = np.log(by_secret / max(by_secret.sum(), 1e-300) + 1e-300)
        assert math.isclose(by_secret.sum(), chance, rel_tol=1e-6, abs_tol=1e-12)


def test_channel_s_law_of_a_text_is_that_of_released_texts_and_without_a_belief_it_is_not():
    sessions, per_token = 2500, 0.4
    played = ResearchSessions.seeded(8, RULES["channel"], per_token, 1, sessions)
    written = np.stack([played.release(np.tile(row, (sessions, 1))).tokens for row in VOTES], axis=1)
    counts = np.array([(written == text).all(axis=1).sum() for text in TAILS])
    single = GreedyLaw("channel", per_token)
    forgetting = [math.prod(np.exp(single.score((VOTES[[i]],), text[[i]])[0][0]) for i in range(3)) for text in TAILS]
    assert p_value(counts, channel_law(per_token)) > FALSE_ALARM
    assert p_value(counts, np.array(forgetting)) < FALSE_ALARM


def test_plurality_s_law_is_zero_or_one_and_mixture_s_the_share_of_votes():
    for targets, chance, share in (
        ([9, 4, 7], 0.0, 3 * 4 / 64),
        ([3, 4, 7], 1.0, 3 * 4 / 64),
        ([5, 4, 8], 0.0, 2 / 64),
    ):
        found, is_top = GreedyLaw("plurality", math.inf).score((VOTES,), np.array(targets))
        assert math.exp(found.sum()) == chance
        assert is_top.all() == bool(chance), "ties go to the smaller token"
        assert math.isclose(np.exp(GreedyLaw("mixture", math.inf).score((VOTES,), np.array(targets))[0].sum()), share)
    assert GreedyLaw("plurality", math.inf).score((VOTES,), np.array([1, 4, 7]))[0].sum() == -math.inf


def test_a_channel_emits_its_marginal():
    mass = np.array([3, 2, 3]) / 8
    weights = optimal_channel(mass, 0.1).weights
    for token, weight in zip((3, 5, 9), weights, strict=True):
        found = GreedyLaw("channel", 0.1).score((VOTES[:1],), np.array([token]))[0][0]
        assert math.isclose(math.exp(found), weight, abs_tol=1e-6)


def test_greedy_laws_read_the_votes_of_the_engine(small_lab, asked):
    engine = small_lab.engine()
    for one, emission in zip(asked, emissions(engine, asked, law_of("mixture", 0.0, None)), strict=True):
        shares = [(engine.votes(one.context + one.tokens[:i]) == token).mean() for i, token in enumerate(one.tokens)]
        assert math.isclose(math.exp(emission.log_probability), math.prod(shares), abs_tol=1e-12)


def test_nothing_to_score_is_certain_and_no_context_is_refused(small_lab):
    engine = small_lab.engine()
    assert emissions(engine, [Continuation((1,), ())], MixtureLaw(1.0)) == [(0.0, True)]
    with pytest.raises(InvalidInput, match="context"):
        emissions(engine, [Continuation((), (1,))], MixtureLaw(1.0))


@pytest.mark.parametrize(
    ("source", "temperature", "per_token", "words"),
    [
        ("gaussian", 1.0, 2.0**-16, "no closed form.*release=channel"),
        ("gaussian", 0.0, 2.0**-16, "no closed form.*release=channel"),
        ("plurality", 1.0, None, "temperature=0"),
        ("channel", 1.0, 2.0**-16, "temperature=0"),
        ("channel", 0.0, None, "per_token"),
        ("laplace", 0.0, None, "Unknown release"),
    ],
)
def test_where_there_is_no_exact_law_the_error_says_what_can_be_asked(source, temperature, per_token, words):
    with pytest.raises(InvalidInput, match=words):
        law_of(source, temperature, per_token)
