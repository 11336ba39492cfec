"""What is hidden stays hidden: print, format, pickle, copy, comparison, tracebacks with all their local variables."""

import copy
import gc
import json
import pickle

import pytest

from curator.reporter import everything_in
from paclm.curator.redacted import Redacted, redact_errors, redact_traceback
from paclm.errors import CuratorError, UnsoundState

TELLTALE = 982451653


def test_a_hidden_value_is_not_printed_pickled_copied_or_compared():
    box = Redacted(TELLTALE)
    for said in (repr(box), str(box), f"{box}", f"{box!r:>20}", format(box, ""), f"{[box]} { ({'a': box}) }"):
        assert str(TELLTALE) not in said
    assert box.reveal() == TELLTALE
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy, Redacted.__getstate__):
        with pytest.raises(UnsoundState):
            attempt(box)
    for attempt in (vars, json.dumps):
        with pytest.raises(TypeError):
            attempt(box)
    assert box != Redacted(TELLTALE)
    assert box == box
    assert len({box, Redacted(TELLTALE)}) == 2


class Oddity(Exception):
    pass


@redact_errors
def fails(box, kind):
    inside = box.reveal()
    raise kind(f"the value is {inside}")


@pytest.mark.parametrize("kind", [ValueError, Oddity, MemoryError, AssertionError])
def test_a_failure_tells_its_kind_and_nothing_else(kind):
    with pytest.raises(UnsoundState, match=kind.__name__) as caught:
        fails(Redacted(TELLTALE), kind)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    said = everything_in(caught.value)
    assert "fails(" in said  # the reporter does see frames and their variables
    assert str(TELLTALE) not in said


def test_an_interruption_is_passed_on_without_the_frames_it_met():
    with pytest.raises(KeyboardInterrupt) as caught:
        fails(Redacted(TELLTALE), KeyboardInterrupt)
    said = everything_in(caught.value)  # apart: pytest keeps the parts of an assertion in local variables
    assert str(TELLTALE) not in said


@pytest.mark.parametrize(("code", "kept"), [(3, 3), (0, 0), (None, None), (f"the value is {TELLTALE}", 1), (True, 1)])
def test_an_exit_keeps_its_status_and_nothing_else(code, kept):
    @redact_errors
    def leaves(box):
        raise SystemExit(box.reveal())

    with pytest.raises(SystemExit) as caught:
        leaves(Redacted(code))
    said = everything_in(caught.value)
    assert (caught.value.code, type(caught.value.code)) == (kept, type(kept))
    assert str(TELLTALE) not in said.replace(repr(code), "")  # the test's own frame


def test_our_own_errors_can_keep_their_message_and_lose_their_frames():
    @redact_traceback
    def opens(box):
        key = box.reveal()
        try:
            raise OSError(key)
        except OSError as error:
            raise CuratorError("There is no such file.") from error

    with pytest.raises(CuratorError) as caught:
        opens(Redacted(TELLTALE))
    said = everything_in(caught.value)
    assert str(TELLTALE) not in said


def test_the_reporter_would_see_a_value_that_is_not_hidden():
    def careless(value):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        careless(TELLTALE)
    assert str(TELLTALE) in everything_in(caught.value)


def test_raising_from_none_would_not_have_been_enough():
    def half_careful(box):
        try:
            inside = box.reveal()
            raise ValueError(inside)
        except ValueError:
            raise UnsoundState("no") from None

    with pytest.raises(UnsoundState) as caught:
        half_careful(Redacted(TELLTALE))
    assert str(TELLTALE) in everything_in(caught.value)


def test_a_failed_step_leaves_no_error_behind_in_memory():
    with pytest.raises(UnsoundState):
        fails(Redacted(TELLTALE), Oddity)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Oddity]  # isinstance would ask lazy modules


def test_an_error_raised_while_another_is_redacted_does_not_carry_its_frames(monkeypatch):
    monkeypatch.setattr("paclm.curator.redacted._bare", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        redact_errors(int)("private")
    assert isinstance(caught.value.__context__, ValueError)
    assert caught.value.__context__.__traceback__ is None
