"""InvisibleInk's search on public text, and what it then reaches on the text of the others."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from paclm.errors import InvalidInput
from paclm.study.baselines import ink_rows
from paclm.study.baselines.distributions import Distributions, text_distributions
from paclm.study.baselines.ink_rows import InkSearch, ink_choices
from paclm.study.baselines.ink_search import InkPlayer, InkTable, InkTarget, targets_of, unsearched
from paclm.study.baselines.invisible_ink import InkSettings, release_distribution, sample
from paclm.study.eval_text import Passage
from paclm.study.lab import Lab

TARGETS = targets_of((1.0, 8.0), (20, 1000), 1e-5)
SEARCH = InkSearch(60, (0.7, 1.0, 1.3))


def public_text(seed=3):
    """Random tokens stand for public text: no record of the workspace is made of them."""
    rng = np.random.default_rng(seed)
    return [Passage.of(rng.integers(0, 600, 40).tolist()) for _ in range(3)]


def with_text(lab, test_text=None, public=None):
    return Lab(lab.workspace, runtime=lab.runtime, test_text=test_text, public_text=public)


@pytest.fixture
def parts(lab):
    engine = lab.engine("shards-4", context=64)
    return list(text_distributions(engine, lab.passages(50), support_size=40))


def test_what_is_played_is_exactly_the_probability_of_the_true_token(parts):
    settings = [
        InkSettings(num_shards=4, clip=0.3, temperature=0.8, top_k=30),
        InkSettings(num_shards=4, clip=0.05, temperature=1.2, score="logits"),
    ]
    player = InkPlayer(settings)
    for part in parts:
        player.see(part)
    for own, found in zip(settings, player.figures(), strict=True):
        exact = [release_distribution(part, own).gather(-1, part.truth[:, None])[:, 0].exp() for part in parts]
        assert found.truth == pytest.approx(torch.cat(exact).numpy(), rel=1e-5)  # played in float32
        free = InkPlayer([replace(own, clip=1e6, top_k=None)])
        for part in parts:
            free.see(part)
        (unclipped,) = free.figures()
        assert unclipped.truth == pytest.approx(unclipped.ceiling, rel=1e-6)
        assert len(found.passage) == len(found.truth) == 50


def test_drawn_tokens_are_right_as_often_as_expected(parts):
    own = InkSettings(num_shards=4, clip=2.0, temperature=0.5)
    player = InkPlayer([own])
    rng, hits = np.random.default_rng(0), []
    for part in parts:
        player.see(part)
        exact = release_distribution(part, own)
        hits += [sample(exact, rng) == part.truth.numpy() for _ in range(200)]
    (found,) = player.figures()
    rate, error = np.mean(np.concatenate(hits)), math.sqrt((found.truth * (1 - found.truth)).mean() / (200 * 50))
    assert abs(rate - found.truth.mean()) < 4 * error  # seeded; for a fresh seed, false alarm < 1e-4


def informed_part(positions=200, shards=4, vocabulary=60):
    """Shard models that know a little more than the public one about the token that follows."""
    draw = torch.Generator().manual_seed(7)
    logits = 2.0 * torch.randn(positions, 1, vocabulary, dtype=torch.float64, generator=draw)
    logits = logits + 0.5 * torch.randn(positions, shards + 1, vocabulary, dtype=torch.float64, generator=draw)
    truth = torch.multinomial(torch.softmax(logits[:, -1], -1), 1, generator=draw)[:, 0]
    logits[torch.arange(positions), :-1, truth] += 1.0
    norms = torch.logsumexp(logits, -1)
    logs = logits - norms.unsqueeze(-1)
    passage = np.arange(positions) // 20
    return Distributions(logs[:, :-1], logs[:, -1], truth[:, None], truth, norms, passage)


def test_the_search_takes_the_largest_gain_of_its_grid():
    part = informed_part()
    table = InkTable(4, (0.7, 1.0), (None, 30), np.geomspace(1e-3, 10.0, 40))
    table.see(part)
    choices = table.choose(TARGETS)
    for choice in choices:
        others = [
            choice.target.settings(4, temperature, score, top_k)
            for temperature in (0.7, 1.0)
            for score in ("logits", "log probabilities")
            for top_k in (None, 30)
        ]
        assert choice.settings in others
        assert choice.settings.epsilon(choice.target.queries, 1e-5) <= choice.target.epsilon
        player = InkPlayer([choice.settings, *others])
        player.see(part)
        gains = [(found.truth - found.public).mean() for found in player.figures()]
        assert gains[0] >= 0.98 * max(gains)
        assert min(gains) < 0.95 * max(gains)  # the twin: another choice would be seen
        assert choice.gain == pytest.approx(gains[0], rel=0.02)


def test_more_budget_or_weaker_neighbours_never_expect_less():
    table = InkTable(4, (1.0,), (None,), np.geomspace(1e-3, 10.0, 40))
    table.see(informed_part())
    gains = {choice.target: choice.gain for choice in table.choose(TARGETS)}
    for target, gain in gains.items():
        assert gain > 0.0
        assert gain <= gains[target._replace(epsilon=8.0)]
        assert gain <= gains[target._replace(queries=20)]
        assert gain <= gains[target._replace(adjacency="public")]


def test_a_table_without_a_position_is_refused():
    with pytest.raises(InvalidInput):
        InkTable(4).choose(TARGETS)


def test_without_public_text_nothing_is_searched(lab):
    (only,) = ink_choices(lab, 4, TARGETS, SEARCH)
    assert only == unsearched(TARGETS, 4)
    for choice in only:
        assert (choice.settings.temperature, choice.settings.top_k, choice.gain) == (1.0, None, None)


def test_the_search_reads_the_public_text_alone(lab, monkeypatch):
    """Every text that the engine is shown in the search is public, and another test text gives the same choices."""
    public = public_text()
    known = {passage.tokens for passage in public}
    seen = []

    def noting(engine, passages):
        seen.extend(passages)
        return text_distributions(engine, passages)

    monkeypatch.setattr(ink_rows, "text_distributions", noting)
    found = [
        ink_choices(with_text(lab, test_text=text, public=public), 4, TARGETS, SEARCH)
        for text in (None, public_text(seed=4), public_text(seed=5))
    ]
    assert seen
    assert all(any(passage.tokens == tokens[: len(passage)] for tokens in known) for passage in seen)
    assert found[0] == found[1] == found[2]
    other = ink_choices(with_text(lab, public=public_text(seed=6)), 4, TARGETS, SEARCH)
    assert other != found[0]  # the twin: another public text does matter


def test_public_text_that_is_also_scored_is_refused(lab):
    public = public_text()
    with pytest.raises(InvalidInput, match="--public-text"):
        ink_choices(with_text(lab, test_text=public, public=public), 4, TARGETS, SEARCH)
    held_out = list(lab.test_passages)
    with pytest.raises(InvalidInput, match="--public-text"):
        ink_choices(with_text(lab, public=held_out), 4, TARGETS, SEARCH)


def test_a_target_under_their_neighbours_allows_twice_the_clip():
    any_change, fallback = (
        InkTarget(100, 1.0, 1e-5, kind).settings(8, 1.0, "logits", None) for kind in ("any", "public")
    )
    assert fallback.clip == pytest.approx(2 * any_change.clip)
