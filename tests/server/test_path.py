"""The drawing in docs/internals/path.md is the path that a completion takes: every module called, and no other."""

import ast
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import paclm
from server.live import bearer, serve

SOURCE = Path(paclm.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "internals" / "path.md"
MOST_FILES = 30


class Trace:
    """The modules of paclm in which a function was called, in any thread, while it is on."""

    def __init__(self):
        self.is_on = False
        self.modules = set()

    def __call__(self, frame, event, _):
        path = frame.f_code.co_filename
        if self.is_on and event == "call" and path.startswith(f"{SOURCE}/"):
            self.modules.add(path.removeprefix(f"{SOURCE}/"))


@contextmanager
def traced():
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


def drawn():
    """The modules that the page's drawing names."""
    (drawing,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\b[a-z]+/[a-z_]+\.py\b", drawing))


def test_a_completion_crosses_the_modules_that_are_drawn(make):
    with traced() as trace, serve(make(), None, None) as live:
        live.complete()  # what happens once per process is not part of the path
        trace.is_on = True
        whole = live.complete(prompt="the patient", max_tokens=12)
        streamed = live.complete(prompt="the patient", max_tokens=12, stream=True, headers=bearer(live.admin))
        trace.is_on = False
        assert live.curator.account.dissent_tokens > 0
    assert whole.json()["usage"]["completion_tokens"] > 0
    assert '"disputed"' in streamed.text
    assert trace.modules == drawn()
    assert len(trace.modules) <= MOST_FILES


def test_a_token_has_three_types_between_votes_and_wire():
    """A `Release` of the mechanism, a `Piece` of a stream; the event on the wire is bytes."""
    classes = (
        node
        for room in ("privacy", "curator", "server")
        for path in (SOURCE / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    fields = {node.name: {ast.unparse(f.target) for f in node.body if isinstance(f, ast.AnnAssign)} for node in classes}
    assert {name for name, names in fields.items() if "token" in names} == {"Release", "Piece"}
