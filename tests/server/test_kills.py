"""Front or curator killed at random instants under load: nothing is undercounted, and no reply is told twice."""

from server.killing import Killing
from server.late_commit import commit_too_late

UNDERCOUNT = "undercount: private_tokens"


def test_after_each_of_five_kills_all_that_left_is_counted_and_replies_are_repeated_or_lost(make):
    killing = Killing(make(per_token="2^-40").path, seed=1)
    killing.run(kills=5)
    assert killing.problems == []
    assert set(killing.victims) == {"front", "curator"}
    assert killing.kinds["repeated"] > 0
    assert killing.kinds["lost"] > 0


def test_a_commit_after_the_send_is_noticed(make):
    """The front passes on what the curator sent before it was killed: some client has more than the ledger knows of."""
    killing = Killing(make(per_token="2^-40").path, seed=1, may_be_killed=["curator"], prepare=commit_too_late)
    for _ in range(8):  # an instant that shows it comes soon
        killing.run(kills=1)
        if UNDERCOUNT in killing.problems:
            break
    assert UNDERCOUNT in killing.problems
