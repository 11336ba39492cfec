"""What a condition is: its names, how it shows, what is done about it. Knows nothing about patients.

`data/chronic.txt` and `data/acute.txt` list them, the commonest first. Symptoms and findings are noun phrases,
plans and advice bare infinitives; all are phrases of the grammar and may use the slots <side>, <he>, <him>, <his>.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paclm.worlds.clinic.grammar import Phrase, parse_phrase
from paclm.worlds.clinic.tables import read_blocks

_CLINICS = {
    "heart": "cardiology, heart failure clinic, hypertension clinic, lipid clinic, thrombosis clinic, vascular clinic",
    "chest": "chest clinic, respiratory clinic, sleep clinic, allergy clinic",
    "bowel": "bowel clinic, gastroenterology, liver clinic, surgical clinic, surgical ward, dietetics",
    "bones": "rheumatology, hand clinic, physiotherapy, spinal clinic, shoulder clinic, orthopaedic clinic, "
    "knee clinic, fracture clinic, bone clinic, falls clinic, pain clinic",
    "nerves": "neurology, stroke clinic, movement clinic, memory clinic, headache clinic, TIA clinic, balance clinic, "
    "talking therapies, community mental health team",
    "skin": "dermatology, leg ulcer clinic, burns unit, infectious diseases, eye clinic, ear clinic, "
    "ear nose and throat, dental hospital",
}
_BY_CLINIC = {clinic: name for name, clinics in _CLINICS.items() for clinic in clinics.split(", ")}
SPECIALITIES = (*_CLINICS, "medicine")
"""Every hospital has a ward for each."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition as the notes speak of it."""

    name: str
    """May hold <side>: a knee is left or right for ever."""
    short: str
    ages: tuple[int, int]
    sex: str
    """"men", "women", or empty for both."""
    tags: frozenset[str]
    """Of: pressure, heart, lungs, fever (they move the vital signs); joint, wound, mind (their triggers); admits."""
    clinic: str
    labs: tuple[str, ...]
    medicines: tuple[str, ...]
    symptoms: tuple[Phrase, ...]
    findings: tuple[Phrase, ...]
    plans: tuple[Phrase, ...]
    advice: tuple[Phrase, ...]

    @property
    def speciality(self) -> str:
        return _BY_CLINIC.get(self.clinic, "medicine")

    def fits(self, age: int, sex: str) -> bool:
        return self.ages[0] <= age <= self.ages[1] and self.sex in ("", sex)


def eligible(conditions: Sequence[Condition], age: int, sex: str) -> list[Condition]:
    """Those that a person of this age and sex may have, in the order given."""
    return [one for one in conditions if one.fits(age, sex)]


def _read(title: str, lines: list[str]) -> Condition:
    name, _, short = title.partition(" / ")
    fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    ages, _, sex = fields["who"].partition(" ")
    youngest, _, oldest = ages.partition("-")
    return Condition(
        name=name,
        short=short,
        ages=(int(youngest), int(oldest)),
        sex=sex,
        tags=frozenset(fields.get("tags", "").split()),
        clinic=fields.get("clinic", ""),
        labs=tuple(fields.get("labs", "").split()),
        medicines=tuple(filter(None, fields.get("medicines", "").split(", "))),
        symptoms=_phrases(fields["symptoms"]),
        findings=_phrases(fields["findings"]),
        plans=_phrases(fields["plans"]),
        advice=_phrases(fields["advice"]),
    )


def _phrases(text: str) -> tuple[Phrase, ...]:
    return tuple(parse_phrase(part) for part in text.split(";") if part.strip())


CHRONIC = tuple(_read(*block) for block in read_blocks("chronic"))
ACUTE = tuple(_read(*block) for block in read_blocks("acute"))
