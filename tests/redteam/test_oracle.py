"""paclm against an independent implementation of Algorithm 1 and its accounting, on votes of real worlds."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest

import paclm
from paclm.privacy.accounting import Account, charge_units
from paclm.privacy.randomness import NoiseSource
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.replay import ReplaySettings, replay
from redteam import oracle

VOTES = Path(__file__).parents[1] / "fixtures" / "votes"
PER_TOKEN = 2.0**-4
TOKENS, SESSIONS = 128, 24


class Dictated(NoiseSource):
    """Standard normals that the test chooses."""

    def __init__(self, normals):
        self._normals = np.asarray(normals, dtype=float)

    def standard_normal(self, size):
        return self._normals[:size]


@pytest.fixture(scope="module")
def votes():
    return np.load(VOTES / "smollm2-wiki-gumbel.npz")["votes"]


def beliefs(rng, num_worlds):
    """Uniform, some way into a session, and one world almost found."""
    weights = rng.gamma(0.3, size=num_worlds) + 1e-6
    found = np.full(num_worlds, 1e-7)
    found[3] = 1.0
    return [np.full(num_worlds, 1.0 / num_worlds), weights / weights.sum(), found / found.sum()]


def test_the_oracle_imports_nothing_of_ours():
    tree = ast.parse(Path(oracle.__file__).read_text())
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert {name.split(".")[0] for name in names} == {"fractions", "mpmath", "numpy"}


@pytest.mark.parametrize("per_token", [2.0**-4, 2.0**-16, 2.0**-32])
def test_the_belief_depends_on_the_noise_as_the_oracle_says(votes, per_token):
    """The log belief ratio of world s is −d²/2 − z·u_s: z = 0 and the unit vectors show all d² and u exactly."""
    rng = np.random.default_rng(1)
    rows = [row for row in votes if len(set(row.tolist())) > 1]
    rows.sort(key=lambda row: -len(set(row.tolist())))
    for row in (*rows[:3], *rows[200:204], *rows[-2:]):
        for belief in beliefs(rng, len(row)):
            secret, size = int(rng.integers(len(row))), len(set(row.tolist())) - 1
            expected = oracle.expected_moves(row.tolist(), belief, secret, per_token)

            def ratios(normals, belief=belief, row=row, secret=secret):
                _, after = paclm.release_token(row, np.log(belief), secret, per_token, Dictated(normals))
                moved = after - np.log(belief)
                return moved - moved[secret]

            at_rest = ratios(np.zeros(size))
            np.testing.assert_allclose(-2 * at_rest, np.diag(expected), rtol=1e-5, atol=1e-12)
            dependence = np.array([at_rest - ratios(unit) for unit in np.eye(size)])  # (a − 1, m)
            np.testing.assert_allclose(dependence.T @ dependence, expected, rtol=1e-3, atol=1e-3 * expected.max())


def play(votes, per_token, seed):
    """Sessions of the oracle: flips where worlds differ, and the leak by the belief's entropy, one figure each."""
    rng, flips, leaks = np.random.default_rng(seed), [], []
    for _ in range(SESSIONS):
        secret, start = int(rng.integers(votes.shape[1])), int(rng.integers(len(votes)))
        belief, flipped, disputed = np.full(votes.shape[1], 1.0 / votes.shape[1]), 0, 0
        for row in votes[(start + np.arange(TOKENS)) % len(votes)].tolist():
            token, belief = oracle.released(row, belief, secret, per_token, rng)
            is_dissent = len(set(row)) > 1
            disputed += is_dissent
            flipped += is_dissent and token != row[secret]
        flips.append((flipped, disputed))
        leaks.append(math.log(votes.shape[1]) + float((belief * np.log(np.maximum(belief, 1e-300))).sum()))
    return np.array(flips), np.array(leaks)


def far(found, other, stderr):
    return abs(found - other) > 5 * stderr


def test_replay_agrees_with_the_oracle_and_not_with_one_that_has_half_the_noise():
    """Five standard errors for two figures: false alarm under 2e-6 for a fresh seed."""
    recorded = RecordedVotes.load(VOTES / "smollm2-wiki-gumbel.npz")
    settings = ReplaySettings(per_token=PER_TOKEN, sessions=8 * SESSIONS, tokens=TOKENS, seed=5)
    found = replay(recorded, settings)
    flips, leaks = play(recorded.votes, PER_TOKEN, 6)
    leak_error = math.hypot(float(leaks.std(ddof=1)) / math.sqrt(SESSIONS), found["leaked_stderr"])
    rate = flips[:, 0].sum() / flips[:, 1].sum()
    spread = (flips[:, 0] - rate * flips[:, 1]).std(ddof=1) * math.sqrt(SESSIONS) / flips[:, 1].sum()
    flip_error = spread * math.sqrt(1 + 1 / 8)
    assert not far(found["leaked_nats"], leaks.mean(), leak_error)
    assert not far(found["flip_given_dissent"], rate, flip_error)
    wrong_flips, _ = play(recorded.votes, 4 * PER_TOKEN, 6)
    assert far(found["flip_given_dissent"], wrong_flips[:, 0].sum() / wrong_flips[:, 1].sum(), flip_error)
    assert found["charged_nats"] == TOKENS * PER_TOKEN


@pytest.mark.parametrize("charge", ["every-token", "dissent"])
@pytest.mark.parametrize("per_token", [2.0**-16, 1e-9, 3.3e-12, 2.0**-60])
def test_charges_and_bounds_are_the_oracles(votes, charge, per_token):
    some, total = votes[:300], 2.0**-3
    account = Account.open(total)
    for row in some.tolist():
        is_dissent = len(set(row)) > 1
        price = charge_units(charge, per_token, reads_secret=True, is_dissent=is_dissent)
        account = account.charge(price, is_dissent=is_dissent)
    assert account.spent_units == oracle.spent(some, per_token, charge)
    for prior in (1 / 2, 1 / 128):
        for nats in (total, 2.0**-10, per_token):
            exact = oracle.success_bound(nats, prior)
            assert exact <= paclm.success_bound(nats, prior) <= exact + 1e-9
