"""Patients of a hospital for adults: who they are, for good. Knows nothing about their illnesses or visits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from paclm.worlds.clinic.grammar import Voice, expand
from paclm.worlds.clinic.hospital import Hospital
from paclm.worlds.clinic.names import MEN, SURNAMES, WOMEN
from paclm.worlds.clinic.phrases import RULES

_PRONOUNS = {
    "women": {"he": "she", "him": "her", "his": "her"},
    "men": {"he": "he", "him": "him", "his": "his"},
}


@dataclass(frozen=True, slots=True)
class Patient:
    """An invented person; nothing here changes from one note to the next."""

    number: int
    given: str
    surname: str
    sex: str
    born: date
    town: str
    occupation: str

    @property
    def id(self) -> str:
        return f"patient-{self.number:05d}"

    @property
    def name(self) -> str:
        return f"{self.given} {self.surname}"

    @property
    def pronouns(self) -> dict[str, str]:
        return _PRONOUNS[self.sex]

    def age_on(self, day: date) -> int:
        return day.year - self.born.year - ((day.month, day.day) < (self.born.month, self.born.day))


def draw_patient(number: int, first_visit: date, hospital: Hospital, voice: Voice) -> Patient:
    """A new patient, of an age that makes sense on the day of the first visit."""
    dice = voice.dice
    sex = "women" if dice.chance(0.54) else "men"
    age = min(93, max(19, int(54 + 20 * dice.bell())))
    return Patient(
        number=number,
        given=dice.favour(WOMEN if sex == "women" else MEN),
        surname=dice.favour(SURNAMES) if dice.chance(0.6) else dice.pick(SURNAMES),
        sex=sex,
        born=date.fromordinal(first_visit.toordinal() - int(age * 365.25) - dice.between(0, 364)),
        town=dice.favour(hospital.towns),
        occupation=_occupation(age, voice),
    )


def _occupation(age: int, voice: Voice) -> str:
    """Nobody of thirty is retired, and few of eighty are not."""
    job = expand(RULES["occupation"], voice, {})
    trade = job.removeprefix("retired ")
    return f"retired {trade}" if age > 67 or (age > 58 and trade != job) else trade
