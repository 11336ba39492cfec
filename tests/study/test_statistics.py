import math

import numpy as np
import pytest
from scipy.stats import binom

from paclm.errors import InvalidInput
from paclm.privacy.leak import mean_and_stderr
from paclm.study.statistics import cluster_bootstrap, clustered_mean, retained_gain

DATASETS, CLUSTERS, SIZE = 300, 40, 10


def clustered_data(rng, num=CLUSTERS, shared=1.0):
    """Samples with mean zero, of which (with `shared` 1) half the variance is shared inside a cluster."""
    values = shared * rng.normal(size=(num, 1)) + rng.normal(size=(num, SIZE))
    return values.ravel(), np.repeat(np.arange(num), SIZE)


def misses(error_of, num=CLUSTERS, shared=1.0):
    """In how many data sets the true mean lies more than two standard errors away."""
    rng = np.random.default_rng(5)
    count = 0
    for _ in range(DATASETS):
        values, clusters = clustered_data(rng, num, shared)
        mean, stderr = error_of(values, clusters, rng)
        count += abs(mean) > 2 * stderr
    return count


# An honest error misses about 5 % of the time, 6.5 % allowing for 40 clusters. Seeded; for a fresh seed the number of
# misses passes this line with probability below 1e-4.
MOST_MISSES = int(binom.isf(1e-4, DATASETS, 0.065))


def clustered(values, clusters, rng):
    return clustered_mean(values, clusters, rng, 200)


def independent(values, clusters, rng):
    return mean_and_stderr(values)


def bootstrap_alone(values, clusters, rng):
    return float(values.mean()), float(cluster_bootstrap(values, clusters, rng, 200).std(ddof=1))


@pytest.mark.parametrize(
    ("num", "shared", "wrong"),
    [
        (CLUSTERS, 1.0, independent),
        (4, 0.0, bootstrap_alone),  # samples independent in truth, in four clusters that may happen to agree
    ],
)
def test_the_error_over_clusters_covers_the_truth_as_often_as_it_says_and_a_wrong_one_does_not(num, shared, wrong):
    assert misses(clustered, num, shared) <= MOST_MISSES
    assert misses(wrong, num, shared) > MOST_MISSES


def test_the_same_generator_gives_the_same_error_and_another_a_similar_one():
    values, clusters = clustered_data(np.random.default_rng(1))
    first, again, other = (clustered_mean(values, clusters, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert first == again
    assert first.stderr != other.stderr
    assert first.stderr == pytest.approx(other.stderr, rel=0.2)


def test_resamples_are_of_whole_clusters_and_samples_without_them_are_refused():
    rng = np.random.default_rng(0)
    values, clusters = np.repeat([0.0, 1.0], 50), np.repeat([0, 1], 50)
    assert set(cluster_bootstrap(values, clusters, rng)) == {0.0, 0.5, 1.0}
    two = clustered_mean(2 * values - 1, clusters, rng, 4000)  # the error of two samples
    assert two.stderr == pytest.approx(mean_and_stderr([1.0, -1.0]).stderr, rel=0.05)
    assert clustered_mean(np.array([1.0, 1.0, 1.0, 0.0]), np.array([7, 7, 7, 2]), rng).mean == 0.75  # not 0.5
    mean, stderr = clustered_mean([1, 0], np.array([3, 3]), rng)
    assert mean == 0.5
    assert math.isnan(stderr), "one cluster has no error"
    for samples, some in (([1.0, 2.0], [0]), ([], [])):
        with pytest.raises(InvalidInput):
            clustered_mean(samples, np.array(some, dtype=int), rng)


def test_retained_gain_is_a_ratio_with_an_error_and_none_without_a_gain():
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(50), 20)
    public, full = rng.random(1000) < 0.3, rng.random(1000) < 0.5
    private = np.where(rng.random(1000) < 0.5, public, full)
    found = retained_gain(private, public, full, clusters, rng)
    assert found is not None
    assert abs(found.mean - 0.5) < 4 * found.stderr
    assert 0.01 < found.stderr < 0.2
    assert retained_gain(private, full, full, clusters, rng) is None
