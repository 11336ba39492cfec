"""Patients of a practice for adults: who they are, for good. Knows nothing about their illnesses or visits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date

from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.grammar import expand
from paclm.worlds.clinic.names import MEN, SURNAMES, TOWN_ENDS, TOWN_STARTS, WOMEN
from paclm.worlds.clinic.phrases import RULES

_PRONOUNS = {
    "women": {"man": "woman", "he": "she", "him": "her", "his": "her", "himself": "herself"},
    "men": {"man": "man", "he": "he", "him": "him", "his": "his", "himself": "himself"},
}


@dataclass(frozen=True, slots=True)
class Patient:
    """An invented person; nothing here changes from one note to the next."""

    number: int
    given: str
    surname: str
    sex: str
    born: date
    height: int
    weight: float
    town: str
    life: dict[str, str]
    """Pronouns and circumstances, by slot: occupation, hobby, household, pet, smoking, drinking, allergy, family …"""

    @property
    def id(self) -> str:
        return f"patient-{self.number:05d}"

    @property
    def name(self) -> str:
        return f"{self.given} {self.surname}"

    def age_on(self, day: date) -> int:
        return day.year - self.born.year - ((day.month, day.day) < (self.born.month, self.born.day))


def draw_patient(number: int, first_visit: date, dice: Dice) -> Patient:
    """A new patient, of an age that makes sense on the day of the first visit."""
    sex = "women" if dice.chance(0.54) else "men"
    age = min(93, max(19, int(54 + 20 * dice.bell())))
    born = date.fromordinal(first_visit.toordinal() - int(age * 365.25) - dice.between(0, 364))
    height = int((164 if sex == "women" else 177) + 6 * dice.bell())
    return Patient(
        number=number,
        given=dice.spread(WOMEN if sex == "women" else MEN),
        surname=_surname(dice),
        sex=sex,
        born=born,
        height=height,
        weight=round(height * height / 10000 * (26.5 + 3.6 * dice.bell()), 1),
        town=dice.favour(TOWN_STARTS) + dice.favour(TOWN_ENDS),
        life=_life(sex, age, dice),
    )


def _surname(dice: Dice) -> str:
    one = dice.spread(SURNAMES)
    other = dice.pick(SURNAMES)
    return f"{one}-{other}" if dice.chance(0.04) and other != one else one


def _life(sex: str, age: int, dice: Dice) -> dict[str, str]:
    life = dict(_PRONOUNS[sex])
    for slot in ("occupation", "household", "hobby", "usual", "pet", "smoking", "drinking", "allergy"):
        life[slot] = expand(RULES[slot], dice, life)
    life["companion"] = expand(RULES["companion" if age > 48 else "young_companion"], dice, life)
    life["hobby2"] = expand(RULES["hobby"], dice, {})
    life["occupation"] = _fitting_job(life["occupation"], age)
    if dice.chance(0.6):
        companion = re.sub("^(an?|the) ", f"{life['his']} ", life["companion"])
        life["companion"] = f"{companion} {dice.spread(WOMEN if _is_woman(companion) else MEN)}"
    life["family"] = "; ".join(_relation(dice, life) for _ in range(1 + dice.chance(0.4)))
    return life


def _is_woman(companion: str) -> bool:
    return companion.split()[-1] in ("daughter", "sister", "niece", "landlady", "mother", "mother-in-law")


def _fitting_job(job: str, age: int) -> str:
    """Nobody of thirty is retired, and few of eighty are not."""
    trade = job.removeprefix("retired ")
    return f"retired {trade}" if age > 67 or (age > 58 and trade != job) else trade


def _relation(dice: Dice, life: dict[str, str]) -> str:
    return " ".join(
        expand(RULES[rule], dice, life) for rule in ("family_relative", "family_had", "family_illness", "family_when")
    )
