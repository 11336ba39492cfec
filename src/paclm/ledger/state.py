"""The running totals after each event, and sums by key and by time: pure, used to write the ledger and to verify it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from paclm.config import MechanismConfig
from paclm.errors import BudgetExceeded, InvalidInput, UnsoundState
from paclm.ledger.events import (
    Arrived,
    BadRow,
    Event,
    Extended,
    KeyRotated,
    Moved,
    Opened,
    Restored,
    Row,
    SecretSealed,
    Settings,
    SettingsChanged,
    Stepped,
    Usage,
    WitnessChanged,
    from_fields,
)
from paclm.privacy.accounting import Account, charge_units, nats_up, units_up
from paclm.privacy.bounds import success_bound

LOST = "(lost before a restore)"
"""The key to which a restore attributes the charges it has to assume."""


@dataclass(frozen=True, slots=True)
class State:
    """The running totals after an event. Stored with it, so that opening need not read the whole history."""

    total_units: int
    committed_units: int
    """The total that the guarantee is stated at: the largest under which anything was charged. Lowering the total
    after the first charge stops spending earlier and leaves the bound: it was lowered knowing outputs. So a setting may
    raise it again, up to this: every path stays within what the bound is stated at."""
    settings_seq: int
    """The row with the settings in force."""
    belief_row: int
    """The row that holds the hash of the current belief."""
    belief_seq: int
    """The row that the belief was sealed for: `belief_row`, unless a restore took the belief from a witness."""
    spent_units: int = 0
    tokens: int = 0
    dissent_tokens: int = 0
    charged_tokens: int = 0
    public_tokens: int = 0
    witness: str | None = None
    belief_is_lost: bool = False
    """Releases are missing from the belief, after a restore without a witness: nothing may be charged again."""
    secret_row: int = 0
    """The row that holds the hash of the sealed secret; 0: no secret was drawn yet, or before this field existed."""

    @property
    def account(self) -> Account:
        """These totals as the privacy room's account."""
        return Account(self.total_units, self.spent_units, self.tokens, self.dissent_tokens, self.charged_tokens)

    def bounds(self, num_worlds: int) -> Bounds:
        """The guarantee: at the committed total, never at the spend."""
        return bounds_at(self.committed_units, num_worlds)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest success probability of any attack, at a total."""

    mia: float
    """On the membership of a record, from a prior of 1/2."""
    world_id: float
    """On the realized world, from a prior of 1/m."""


@lru_cache(maxsize=64)
def bounds_at(units: int, num_worlds: int) -> Bounds:
    """The bounds at a total. Cached: figures are read often, and the total seldom changes."""
    nats = nats_up(units)
    return Bounds(success_bound(nats, 1 / 2), success_bound(nats, 1 / num_worlds))


_FIELDS = tuple(field.name for field in dataclasses.fields(State))
_TOKENS = ("tokens", "dissent_tokens", "charged_tokens", "public_tokens")


def to_state_fields(state: State) -> dict[str, Any]:
    """A state as plain values."""
    return {name: getattr(state, name) for name in _FIELDS}


def from_state_fields(fields: Mapping[str, Any]) -> State:
    """The state that `to_state_fields` described."""
    if not set(_FIELDS) - {"secret_row"} <= set(fields) <= set(_FIELDS):
        raise BadRow("has running totals with missing or unknown fields")
    state = State(**fields)
    counts = [value for name, value in fields.items() if name not in ("witness", "belief_is_lost")]
    if any(type(count) is not int or count < 0 for count in counts) or state.spent_units > state.total_units:
        raise BadRow("has running totals that no ledger can have")
    return state


def parse_row(row: Row) -> tuple[Event, State]:
    """The event in a row and the running totals after it."""
    try:
        body: dict[str, Any] = json.loads(row.body)
        return from_fields(row.kind, body["event"]), from_state_fields(body["after"])
    except (ValueError, KeyError, TypeError, RecursionError):  # a forged body may be nested without end
        raise BadRow("cannot be read") from None


def apply(state: State | None, seq: int, event: Event) -> State:
    """The state after an event that becomes row `seq`; raises rather than overspend."""
    if isinstance(event, Opened):
        if state is not None or seq != 1:
            raise BadRow("opens a ledger that is already open")
        return State(event.total_units, event.total_units, settings_seq=seq, belief_row=seq, belief_seq=seq)
    if state is None:
        raise BadRow("comes before the row that opens a ledger")
    match event:
        case Stepped():
            return _step(state, seq, event)
        case SettingsChanged():
            if event.total_units > state.committed_units:
                raise InvalidInput(_LARGER.format(nats_up(event.total_units), nats_up(state.committed_units)))
            if event.total_units > state.total_units and state.belief_is_lost:
                raise UnsoundState(_LOST_BELIEF)
            if event.total_units < state.spent_units:
                raise InvalidInput(_BELOW_SPENT.format(nats_up(event.total_units), nats_up(state.spent_units)))
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
            if event.belief is not None:
                state = replace(state, belief_row=seq, belief_seq=seq)
            if event.secret is not None and not state.secret_row:
                raise BadRow("seals a secret that was never drawn")
            return state if event.secret is None else replace(state, secret_row=seq)
        case SecretSealed():
            is_late = event.origin == "drawn" and (state.tokens or state.belief_is_lost)
            if event.origin not in ("drawn", "file", "resealed"):
                raise BadRow(f"seals a secret of the origin {event.origin!r}, which does not exist")
            if is_late or bool(state.secret_row) != (event.origin == "resealed"):
                raise BadRow("seals a second secret")
            return replace(state, secret_row=seq)
        case Moved() | Arrived():
            return state
        case WitnessChanged():
            return replace(state, witness=event.new)
        case Restored():
            return _restore(state, seq, event)


_LARGER = (
    "A total of {:.6g} nats is more than the {:.6g} that were committed. That weakens the guarantee for everything "
    "already released, so it is never done by a setting: run paclm ledger extend."
)
_BELOW_SPENT = (
    "A total of {:.6g} nats is less than the {:.6g} already spent. Released tokens cannot be recalled: the total can "
    "be lowered to what is spent, not below."
)
_LOST_BELIEF = (
    "This ledger was restored without a witness: its belief may lack released tokens, and noise calibrated to such a "
    "belief hides too little. Nothing can be charged to it any more. Make a new workspace."
)


def _step(state: State, seq: int, event: Stepped) -> State:
    units = sum(entry.units for entry in event.entries)
    if units and state.belief_is_lost:
        raise UnsoundState(_LOST_BELIEF)
    if state.spent_units + units > state.total_units:
        raise BudgetExceeded(
            f"This step costs {nats_up(units):.6g} nats; {nats_up(state.total_units - state.spent_units):.6g} of "
            f"{nats_up(state.total_units):.6g} are left. Nothing was charged and nothing may be released."
        )
    totals = {name: getattr(state, name) + sum(getattr(entry, name) for entry in event.entries) for name in _TOKENS}
    if event.belief is not None:
        totals |= {"belief_row": seq, "belief_seq": seq}
    return replace(state, spent_units=state.spent_units + units, **totals)


def _with_total(state: State, total_units: int) -> State:
    committed = total_units if state.spent_units == 0 else max(state.committed_units, total_units)
    return replace(state, total_units=total_units, committed_units=committed)


def _restore(state: State, seq: int, event: Restored) -> State:
    if event.proof == "current":
        return state
    if event.proof == "witness" and event.state is not None:
        after = from_state_fields(event.state)  # the secret stays as stored: a witness does not hold it
        after = replace(after, settings_seq=seq, belief_row=seq, secret_row=state.secret_row)
    elif event.proof == "none":
        total = max(state.total_units, event.total_units)
        committed = max(state.committed_units, total)
        after = replace(
            state, total_units=total, committed_units=committed, spent_units=total, witness=None, belief_is_lost=True
        )
    else:
        raise BadRow(f"restores with the proof {event.proof!r}, which does not exist")
    if after.spent_units < state.spent_units:
        raise BadRow("restores a spend lower than the ledger already had")
    return after


def usages(before: State | None, after: State, event: Event) -> tuple[Usage, ...]:
    """What an event adds to the sums by hour and key; charges assumed by a restore go to `LOST`."""
    if isinstance(event, Stepped):
        return event.entries
    if isinstance(event, Restored) and before is not None and after != before:
        counts = {name: getattr(after, name) - getattr(before, name) for name in _TOKENS}
        lost = Usage(LOST, units=after.spent_units - before.spent_units, **counts)
        return (lost,) if lost != Usage(LOST) else ()
    return ()


@dataclass(frozen=True, slots=True)
class Price:
    """What one private token costs under the settings in force."""

    dissent: int
    """Units of a token on which the worlds dissented."""
    unanimous: int
    """Units of a token on which all worlds voted alike."""

    @classmethod
    def of(cls, config: MechanismConfig) -> Price:
        """The price under these settings; a budget that cannot be accounted, such as inf, is refused."""
        from paclm.privacy.releases import rule_named  # numpy and scipy: half a second that a reader need not wait

        reads_secret = rule_named(config.release).reads_secret
        units_up(config.per_token)  # inf is refused also where nothing is charged
        dissent, unanimous = (
            charge_units(config.charge, config.per_token, reads_secret=reads_secret, is_dissent=is_dissent)
            for is_dissent in (True, False)
        )
        return cls(dissent, unanimous)

    def check(self, entries: tuple[Usage, ...]) -> None:
        """Refuse a step charged below its price: a second check of what the curator computed."""
        for entry in entries:
            due = entry.dissent_tokens * self.dissent + (entry.tokens - entry.dissent_tokens) * self.unanimous
            if entry.units < due or max(entry.dissent_tokens, entry.charged_tokens) > entry.tokens:
                raise UnsoundState(
                    f"A step charges {entry.units} units for {entry.tokens} tokens ({entry.dissent_tokens} dissent, "
                    f"{entry.charged_tokens} charged), and {due} are due. Nothing may be released."
                )


def new_settings(event: Event) -> Settings | None:
    """The settings that an event puts in force, if any."""
    match event:
        case Opened() | Extended() | Restored():
            return event.settings
        case SettingsChanged():
            return event.new
        case _:
            return None


UsageTable = dict[tuple[str, str], Usage]
"""(hour, key) → sum. Hours are in UTC: 2026-11-20T14."""


def add_usages(table: UsageTable, at: str, entries: Iterable[Usage]) -> None:
    """Add the entries of an event at that time to the sums by hour and key."""
    for entry in entries:
        place = at[:13], entry.key
        table[place] = table[place].plus(entry) if place in table else entry


def by_day(hours: Mapping[str, Usage]) -> dict[str, Usage]:
    """Sums by day (UTC) of sums by hour, oldest first; `key` of an entry is the day."""
    return _grouped((hour[:10], usage) for hour, usage in hours.items())


def by_key(table: UsageTable) -> dict[str, Usage]:
    """Sums by key, sorted."""
    return _grouped((key, usage) for (_, key), usage in table.items())


def _grouped(named: Iterable[tuple[str, Usage]]) -> dict[str, Usage]:
    sums: dict[str, Usage] = {}
    for name, usage in named:
        sums[name] = sums.get(name, Usage(name)).plus(usage)
    return dict(sorted(sums.items()))


class Sums:
    """Sums by key and by hour of an open ledger: taken once from the table, then updated with every row."""

    def __init__(self, by_key: dict[str, Usage], by_hour: dict[str, Usage]) -> None:
        self.by_key, self.by_hour = by_key, by_hour

    def add(self, at: str, entries: Iterable[Usage]) -> None:
        """Add the entries of an event at that time."""
        hour = at[:13]
        for entry in entries:
            self.by_key[entry.key] = self.by_key[entry.key].plus(entry) if entry.key in self.by_key else entry
            self.by_hour[hour] = (self.by_hour.get(hour) or Usage(hour)).plus(entry)
