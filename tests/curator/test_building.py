"""Grammars of a server's streams are built in a thread: other streams go on meanwhile."""

import threading
from concurrent.futures import wait

import pytest

from curator.deployments import without_notes
from paclm import Curator
from paclm.curator.grammar import Grammar, Grammars, choice_grammar
from paclm.errors import InvalidInput

CHOICE = choice_grammar(["yes", "no"])


@pytest.fixture
def slow(monkeypatch):
    """Grammars are built once this is set."""
    go, start = threading.Event(), Grammars.start

    def start_later(self, grammar):
        assert go.wait(60)
        return start(self, grammar)

    monkeypatch.setattr(Grammars, "start", start_later)
    yield go
    go.set()


@pytest.fixture
def curator(make):
    with without_notes(), Curator.open(make()) as curator:
        yield curator


def begin(curator, *requests):
    streams = curator.hold(requests)
    for stream in streams:
        curator.start(stream)
    return streams


def test_a_stream_goes_on_while_the_grammar_of_another_is_built(curator, slow):
    chosen, plain = begin(curator, curator.request("the", 12, grammar=CHOICE), curator.request("the patient", 4))
    while plain.finish_reason is None:
        assert {stream for stream, _ in curator.step()} <= {plain}
    assert chosen.tokens == []
    assert curator.step() == []  # nothing to do: it waits for a moment
    slow.set()
    while chosen.finish_reason is None:
        curator.step()
    assert chosen.text in ("yes", "no")


def test_a_stream_can_be_cancelled_while_its_grammar_is_built(curator, slow):
    (stream,) = begin(curator, curator.request("the", 12, grammar=CHOICE))
    assert curator.step() == []
    curator.cancel(stream)
    assert (stream.finish_reason, curator.num_active, curator.reserved_units) == ("cancelled", 0, 0)
    assert curator.account.tokens == 0


def test_a_grammar_that_was_not_tried_and_cannot_be_built_releases_nothing(curator):
    (stream,) = begin(curator, curator.request("the", 12, grammar=Grammar("nonsense")))
    wait([stream.building])
    with pytest.raises(InvalidInput, match="cannot be used"):
        curator.step()
    assert curator.account.tokens == 0


def test_without_a_queue_of_its_own_a_caller_learns_at_once_what_cannot_be_built(curator):
    with pytest.raises(InvalidInput, match="cannot be used"):
        curator.submit(curator.request("the", 12, grammar=Grammar("nonsense")))
    assert curator.num_active == 0
    assert len(curator.generate("the", 4).tokens) > 0


def test_owners_take_turns(small_tokenizer, slow, monkeypatch):
    """An owner with many slow grammars delays the one of another by one."""
    built = Grammars(small_tokenizer, len(small_tokenizer))
    waiting = [built.begin(CHOICE, "busy") for _ in range(5)]
    quiet = built.begin(CHOICE, "quiet")
    done = []
    for name, state in [*zip("abcde", waiting, strict=True), ("quiet", quiet)]:
        state.add_done_callback(lambda _, name=name: done.append(name))
    waiting[2].cancel()
    slow.set()
    wait([*waiting, quiet])
    built.close()
    assert done == ["c", "a", "b", "quiet", "d", "e"] or done == ["c", "a", "quiet", "b", "d", "e"]
