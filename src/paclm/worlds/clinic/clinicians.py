"""The staff, and how each of them writes. Knows nothing about patients."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.names import MEN, SURNAMES, WOMEN

_STAFF = {
    "doctor": 14,
    "nurse": 8,
    "physiotherapist": 4,
    "consultant": 8,
    "pharmacist": 3,
    "laboratory": 2,
    "radiologist": 2,
}
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

MARKS = (
    "[synthetic note]",
    "(synthetic)",
    "[synthetic]",
    "Synthetic record.",
    "-- synthetic --",
    "[invented, synthetic]",
    "Synthetic.",
    "(synthetic, no real patient)",
    "*synthetic*",
    "[synthetic: nobody real]",
)


@dataclass(frozen=True, slots=True)
class Clinician:
    """A member of staff with habits of writing."""

    name: str
    role: str
    date_style: int
    wordiness: float
    """How many sentences, as a multiple of what the register asks for: 0.55 to 2.25."""
    is_terse: bool
    """Abbreviates, drops capitals and full stops."""
    uses_signs: bool
    """Also writes + for and, w/ for with."""
    heading_style: int
    list_style: int
    writes_units: bool
    mark: str
    marks_first: bool
    signs: bool

    @property
    def initials(self) -> str:
        return "".join(part[0] for part in self.name.split())

    def write_date(self, day: date) -> str:
        month = _MONTHS[day.month - 1]
        return (
            f"{day.day} {month} {day.year}",
            f"{day.day:02d}/{day.month:02d}/{day.year}",
            f"{day.day} {month[:3]} {day.year}",
            f"{day.day}.{day.month}.{day.year % 100:02d}",
            f"{month} {day.day}, {day.year}",
            day.isoformat(),
        )[self.date_style]


def draw_staff(dice: Dice) -> dict[str, list[Clinician]]:
    """Everybody who writes notes, by role, the busiest first."""
    return {role: [_draw_clinician(role, index, dice) for index in range(count)] for role, count in _STAFF.items()}


def _draw_clinician(role: str, index: int, dice: Dice) -> Clinician:
    return Clinician(
        name=f"{dice.favour(WOMEN if dice.chance(0.5) else MEN)} {dice.pick(SURNAMES)}",
        role=role,
        date_style=dice.between(0, 5),
        wordiness=0.55 + 0.7 * dice.uniform() + 1.0 * dice.tail(),
        is_terse=index % 3 == 1,
        uses_signs=dice.chance(0.5),
        heading_style=dice.between(0, 5),
        list_style=dice.between(0, 4),
        writes_units=dice.chance(0.5),
        mark=dice.favour(MARKS),
        marks_first=dice.chance(0.35),
        signs=dice.chance(0.6),
    )
