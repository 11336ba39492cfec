import numpy as np
import pytest
import torch
from scipy import stats

from paclm.engine.census import HybridCoins, coupling_ceiling, hybrid_votes, independent_votes
from paclm.engine.decode_step import coupled_votes, pick, support_logits, top_tokens
from paclm.errors import InvalidInput

DRAWS, WORLDS, SUPPORT = 20_000, 4, 6
TOKENS = torch.tensor([31, 7, 90, 2, 55, 18])


def some_logits(spread=1.0):
    generator = torch.Generator().manual_seed(4)
    common = torch.randn(1, SUPPORT, generator=generator)
    return common + spread * torch.randn(WORLDS, SUPPORT, generator=generator)  # (W, k)


def gumbel(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).gumbel(size=shape))


def chi_square_p(votes, logits, temperature):
    """One p-value per world: votes (draws, W) against softmax(logits / τ)."""
    expected = (torch.softmax(logits.double() / temperature, -1) * len(votes)).numpy()
    counts = (votes.unsqueeze(2) == TOKENS).sum(0).numpy()  # (W, k)
    return [float(stats.chisquare(*both, sum_check=False).pvalue) for both in zip(counts, expected, strict=True)]


def agreement(votes):
    return float((votes == votes[:, :1]).all(1).double().mean())


def ceiling_of(logits):
    return float(coupling_ceiling(logits.unsqueeze(0))[0])


def draw(rule, logits, temperature):
    """(draws, W) votes under fresh coins."""
    many, support = logits.expand(DRAWS, -1, -1), TOKENS.expand(DRAWS, -1)
    if rule == "coupled":
        return coupled_votes(many, support, gumbel(DRAWS, SUPPORT), temperature)
    if rule == "independent":
        return independent_votes(many, support, gumbel(DRAWS, WORLDS, SUPPORT), temperature)
    switch = torch.from_numpy(np.random.default_rng(9).random(DRAWS))
    coins = HybridCoins(switch, gumbel(DRAWS, SUPPORT, seed=1), gumbel(DRAWS, WORLDS, SUPPORT, seed=2))
    return hybrid_votes(many, support, coins, temperature)


