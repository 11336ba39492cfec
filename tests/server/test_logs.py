"""Logs: one JSON object a line, counts only, and no way for a prompt to get in, not even by an exception."""

import asyncio
import gc
import io
import json
import logging
import subprocess
import sys
import threading
from dataclasses import fields

import pytest

from paclm.errors import InvalidInput
from paclm.server import telemetry
from paclm.server.telemetry import Entry, JsonLines, describe_error, logging_config, write

PROMPT = "Mrs Miller presents with a persistent cough"


@pytest.fixture
def stream():
    """A handler with the formatter, on a logger of its own and on ours."""
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(JsonLines())
    here = threading.get_ident()
    handler.addFilter(lambda record: record.thread == here)  # a server of other tests may still have something to say
    ours = logging.getLogger(telemetry.LOGGER)
    others = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", "somebody")]
    before = [(logger, logger.level, logger.propagate) for logger in (ours, *others)]
    for logger in (ours, *others):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    yield handler.stream
    for logger, level, propagate in before:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def raise_with_the_prompt():
    body = {"prompt": PROMPT}
    try:
        raise KeyError(body["prompt"])
    except KeyError as error:
        raise ValueError(f"cannot read {body}") from error


def test_an_entry_becomes_one_line_with_its_figures_and_nothing_that_was_not_given(stream):
    write(Entry(event="answered", request="req_4f1d20c3ab99", key="alice", route="chat", status=200, private_tokens=12))
    (line,) = lines(stream)
    assert list(line) == ["time", "level", "event", "request", "key", "route", "status", "private_tokens"]
    assert (line["event"], line["status"], line["private_tokens"]) == ("answered", 200, 12)
    assert line["time"].endswith("+00:00")


@pytest.mark.parametrize("field", [field.name for field in fields(Entry)])
@pytest.mark.parametrize("value", [PROMPT, "Mrs\nMiller", "{}", ["x"], b"x", {"prompt": PROMPT}])
def test_no_field_takes_a_text(field, value):
    with pytest.raises(InvalidInput) as refused:
        Entry(**{"event": "answered", field: value})
    assert "Miller" not in str(refused.value)


def test_an_api_key_cannot_stand_where_its_name_should():
    with pytest.raises(InvalidInput, match="'key'"):
        Entry(event="answered", key="paclm-AcB_supAxBLgHEAdgtAwgEItsvktBx2GL7grjN2jmwE")


def test_anything_else_that_is_logged_is_reduced_to_its_logger_place_and_uvicorns_template(stream):
    logging.getLogger("somebody").warning("got %s", PROMPT)
    logging.getLogger("somebody").warning(f"got {PROMPT}", extra={"entry": {"prompt": PROMPT}})
    logging.getLogger("uvicorn.error").info("%s - bad request %s", "10.0.0.1", PROMPT)
    assert "Miller" not in stream.getvalue()
    *others, uvicorns = lines(stream)
    assert uvicorns["template"] == "%s - bad request %s"
    for line in others:
        assert set(line) == {"time", "level", "event", "logger", "at"}
        assert line["at"].startswith("test_logs:")


def test_an_exception_is_told_by_its_types_and_places_without_its_message(stream):
    try:
        raise_with_the_prompt()
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
    (line,) = lines(stream)
    assert (line["error"], line["caused_by"]) == ("ValueError", ["KeyError"])
    assert line["template"] == "Exception in ASGI application"
    assert line["trace"][-1].endswith("raise_with_the_prompt")
    assert "Miller" not in stream.getvalue()
    assert "body" not in stream.getvalue()


def test_the_standard_formatter_would_have_told_the_prompt():
    """The twin: what the same record looks like without ours."""
    record = logging.LogRecord("uvicorn.error", logging.ERROR, __file__, 1, "x", (), None)
    try:
        raise_with_the_prompt()
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "Miller" in logging.Formatter().format(record)
    assert "Miller" not in JsonLines().format(record)


def test_an_exception_that_asyncio_finds_later_is_reduced_too(stream):
    async def fail():
        raise_with_the_prompt()

    async def main():
        task = asyncio.create_task(fail())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del task
        gc.collect()

    asyncio.run(main())
    (line,) = lines(stream)
    assert (line["logger"], line["error"]) == ("asyncio", "ValueError")
    assert "Miller" not in stream.getvalue()


def test_an_endless_chain_of_causes_ends():
    first, second = ValueError(PROMPT), KeyError(PROMPT)
    first.__cause__, second.__cause__ = second, first
    assert len(describe_error(first)["caused_by"]) < 20


def test_uvicorns_access_log_and_its_talk_of_start_and_stop_are_off_and_its_warnings_are_not():
    loggers = logging_config()["loggers"]
    assert loggers[telemetry.LOGGER]["level"] == "INFO"
    assert {loggers[name]["level"] for name in ("uvicorn", "uvicorn.error")} == {"WARNING"}
    assert loggers["uvicorn.access"] == {"handlers": [], "level": "CRITICAL", "propagate": False}


def test_whatever_a_process_says_by_whatever_way_is_a_json_line_without_the_prompt():
    program = f"""
import logging, threading, warnings
from paclm.server import telemetry
telemetry.install()
telemetry.write(telemetry.Entry(event="started"))
warnings.warn({PROMPT!r})
logging.getLogger("transformers").error({PROMPT!r})
logging.getLogger("uvicorn.access").info({PROMPT!r})
def fail():
    raise ValueError({PROMPT!r})
thread = threading.Thread(target=fail); thread.start(); thread.join()
class Bad:
    def __del__(self):
        fail()
Bad()
fail()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in told] == ["started"] + ["log"] * 5
    assert [line.get("error") for line in told] == [None, None, None, "ValueError", "ValueError", "ValueError"]
    assert "Miller" not in done.stderr
