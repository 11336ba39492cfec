"""The admin's figures: asking for them delays no step, and what log and sentences say as the budget ends."""

import logging

import pytest

from curator.deployments import ScriptedEngine
from paclm.server import telemetry
from paclm.server.stats import guarantee, spent
from paclm.server.telemetry import BIN_SECONDS, Recent
from server.live import bearer, serve
from server.stepped import wait_until


def test_a_dashboard_never_has_the_ledgers_table_read_between_two_steps(start):
    """Years of use by many keys are a large table; what the stepping thread does must not grow with it."""
    live = start()
    live.complete(max_tokens=4)
    statements = []
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

    def sums(points):
        return [sum(point[name] for point in points) for name in names]

    assert sums(history["recent"]["points"]) == sums(history["points"])
    private, public, dissent = sums(history["points"])
    assert (private, dissent) == (live.curator.account.tokens, live.curator.account.dissent_tokens)
    assert min(private, public, dissent) > 0


def test_settings_are_shown_as_they_are_in_force(start):
    """Automatic ones are 0 in paclm.toml, and the playground needs the context."""
    engine = ScriptedEngine(num_slots=5)
    engine.context = 40
    runtime = start(engine=engine).as_admin("/v1/admin/overview")["settings"]["runtime"]
    assert (runtime["context"], runtime["max_sequences"]) == (40, 5)


def test_rates_count_every_token_that_left():
    now = 1000.0
    recent = Recent(clock=lambda: now)
    recent.add({"agreed": 1, "disputed": 1, "public": 1})
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


def entries(caplog):
    found = [(record.levelname, entry) for record in caplog.records if (entry := getattr(record, "entry", None))]
    return [(entry.event, entry.remaining_tokens, level) for level, entry in found if "budget" in entry.event]


def test_little_left_and_nothing_left_are_said_once_each(start, caplog):
    caplog.set_level(logging.INFO, logger=telemetry.LOGGER)
    live = start(per_token="2^-8", total=20 * 2.0**-8, on_exhausted="public")
    assert entries(caplog) == []
    while live.spent_tokens < 17:
        live.complete(max_tokens=17 - live.spent_tokens)
    assert entries(caplog) == []
    while live.spent_tokens < 20:
        live.complete(max_tokens=1)
    live.complete(max_tokens=3)
    assert entries(caplog) == [("budget_low", 2, "WARNING"), ("budget_exhausted", 0, "WARNING")]


@pytest.mark.parametrize("on_exhausted", ["public", "refuse"])
def test_a_start_without_budget_says_what_happens_now(make, small_tokenizer, caplog, on_exhausted):
    workspace = make(per_token="2^-8", total="2^-8", on_exhausted=on_exhausted)
    with serve(workspace, ScriptedEngine(), small_tokenizer) as live:
        live.complete(max_tokens=1)
    caplog.set_level(logging.INFO, logger=telemetry.LOGGER)
    caplog.clear()
    with serve(workspace, ScriptedEngine(), small_tokenizer, admin_name="again") as live:
        privacy = live.http.get("/v1/privacy").json()
        overview = live.http.get("/v1/admin/overview", headers=bearer(live.admin)).json()
    told = [entry for record in caplog.records if (entry := getattr(record, "entry", None))]
    assert [entry.event for entry in told] == ["started", "budget_exhausted", "stopping", "stopped"]
    assert told[1].on_exhausted == on_exhausted
    assert "until the budget is spent" not in privacy["sentence"]
    assert privacy["sentence"].endswith("The guarantee holds as committed; nothing more is charged.")
    assert ("the public model answers" in overview["sentences"]["left"]) is (on_exhausted == "public")


def test_sentences_show_no_less_than_the_bound_and_the_spending_and_name_the_unit(start):
    figures = {"mia_bound": 0.5881573838, "spent_nats": 2.0**-32, "total_nats": 2.0**-6}
    assert " more than 58.82% of the time" in guarantee({**figures, "remaining_tokens": 1})
    assert spent(figures).startswith("0.01% of the budget is spent so far")
    assert spent({**figures, "spent_nats": 0.0}).startswith("0.00% of the budget")
    privacy = start(unit="the records of one patient were").http.get("/v1/privacy").json()
    assert "whether the records of one patient were in the half of the corpus" in privacy["sentence"]
    assert "until the budget is spent" in privacy["sentence"]
    assert "Whether a record is in the corpus at all is not hidden." in privacy["not_promised"]
    assert "memorized may be emitted" in privacy["not_promised"]
