"""The admin's figures: the same words everywhere, and asking for them delays no step."""

from typing import Any

import pytest

from curator.deployments import ScriptedEngine
from paclm.server.metrics import BIN_SECONDS, Recent
from server.stepped import wait_until


def test_a_dashboard_never_has_the_ledgers_table_read_between_two_steps(start):
    """Years of use by many keys are a large table; what the stepping thread does must not grow with it."""
    live = start()
    live.complete(max_tokens=4)
    statements: list[str] = []
    live.curator._custody.ledger.store.db.set_trace_callback(statements.append)
    live.complete(max_tokens=4, temperature=0)
    for _ in range(3):
        overview, history = live.as_admin("/v1/admin/overview"), live.as_admin("/v1/admin/history")
    assert any("INTO events" in statement for statement in statements)  # the steps are seen
    assert not [statement for statement in statements if "FROM usage" in statement and "WHERE hour" not in statement]
    (ward,) = (row for row in overview["keys"] if row["name"] == "ward")
    assert ward["private_tokens"] == live.spent_tokens
    assert sum(point["private_tokens"] for point in history["points"]) == live.spent_tokens


def test_history_counts_the_last_minutes_in_the_words_of_the_ledger(start, monkeypatch):
    """Private tokens without the public ones; those with dissent are some of the private ones."""
    live = start(engine=ScriptedEngine(dissent=0.5), per_token="2^-6", total="0.08", on_exhausted="public")
    live.complete(max_tokens=20, temperature=0)
    wait_until(lambda: live.service.is_idle)
    recent = live.service.recent
    monkeypatch.setattr(recent, "_clock", lambda clock=recent._clock: clock() + 2 * BIN_SECONDS)  # bins that are full
    history = live.as_admin("/v1/admin/history")
    names = ("private_tokens", "public_tokens", "dissent_tokens")

    def sums(points: list[dict[str, Any]]) -> list[int]:
        return [sum(point[name] for point in points) for name in names]

    assert sums(history["recent"]["points"]) == sums(history["points"])
    private, public, dissent = sums(history["points"])
    assert (private, dissent) == (live.curator.account.tokens, live.curator.account.dissent_tokens)
    assert min(private, public, dissent) > 0


def test_rates_count_every_token_that_left():
    now = 1000.0
    recent = Recent(clock=lambda: now)
    recent.add(["agreed", "disputed", "public"])
    now += BIN_SECONDS
    assert recent.rates() == (0.3, 0.1)  # over ten seconds


@pytest.mark.parametrize(
    ("release", "charge", "price"), [("gaussian", "dissent", 2.0**-8), ("mixture", "every-token", 0)]
)
def test_a_plan_asks_the_curator_for_the_price(start, release, charge, price):
    live = start(per_token="2^-8", total="2^-4", release=release, charge=charge, on_exhausted="refuse")
    plan = live.http.post("/v1/privacy/plan", json={"model": "clinic", "prompt": "the", "max_tokens": 5}).json()
    assert plan["max_nats"] == 5 * price
    held = live.curator.hold([live.curator.request("the", 5)])
    assert live.curator.reserved_units == 5 * live.curator.worst_price
    live.curator.cancel(held[0])
