"""Hostile schemas over HTTP: refused before the curator sees them, or served within the limits; no other key waits."""

import json
import math
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from curator.deployments import set_mechanism
from paclm import Workspace
from paclm.curator import grammar
from paclm.server import completions, grammar_checks
from paclm.server.structured import grammar_of
from server.live import bearer, serve
from server.stepped import wait_until
from server.writer import Writer
from structured.hostile import HOSTILE

SOME = [
    "regex (a|aa)+ nested 30 deep",
    "regex .*a.{14}b|.*b.{15}c|…",
    "regex of 1 MB",
    "pattern (.{1,500}){1,500}",
    "multipleOf 997 and 1009",
    "20,000 optional properties",
    "objects 10,000 deep",
    "open brackets only",
    "reference to itself",
    "objects doubled 25 times",
    "200 allOf patterns",
    "1,000 objects in a chain of references",
    "grammar S: S S S | S S | a",
    "grammar that forces 7 MB",
    "grammar that forces 900 kB after one letter",
    "grammar in another format",
]
"""One of each kind; all of them take half a minute."""


@pytest.fixture(scope="module")
def live(template, tmp_path_factory, small_tokenizer):
    folder = tmp_path_factory.mktemp("hostile") / "clinic"
    shutil.copytree(template, folder)
    set_mechanism(folder, per_token="2^-20", total="2^-4", support_size=40)
    with pytest.MonkeyPatch.context() as environment:
        for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_KEY_COMMAND", "PACLM_WITNESS"):
            environment.delenv(name, raising=False)
        with serve(Workspace.open(folder), Writer(small_tokenizer), small_tokenizer) as live:
            environment.undo()
            yield live


def body_of(kind, text):
    """The bytes of a request; a schema is put in as it stands, because no encoder would write some of them."""
    name = "json" if kind == "json_schema" else kind
    value = text if kind == "json_schema" else json.dumps(text)
    return (
        f'{{"model": "clinic", "prompt": "the", "max_tokens": 8, "structured_outputs": {{"{name}": {value}}}}}'.encode()
    )


def send(live, kind, text, key=None):
    headers = {"content-type": "application/json", **bearer(key or live.ward)}
    return live.http.post("/v1/completions", content=body_of(kind, text), headers=headers)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.stress) for name in HOSTILE]
)
def test_a_hostile_grammar_is_refused_or_served_within_the_limits(live, name):
    num_read = live.scheduler.num_read
    answer = send(live, *HOSTILE[name]())
    assert answer.status_code in (200, 400, 413), answer.text
    if answer.status_code == 200:
        assert answer.json()["usage"]["completion_tokens"] <= 8
    else:
        assert live.scheduler.num_read == num_read  # the curator was not asked
        assert len(answer.text) < 600
    assert live.complete(max_tokens=2).status_code == 200


def test_an_answer_of_another_key_is_complete_while_hostile_grammars_are_tried(live, monkeypatch):
    monkeypatch.setattr(grammar_checks, "DEADLINE_SECONDS", 60)
    monkeypatch.setattr(grammar, "_MOST_MULTIPLE", math.inf)  # else nothing would be tried
    other = live.keys.add("other")
    assert send(live, "regex", "[ab]{3}").json()["choices"][0]["finish_reason"] == "stop"
    process = live.service.grammars._process
    os.kill(process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        try:
            endless = [f'{{"type": "integer", "multipleOf": {number}}}' for number in (9_999_991, 9_999_973)]
            slow = [pool.submit(send, live, "json_schema", schema) for schema in endless]
            wait_until(lambda: live.service.grammars._num_waiting["ward"] == 2)
            assert live.complete(headers=bearer(other)).status_code == 200
            with live.http.stream(
                "POST",
                "/v1/completions",
                json={"model": "clinic", "prompt": "the", "max_tokens": 20, "stream": True},
                headers=bearer(other),
            ) as stream:
                assert "data: [DONE]" in stream.read().decode()
            assert send(live, "regex", "[ab]{3}").status_code == 200  # known already
            assert not any(job.done() for job in slow)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert {job.result(60).json()["error"]["code"] for job in slow} == {"grammar_too_complex"}
    assert live.service.grammars._process is process


def test_a_grammar_that_was_not_tried_before_is_tried_when_the_request_is_admitted(live, monkeypatch):
    """One that cannot be built would stop the curator, whatever forgot to try it."""

    async def forget(ask, *_, **__):
        return grammar_of(ask)

    monkeypatch.setattr(completions, "_checked_grammar", forget)
    num_read = live.scheduler.num_read
    answer = live.complete(structured_outputs={"grammar": "nonsense"}, n=3)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_grammar")
    assert live.scheduler.num_read == num_read
    assert live.complete(structured_outputs={"choice": ["yes", "no"]}, n=3).status_code == 200
    assert all(key.reserved_tokens == 0 for key in live.keys.list())
