"""Two servers of one ledger in PostgreSQL: one serves, the other waits, and takes over when it is dead or told to."""

import os
import secrets
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest

from curator.deployments import ScriptedEngine
from paclm import Curator, Workspace
from paclm.curator import custody
from paclm.errors import LedgerBusy, LedgerFenced, LedgerHeld, LedgerUnwritable, LedgerWrongKey, ServiceError
from paclm.ledger.verify import verify
from paclm.server.standby import check_take_over, open_when_free
from server.forked import hold_back_commits
from server.killing import MAY_READ_PROCESSES, Asked
from server.standing import KillingUnderStandby, Server, copies_of, servers
from server.stepped import wait_until

FENCED = 75

ASK = {"model": "clinic", "prompt": "the patient", "max_tokens": 12, "stream": False}


@pytest.fixture
def start():
    with servers() as start:
        yield start


def charged(database):
    """Private tokens in the ledger, which is intact."""
    report = verify(database)
    assert report.intact, report.problem
    return report.contents.state.tokens


def change_a_byte(path):
    """Keeps size and time, which is all that opening a workspace looks at; loading its models reads the file."""
    content, stat = bytearray(path.read_bytes()), path.stat()
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def used_by(server, key):
    with server.http(key) as http:
        rows = http.get("/v1/admin/overview").json()["keys"]
    return {row["name"]: row["used_tokens"] for row in rows}


def ask_until_cut_off(server, key):
    """Stream one answer after another; returns the one that did not end by itself."""
    asked = None
    while asked is None or asked.is_complete:
        asked = Asked("admin", secrets.token_hex(8), {**ASK, "max_tokens": 40, "stream": True})
        with suppress(httpx.TransportError):
            asked.send(server.url, key)
    return asked


def test_one_of_two_standbys_takes_over_from_a_killed_server_and_repeats_its_reply(make, roles, start):
    here, there = copies_of(make(per_token="2^-16", total="2^-4"), "here", "there")
    first: Server = start(here, roles, is_forked=False).wait_until_serving()
    key = first.admin_key
    if MAY_READ_PROCESSES:
        environments = [Path(f"/proc/{pid}/environ").read_text() for pid in (first.process.pid, first.front)]
        assert ["PACLM_LEDGER" in environment for environment in environments] == [True, False]
    standbys = [start(there, roles), start(here, roles)]
    for standby in standbys:
        standby.wait_until_standby()
        assert "in use by" in standby.words
        wait_until(lambda: '"event": "standby"' in standby.said, 60)  # noqa: B023
        assert standby.url is None
    asked = Asked("admin", "once", ASK)
    assert asked.send(first.url, key).status_code == 200
    assert asked.tokens > 0
    before, used = charged(roles), used_by(first, key)["admin"]
    os.kill(first.process.pid, signal.SIGKILL)
    wait_until(lambda: any(standby.is_ready() for standby in standbys), 120)
    second = next(standby for standby in standbys if standby.is_ready()).wait_until_serving()
    again = Asked("admin", "once", ASK)
    response = again.send(second.url, key)
    assert "idempotent-replayed" in response.headers
    assert again.content == asked.content
    assert charged(roles) == before
    assert used_by(second, key)["admin"] == used
    more = Asked("admin", "more", ASK)
    assert more.send(second.url, key).status_code == 200
    assert charged(roles) == before + more.tokens
    assert used_by(second, key)["admin"] == used + more.tokens
    (last,) = (standby for standby in standbys if standby is not second)
    assert last.process.poll() is None
    assert last.url is None
    assert last.words.count("This server is a standby") == 1
    last.process.send_signal(signal.SIGTERM)
    assert last.wait_for_end() == 0


def test_a_server_that_is_taken_over_exits_with_its_own_status_idle_or_streaming(
    make, roles, start, tmp_path, postgres
):
    here, there, broken = copies_of(make(per_token="2^-16", total="2^-4"), "here", "there", "broken")
    first = start(here, roles).wait_until_serving()
    key = first.admin_key
    change_a_byte(next((broken / "adapters").glob("*.safetensors")))
    assert start(broken, roles, "--take-over").wait_for_end() == 2  # what cannot serve stops nobody
    assert first.process.poll() is None
    second = start(there, roles, "--take-over", prepare=partial(hold_back_commits, there.parent))
    assert first.wait_for_end() == FENCED
    assert "took over the ledger" in first.words
    second.wait_until_serving()

    with ThreadPoolExecutor(1) as client:
        asking = client.submit(ask_until_cut_off, second, key)
        wait_until((there.parent / "held").exists, 60)
        third = start(here, roles, "--take-over").wait_until_serving()
        (there.parent / "go").touch()
        assert second.wait_for_end() == FENCED
        asked = asking.result()
    assert 0 < asked.tokens < 40  # cut off in the middle
    assert asked.tokens <= charged(roles)

    postgres.restart("immediate")
    assert third.wait_for_end() == 2
    assert "was lost" in third.words
    assert charged(roles) > 0


