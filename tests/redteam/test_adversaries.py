"""Adversaries who choose every question from all they have seen, and guess from the belief itself.

That is better than any caller can, and still none wins more often than the bound at the committed total.
"""

import math

import numpy as np
import pytest

import paclm
from curator.deployments import WORLDS, ScriptedEngine
from paclm.errors import BudgetExceeded
from paclm.privacy.accounting import Account, charge_units, units_up
from paclm.privacy.randomness import ResearchNoise

TOTAL, PER_TOKEN, NUM_WORLDS = 0.25, 0.25 / 6, 8
MEMBERSHIP = paclm.assign_worlds(40, NUM_WORLDS, 3)  # (records, worlds)


def about_one_record(belief, _rng):
    """Ask where the worlds that hold the record differ from the others: nothing else tells about it."""
    return MEMBERSHIP[0].astype(int)


def halving(belief, _rng):
    """Ask where the belief is split most evenly, which tells most about the world."""
    order = np.argsort(-belief)
    votes = np.zeros(NUM_WORLDS, dtype=int)
    votes[order[::2]] = 1
    return votes


def all_apart(belief, _rng):
    """Ask where every world votes for another token."""
    return np.arange(NUM_WORLDS)


def one_against_all(belief, _rng):
    """Ask where the likeliest world is alone."""
    return (np.arange(NUM_WORLDS) == int(np.argmax(belief))).astype(int)


ADVERSARIES = [about_one_record, halving, all_apart, one_against_all]


def wins(adversary, games, seed, *, calibrated_for=PER_TOKEN, stops_at=1.0):
    """How often the record's membership and the world are named, (games, 2); each token is charged PER_TOKEN.

    The adversary stops early once it believes either answer with `stops_at`: a stop chosen from outputs.
    """
    rng, noise, won = np.random.default_rng(seed), ResearchNoise(seed), np.zeros((games, 2))
    price = charge_units("every-token", PER_TOKEN, reads_secret=True, is_dissent=True)
    for game in range(games):
        secret, account = int(rng.integers(NUM_WORLDS)), Account.open(TOTAL)
        log_belief = np.full(NUM_WORLDS, -math.log(NUM_WORLDS))
        while account.affords(price):
            belief = np.exp(log_belief)
            held = float(belief @ MEMBERSHIP[0])
            if max(held, 1 - held) >= stops_at:
                break
            account = account.charge(price, is_dissent=True)
            _, log_belief = paclm.release_token(adversary(belief, rng), log_belief, secret, calibrated_for, noise)
        belief = np.exp(log_belief)
        held = float(belief @ MEMBERSHIP[0])
        won[game] = (held > 0.5) == MEMBERSHIP[0, secret], int(np.argmax(belief)) == secret
    return won


def exceeds(won):
    """Whether either rate is more than four standard errors above its bound."""
    bounds = np.array([paclm.success_bound(TOTAL, 1 / 2), paclm.success_bound(TOTAL, 1 / NUM_WORLDS)])
    return won.mean(axis=0) > bounds + 4 * np.sqrt(bounds * (1 - bounds) / len(won))


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("stops_at", [1.0, 0.8])
def test_no_adversary_wins_more_often_than_the_bound_at_the_total(adversary, stops_at):
    """Eight cases of two rates: were a rate at its bound, a false alarm would come with 5e-4 for a fresh seed."""
    assert not exceeds(wins(adversary, 800, 1, stops_at=stops_at)).any()


def test_noise_for_twice_the_budget_is_noticed():
    assert exceeds(wins(about_one_record, 4000, 2, calibrated_for=2 * PER_TOKEN))[0]


@pytest.mark.stress
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_no_adversary_wins_more_often_in_40_000_games(adversary):
    assert not exceeds(wins(adversary, 40_000, 11)).any()


def split(votes, belief):
    """The belief-weighted dissent of a ballot: what an adversary who knows all worlds maximizes."""
    mass = [belief[votes == vote].sum() for vote in set(votes.tolist())]
    return -sum(m * math.log(m) for m in mass if m > 0)


def test_a_caller_who_seeks_dissent_is_charged_for_every_token_and_stopped_at_the_total(make, open_curator):
    """It reads the engine, which is public to it, picks the prompt and coins with the most dissent, and asks for one
    token. Under `dissent` that spends fastest, and never past the total."""
    workspace = make(per_token="2^-8", total="2^-4", charge="dissent", on_exhausted="refuse")
    engine, belief = ScriptedEngine(dissent=0.5, distinct=3), np.full(WORLDS, 1 / WORLDS)
    with open_curator(workspace, engine=engine) as curator:
        tried = np.random.default_rng(4)
        num_answers = 0
        while num_answers < 40:
            prompts = [tuple(int(t) for t in tried.integers(1, 700, 3)) for _ in range(12)]
            worth = [split(engine._vote(list(prompt), np.zeros(40), 0.0)[1], belief) for prompt in prompts]
            before = curator.account
            try:
                out = curator.generate(prompts[int(np.argmax(worth))], max_new_tokens=1, temperature=0.0)
            except BudgetExceeded:
                break
            spent = curator.account.spent_units - before.spent_units
            assert spent == units_up(2.0**-8) * (out.marks[0] == "disputed")
            assert max(worth) > 0
            num_answers += 1
        account = curator.account
        assert account.spent_units == account.total_units == 16 * units_up(2.0**-8)
        assert num_answers == 16  # every token had dissent, as the adversary wanted
        assert curator._custody.ledger.bounds.mia == paclm.success_bound(2.0**-4, 1 / 2)
