"""Who may do what: no key, wrong keys, other keys, path tricks, foreign pages, and headers that pretend."""

import http.client
from pathlib import Path

import httpx
import pytest

from paclm.config import ServerConfig
from paclm.server.access import _PROXY_HEADERS
from paclm.server.refusals import no_key, unknown_key
from server.live import bearer

ADMIN_PATHS = ("/v1/admin/overview", "/v1/admin/history", "/metrics")
KEY_PATHS = ("/v1/models", "/v1/models/clinic", "/v1/privacy", "/openapi.json")
OPEN_PATHS = ("/health", "/")
ASK = {"model": "clinic", "prompt": "the", "max_tokens": 2}
HEADERS = Path(__file__).parents[1] / "fixtures" / "headers"
PROXY_HEADERS = (HEADERS / "proxy.txt").read_text().split()
PLAIN_HEADERS = (HEADERS / "plain.txt").read_text().split()
"""Of openai for Python and Node, LangChain, litellm, Open WebUI, curl, browsers, Prometheus and trace propagation."""


def wrong_headers(live):
    return {
        "no header": {},
        "an empty key": {"authorization": "Bearer"},
        "a made-up key": bearer("paclm-" + "A" * 43),
        "a key and something": bearer(live.ward + "x"),
        "part of a key": bearer(live.ward[:-1]),
        "another scheme": {"authorization": f"Basic {live.ward}"},
        "no scheme": {"authorization": live.ward},
        "a name instead of a key": bearer("ward"),
        "an SQL riddle": bearer("' OR '1'='1"),
    }


def nobody(live):
    return httpx.Client(base_url=live.url, timeout=120)


def test_without_a_right_key_there_is_nothing_but_health_and_the_page(live):
    with nobody(live) as http:
        for name, headers in wrong_headers(live).items():
            for path in (*KEY_PATHS, *ADMIN_PATHS):
                answer = http.get(path, headers=headers)
                assert answer.status_code == 401, (name, path)
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/privacy/plan"):
                assert http.post(path, json=ASK, headers=headers).status_code == 401, (name, path)
        assert [http.get(path).status_code for path in OPEN_PATHS] == [200, 200]
        assert http.get("/health").json() == {"status": "ok"}
        probe = http.head("/health")
        assert (probe.status_code, probe.content) == (200, b"")
    assert live.spent_tokens == 0


def test_an_ordinary_key_does_not_open_admin_paths(live):
    for path in ADMIN_PATHS:
        assert live.http.get(path).status_code == 403
        assert live.http.get(path, headers=bearer(live.admin)).status_code == 200
    for path in KEY_PATHS:
        assert live.http.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "//v1/admin/overview",
        "/v1//admin/overview",
        "/V1/ADMIN/OVERVIEW",
        "/v1/admin/overview/",
        "/static/../v1/admin/overview",
        "/static/..%2f..%2f..%2fcurator%2fkey",
        "/static/%2e%2e/app.py",
        "/static/../../../../../../etc/passwd",
        "/health/../metrics",
        "/v1/models/..%2fadmin%2foverview",
        "/v1/admin/overview%00",
        "/metrics;x=1",
        "/v1/admin",
        "/./metrics",
    ],
)
def test_no_spelling_of_a_path_opens_an_admin_path(shared, path):
    """Sent as they are: clients that tidy paths would hide the question."""
    address = shared.url.removeprefix("http://")
    for headers in ({}, bearer(shared.ward)):
        connection = http.client.HTTPConnection(address, timeout=120)
        connection.putrequest("GET", path)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        assert answer.status in (401, 403, 404), path
        assert b"spent" not in said
        assert b"paclm_tokens" not in said
        assert b"root:" not in said


def test_belief_and_leak_are_said_to_the_admin_alone_and_to_three_digits(live):
    live.complete(max_tokens=20)
    for answer in (live.http.get("/v1/privacy"), live.complete(), live.http.get("/health")):
        assert "leak" not in answer.text
        assert "belief" not in answer.text
        assert "entropy" not in answer.text
    belief = live.as_admin("/v1/admin/overview")["belief"]
    assert belief["leak_estimate_nats"] == float(f"{belief['leak_estimate_nats']:.3g}") > 0
    assert belief["entropy_nats"] == float(f"{belief['entropy_nats']:.3g}")


def test_marks_of_dissent_are_for_the_admin(live):
    ask = {**ASK, "max_tokens": 12, "stream": True}
    assert "marks" not in live.http.post("/v1/completions", json=ask).text
    said = live.http.post("/v1/completions", json=ask, headers=bearer(live.admin)).text
    assert '"agreed"' in said or '"disputed"' in said


def test_on_loopback_no_key_is_needed_until_an_ordinary_one_was_made(start):
    live = start()
    with nobody(live) as http:
        assert http.post("/v1/completions", json=ASK).status_code == 401
        live.keys.database._connection.execute("DELETE FROM keys WHERE name = 'ward'")
        answer = http.post("/v1/completions", json=ASK)
        assert answer.status_code == 200
        assert live.curator.usage().by_tag.keys() == {"local"}
        used = live.curator.usage().by_tag["local"].tokens
        assert http.get("/v1/privacy").json()["key"] == {"name": "local", "quota_tokens": None, "used_tokens": used}
        assert used > 0
        assert http.get("/v1/admin/overview").status_code == 401
        wrong = http.post("/v1/completions", json=ASK, headers=bearer("wrong"))
        assert wrong.status_code == 401
        assert "the key none" in wrong.json()["error"]["message"]
        for header in PROXY_HEADERS[::4]:  # a proxy is in front: the client may be on another machine
            assert http.post("/v1/completions", json=ASK, headers={header: "1"}).status_code == 401, header
        live.keys.add("somebody")
        live.keys.revoke("somebody")
        assert http.post("/v1/completions", json=ASK).status_code == 401


