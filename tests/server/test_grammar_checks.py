"""Grammars are tried in a process that can be killed: hostile ones are refused, and delay no one else."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paclm.curator.grammar import (
    Grammar,
    Grammars,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    user_grammar,
)
from paclm.server import grammar_checks
from paclm.server.grammar_checks import GrammarChecks, without_words_of
from paclm.server.refusals import Refused
from server.killing import READS_PROCESSES, is_running
from server.live import bearer
from server.stepped import wait_until

HONEST = json_schema_grammar({"type": "object", "properties": {"dose": {"type": "integer"}}, "required": ["dose"]})


def chain_of_references(num):
    """Flat JSON, and still as deep a recursion as there are references."""
    defs = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{num}": {"type": "string"}}}


def product_of_unions(num, each):
    """All combinations of one alternative of each union: each to the power of num."""
    names = [[f"p{i}_{j}" for j in range(each)] for i in range(num)]
    unions = [
        {"anyOf": [{"type": "object", "properties": {name: {"type": "string"}}} for name in row]} for row in names
    ]
    return {"allOf": unions}


KILLED = {
    "stack": json_schema_grammar(chain_of_references(1000)),
    "rules": Grammar("\n".join(["start: r0", *(f'r{n}: "x" r{n + 1} | "y"' for n in range(2500)), 'r2500: "z"'])),
    "time": Grammar('start: %json {"type": "integer", "multipleOf": 99999999}'),  # a request's is refused before
    "memory": Grammar('start: %json {"allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}'),
}
REFUSED = {
    "fuel": user_grammar("start: T\nT: " + " & ".join(f"/.*{letter}.*/" for letter in "abcdefghijklmnopqrst")),
    "combinations": json_schema_grammar(product_of_unions(4, 8)),
    "nesting": user_grammar(f"start: {'(' * 4000}'a'{')' * 4000}"),
    "pattern": regex_grammar("(" * 2000 + "ZEBRA" + ")" * 2000),
    "no answer": json_schema_grammar({"type": "string", "minLength": 5, "maxLength": 2}),
    "no grammar": user_grammar("ZEBRA ZEBRA"),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine is no reason to fail; the test of the deadline sets its own."""
    monkeypatch.setattr(grammar_checks, "DEADLINE_SECONDS", 60)


@pytest.fixture
def tried(small_tokenizer):
    """Run something with checks of its own; at the end no process is left."""

    def tried(work):
        @asynccontextmanager
        async def opened():
            checks = GrammarChecks(small_tokenizer, len(small_tokenizer), outcomes.append)
            try:
                yield checks
            finally:
                process = checks._process
                await checks.close()
                assert process is None or not is_running(process.pid)

        async def run():
            async with asyncio.timeout(60), opened() as checks:
                await work(checks, outcomes)

        outcomes = []
        asyncio.run(run())

    return tried


async def refusal(checks, grammar, owner="ward"):
    """The refusal, or None if the grammar was accepted."""
    try:
        await checks.check(grammar, owner)
    except Refused as refused:
        return refused
    return None


def test_hostile_grammars_are_refused_and_the_process_lives_on(tried, capfd):
    async def work(checks, outcomes):
        assert await refusal(checks, HONEST) is None
        pid = checks._process.pid
        for grammar in KILLED.values():
            refused = await refusal(checks, grammar)
            assert (refused.status, refused.code, refused.reason) == (400, "grammar_too_complex", "input")
        for grammar in REFUSED.values():
            refused = await refusal(checks, grammar)
            assert (refused.status, refused.code) == (400, "invalid_grammar")
            assert len(refused.message) < 300
            assert "ZEBRA" not in refused.message
        assert await refusal(checks, json_object_grammar()) is None
        assert checks._process.pid == pid
        assert outcomes == ["accepted", *["killed"] * len(KILLED), *["refused"] * len(REFUSED), "accepted"]

    tried(work)
    assert capfd.readouterr() == ("", "")  # nor is anything of a grammar written anywhere


def test_what_is_accepted_is_what_the_curator_builds(tried, small_tokenizer):
    good = [HONEST, choice_grammar(["yes", "no"]), regex_grammar(r"\d{3}-\d{4}"), json_object_grammar()]
    in_curator = Grammars(small_tokenizer, len(small_tokenizer))

    async def work(checks, _):
        for grammar in (*good, *REFUSED.values()):
            refused = await refusal(checks, grammar)
            if refused is None:
                in_curator.start(grammar)
            else:
                with pytest.raises(ValueError, match=r".") as raised:
                    in_curator.start(grammar)
                assert without_words_of(grammar.text, str(raised.value)) == refused.message

    tried(work)


