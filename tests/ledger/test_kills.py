"""SIGKILL at random instants, then a restart: never fewer charged than released, at most one step more, belief exact.

A kill loses nothing that the kernel has: `test_syncs.py` checks that commits reach the disk.
"""

import pytest

from ledger import kills
from ledger.stores import IN_A_FILE
from paclm.ledger.verify import verify

pytestmark = IN_A_FILE


def check(folder, num_kills, seed, with_witness):
    tally = kills.run_kills(folder, num_kills, "commit-first", seed=seed, with_witness=with_witness)
    assert tally.kills == num_kills
    assert tally.undercounts == 0
    assert tally.most_overcharged_tokens <= kills.TOKENS
    assert tally.lost_beliefs == 0
    assert verify(folder / "ledger.sqlite", [kills.KEY]).intact


@pytest.mark.parametrize("with_witness", [False, True], ids=["alone", "with witness"])
def test_kills_never_leave_fewer_tokens_charged_than_released(setup, with_witness):
    check(setup.folder, 6, 1, with_witness)


def test_the_driver_reports_undercounts_when_tokens_are_released_first(setup):
    """A worker spends most of its time between release and commit there: eight kills hit it, or a few more."""

    def undercounts(seed):
        folder = setup.folder / f"round-{seed}"
        folder.mkdir(mode=0o700)
        return kills.run_kills(folder, 8, "release-first", seed=seed).undercounts

    assert any(undercounts(seed) for seed in range(8))


@pytest.mark.stress
@pytest.mark.parametrize("with_witness", [False, True], ids=["alone", "with witness"])
def test_two_hundred_kills(setup, with_witness):
    check(setup.folder, 200, 3, with_witness)


@pytest.mark.stress
def test_two_hundred_kills_of_the_wrong_order_are_reported(setup):
    tally = kills.run_kills(setup.folder, 200, "release-first", seed=4)
    assert tally.undercounts > 50
