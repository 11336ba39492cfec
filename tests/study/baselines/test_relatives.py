"""AdaPMixED and SubMix: their rules, their own accounts, and where they stop."""

import numpy as np
import pytest
import torch

from paclm.errors import InvalidInput
from paclm.study.baselines import adapmixed, submix
from paclm.study.baselines.accountants import epsilon_of, mix, renyi_divergence, symmetric_divergence
from paclm.study.baselines.adapmixed import AdaSettings
from paclm.study.baselines.pmixed import mixing_weight
from paclm.study.baselines.submix import SubMixSettings


def ensemble(spread, seed=0, positions=6, shards=4, vocabulary=80):
    rng = np.random.default_rng(seed)
    public = rng.normal(0.0, 2.0, (positions, 1, vocabulary))
    logs = np.concatenate([public + rng.normal(0.0, spread, (positions, shards, vocabulary)), public], axis=1)
    both = torch.log_softmax(torch.from_numpy(logs), -1)
    shard_logs, public_logs = both[:, :-1], both[:, -1]
    return shard_logs, public_logs, public_logs.argsort(-1, descending=True)


def test_adapmixed_answers_with_the_mean_of_models_in_its_ball_and_charges_the_largest_omission():
    shards, public, support = ensemble(0.5)
    settings = AdaSettings(order=6, radius=0.05, threshold=1e9, screen_size=20)
    found = adapmixed.answer(shards, public, support, settings, np.random.default_rng(0))
    assert found.is_private.all()
    screen = (1e-4 / 4) ** 2 * 6 / 0.01**2
    for i in range(len(public)):
        weights = mixing_weight(shards[i].numpy(), public[i].numpy(), 6, 0.05)
        members = np.exp(mix(shards[i].numpy(), public[i].numpy(), weights))
        mean = np.log(members.mean(0))
        assert found.log_release[i].exp().numpy() == pytest.approx(np.exp(mean), rel=0.05, abs=1e-4)
        worst = max(
            float(symmetric_divergence(mean, np.log(np.delete(members, k, 0).mean(0)), 6)) for k in range(len(members))
        )
        assert found.losses[i] == pytest.approx(screen + worst, rel=0.1)


def test_adapmixed_sends_what_is_far_from_the_public_model_to_it_and_charges_the_screen_alone():
    shards, public, support = ensemble(3.0)
    strict = AdaSettings(threshold=1e-9, screen_size=20)
    found = adapmixed.answer(shards, public, support, strict, np.random.default_rng(0))
    assert not found.is_private.any()
    assert torch.equal(found.log_release, public)
    assert found.losses == pytest.approx((strict.screen_weight / 4) ** 2 * strict.order / strict.noise**2)


def test_adapmixed_stops_before_its_account_passes_epsilon():
    settings = AdaSettings()
    losses = np.full(100, 0.01)
    count = adapmixed.within(losses, 1.0, settings)
    assert 0 < count < 100
    assert float(epsilon_of(0.01 * count, settings.order, settings.delta)) <= 1.0
    assert float(epsilon_of(0.01 * (count + 1), settings.order, settings.delta)) > 1.0
    assert adapmixed.spent_epsilon(losses[:count], settings) <= 1.0


@pytest.mark.parametrize("sharpness", [0.01, 1.0, 30.0, 1000.0])
def test_submix_can_clip_any_pair_of_distributions_and_leaves_alone_what_is_inside_the_band(sharpness):
    draw = torch.Generator().manual_seed(7)
    public = torch.log_softmax(3.0 * torch.randn(5, 1, 400, generator=draw), -1)
    shards = torch.log_softmax(sharpness * torch.randn(5, 4, 400, generator=draw), -1)
    clipped = submix.clip(shards, public, 5.0)
    assert float((clipped - public).abs().max()) <= 5.0 + 1e-4
    assert clipped.exp().sum(-1).numpy() == pytest.approx(1.0, abs=1e-5)
    close = torch.log_softmax(public + 0.1 * torch.randn(5, 4, 400, generator=draw), -1)
    assert float((submix.clip(close, public, 5.0) - close).abs().max()) < 1e-4


def test_submix_takes_the_largest_weight_that_either_half_allows():
    shards, public, _ = ensemble(3.0)
    settings = SubMixSettings(epsilon=1.0, queries=50, gamma=4.0)
    clipped = submix.clip(shards, public.unsqueeze(1), 2.0)
    pairs = np.array([[0, 2], [3, 1]])
    found = submix.answer(shards, public, pairs, settings)
    one, two, p0 = clipped[0, 0].numpy(), clipped[0, 2].numpy(), public[0].numpy()
    middle = np.logaddexp(one, two) - np.log(2)

    def differs(weight):
        centre = mix(middle, p0, np.array(weight))
        return max(float(renyi_divergence(centre, mix(half, p0, np.array(weight)), 2)) for half in (one, two))

    weight = found.weights[0, 0]
    assert 0.0 < weight < 1.0
    assert differs(weight) <= settings.allowance * (1 + 1e-9)
    assert differs(weight * 1.001) > settings.allowance


def test_pairs_use_every_shard_once_and_are_public_for_ever_once_one_has_spent_its_share():
    pairs = submix.random_pairs(9, np.random.default_rng(1))
    assert pairs.shape == (4, 2)
    assert len(set(pairs.flatten().tolist())) == 8
    with pytest.raises(InvalidInput, match="3"):
        submix.random_pairs(3, np.random.default_rng(1))
    losses = np.stack([np.full(40, 0.01), np.full(40, 0.11)], axis=1)
    assert submix.within(losses, SubMixSettings(epsilon=1.0, queries=50)) == 9
    assert submix.within(losses * 0.01, SubMixSettings(epsilon=1.0, queries=5)) == 5
