"""Room in the cache: who finds none waits or is told why, none fails midway, and a key leaves some to others."""

import re

import pytest

from curator.deployments import CONTEXT
from paclm import Workspace
from server.live import bearer, serve
from server.stepped import SteppedEngine, asking, num_known, wait_until

GREEDY = {"temperature": 0}


@pytest.fixture
def tight(make):
    """A workspace whose engine has a cache for one sequence, though 64 may run."""
    settings = make().path / "paclm.toml"
    settings.write_text(settings.read_text() + "cache_gib = 0.0003\n")
    return Workspace.open(settings.parent)


def test_requests_that_do_not_fit_together_are_answered_in_turn_and_one_that_never_fits_is_refused(tight):
    engine, prompt = SteppedEngine(), [5, 6, 7, 8]
    with serve(tight, None, None) as live, asking(engine) as pool:
        assert (live.curator.capacity, live.curator.num_free) == (CONTEXT, 1)
        jobs = [pool.submit(live.complete, prompt, CONTEXT - 4, stream=n % 2 == 0) for n in range(6)]
        for answer in [job.result(60) for job in jobs]:
            assert answer.status_code == 200
            assert re.search(r'"finish_reason": ?"(length|stop)"', answer.text)
            assert '"error"' not in answer.text
        refused = live.complete(prompt, CONTEXT - 3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert str(CONTEXT) in refused.json()["error"]["message"]
        assert live.complete(prompt, 4).status_code == 200


def test_no_more_run_together_than_the_cache_holds_and_nobody_overtakes(start):
    engine = SteppedEngine(num_slots=8, num_blocks=CONTEXT, dissent=0.0)
    live = start(engine=engine)
    with asking(engine) as pool:
        jobs = []
        for number, wanted in enumerate((20, 20, 60, 2), start=1):  # the last has room beside the first two
            jobs.append(pool.submit(live.complete, [number, 2], wanted, **GREEDY))
            wait_until(lambda number=number: num_known(live) == number)
        engine.run_free()
        assert {job.result(60).status_code for job in jobs} == {200}
    assert max(map(len, engine.orders)) == 2
    assert [order for order in engine.orders if 3 in order or 4 in order] == [[3]] * 60 + [[4]] * 2


@pytest.mark.parametrize(
    ("num_blocks", "wanted"), [(4 * CONTEXT, 2), (2 * CONTEXT, 30)], ids=["a place of four", "room for one of four"]
)
def test_a_key_leaves_a_place_and_room_to_another(start, num_blocks, wanted):
    engine = SteppedEngine(num_slots=4 if wanted == 2 else 8, num_blocks=num_blocks, dissent=0.0)
    live = start(engine=engine)
    other = bearer(live.keys.add("other"))
    with asking(engine) as pool:
        jobs = [pool.submit(live.complete, [n + 1, 2], wanted, **GREEDY) for n in range(8)]
        wait_until(lambda: num_known(live) == 8)
        engine.wait_until_it_stands()
        engine.let(1)
        engine.wait_until_it_stands()
        assert len(engine.sequences) == 4  # the only key there is
        jobs += [pool.submit(live.complete, [9, 9], wanted, headers=other, **GREEDY) for _ in range(2)]
        engine.run_free()
        assert {job.result(60).status_code for job in jobs} == {200}
        engine.stand_still()
        jobs = [pool.submit(live.complete, [n + 1, 2], wanted, **GREEDY) for n in range(8)]
        wait_until(lambda: num_known(live) == 8)
        engine.wait_until_it_stands()
        engine.let(1)
        engine.wait_until_it_stands()
        assert len(engine.sequences) == 3
        jobs.append(pool.submit(live.complete, [9, 9], wanted, headers=other, **GREEDY))
        wait_until(lambda: num_known(live) == 9)
        engine.let(1)
        wait_until(lambda: len(engine.sequences) == 4)  # at once, though five waited before it
        engine.run_free()
        assert {job.result(60).status_code for job in jobs} == {200}
