"""Sixteen clients for a few seconds; the long twin is in tests/stress."""

from curator.deployments import ScriptedEngine
from server.load import ask_for
from server.stepped import wait_until


def test_sixteen_clients_lose_and_mix_up_nothing(start):
    live = start(engine=ScriptedEngine(dissent=0.0, num_slots=6), per_token="2^-40")
    got = ask_for(live.url, live.admin, clients=16, seconds=2, tokens=12, at_least=2)
    assert got.problems == []
    assert got.complete >= 32
    assert got.refused == got.left == 0
    assert all(len(texts) == 1 for texts in got.texts.values())  # all worlds agree here: one answer per prompt
    assert got.tokens == live.spent_tokens
    assert live.scheduler.num_running == live.scheduler.num_waiting == 0


def test_clients_that_leave_cost_what_they_received_and_at_most_the_steps_in_flight(start):
    live = start(engine=ScriptedEngine(num_slots=6), per_token="2^-40")
    got = ask_for(live.url, live.admin, clients=12, seconds=2, tokens=30, leaving=0.7, at_least=2)
    assert got.problems == []
    assert got.left >= 5
    wait_until(lambda: live.service.is_idle)
    assert got.tokens <= live.spent_tokens
    assert live.curator.reserved_units == 0
    assert live.scheduler.num_running == live.scheduler.num_waiting == 0
