"""The drawing in docs/internals/path.md is the path that a completion takes: every module called, and no other."""

import ast
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import paclm
from server.live import bearer, serve

SOURCE = Path(paclm.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "internals" / "path.md"
MOST_FILES = 40


@contextmanager
def traced():
    """The modules of paclm in which a function is called, in any thread started inside the block, while `is_on`."""
    trace = SimpleNamespace(is_on=False, modules=set())

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if trace.is_on and event == "call" and path.startswith(f"{SOURCE}/"):
            trace.modules.add(path.removeprefix(f"{SOURCE}/"))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield trace
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


def drawn():
    """The modules that the page's drawing names."""
    (drawing,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\b(?:[a-z]+/)?[a-z_]+\.py\b", drawing))


def test_a_completion_crosses_the_modules_that_are_drawn(make):
    with traced() as trace, serve(make(), None, None) as live:
        live.complete()  # what happens once per process is not part of the path
        trace.is_on = True
        whole = live.complete(prompt="the patient", max_tokens=12)
        streamed = ""
        while '"disputed"' not in streamed and live.spent_tokens < 2000:  # a short answer may have none
            options = {"stream": True, "headers": bearer(live.admin)}
            streamed += live.complete(prompt="the patient", max_tokens=12, **options).text
        trace.is_on = False
        assert live.curator.account.dissent_tokens > 0
    assert whole.json()["usage"]["completion_tokens"] > 0
    assert '"disputed"' in streamed
    assert trace.modules == drawn()
    assert len(trace.modules) <= MOST_FILES


def test_a_token_has_three_types_between_votes_and_wire():
    """A `Release` of the mechanism, a `Piece` of a stream; the event on the wire is bytes."""
    classes = (
        node
        for room in ("privacy", "curator", "server")
        for path in (SOURCE / room).glob("*.py")
        if path.name != "openapi.py"  # describes the bytes
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    fields = {node.name: {ast.unparse(f.target) for f in node.body if isinstance(f, ast.AnnAssign)} for node in classes}
    assert {name for name, names in fields.items() if "token" in names} == {"Release", "Piece"}
