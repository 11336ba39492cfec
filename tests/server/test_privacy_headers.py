"""Privacy figures as response headers: what the same caller finds in the body, and nothing else."""

import json

import pytest

from server.live import bearer

AFTERWARDS = {"charged_nats", "private_tokens", "public_tokens"}


def figures_of(answer):
    """The `paclm-` headers, as the fields of `privacy`."""
    read = {}
    for name, value in answer.headers.items():
        if name.startswith("paclm-") and name != "paclm-budget":
            text = name in ("paclm-promise", "paclm-unit")
            read[name.removeprefix("paclm-").replace("-", "_")] = value if text else json.loads(value)
    return read


def last_privacy(answer):
    """Of a stream, without marks."""
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return {name: value for name, value in events[-1]["privacy"].items() if name != "marks"}


@pytest.mark.parametrize("role", ["admin", "ward"])
@pytest.mark.parametrize("promise", ["half", "corpus"])
def test_headers_say_what_the_body_says_to_the_same_caller_and_a_repeat_says_it_again(request, promise, role):
    live = request.getfixturevalue({"half": "shared", "corpus": "corpus"}[promise])
    headers = bearer(getattr(live, role))
    once = headers | {"idempotency-key": f"{role}-whole"}
    first, repeated = (live.complete(max_tokens=5, headers=once) for _ in range(2))
    assert figures_of(first) == figures_of(repeated) == first.json()["privacy"] == repeated.json()["privacy"]
    once = headers | {"idempotency-key": f"{role}-stream"}
    stored, again = (live.complete(max_tokens=5, stream=True, headers=once) for _ in range(2))
    assert figures_of(stored).keys() == last_privacy(stored).keys() - AFTERWARDS
    assert figures_of(again) == last_privacy(again) == last_privacy(stored)
    known = figures_of(stored)
    assert {"half": {"mia_bound", "remaining_tokens"}, "corpus": {"epsilon", "delta", "unit"}}[promise] <= known.keys()
    shown = live.http.get("/v1/privacy", headers=headers).json()
    if role == "ward" or promise == "corpus":  # the admin's figures are exact, and others spend meanwhile
        assert known == {name: shown[name] for name in known}


def test_without_the_admin_key_headers_do_not_count_dissent(start):
    live = start(per_token="2^-16", total="2^-4", charge="dissent")
    seen = [figures_of(live.complete(max_tokens=9)) for _ in range(4)]
    price = live.service.curator.config.per_token
    assert all(figures["charged_nats"] == figures["private_tokens"] * price for figures in seen)
    assert len({figures["remaining_tokens"] for figures in seen}) == 1
    exact = figures_of(live.complete(max_tokens=9, headers=bearer(live.admin)))
    assert exact["charged_nats"] < exact["private_tokens"] * price  # so the test would see it


def test_a_repeat_says_too_that_the_public_model_answered(start):
    live = start(per_token="2^-8", total="2^-6", on_exhausted="public")  # four tokens
    for is_stream in (False, True):
        once = {"idempotency-key": f"one-{is_stream}"}
        first = live.complete(max_tokens=9, stream=is_stream, headers=once)
        again = live.complete(max_tokens=9, stream=is_stream, headers=once)
        assert (again.headers["idempotent-replayed"], again.headers["paclm-budget"]) == ("true", "exhausted")
        assert again.content == first.content
        assert json.loads(again.headers["paclm-public-tokens"]) > 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_repeat_says_the_bound_in_force_and_not_the_one_of_the_first_answer(start, is_stream):
    """After `paclm ledger extend` the weaker bound holds for everything, also for what was released before."""
    live, once = start(), {"idempotency-key": "once"}
    first = live.complete(max_tokens=5, stream=is_stream, headers=once)
    state = live.service.curator.state
    weaker = {"mia_bound": 0.75, "world_id_bound": 0.5}
    live.service.curator.state = {**state, **weaker, "coarse": {**state["coarse"], **weaker}}
    again = live.complete(max_tokens=5, stream=is_stream, headers=once)
    assert (again.headers["idempotent-replayed"], again.content) == ("true", first.content)
    assert figures_of(first)["mia_bound"] < figures_of(again)["mia_bound"] == 0.75
    assert figures_of(again)["private_tokens"] == 5
