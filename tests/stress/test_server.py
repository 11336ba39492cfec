"""64 clients for a minute and 700 at once on the embedded model with 32 worlds; a server that is killed under load."""

import json
import re
from pathlib import Path

import httpx
import pytest

from curator.deployments import build_workspace, set_mechanism
from paclm.engine.base_model import TINY_FOLDER
from server.killing import STEPS_IN_FLIGHT, Killing, serve_process
from server.live import bearer, ledger_rows
from server.load import ask_for
from server.standing import KillingUnderStandby, copies_of, servers
from server.worker_kills import ServedWithWorkers, children_of

pytestmark = pytest.mark.stress


def resident_megabytes(pid):
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


@pytest.fixture
def clinic(tmp_path, texts):
    path: Path = build_workspace(tmp_path / "clinic", texts, TINY_FOLDER, num_worlds=32, spread=0.02).path
    set_mechanism(path, per_token="2^-40", total="2^-10")
    settings = (path / "paclm.toml").read_text()
    (path / "paclm.toml").write_text(settings.replace("max_sequences = 64", "max_sequences = 32"))
    return path


def test_64_clients_for_a_minute(clinic):
    process, url, key = serve_process(clinic)
    try:
        warm = ask_for(url, key, clients=64, seconds=15, tokens=24, leaving=0.2)
        before = resident_megabytes(process.pid)
        got = ask_for(url, key, clients=64, seconds=60, tokens=24, leaving=0.2)
        after = resident_megabytes(process.pid)
    finally:
        process.terminate()
        process.wait(60)
    print(json.dumps({"tokens": got.tokens, "complete": got.complete, "left": got.left, "MB": [before, after]}))
    assert warm.problems == got.problems == []
    assert got.refused == 0
    assert got.complete > 64
    assert after < before * 1.1 + 20
    received, left = warm.tokens + got.tokens, warm.left + got.left
    assert received <= ledger_rows(clinic) <= received + left * STEPS_IN_FLIGHT * 2


def charged_tokens(url, key):
    overview = httpx.get(f"{url}/v1/admin/overview", headers=bearer(key), timeout=60).json()
    return overview["tokens"]["charged"]


def test_64_clients_for_a_minute_and_700_at_once_are_charged_what_they_receive(clinic):
    """No client leaves, so that not one token may be charged and not received, or received and not charged.

    700 are more than the connections and the places in the queue: some are refused, are told when to ask again, and do;
    others lose their connection to a newer one before they are heard, which costs nothing, and connect again.
    """
    process, url, key = serve_process(clinic)
    figures = {}
    try:
        for name, load in {
            "64 for a minute": {"clients": 64, "seconds": 60, "tokens": 24},
            "700 at once": {"clients": 700, "seconds": 0, "tokens": 8, "patient": True},
        }.items():
            before = charged_tokens(url, key)
            got = ask_for(url, key, **load)
            charged = charged_tokens(url, key) - before
            refusals = {" ".join(map(str, kind)): number for kind, number in got.refusals.items()}
            figures[name] = {"received": got.tokens, "charged": charged, "answers": got.complete, "refusals": refusals}
            figures[name]["cut"] = dict(got.cut)
            assert got.problems == []
            assert got.left == 0
            assert got.tokens == charged > 0
            assert got.complete >= load["clients"]
            assert set(got.refusals) <= {(503, "queue_full", True), (503, "too_many_connections", True)}
    finally:
        process.terminate()
        process.wait(60)
        print(json.dumps(figures))
    assert not figures["64 for a minute"]["refusals"]
    assert not figures["64 for a minute"]["cut"]
    assert ledger_rows(clinic) == sum(load["received"] for load in figures.values())


def test_200_kills_of_front_or_curator_lose_no_count_and_no_reply(make):
    killing = Killing(make(per_token="2^-40").path, seed=2)
    killing.run(kills=200)
    assert killing.problems == []
    assert min(killing.victims.count("front"), killing.victims.count("curator")) > 50
    assert min(killing.kinds.values()) > 0


def test_100_kills_of_front_curator_and_database_lose_no_count_and_no_reply(make, roles, postgres, monkeypatch):
    monkeypatch.setenv("PACLM_LEDGER", roles)
    victims = ["front", "curator", "backend", "database"]
    workspace = make(per_token="2^-24")
    killing = KillingUnderStandby(workspace, roles, seed=3, may_be_killed=victims, postgres=postgres, quota=5_000)
    killing.run(kills=100)
    assert killing.problems == []
    assert min(map(killing.victims.count, victims)) == 25
    assert min(killing.kinds.values()) > 0
    assert 0 < killing.received["client-0"] <= 5_000


def test_50_kills_of_a_worker_lose_no_count_and_no_answer(make):
    server = ServedWithWorkers(make(per_token="2^-24").path)
    server.lose_under_load(times=50, seed=4)
    assert server.count("worker_lost") == server.count("worker_back") >= 50
    assert server.end() == 0
    server.check_ledger()


def test_a_standby_starts_its_workers_when_it_takes_the_ledger(make, roles):
    here, there = copies_of(make(), "here", "there")
    ask = {"model": "clinic", "prompt": "the patient", "max_tokens": 4}
    with servers() as start:
        first = start(here, roles, "--workers", "2").wait_until_ready()
        second = start(there, roles, "--workers", "2").wait_until_standby()
        assert set(children_of(second.process.pid)) == {"front"}
        first.process.kill()
        second.wait_until_ready()
        assert set(children_of(second.process.pid)) == {"front", "worker"}
        with second.http(first.admin_key) as http:
            assert http.post("/v1/completions", json=ask).status_code == 200
