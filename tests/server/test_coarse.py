"""Without the admin key nothing that a server says counts dissent: not within an hour, and then to 1 % of the total."""

import re
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.curator.streams import UsageFigures
from paclm.ledger.events import Usage
from paclm.privacy.accounting import Account, nats_up
from paclm.privacy.randomness import NoiseSource
from paclm.server.scheduler import CoarseBudget
from server.live import bearer, serve
from server.stepped import SteppedEngine, asking, wait_until

B = 2.0**-12
TWO_HUNDRED = {"per_token": B, "total": 200 * B, "charge": "dissent"}
NOW = datetime(2026, 11, 16, 14, 20, tzinfo=UTC)
RANDOM = re.compile(rb'"(item_)?id": ?"[^"]*"|"(created|created_at|completed_at)": ?\d+')


class Dissenting(SteppedEngine):
    """World 0, which is the realized one, says the same words whether another world dissents or not."""

    def __init__(self, is_dissenting, **options):
        super().__init__(dissent=0.0, **options)
        self.is_dissenting = is_dissenting
        self.run_free()

    def _vote(self, tokens, coins, temperature):
        support, votes, public = super()._vote(tokens, coins, temperature)
        if self.is_dissenting:
            votes[1] = support[0] if support[0] != votes[0] else support[1]
        return support, votes, public


@pytest.fixture
def clock(monkeypatch):
    """The hour of the server and of its ledgers. World 0 is the realized one, and no noise hides what it says."""
    clock = {"now": NOW}
    monkeypatch.setattr("paclm.server.scheduler.current_hour", lambda: clock["now"].isoformat()[:13])
    monkeypatch.setattr("secrets.randbelow", lambda _: 0)
    monkeypatch.setattr(NoiseSource, "standard_normal", lambda self, size: np.zeros(size))
    return clock


@contextmanager
def served(workspace, tokenizer, engine, clock, **options):
    with serve(workspace, engine, tokenizer, **options) as live:
        live.curator._custody.ledger._clock = lambda: clock["now"]
        yield live


@pytest.fixture
def pair(make, chat_tokenizer, clock):
    """Start two servers that differ in nothing but dissent: none, and on every token."""

    @contextmanager
    def pair(**mechanism):
        engines = Dissenting(False), Dissenting(True)
        made = [make(name, **{**TWO_HUNDRED, **mechanism}) for name in ("quiet", "loud")]
        with (
            served(made[0], chat_tokenizer, engines[0], clock) as quiet,
            served(made[1], chat_tokenizer, engines[1], clock) as loud,
        ):
            yield quiet, loud
            assert quiet.curator.account.spent_units == 0 < quiet.spent_tokens
            assert loud.curator.account.dissent_tokens == loud.spent_tokens > 0

    return pair


def shown(response):
    """Everything of a response but random names and the time."""
    headers = {name: value for name, value in response.headers.items() if name not in ("date", "x-request-id")}
    headers.pop("content-length", None)  # of `created` and ids, which are of one length, and of the body
    return response.status_code, headers, RANDOM.sub(b"", response.content)


def session(live, key):
    """What a caller sees who asks all there is to ask, large requests included, between one token and the next."""
    seen = {}
    with httpx.Client(base_url=live.url, headers=bearer(key), timeout=60) as http:

        def ask(name, path, **body):
            fields = {"model": "clinic", "prompt": "the", "max_tokens": 5, "temperature": 0, **body}
            if "input" in body:
                del fields["prompt"], fields["max_tokens"]
            answer = http.get(path) if not body else http.post(path, json=fields)
            seen[name] = shown(answer)

        for turn in range(2):
            ask((turn, "whole"), "/v1/completions", n=2)
            ask((turn, "stream"), "/v1/completions", stream=True, stream_options={"include_usage": True})
            ask((turn, "one token"), "/v1/completions", max_tokens=1)
            ask((turn, "response"), "/v1/responses", input="the", max_output_tokens=5)
            ask((turn, "events"), "/v1/responses", input="the", max_output_tokens=5, stream=True)
            ask((turn, "privacy"), "/v1/privacy")
            for tokens in (40, 45, 46, 48, 50, 55):  # 160 to 220 tokens
                ask((turn, "plan", tokens), "/v1/privacy/plan", max_tokens=tokens, n=4)
            for tokens in (45, 46, 50, 55):  # 180 to 220 tokens
                ask((turn, "large", tokens), "/v1/completions", max_tokens=tokens, n=4, stop=["e", "a", "o", "t"])
            ask((turn, "models"), "/v1/models")
            ask((turn, "admin"), "/v1/admin/overview")
            ask((turn, "metrics"), "/metrics")
        ask("openapi", "/openapi.json")
    return seen


def differences(pair, key_of):
    """Names of what differs between the two sessions."""
    quiet, loud = (session(live, key_of(live)) for live in pair)
    return {name if isinstance(name, str) else name[1] for name, here in quiet.items() if here != loud[name]}


@pytest.mark.parametrize("settings", [{"on_exhausted": "refuse"}, {"on_exhausted": "public", "total": 2000 * B}])
def test_no_sequence_of_requests_shows_dissent_within_the_hour(pair, settings):
    """Also those whose size finds out what is left. What the admin sees of the same requests would be caught."""
    with pair(**settings) as both:
        assert differences(both, lambda live: live.ward) == set()
        caught = differences(both, lambda live: live.admin)
        assert caught >= {"whole", "stream", "one token", "response", "events", "privacy", "plan", "admin", "metrics"}


