"""The running totals: pure, and strict about the order of events."""

import pytest

from paclm.errors import BudgetExceeded
from paclm.ledger.events import KINDS, BadRow, Opened, Restored, Stepped, Usage, from_fields, to_fields
from paclm.ledger.state import State, apply, from_state_fields, to_state_fields

OPENED = Opened("id", "workspace", 8, {"per_token": 1.0, "total": 2.0}, 100, "00")
START = State(100, 100, settings_seq=1, belief_row=1, belief_seq=1)


def test_the_first_row_opens_the_ledger_and_no_other_does():
    assert apply(None, 1, OPENED) == START
    with pytest.raises(BadRow):
        apply(START, 2, OPENED)
    with pytest.raises(BadRow):
        apply(None, 1, Stepped((), None))
    with pytest.raises(BadRow, match="hearsay"):  # a restore without a known proof
        apply(START, 2, Restored("hearsay", 1, 1, 100, None, None, None, "ada"))


def test_a_step_adds_up_its_entries_and_spends_at_most_the_last_unit():
    after = apply(START, 2, Stepped((Usage("a", 3, 1, 3, 60, 2), Usage("b", 1, 0, 1, 40)), "ff"))
    assert (after.spent_units, after.tokens, after.dissent_tokens, after.public_tokens) == (100, 4, 1, 2)
    assert (after.belief_row, after.belief_seq) == (2, 2)
    with pytest.raises(BudgetExceeded):
        apply(START, 2, Stepped((Usage("a", 3, 1, 3, 60), Usage("b", 1, 0, 1, 41)), None))


@pytest.mark.parametrize("change", [{"tokens": -1}, {"tokens": True}, {"spent_units": 101}, {"tokens": "1"}])
def test_totals_that_no_ledger_can_have_are_refused(change):
    with pytest.raises(BadRow):
        from_state_fields(to_state_fields(START) | change)


def test_events_come_back_from_their_fields():
    step = Stepped((Usage("a", 3, 1, 3, 30), Usage("b", public_tokens=2)), None)
    for event in (OPENED, step):
        assert from_fields(event.kind, to_fields(event)) == event
    assert to_fields(step)["entries"][1] == {"key": "b", "public_tokens": 2}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("refunded", {}),
        ("stepped", {"entries": []}),
        ("stepped", {"entries": [], "belief": None, "more": 1}),
        ("stepped", {"entries": [{"key": "a", "units": -1}], "belief": None}),
        ("stepped", {"entries": [{"unknown": 1}], "belief": None}),
    ],
)
def test_unknown_kinds_and_fields_are_refused(kind, fields):
    with pytest.raises(BadRow):
        from_fields(kind, fields)


def test_no_kind_was_ever_renamed():
    """Rows outlive versions: a kind may be added here, never removed or renamed."""
    kinds = "opened stepped settings-changed extended key-rotated witness-changed restored"
    assert set(KINDS) >= set(kinds.split())
