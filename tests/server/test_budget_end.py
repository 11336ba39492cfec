"""What the log, `/v1/privacy` and the overview say as the budget comes to its end."""

import logging
from typing import Any

import pytest

from paclm.server import logs
from paclm.server.stats import guarantee, spent
from server.live import bearer, serve


def entries(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, str | None]]:
    found = [(record.levelname, entry) for record in caplog.records if (entry := getattr(record, "entry", None))]
    return [(entry.event, entry.remaining_tokens, level) for level, entry in found if "budget" in entry.event]


def test_little_left_and_nothing_left_are_said_once_each(start, caplog):
    caplog.set_level(logging.INFO, logger=logs.LOGGER)
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
    from curator.deployments import ScriptedEngine

    workspace = make(per_token="2^-8", total="2^-8", on_exhausted=on_exhausted)
    with serve(workspace, ScriptedEngine(), small_tokenizer) as live:
        live.complete(max_tokens=1)
    caplog.set_level(logging.INFO, logger=logs.LOGGER)
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


def test_sentences_show_no_less_than_the_bound_and_the_spending():
    figures: dict[str, Any] = {"mia_bound": 0.5881573838, "spent_nats": 2.0**-32, "total_nats": 2.0**-6}
    assert " more than 58.82% of the time" in guarantee({**figures, "remaining_tokens": 1})
    assert spent(figures).startswith("0.01% of the budget is spent so far")
    assert spent({**figures, "spent_nats": 0.0}).startswith("0.00% of the budget")


def test_the_guarantee_names_its_unit_and_what_it_does_not_hide(start):
    live = start(unit="the records of one patient were")
    privacy = live.http.get("/v1/privacy").json()
    assert privacy["sentence"].startswith(
        "No attack on whether the records of one patient were in the half of the corpus that was used succeeds more"
    )
    assert "until the budget is spent" in privacy["sentence"]
    assert "Whether a record is in the corpus at all is not hidden." in privacy["not_promised"]
    assert "memorized may be emitted" in privacy["not_promised"]
