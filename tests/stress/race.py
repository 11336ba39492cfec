"""A test with a race in it that is seldom lost; `test_pauses` shows that pauses find it."""

import pytest

from server.stepped import asking, num_known, wait_until


@pytest.mark.parametrize("attempt", range(10))
def test_that_takes_a_step_for_begun_when_the_last_is_done(start, engine, attempt):
    live = start(engine=engine)
    with asking(engine) as pool:
        pool.submit(live.complete, max_tokens=20, temperature=0)
        engine.let(1)
        wait_until(lambda: len(engine.orders) == 1)  # the next call begins after a commit: who comes now may be in time
        pool.submit(live.complete, max_tokens=20, temperature=0)
        wait_until(lambda: num_known(live) == 2)
        engine.let(2)
        wait_until(lambda: len(engine.orders) == 3)
    assert len(engine.orders[2]) == 1