def test_every_header_of_a_proxy_is_found_and_none_of_a_plain_client():
    found = [bool(_PROXY_HEADERS.search(name)) for name in (*PROXY_HEADERS, *map(str.upper, PROXY_HEADERS))]
    assert [name for name, is_found in zip(PROXY_HEADERS * 2, found, strict=True) if not is_found] == []
    assert [name for name in PLAIN_HEADERS if _PROXY_HEADERS.search(name)] == []


def test_a_word_for_no_key_is_no_key(start):
    live = start(has_ward=False)
    with nobody(live) as http:
        for said in ("Bearer none", "bearer none", "Bearer EMPTY", "Bearer DUMMY_KEY"):
            assert http.post("/v1/completions", json=ASK, headers={"authorization": said}).status_code == 200
        assert live.curator.usage().by_tag.keys() == {"local"}
        for said in ("Bearer None", "Bearer empty", "Bearer none needed", "Basic none", "Basic EMPTY", "none", "EMPTY"):
            assert http.post("/v1/completions", json=ASK, headers={"authorization": said}).status_code == 401
        for word in ("none", "EMPTY", "DUMMY_KEY"):
            behind_a_proxy = {"x-forwarded-for": "1", **bearer(word)}
            assert http.post("/v1/completions", json=ASK, headers=behind_a_proxy).status_code == 401
            assert http.get("/v1/admin/overview", headers=bearer(word)).status_code == 401
        live.keys.add("somebody")
        for word in ("none", "EMPTY", "DUMMY_KEY"):
            assert http.post("/v1/completions", json=ASK, headers=bearer(word)).status_code == 401


def test_a_missing_key_and_a_wrong_one_are_told_apart_and_a_revoked_one_is_refused_at_once(live):
    unknown = unknown_key(is_needed=True).message
    with nobody(live) as http:
        for path in ("/v1/models", "/v1/admin/overview"):
            said = {key: http.get(path, headers=bearer(key)).json()["error"]["message"] for key in ("none", "wrong")}
            assert said["none"] == http.get(path).json()["error"]["message"] == no_key().message
            assert said["wrong"] == unknown
    assert live.complete().status_code == 200
    live.keys.revoke("ward")
    spent, refused = live.spent_tokens, live.complete()
    assert (refused.status_code, refused.json()["error"]["message"]) == (401, unknown)
    assert live.spent_tokens == spent


def test_beyond_loopback_a_key_is_always_needed(start):
    live = start(is_loopback=False)
    live.keys.database._connection.execute("DELETE FROM keys WHERE name = 'ward'")
    with nobody(live) as http:
        assert http.post("/v1/completions", json=ASK).status_code == 401
        assert http.post("/v1/completions", json=ASK, headers=bearer("none")).status_code == 401
        assert http.get("/v1/models", headers={"host": "notes.example"}).status_code == 401
        assert http.get("/v1/models", headers={"host": "notes.example", **bearer(live.admin)}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1"])
def test_on_loopback_only_this_machines_own_names_are_answered(shared, host):
    for path in ("/v1/models", "/health"):
        assert shared.http.get(path, headers={"host": host}).status_code in (400, 403)
    for own in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
        assert shared.http.get("/v1/models", headers={"host": own}).status_code == 200


def test_a_page_of_another_site_cannot_spend(start):
    live = start(settings=ServerConfig(cors_origins=("https://notes.example",)))
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        assert live.complete(headers={"origin": origin}).status_code == 403
    plain = {"content-type": "text/plain"}  # what a form can send without asking first
    assert live.http.post("/v1/completions", content='{"model":"clinic"}', headers=plain).status_code == 415
    assert live.spent_tokens == 0
    own = live.complete(headers={"origin": live.url})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers
    allowed = live.complete(headers={"origin": "https://notes.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://notes.example"
    shown = {name for name in allowed.headers if name.startswith("paclm-")}
    assert shown
    assert shown <= set(allowed.headers["access-control-expose-headers"].split(", "))


def test_every_response_has_the_protective_headers_and_there_is_no_cors_unless_set(live):
    for answer in (live.http.get("/"), live.http.get("/v1/models"), live.http.get("/nothing"), live.complete()):
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "unsafe-inline" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-request-id"].startswith("req_")
        assert "server" not in answer.headers
    asking_first = {"origin": "https://notes.example", "access-control-request-method": "POST"}
    answer = live.http.options("/v1/completions", headers=asking_first)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_a_wrong_path_or_method_has_an_error_body_too(live):
    for path in ("/nothing", "/completions", "/chat/completions", "/models"):  # the last three: a base_url without /v1
        assert "/v1" in live.http.get(path).json()["error"]["message"]
    assert "/openapi.json" in live.http.get("/v1").json()["error"]["message"]
    for path in ("/v1/responses/input_tokens", "/v1/embeddings"):
        refused = live.http.post(path, json=ASK)
        assert refused.status_code == 404
        assert refused.json()["error"]["type"] == "not_found_error"
    answer = live.http.put("/v1/completions", json=ASK)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["type"] == "invalid_request_error"