def test_a_grammar_sent_again_is_not_tried_again_but_for_another_key(tried):
    async def work(checks, outcomes):
        for _ in range(3):
            assert await refusal(checks, HONEST) is None
            assert (await refusal(checks, KILLED["stack"])).code == "grammar_too_complex"
        assert outcomes == ["accepted", "killed"]
        together = await asyncio.gather(*[refusal(checks, choice_grammar(["a", "b"])) for _ in range(100)])
        assert together == [None] * 100
        assert outcomes == ["accepted", "killed", "accepted"]
        assert await refusal(checks, HONEST, "other") is None  # how long it took would say what others sent
        assert len(outcomes) == 4

    tried(work)


def test_outcomes_that_are_kept_are_limited(tried, monkeypatch):
    monkeypatch.setattr(grammar_checks, "_KEPT", 2)

    async def work(checks, outcomes):
        for value in ("a", "b", "c", "b", "c", "a"):
            assert await refusal(checks, choice_grammar([value])) is None
        assert len(checks._found) == 2
        assert len(outcomes) == 4

    tried(work)


def test_a_process_that_does_not_answer_is_killed_and_replaced(tried, monkeypatch):
    async def work(checks, outcomes):
        assert await refusal(checks, HONEST) is None
        first = checks._process.pid
        os.kill(first, signal.SIGSTOP)
        monkeypatch.setattr(grammar_checks, "DEADLINE_SECONDS", 0.05)
        refused = await refusal(checks, json_object_grammar())
        assert (refused.status, refused.code) == (400, "grammar_too_complex")
        assert not is_running(first)
        monkeypatch.setattr(grammar_checks, "DEADLINE_SECONDS", 60)
        assert await refusal(checks, json_object_grammar()) is None  # not known as refused: a busy machine is no reason
        assert checks._process.pid != first
        assert outcomes == ["accepted", "killed", "accepted"]

    tried(work)


def test_a_process_that_was_lost_is_replaced(tried):
    async def work(checks, _):
        assert await refusal(checks, HONEST) is None
        os.kill(checks._process.pid, signal.SIGKILL)
        refused = await refusal(checks, json_object_grammar())
        assert (refused.status, refused.code) == (503, "grammar_check_failed")
        assert await refusal(checks, json_object_grammar()) is None

    tried(work)


def test_a_process_that_cannot_start_refuses_and_is_tried_again(tried, monkeypatch):
    async def work(checks, _):
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/bin/false")
            assert (await refusal(checks, HONEST)).status == 503
            broken.setattr(sys, "executable", "/nonexistent")
            assert (await refusal(checks, HONEST)).status == 503
        assert await refusal(checks, HONEST) is None

    tried(work)


def test_keys_take_turns_and_a_key_has_a_limited_queue(tried):
    async def work(checks, _):
        done = []

        async def ask(owner, number):
            refused = await refusal(checks, choice_grammar([f"{owner} {number}"]), owner)
            done.append((owner, refused and refused.code))

        assert await refusal(checks, HONEST) is None
        os.kill(checks._process.pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(ask("busy", number)) for number in range(20)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(ask("quiet", 0)))
        await asyncio.sleep(0.01)
        assert done == [("busy", "too_many_grammars")] * 4
        os.kill(checks._process.pid, signal.SIGCONT)
        await asyncio.gather(*tasks)
        assert done[4:] == [("busy", None), ("quiet", None), *[("busy", None)] * 15]
        assert not checks._under_way
        assert not checks._num_waiting

    tried(work)


def test_a_caller_that_leaves_does_not_mix_up_replies(tried):
    async def work(checks, outcomes):
        assert await refusal(checks, HONEST) is None
        os.kill(checks._process.pid, signal.SIGSTOP)
        left = asyncio.create_task(refusal(checks, REFUSED["no grammar"]))
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.sleep(0)
        os.kill(checks._process.pid, signal.SIGCONT)
        assert await refusal(checks, json_object_grammar()) is None
        assert outcomes == ["accepted", "refused", "accepted"]

    tried(work)