def test_after_kills_of_curator_and_database_all_that_left_is_counted(make, roles, postgres, monkeypatch):
    monkeypatch.setenv("PACLM_LEDGER", roles)
    victims = ["curator", "backend", "database"]
    workspace = make(per_token="2^-20")
    killing = KillingUnderStandby(
        workspace, roles, seed=1, clients=3, may_be_killed=victims, postgres=postgres, quota=200
    )
    killing.run(kills=15)
    assert killing.problems == []
    assert [killing.victims.count(victim) for victim in victims] == [5, 5, 5]
    assert killing.kinds["repeated"] > 0
    assert killing.kinds["lost"] > 0
    assert 0 < killing.received["client-0"] <= 200


def test_a_server_of_corpus_is_taken_over_with_its_keys_and_replies_whatever_its_front_holds(
    dp_template, tmp_path, roles, start, postgres, monkeypatch
):
    parts = urlsplit(roles)
    name = parts.username
    with postgres.connect() as admin:
        admin.execute(f"CREATE ROLE {name}_front LOGIN CONNECTION LIMIT 10 PASSWORD 'known'")
        admin.execute(f"GRANT {name}_front TO {name}")
    login = parts._replace(netloc=f"{name}_front:known@{parts.hostname}:{parts.port}").geturl()
    monkeypatch.setenv("PACLM_LEDGER_FRONT", login)
    path, options = shutil.copytree(dp_template, tmp_path / "clinic"), ("--promise", "corpus")
    first = start(path, roles, *options).wait_until_serving()
    key, asked, again = first.admin_key, Asked("admin", "once", ASK), Asked("admin", "once", ASK)
    assert asked.send(first.url, key).status_code == 200
    with psycopg.connect(login) as hostile:
        hostile.execute("SELECT 1 FROM paclm.keys FOR UPDATE")
        hostile.execute("LOCK TABLE paclm.replies IN ACCESS EXCLUSIVE MODE")
        second = start(path, roles, *options, "--take-over")
        assert first.wait_for_end() == FENCED
        second.wait_until_serving()
        hostile.close()
    assert "idempotent-replayed" in again.send(second.url, key).headers
    assert again.content == asked.content


def test_a_standby_outlives_what_passes_and_a_server_that_never_waited_does_not(make, monkeypatch):
    workspace, said = make(), []
    monkeypatch.setenv("PACLM_LEDGER", "postgresql://nowhere/ledger")
    monkeypatch.setattr("paclm.server.standby._POLL_SECONDS", 0.0)
    monkeypatch.setattr("paclm.server.standby.telemetry.install", lambda: None)
    monkeypatch.setattr("paclm.server.standby.refuse_if_held", lambda *_: None)
    outcomes = iter([LedgerHeld("held"), LedgerUnwritable("restarts"), LedgerBusy("a commit waits"), "open"])

    def opening():
        if isinstance(outcome := next(outcomes), Exception):
            raise outcome
        return outcome

    waiting = Workspace.open(workspace.path)
    assert open_when_free(waiting, opening, said.append) == "open"
    assert said == ["held"]
    outcomes = iter([LedgerUnwritable("not there")])
    with pytest.raises(LedgerUnwritable):
        open_when_free(waiting, opening, said.append)


def test_a_key_of_another_workspace_stops_no_server(make, small_tokenizer, roles, monkeypatch):
    def open_curator(**options):
        return Curator.open(workspace.path, engine=ScriptedEngine(), tokenizer=small_tokenizer, **options)

    workspace = make()
    monkeypatch.setenv("PACLM_LEDGER", roles)
    monkeypatch.setenv("PACLM_KEY", "7a" * 32)
    with open_curator() as curator:
        curator.generate("the", 2)
        monkeypatch.setenv("PACLM_KEY", "7b" * 32)
        with pytest.raises(LedgerWrongKey, match="not taken over"):
            open_curator(take_over=True)
        curator.generate("the", 2)
        monkeypatch.setenv("PACLM_KEY", "7a" * 32)
        with open_curator(take_over=True), pytest.raises(LedgerFenced):
            curator.generate("the", 2)


def test_who_loses_the_race_for_an_empty_database_waits_and_serves_what_the_other_made(
    make, small_tokenizer, roles, monkeypatch
):
    here, there = copies_of(make(), "here", "there")
    monkeypatch.setenv("PACLM_LEDGER", roles)
    monkeypatch.setenv("PACLM_KEY", "7a" * 32)
    monkeypatch.setattr("paclm.server.standby.telemetry.install", lambda: None)
    found, said = [], []

    def open_curator(path):
        return Curator.open(path, engine=ScriptedEngine(), tokenizer=small_tokenizer)

    def exists_late(address):  # the other one makes it between question and answer
        found.append(exists(address))
        if len(found) == 1:
            open_curator(here).close()
        return found[-1]

    exists = custody.exists
    monkeypatch.setattr(custody, "exists", exists_late)
    with open_when_free(Workspace.open(there), lambda: open_curator(there), said.append) as curator:
        assert curator.epoch is not None
    assert found[0] is False
    assert len(said) == 1


def test_a_file_cannot_be_taken_over(make):
    with pytest.raises(ServiceError, match="is a file"):
        check_take_over(make())