def test_admission_by_the_exact_account_would_show_dissent(pair):
    with pair(on_exhausted="refuse") as both:
        for live in both:
            live.scheduler._terms._coarse._is_strict = False
        assert "large" in differences(both, lambda live: live.ward)


def test_a_callers_own_reservations_do_not_show_dissent(pair):
    """With most of the budget reserved by a request in progress, small ones would find out what is left at any time."""

    def statuses(live):
        engine = live.curator._engine
        live.complete(max_tokens=20, temperature=0)
        wait_until(lambda: live.service.is_idle)
        engine.stand_still()
        with asking(engine) as pool:
            pool.submit(live.complete, max_tokens=40, n=4, temperature=0)  # 160 of the 180 tokens that are left
            engine.wait_until_it_stands()
            small = pool.submit(live.complete, max_tokens=30, temperature=0)
            wait_until(lambda: live.num_calls == 1)
            engine.let(1)
            return small.result(60).status_code

    with pair(on_exhausted="refuse") as (quiet, loud):
        assert statuses(quiet) == statuses(loud) == 503


def test_the_view_is_of_the_last_full_hour_and_rounded_to_the_safe_side(make, small_tokenizer, clock):
    with served(make(**TWO_HUNDRED), small_tokenizer, Dissenting(True), clock) as live:
        live.complete(max_tokens=7, temperature=0)
        now = live.http.get("/v1/privacy").json()
        assert (now["spent_nats"], now["remaining_tokens"], now["as_of"]) == (0.0, 200, "2026-11-16T14:00:00Z")
        exact = live.as_admin("/v1/privacy")
        assert (exact["spent_nats"], exact["remaining_tokens"], exact["as_of"]) == (7 * B, 193, None)
        clock["now"] += timedelta(hours=1)
        live.complete(max_tokens=4, temperature=0)
        then = live.http.get("/v1/privacy").json()
        assert (then["spent_nats"], then["remaining_tokens"], then["as_of"]) == (8 * B, 192, "2026-11-16T15:00:00Z")


def test_a_restart_changes_nothing_of_the_view(make, small_tokenizer, clock):
    workspace, views = make(**TWO_HUNDRED), []
    for name in ("one", "two", "three"):
        with served(workspace, small_tokenizer, Dissenting(True), clock, admin_name=name, has_ward=False) as live:
            views.append(httpx.get(f"{live.url}/v1/privacy").json() | {"key": None})
            live.complete(max_tokens=9, temperature=0)
    assert live.spent_tokens == 27
    assert views[0] == views[1] == views[2]


def test_that_the_budget_is_gone_is_shown_at_once(make, small_tokenizer, clock):
    workspace = make(**{**TWO_HUNDRED, "total": 4 * B}, on_exhausted="public")
    with served(workspace, small_tokenizer, Dissenting(True), clock) as live:
        answer = live.complete(max_tokens=3, temperature=0).json()["privacy"]
        assert (answer["charged_nats"], answer["remaining_tokens"]) == (3 * B, 4)
        answer = live.complete(max_tokens=3, temperature=0).json()["privacy"]
        assert (answer["private_tokens"], answer["charged_nats"], answer["remaining_tokens"]) == (1, B, 0)
        assert live.http.get("/v1/privacy").json()["is_exhausted"]


@given(
    total=st.integers(1, 10**6),
    price=st.integers(1, 10**4),
    steps=st.lists(st.sampled_from(["agreed", "disputed", "hour"]), max_size=60),
)
def test_admission_never_goes_by_more_than_is_left_and_the_view_changes_with_the_hour_alone(total, price, steps):
    clock = {"now": NOW}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paclm.server.scheduler.current_hour", lambda: clock["now"].isoformat()[:13])
        ledger = FakeLedger(total, price, clock)
        coarse = CoarseBudget(ledger)
        for step in steps:
            before, shown = ledger.account, coarse.figures()
            if step == "hour":
                clock["now"] += timedelta(hours=1)
                coarse.refresh()
                assert coarse.figures()["spent_nats"] >= before.spent_nats
                assert coarse.figures()["remaining_tokens"] <= before.remaining_tokens(nats_up(price))
                continue
            if not coarse.admits_by.affords(price):
                continue
            ledger.charge(step == "disputed")
            coarse.refresh()
            assert coarse.figures() == shown
            assert coarse.admits_by.spent_units >= ledger.account.spent_units


class FakeLedger:
    """As much of a curator as the view needs, at any price and total."""

    worst_price = property(lambda self: self.price)

    def __init__(self, total, price, clock):
        self.account, self.price, self.clock = Account(total), price, clock
        self.config = SimpleNamespace(per_token=nats_up(price), charge="dissent", on_exhausted="refuse")
        self.by_hour = {}

    def charge(self, is_dissent):
        units, hour = self.price * is_dissent, self.clock["now"].isoformat()[:13]
        self.account = self.account.charge(units, is_dissent=is_dissent)
        self.by_hour[hour] = self.by_hour.get(hour, Usage(hour)).plus(
            Usage(hour, 1, int(is_dissent), int(is_dissent), units)
        )

    def usage(self):
        return UsageFigures({}, self.by_hour)

    def figures(self):
        account = self.account
        left = account.remaining_tokens(self.config.per_token)
        return {"spent_nats": account.spent_nats, "remaining_tokens": left}
