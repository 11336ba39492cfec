"""The running totals after each event: one pure function, used to write the ledger and again to verify it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paclm.config import MechanismConfig
from paclm.errors import BudgetExceeded, InvalidInput, UnsoundState
from paclm.ledger.events import (
    BadRow,
    Event,
    Extended,
    KeyRotated,
    Opened,
    Restored,
    SettingsChanged,
    Stepped,
    Usage,
    WitnessChanged,
)
from paclm.privacy.accounting import Account, charge_units, nats_up, units_up
from paclm.privacy.bounds import success_bound
from paclm.privacy.releases import rule_named

LOST = "(lost before a restore)"
"""Whose the charges are that a restore had to assume."""


@dataclass(frozen=True, slots=True)
class State:
    """Where the budget stands after an event. Stored with it, so that opening never reads the whole history."""

    total_units: int
    committed_units: int
    """What the guarantee is stated at: the largest total under which anything was charged. A total that is lowered
    after the first charge stops the spending earlier, but whoever lowers it has seen outputs: the bound stays."""
    settings_seq: int
    """The row with the settings in force."""
    belief_row: int
    """The row that holds the hash of the current belief."""
    belief_seq: int
    """The row the belief was sealed for: the same one, until a restore brings it back from a witness."""
    spent_units: int = 0
    tokens: int = 0
    dissent_tokens: int = 0
    charged_tokens: int = 0
    public_tokens: int = 0
    witness: str | None = None
    belief_is_lost: bool = False
    """Releases were made that this ledger has no belief of: nothing may ever be charged again."""

    @property
    def account(self) -> Account:
        """The same as the privacy room's account."""
        return Account(self.total_units, self.spent_units, self.tokens, self.dissent_tokens, self.charged_tokens)

    def bounds(self, num_worlds: int) -> Bounds:
        """The guarantee: at the committed total, never at the spend."""
        return bounds_at(self.committed_units, num_worlds)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest success of any attack, at a total."""

    mia: float
    """On the membership of a record, from a prior of 1/2."""
    world_id: float
    """On the realized world, from a prior of 1/m."""


def bounds_at(units: int, num_worlds: int) -> Bounds:
    """The bounds that a committed total implies."""
    nats = nats_up(units)
    return Bounds(success_bound(nats, 1 / 2), success_bound(nats, 1 / num_worlds))


_FIELDS = tuple(field.name for field in dataclasses.fields(State))


def to_state_fields(state: State) -> dict[str, Any]:
    """A state as plain values."""
    return {name: getattr(state, name) for name in _FIELDS}


def from_state_fields(fields: Mapping[str, Any]) -> State:
    """The state that `to_state_fields` described."""
    if set(fields) != set(_FIELDS):
        raise BadRow("has running totals with missing or unknown fields")
    state = State(**fields)
    counts = [value for name, value in fields.items() if name not in ("witness", "belief_is_lost")]
    if any(type(count) is not int or count < 0 for count in counts) or state.spent_units > state.total_units:
        raise BadRow("has running totals that no ledger can have")
    return state


def apply(state: State | None, seq: int, event: Event) -> State:
    """The state after an event that becomes row `seq`; raises rather than overspend."""
    if isinstance(event, Opened):
        if state is not None or seq != 1:
            raise BadRow("opens a ledger that was open already")
        return State(event.total_units, event.total_units, settings_seq=seq, belief_row=seq, belief_seq=seq)
    if state is None:
        raise BadRow("comes before the row that opens a ledger")
    match event:
        case Stepped():
            return _step(state, seq, event)
        case SettingsChanged():
            if event.total_units > state.total_units:
                raise InvalidInput(_LARGER.format(nats_up(event.total_units), nats_up(state.total_units)))
            _check_total(state, event.total_units)
            return _with_total(replace(state, settings_seq=seq), event.total_units)
        case Extended():
            if state.belief_is_lost:
                raise UnsoundState(_LOST_BELIEF)
            if event.new_total_units <= state.total_units:
                raise InvalidInput(
                    f"{nats_up(event.new_total_units):.6g} nats do not extend a total of "
                    f"{nats_up(state.total_units):.6g}. A smaller total is set in [mechanism] of paclm.toml."
                )
            return _with_total(replace(state, settings_seq=seq), event.new_total_units)
        case KeyRotated():
            return state if event.belief is None else replace(state, belief_row=seq, belief_seq=seq)
        case WitnessChanged():
            return replace(state, witness=event.new)
        case Restored():
            return _restore(state, seq, event)


_LARGER = (
    "A total of {:.6g} nats is more than the {:.6g} that were committed. That weakens the guarantee for everything "
    "already released, so it is never done by a setting: run paclm ledger extend."
)
_LOST_BELIEF = (
    "This ledger was restored without a witness: tokens may have left that its belief knows nothing of, and noise "
    "calibrated to that belief hides less than it should. Nothing can be charged to it any more. Make a new workspace."
)


def _step(state: State, seq: int, event: Stepped) -> State:
    units = sum(entry.units for entry in event.entries)
    if units and state.belief_is_lost:
        raise UnsoundState(_LOST_BELIEF)
    if state.spent_units + units > state.total_units:
        raise BudgetExceeded(
            f"This step costs {nats_up(units):.6g} nats, and {nats_up(state.total_units - state.spent_units):.6g} of "
            f"{nats_up(state.total_units):.6g} are left. Nothing was charged and nothing may be released."
        )
    moved = event.belief is not None
    return replace(
        state,
        belief_row=seq if moved else state.belief_row,
        belief_seq=seq if moved else state.belief_seq,
        spent_units=state.spent_units + units,
        tokens=state.tokens + sum(entry.tokens for entry in event.entries),
        dissent_tokens=state.dissent_tokens + sum(entry.dissent_tokens for entry in event.entries),
        charged_tokens=state.charged_tokens + sum(entry.charged_tokens for entry in event.entries),
        public_tokens=state.public_tokens + sum(entry.public_tokens for entry in event.entries),
    )


def _check_total(state: State, total_units: int) -> None:
    if total_units < state.spent_units:
        raise InvalidInput(
            f"A total of {nats_up(total_units):.6g} nats is less than the {nats_up(state.spent_units):.6g} already "
            "spent. What has left cannot be called back: the total can be lowered to what is spent, not below."
        )


def _with_total(state: State, total_units: int) -> State:
    committed = total_units if state.spent_units == 0 else max(state.committed_units, total_units)
    return replace(state, total_units=total_units, committed_units=committed)


def _restore(state: State, seq: int, event: Restored) -> State:
    if event.proof == "current":
        return state
    if event.proof == "witness" and event.state is not None:
        after = replace(from_state_fields(event.state), settings_seq=seq, belief_row=seq)
    elif event.proof == "none":
        total = max(state.total_units, event.total_units)
        committed = max(state.committed_units, total)
        after = replace(
            state, total_units=total, committed_units=committed, spent_units=total, witness=None, belief_is_lost=True
        )
    else:
        raise BadRow(f"restores with the proof {event.proof!r}, which does not exist")
    if after.spent_units < state.spent_units:
        raise BadRow("gives budget back, which no restore does")
    return after


def usages(before: State | None, after: State, event: Event) -> tuple[Usage, ...]:
    """What an event adds to the figures by hour and key; a restore's charges are nobody's."""
    if isinstance(event, Stepped):
        return event.entries
    if isinstance(event, Restored) and before is not None and after != before:
        names = ("tokens", "dissent_tokens", "charged_tokens", "public_tokens")
        counts = {name: getattr(after, name) - getattr(before, name) for name in names}
        lost = Usage(LOST, units=after.spent_units - before.spent_units, **counts)
        return (lost,) if lost != Usage(LOST) else ()
    return ()


@dataclass(frozen=True, slots=True)
class Price:
    """What one private token costs under the settings in force."""

    disputed: int
    """Units of a token on which the worlds differed."""
    agreed: int
    """Units of a token on which all voted alike."""

    @classmethod
    def of(cls, config: MechanismConfig) -> Price:
        """The price that settings imply; refuses budgets that cannot be accounted, such as inf."""
        reads_secret = rule_named(config.release).reads_secret
        units_up(config.per_token)  # inf is refused also where nothing is charged
        disputed, agreed = (
            charge_units(config.charge, config.per_token, reads_secret=reads_secret, is_dissent=is_dissent)
            for is_dissent in (True, False)
        )
        return cls(disputed, agreed)

    def check(self, entries: tuple[Usage, ...]) -> None:
        """Refuse a step that costs less than is due: a second look at what the curator computed."""
        for entry in entries:
            due = entry.dissent_tokens * self.disputed + (entry.tokens - entry.dissent_tokens) * self.agreed
            if entry.units < due or max(entry.dissent_tokens, entry.charged_tokens) > entry.tokens:
                raise UnsoundState(
                    f"A step charges {entry.units} units for {entry.tokens} tokens, {entry.dissent_tokens} of them "
                    f"disputed and {entry.charged_tokens} charged, where {due} are due. Nothing may be released."
                )