def test_a_tokenizer_without_a_fast_form_has_no_structured_output(small_tokenizer):
    class Slow:
        eos_token_id = small_tokenizer.eos_token_id

    async def run():
        return await refusal(GrammarChecks(Slow(), 10), HONEST)

    assert asyncio.run(run()).status == 400


def on_loop(live, grammar, owner="ward"):
    return asyncio.run_coroutine_threadsafe(refusal(live.service.grammars, grammar, owner), live.service._loop)


def test_answers_go_on_while_a_grammar_is_tried(live):
    assert on_loop(live, HONEST).result(60) is None
    process = live.service.grammars._process
    os.kill(process.pid, signal.SIGSTOP)
    hostile = on_loop(live, KILLED["stack"])
    other = bearer(live.keys.add("other"))
    for headers in (bearer(live.ward), other):
        assert live.complete(headers=headers).status_code == 200
    assert not hostile.done()
    os.kill(process.pid, signal.SIGCONT)
    assert hostile.result(60).code == "grammar_too_complex"
    metrics = live.http.get("/metrics", headers=bearer(live.admin)).text
    assert '\npaclm_grammars_total{outcome="accepted"} 1.0\n' in metrics
    assert '\npaclm_grammars_total{outcome="killed"} 1.0\n' in metrics


def test_the_process_ends_with_the_server(start):
    live = start()
    assert on_loop(live, HONEST).result(60) is None
    pid = live.service.grammars._process.pid
    live.service.drain()
    live.server.should_exit = True
    wait_until(lambda: not is_running(pid))


START = """
import asyncio, os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from paclm.curator.grammar import json_object_grammar
from paclm.server.grammar_checks import GrammarChecks, without_words_of

async def run():
    text = Path(sys.argv[1]).read_text()
    tokenizer = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: text), eos_token_id=0)
    checks = GrammarChecks(tokenizer, int(sys.argv[2]))
    await checks.check(json_object_grammar(), "ward")
    print(checks._process.pid, flush=True)
    sys.stdin.readline()
    os.kill(checks._process.pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(run())
"""


@READS_PROCESSES
def test_the_process_has_little_and_dies_with_a_front_that_is_killed(small_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("PACLM_KEY", "7a" * 32)
    monkeypatch.setenv("PGPASSWORD", "private")
    described = tmp_path / "tokenizer.json"
    described.write_text(small_tokenizer.backend_tokenizer.to_str())
    command = [sys.executable, "-c", START, str(described), str(len(small_tokenizer))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as front:
        pid = int(front.stdout.readline())
        place = Path(f"/proc/{pid}")
        names = {entry.partition(b"=")[0] for entry in (place / "environ").read_bytes().split(b"\0") if entry}
        allowed = {*grammar_checks._KEPT_VARIABLES, "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"}
        assert {name.decode() for name in names} <= allowed
        opened = {link.name: os.readlink(link) for link in (place / "fd").iterdir()}
        assert set(opened) == {"0", "1", "2"}
        assert opened["2"] == "/dev/null"
        assert "Threads:\t1\n" in (place / "status").read_text()  # it forks
        assert (place / "limits").read_text().splitlines()[5].split()[:5] == ["Max", "core", "file", "size", "0"]
        front.stdin.write("\n")
        front.stdin.flush()
        assert front.wait(60) == -signal.SIGKILL
        wait_until(lambda: not is_running(pid))


def test_the_process_imports_neither_models_nor_a_web_framework():
    program = (
        "import sys, paclm.server.grammar_child, llguidance\n"
        "large = {'torch', 'transformers', 'tokenizers', 'fastapi', 'pydantic', 'scipy', 'prometheus_client'}\n"
        "print(*large & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_while_a_grammar_is_built_no_file_can_be_opened(tmp_path):
    program = (
        "from paclm.server import grammar_child\n"
        "grammar_child._limit()\n"
        "try:\n    open('/dev/null')\nexcept OSError:\n    print('closed')\n"
        "try:\n    bytearray(2 * grammar_child.MEMORY_BYTES)\nexcept MemoryError:\n    print('full')\n"
        "while True:\n    pass\n"
    )
    done = subprocess.run([sys.executable, "-u", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (-signal.SIGPROF, ["closed", "full"])


def test_a_text_that_is_no_utf_8_cannot_be_a_grammar():
    with pytest.raises(ValueError, match="surrogates"):
        Grammar("start: '\ud800'")
