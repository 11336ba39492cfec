"""What is a hospital's own, drawn from its seed: nothing here can be guessed from another hospital.

Name and catchment, wards by speciality, clinicians and who signs on which weekday, the formulary with local names and
first choices, protocols, case mix, and the house style. Grammar, physiology and drug classes are common to all
hospitals and stand in the other modules. Knows nothing about patients.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from paclm.worlds.clinic.conditions import ACUTE, CHRONIC, SPECIALITIES, Condition
from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.grammar import Habits, Voice, expand
from paclm.worlds.clinic.medicines import MEDICINES
from paclm.worlds.clinic.names import MEN, SURNAMES, TOWN_ENDS, TOWN_STARTS, WOMEN
from paclm.worlds.clinic.tables import read_blocks, read_lines

NUM_CHRONIC, NUM_ACUTE = 12, 8
"""Conditions that a hospital sees, of all that there are."""
LOCAL_SHARE = 0.8
"""How many of its medicines have a local name; the others keep their international one."""

_LISTS = {title: tuple(" ".join(lines).split()) for title, lines in read_blocks("hospitals")}
_THEMES = tuple(names for title, names in _LISTS.items() if title.startswith("wards_"))
_SHORTER = dict(line.split(" = ") for line in read_lines("abbreviations"))
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_INTERVALS = ("two weeks", "four weeks", "six weeks", "eight weeks", "three months", "six months", "ten days", "a week")


@dataclass(frozen=True, slots=True)
class Practice:
    """How one hospital deals with one condition."""

    medicines: tuple[str, ...]
    """Generic names, the first choice first."""
    labs: tuple[str, ...]
    """The order set, in its order."""
    protocol: str
    steps: tuple[str, ...]
    interval: str


@dataclass(frozen=True, slots=True)
class Hospital:
    """One made-up hospital."""

    name: str
    towns: tuple[str, ...]
    """The catchment, the largest first."""
    wards: dict[str, str]
    """By speciality."""
    clinic_days: dict[str, str]
    """The weekday of each ward's clinic."""
    consultants: tuple[str, ...]
    """Who signs, Monday first."""
    sisters: dict[str, str]
    """By ward."""
    formulary: dict[str, str]
    """The local name of each medicine."""
    chronic: tuple[Condition, ...]
    acute: tuple[Condition, ...]
    """The case mix, the commonest first."""
    practices: dict[str, Practice]
    abbreviations: dict[str, str]
    shortens: bool
    """Writes HTN for high blood pressure."""
    date_style: int
    habits: Habits

    def ward_of(self, condition: Condition) -> str:
        return self.wards[condition.speciality]

    def write_day(self, day: date) -> str:
        """A date as this house writes it, weekday included."""
        weekday, month = WEEKDAYS[day.weekday()], _MONTHS[day.month - 1]
        return (
            f"{weekday} {day.day} {month} {day.year}",
            f"{weekday[:3]} {day.day:02d}/{day.month:02d}/{day.year}",
            f"{weekday[:3]} {day.day} {month[:3]} {day.year}",
            f"{weekday}, {month} {day.day}, {day.year}",
            f"{weekday[:2]} {day.day}.{day.month}.{day.year}",
            f"{day.isoformat()} ({weekday[:3]})",
        )[self.date_style]


def draw_hospital(seed: int) -> Hospital:
    """The hospital of this seed; the same on every machine."""
    dice, habits = Dice(f"hospital {seed}"), Habits(seed)
    towns = tuple(dict.fromkeys(dice.pick(TOWN_STARTS) + dice.pick(TOWN_ENDS) for _ in range(5)))
    wards = dict(zip(SPECIALITIES, dice.mixed(dice.pick(_THEMES)), strict=False))
    chronic = tuple(dice.mixed(CHRONIC)[:NUM_CHRONIC])
    acute = tuple(dice.mixed(ACUTE)[:NUM_ACUTE])
    formulary = {name: _local_name(dice) if dice.chance(LOCAL_SHARE) else name for name in MEDICINES}
    protocols = _protocols(dice)
    seen = (*chronic, *acute)
    is_terse = dice.chance(0.4)
    return Hospital(
        name=_name(towns[0], dice),
        towns=towns,
        wards=wards,
        clinic_days={ward: dice.pick(WEEKDAYS[:5]) for ward in wards.values()},
        consultants=tuple(f"Dr {_person(dice)}" for _ in WEEKDAYS),
        sisters={ward: f"Sister {_person(dice).split()[-1]}" for ward in wards.values()},
        formulary=formulary,
        chronic=chronic,
        acute=acute,
        practices={
            one.name: _practice(one, protocol, Voice(dice, habits))
            for one, protocol in zip(seen, protocols, strict=False)
        },
        abbreviations={long: short for long, short in _SHORTER.items() if dice.chance(0.5 if is_terse else 0.06)},
        shortens=is_terse,
        date_style=dice.between(0, 5),
        habits=habits,
    )


def _name(town: str, dice: Dice) -> str:
    kind = dice.pick(_LISTS["kinds"]).replace("-", " ")
    return f"St {dice.pick(WOMEN)}'s {kind}" if dice.chance(0.25) else f"{town} {kind}"


def _person(dice: Dice) -> str:
    return f"{dice.pick(WOMEN if dice.chance(0.5) else MEN)} {dice.pick(SURNAMES)}"


def _local_name(dice: Dice) -> str:
    middle = dice.pick(_LISTS["name_middles"]) if dice.chance(0.6) else ""
    return dice.pick(_LISTS["name_starts"]) + middle + dice.pick(_LISTS["name_ends"])


def _protocols(dice: Dice) -> list[str]:
    """A different one for every condition, named in this hospital's manner."""
    style, kind = dice.between(0, 2), dice.pick(_LISTS["protocol_kinds"])
    if style == 0:
        return [f"{word} {kind}" for word in dice.mixed(_LISTS["protocol_words"])]
    letters = dice.mixed("ABCDEFGHJKLMNPQRSTUVWXYZ")
    if style == 1:
        return [f"{kind} {letter}{dice.between(1, 9)}" for letter in letters]
    return [f"{word} {number}" for number, word in enumerate(dice.mixed(_LISTS["protocol_words"]), 1)]


def _practice(condition: Condition, protocol: str, voice: Voice) -> Practice:
    dice = voice.dice
    return Practice(
        medicines=tuple(dice.mixed(condition.medicines)[:2]),
        labs=tuple(dice.mixed(condition.labs)[:2]),
        protocol=protocol,
        steps=tuple(expand(phrase, voice, {}) for phrase in dice.mixed(condition.plans)[:2]),
        interval=dice.pick(_INTERVALS),
    )