@pytest.mark.parametrize("rule", ["coupled", "independent", "hybrid"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_each_worlds_marginal_is_its_own_restricted_conditional(rule, temperature, spread):
    logits = some_logits(spread)
    # 72 p-values in all; for fresh seeds one falls below 1e-6 with probability below 1e-4.
    assert min(chi_square_p(draw(rule, logits, temperature), logits, temperature)) > 1e-6


@pytest.mark.parametrize("rule", ["coupled", "independent", "hybrid"])
def test_the_marginal_check_catches_a_wrong_temperature(rule):
    logits = some_logits()
    assert max(chi_square_p(draw(rule, logits, 1.15), logits, 1.0)) < 1e-6


@pytest.mark.parametrize("rule", ["coupled", "independent", "hybrid"])
@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
def test_worlds_never_agree_more_often_than_the_coupling_ceiling(rule, spread):
    logits = some_logits(spread)
    ceiling = ceiling_of(logits)
    # 4.5 standard errors; for fresh seeds a false alarm has probability below 1e-4.
    assert agreement(draw(rule, logits, 1.0)) <= ceiling + 4.5 * (ceiling * (1 - ceiling) / DRAWS) ** 0.5
    assert spread < 1.0 or ceiling < 0.9  # votes that copy one world agree always, and would be caught


def test_hybrid_reaches_the_ceiling_where_coupled_gumbel_does_not():
    logits = some_logits(0.05)
    ceiling, hybrid = ceiling_of(logits), agreement(draw("hybrid", logits, 1.0))
    assert ceiling >= 0.9
    assert hybrid > ceiling - 4.5 * (ceiling * (1 - ceiling) / DRAWS) ** 0.5  # false alarm below 1e-5
    assert hybrid >= agreement(draw("coupled", logits, 1.0)) - 0.01


def test_hybrid_below_the_threshold_is_coupled_gumbel():
    logits = some_logits(1.0).expand(50, -1, -1)
    support = TOKENS.expand(50, -1)
    coins = HybridCoins(torch.zeros(50), gumbel(50, SUPPORT), gumbel(50, WORLDS, SUPPORT))
    assert float(coupling_ceiling(logits)[0]) < 0.9
    assert torch.equal(hybrid_votes(logits, support, coins, 1.0), coupled_votes(logits, support, coins.common, 1.0))


def test_identical_worlds_always_agree_and_have_ceiling_one():
    logits = some_logits()[:1].expand(WORLDS, -1)
    assert agreement(draw("coupled", logits, 1.0)) == agreement(draw("hybrid", logits, 1.0)) == 1.0
    assert ceiling_of(logits) == pytest.approx(1.0)


def test_greedy_is_the_argmax_and_the_limit_of_small_temperatures():
    logits, support = some_logits().expand(500, -1, -1), TOKENS.expand(500, -1)
    greedy = coupled_votes(logits, support, None)
    assert torch.equal(greedy, TOKENS[logits.argmax(-1)])
    for temperature in (0.0, 1e-40, 1e-6):
        assert torch.equal(coupled_votes(logits, support, gumbel(500, SUPPORT), temperature), greedy)
    assert not torch.equal(coupled_votes(logits, support, gumbel(500, SUPPORT), 1.0), greedy)


def test_equal_scores_go_to_the_smaller_token_id():
    assert pick(torch.tensor([[[1.0, 3.0, 3.0, 3.0, 0.0, 1.0]]]), TOKENS.unsqueeze(0)).item() == 2


@pytest.mark.parametrize("k", [1, 5, 40, 64])
def test_the_support_breaks_ties_by_token_id(k):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 3, (20, 64), generator=generator).float()
    logits[:, ::7] *= -0.0
    expected = [sorted(range(64), key=lambda t: (-row[t].item(), t))[:k] for row in logits]
    assert top_tokens(logits, k).tolist() == expected


def test_the_support_orders_extreme_logits_and_is_no_larger_than_the_vocabulary():
    logits = torch.tensor([[-1e30, 5.0, -2.5, float("-inf"), 1e-40, 0.0, -1e-40, 3e38]])
    assert top_tokens(logits, 8)[0].tolist() == [7, 1, 4, 5, 6, 2, 0, 3]
    with pytest.raises(InvalidInput, match=r"9 .* 8"):
        top_tokens(logits, 9)


def test_nothing_outside_the_support_is_voted_for_not_even_a_special_token_every_world_loves():
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(50, 8, generator=generator)
    hidden = torch.randn(WORLDS + 1, 200, 8, generator=generator)
    end_of_text = 0
    head[end_of_text] = 30 * hidden[:-1].mean((0, 1)) / hidden[:-1].mean((0, 1)).norm()
    public = hidden[-1] @ head.T
    public[:, end_of_text] = -1e9  # the public model never offers it
    support = top_tokens(public, 10)
    logits = support_logits(hidden, head, support)
    for coins in (None, gumbel(200, 10)):
        votes = coupled_votes(logits, support, coins, 3.0)
        assert bool((votes.unsqueeze(2) == support.unsqueeze(1)).any(2).all())
        assert not bool((votes == end_of_text).any())
    favourite = (hidden[:-1] @ head.T).argmax(-1)
    assert bool((favourite == end_of_text).any()), "the test needs worlds that would have chosen it"


def test_logits_inside_the_support_are_those_of_the_whole_vocabulary():
    generator = torch.Generator().manual_seed(2)
    head, hidden = torch.randn(40, 8, generator=generator), torch.randn(3, 5, 8, generator=generator)
    support = torch.stack([torch.randperm(40, generator=generator)[:7] for _ in range(5)])
    whole = hidden @ head.T  # (W, n, V)
    expected = torch.stack([whole[:, i, support[i]] for i in range(5)])
    assert torch.allclose(support_logits(hidden, head, support), expected, atol=1e-5)
