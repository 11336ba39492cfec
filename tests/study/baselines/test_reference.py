"""Every published number that a faithful PMixED must give."""

import math

import numpy as np
import pytest

from paclm.study.baselines.accountants import matched_nats, rdp_for, renyi_divergence, success_at_half
from paclm.study.baselines.pmixed import PMixedSettings, query_loss


@pytest.mark.parametrize(
    ("members", "radius"),
    [(1, 0.5651780), (2, 0.1938422), (3, 0.2235876), (4, 0.2435550), (5, 0.2583065), (8, 0.2873380), (80, 0.4038904)],
)
def test_the_authors_default_has_its_radius_for_every_sample_size(members, radius):
    settings = PMixedSettings(num_shards=80, order=3, rate=0.03, queries=1024, epsilon=8.0)
    assert settings.radii[members] == pytest.approx(radius, abs=5e-8)
    assert rdp_for(8.0, 1e-5, 3) == pytest.approx(3.1983085, abs=5e-8)


@pytest.mark.parametrize(
    ("epsilon", "order", "budget"),
    [
        *((1.0, order, budget) for order, budget in ((8, -0.214), (16, 0.482), (32, 0.772), (64, 0.899))),
        *((2.0, order, budget) for order, budget in ((8, 0.786), (16, 1.482), (32, 1.772), (64, 1.899))),
    ],
)
def test_the_rigorous_reading_leaves_this_much_at_each_order(epsilon, order, budget):
    assert rdp_for(epsilon, 1e-5, order) == pytest.approx(budget, abs=5e-4)
    settings = PMixedSettings(num_shards=8, order=order, rate=0.1, queries=100, epsilon=epsilon)
    assert settings.radii.any() == (budget > 0), "an order that cannot reach ε leaves the public model"
    assert rdp_for(epsilon, 1e-5, order, "generous") == epsilon


@pytest.mark.parametrize(("num_shards", "radius"), [(8, 0.0019399), (16, 0.0038502), (32, 0.0075853)])
def test_the_validation_cell_of_the_paper_has_its_radius_and_all_orders_the_closed_form(num_shards, radius):
    for order in (2, 3, 8, 32):
        settings = PMixedSettings(num_shards=num_shards, order=order, queries=1024, epsilon=2.0, reading="generous")
        inner = num_shards * math.expm1((order - 1) * settings.rdp / 1024) + 1
        assert settings.radii[-1] == pytest.approx(math.log(inner) / (4 * order * (order - 1)), rel=1e-9)
        assert order != 2 or settings.radii[-1] == pytest.approx(radius, abs=5e-8)


@pytest.mark.parametrize(("epsilon", "success", "nats"), [(1.0, 0.7310613, 0.1109468), (2.0, 0.8807983, 0.3278157)])
def test_matched_guarantees_are_the_papers(epsilon, success, nats):
    assert success_at_half(epsilon, 1e-5) == pytest.approx(success, abs=5e-8)
    assert matched_nats(epsilon, 1e-5) == pytest.approx(nats, abs=5e-8)


def test_the_loss_of_a_query_is_the_published_sum():
    beta, n, q, a = 0.05, 3, 0.1, 5

    def loss(k):
        return math.log((n - 1) / n + math.exp((k - 1) * 4 * beta * k) / n) / (k - 1)

    total = (1 - q) ** (a - 1) * (1 + (a - 1) * q)
    total += sum(math.comb(a, k) * (1 - q) ** (a - k) * q**k * math.exp((k - 1) * loss(k)) for k in range(2, a + 1))
    assert query_loss(beta, n, q, a) == pytest.approx(math.log(total) / (a - 1), rel=1e-12)
    # At β = 1e-12 that sum is 1 to sixteen digits; the loss is q²·a/2·4·2β to first order at a = 2.
    assert query_loss(1e-12, 2, 0.01, 2) == pytest.approx(0.01**2 * 8e-12 / 2, rel=1e-9)


def test_divergence_is_the_published_formula():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])
    for order in (2, 3.5, 18):
        direct = math.log((p**order * q ** (1 - order)).sum()) / (order - 1)
        assert renyi_divergence(np.log(p), np.log(q), order) == pytest.approx(direct, rel=1e-12)
