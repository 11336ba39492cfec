"""Blood results and vital signs as numbers. Knows nothing about why they were taken.

A value sits between what is usual in health (severity 0) and what is seen when the condition is bad (severity 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.tables import read_lines


@dataclass(frozen=True, slots=True)
class Analyte:
    """Something a laboratory measures."""

    name: str
    short: str
    unit: str
    healthy: float
    ill: float
    spread: float
    decimals: int

    def draw(self, severity: float, dice: Dice) -> float:
        """A value for this severity; a quantity that cannot be negative stays clear of zero."""
        centre = self.healthy + (self.ill - self.healthy) * severity
        value = centre + self.spread * dice.bell()
        lowest = min(self.healthy, self.ill)
        return round(max(value, lowest / 5) if lowest > 0 else value, self.decimals)

    def write(self, value: float) -> str:
        return f"{value:.{self.decimals}f}"


def _parse(line: str) -> tuple[str, Analyte]:
    key, name, short, unit, healthy, ill, spread, decimals = (part.strip() for part in line.split(";"))
    return key, Analyte(name, short, unit, float(healthy), float(ill), float(spread), int(decimals))


ANALYTES = dict(map(_parse, read_lines("analytes")))


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a nurse writes down in the first minute."""

    systolic: int
    diastolic: int
    pulse: int
    temperature: float
    saturation: int


def draw_vitals(dice: Dice, *, age: int, pressure: float, fever: float, lungs: float, heart: float) -> Vitals:
    """Vital signs; the four severities run from 0 to 1."""
    systolic = int(112 + age / 5 + 48 * pressure + 8 * dice.bell())
    return Vitals(
        systolic=systolic,
        diastolic=int(30 + systolic * 0.36 + 5 * dice.bell()),
        pulse=int(72 + 26 * fever + 22 * heart + 10 * lungs + 7 * dice.bell()),
        temperature=round(36.6 + 2.0 * fever + 0.2 * dice.bell(), 1),
        saturation=min(100, int(98 - 7 * lungs - 2 * fever + 0.9 * dice.bell())),
    )
