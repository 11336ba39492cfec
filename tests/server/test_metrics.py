"""Metrics: what is counted is what is shown, and no label can carry a text."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paclm import __version__
from paclm.server.api_keys import KeyInfo
from paclm.server.telemetry import GRAMMAR_OUTCOMES, MARKS, REFUSALS, ROUTES, STATUS_CLASSES, Metrics, Standing

ALICE = KeyInfo("alice", False, 100, 30, 20, "2026-11-15", None)
ROOT = KeyInfo("root", True, None, 5, 0, "2026-11-15", None)
GONE = KeyInfo("gone", False, 100, 30, 0, "2026-11-15", "2026-11-16")


PROMISE = {
    "half": {
        "paclm_budget_spent_nats": 0.25,
        "paclm_budget_total_nats": 1.0,
        "paclm_budget_remaining_nats": 0.75,
        "paclm_budget_remaining_tokens": 300,
    },
    "corpus": {"paclm_promise_epsilon": 8.0, "paclm_promise_delta": 1e-4, "paclm_promise_kept": 1},
    "student": {},
}


def standing(promise="half", **changes):
    figures = {"promise": PROMISE[promise], "running": 3, "queued": 2}
    return Standing(**{**figures, "is_serving": True, "keys": (ALICE, ROOT, GONE), **changes})


def samples(metrics, **changes):
    families = text_string_to_metric_families(metrics.render(standing(**changes)).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


def use_everything(metrics, promise):
    for mark in MARKS[promise]:
        metrics.count_tokens("alice", mark, 1)
    for route in ROUTES:
        metrics.count_request(route, 200, 0.1)
    for reason in REFUSALS:
        metrics.count_refusal(reason)
    for outcome in GRAMMAR_OUTCOMES:
        metrics.count_grammar(outcome)
    metrics.replays.inc()
    metrics.disconnects.inc()
    for name in ("step", "commit", "first_token", "between_tokens"):
        getattr(metrics, f"{name}_seconds").observe(0.02)


def test_tokens_are_counted_by_mark_and_by_the_name_of_the_key():
    metrics = Metrics()
    for key, mark in (("alice", "agreed"), ("alice", "disputed"), ("bob", "agreed")):
        metrics.count_tokens(key, mark, 1)
    Metrics().count_tokens("alice", "agreed", 1)  # another registry
    found = samples(metrics)
    assert [value(found, "paclm_tokens_total", mark=mark) for mark in ("agreed", "disputed", "public")] == [2, 1, 0]
    assert [value(found, "paclm_key_tokens_total", key=key) for key in ("alice", "bob")] == [2, 1]


def test_requests_are_counted_by_status_class_and_timed():
    metrics = Metrics()
    for status in (200, 204, 429, 599):
        metrics.count_request("chat", status, 0.5)
    found = samples(metrics)
    assert value(found, "paclm_requests_total", route="chat", status="2xx") == 2
    assert value(found, "paclm_requests_total", route="chat", status="4xx") == 1
    assert value(found, "paclm_request_seconds_count", route="chat") == 4
    assert value(found, "paclm_request_seconds_sum", route="chat") == 2.0


@pytest.mark.parametrize("name", ["step", "ledger_commit", "first_token", "between_tokens"])
def test_durations_fall_into_buckets(name):
    metrics = Metrics()
    for seconds in (0.02, 0.2):
        getattr(metrics, f"{name.removeprefix('ledger_')}_seconds").observe(seconds)
    found = samples(metrics)
    buckets = [value(found, f"paclm_{name}_seconds_bucket", le=le) for le in ("0.01", "0.025", "0.25", "+Inf")]
    assert (value(found, f"paclm_{name}_seconds_count"), buckets) == (2, [0, 1, 2, 2])


@pytest.mark.parametrize("promise", PROMISE)
def test_the_promise_and_the_load_are_as_they_stand_at_the_scrape(promise):
    metrics = Metrics(promise)
    metrics.render(standing(promise, running=9))
    found = samples(metrics, promise=promise)
    expected = {"paclm_streams_running": 3, "paclm_requests_queued": 2, "paclm_serving": 1, **PROMISE[promise]}
    assert {name: value(found, name) for name in expected} == expected
    assert value(samples(metrics, promise=promise, is_serving=False), "paclm_serving") == 0
    for other in set(PROMISE) - {promise}:
        assert not {name for name, _ in found} & set(PROMISE[other])
    assert value(found, "paclm_build_info", version=__version__) == 1


def test_a_keys_figures_go_when_it_is_revoked_and_a_quota_is_shown_only_where_there_is_one():
    metrics = Metrics()
    found = samples(metrics)
    assert value(found, "paclm_key_used_tokens", key="alice") == 30
    assert value(found, "paclm_key_reserved_tokens", key="alice") == 20
    assert value(found, "paclm_key_quota_tokens", key="alice") == 100
    assert value(found, "paclm_key_used_tokens", key="root") == 5
    names = {dict(labels).get("key") for name, labels in found if name == "paclm_key_quota_tokens"}
    assert names == {"alice"}
    assert "alice" not in metrics.render(standing(keys=())).decode()


@pytest.mark.parametrize("promise", PROMISE)
def test_every_metric_is_documented_about_nothing_private_and_labelled_from_fixed_lists(promise):
    metrics = Metrics(promise)
    use_everything(metrics, promise)
    lists = {"mark": MARKS[promise], "route": ROUTES, "status": STATUS_CLASSES, "reason": REFUSALS}
    lists["outcome"] = GRAMMAR_OUTCOMES
    allowed = {**lists, "key": {"alice", "root"}, "version": {__version__}}
    found = samples(metrics, promise=promise)
    for name, labels in found:
        assert all(text in allowed[label] for label, text in labels if label != "le"), name
        assert not re.search(r"belief|secret|leak|vote|world|bound|sigma|prompt|_created$", name)
    families = text_string_to_metric_families(metrics.render(standing(promise)).decode())
    # The parser names a counter without the suffix that it is written with.
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    text = (Path(__file__).parents[2] / "docs" / "guide" / "operations.md").read_text()
    ours = {name.replace("paclm_build", "paclm_build_info").replace("_info_info", "_info") for name in names}
    assert {name for name in ours if name.startswith("paclm") and f"`{name}`" not in text} == set()


def test_what_is_in_no_list_cannot_become_a_label():
    metrics = Metrics()
    metrics.count_request("/v1/completions?prompt=the+patient", 200, 0.1)
    metrics.count_request("chat", 12345, 0.1)
    metrics.count_refusal("the patient")
    text = metrics.render(standing()).decode()
    assert "patient" not in text
    assert 'route="other"' in text
    assert 'status="123xx"' not in text
