"""Puts one visit into words: the slots of the grammar, and the sections of each kind of note.

What is the house's own stands between marks, `FACT kind STOP text END`, so that questions can be cut out of a note.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paclm.worlds.clinic.grammar import Phrase, Voice, expand
from paclm.worlds.clinic.hospital import Hospital
from paclm.worlds.clinic.phrases import RULES
from paclm.worlds.clinic.visits import Change, Prescription, Reading, Visit

FACT, STOP, END = "\x01", "\x02", "\x03"
FACTS = re.compile(f"{FACT}([^{STOP}]*){STOP}([^{END}]*){END}")
"""Kind and text of each."""


def mark(kind: str, text: str) -> str:
    return f"{FACT}{kind}{STOP}{text}{END}"


class Scribe:
    """The house writing about one visit."""

    def __init__(self, visit: Visit, hospital: Hospital, voice: Voice) -> None:
        self.visit = visit
        self.hospital = hospital
        self.voice = voice
        self.practice = hospital.practices[visit.condition.name]
        self.slots: dict[str, str] = {}
        self._fill_person()
        self._fill_house()
        self._fill_condition()
        self.slots["vitals"] = self.say("vitals")
        self.slots["medicine_list"] = self.prescribed(visit.prescriptions)
        if visit.prescriptions:
            self.slots.update(self._drug_slots(visit.prescriptions[0]))

    def say(self, rule: str, extra: Mapping[str, str] | None = None) -> str:
        """A sentence without its full stop."""
        slots = self.slots if extra is None else {**self.slots, **extra}
        return expand(RULES[rule], self.voice, slots)

    def listed(self, items: list[str]) -> str:
        return f"{self.say('between')} ".join(items)

    def prescribed(self, prescriptions: tuple[Prescription, ...]) -> str:
        return self.listed([self.say("prescription", self._drug_slots(one)) for one in prescriptions[:3]])

    def results(self) -> str:
        return self.listed([self._reading(one) for one in self.visit.readings])

    def changes(self) -> list[str]:
        """What is done to the medicines."""
        return [self.say(one.kind, self._change_slots(one)) for one in self.visit.changes]

    def one_of(self, phrases: tuple[Phrase, ...], count: int) -> list[str]:
        """Different ones of a condition's phrases."""
        return [expand(phrase, self.voice, self.slots) for phrase in self.voice.dice.several(phrases, count)]

    def _fill_person(self) -> None:
        visit, dice = self.visit, self.voice.dice
        patient, vitals = visit.patient, visit.vitals
        title = "Mr" if patient.sex == "men" else "Mrs"
        self.slots.update(
            patient.pronouns,
            occupation=patient.occupation,
            name=patient.name,
            surname_title=f"{title} {patient.surname}",
            age=str(visit.age),
            town=patient.town,
            bp=f"{vitals.systolic}/{vitals.diastolic}",
            pulse=str(vitals.pulse),
            temp=f"{vitals.temperature:.1f}",
            sat=str(vitals.saturation),
            stay=("two", "three", "four", "five", "six")[int(5 * dice.tail())],
            past_year=str(visit.day.year - dice.between(2, 12)),
            side=visit.side,
        )

    def _fill_house(self) -> None:
        house, visit, slots = self.hospital, self.visit, self.slots
        ward = house.ward_of(visit.condition)
        slots["hospital"] = mark("hospital", house.name)
        slots["ward"] = mark("ward", ward)
        slots["clinic_day"] = mark("clinic day", house.clinic_days[ward])
        slots["consultant"] = mark("signature", house.consultants[visit.day.weekday()])
        slots["sister"] = mark("ward sister", house.sisters[ward])
        slots["protocol"] = mark("protocol", self.practice.protocol)
        slots["interval"] = mark("review interval", self.practice.interval)
        slots["day"] = house.write_day(visit.day)

    def _fill_condition(self) -> None:
        visit, slots = self.visit, self.slots
        one = visit.condition
        slots["title"] = one.name.replace("<side>", visit.side)
        slots["condition"] = one.short if self.hospital.shortens else slots["title"]
        kind = next((tag for tag in ("joint", "lungs", "mind", "wound", "fever") if tag in one.tags), "other")
        slots["trigger"] = self.say(f"trigger_{kind}")
        slots["since"] = self.say("since_acute" if visit.is_acute else "since_chronic")
        for slot, phrases in (("symptom", one.symptoms), ("finding", one.findings), ("advice", one.advice)):
            first, *rest = self.one_of(phrases, 2)
            slots[slot] = first
            slots[f"{slot}2"] = rest[0] if rest else first
        slots["plan"] = self.practice.steps[0]

    def _drug_slots(self, one: Prescription) -> dict[str, str]:
        name = self.hospital.formulary[one.medicine.name]
        if one.medicine.name == next(iter(self.practice.medicines), ""):  # the first choice for what this note is about
            name = mark("medicine", name)
        return {"drug": name, "dose": one.dose, "rhythm": one.rhythm}

    def _change_slots(self, one: Change) -> dict[str, str]:
        return {**self._drug_slots(one.now), "old_dose": one.old_dose or one.now.dose}

    def _reading(self, one: Reading) -> str:
        analyte = one.analyte
        before = "first" if one.previous is None else f"was {analyte.write(one.previous)}"
        slots = {"lab": analyte.short, "value": analyte.write(one.value), "unit": analyte.unit, "before": before}
        return self.say("result", slots)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of note: how often it is written about a visit, and its lines after the header."""

    title: str
    weight: Callable[[Visit], float]
    write: Callable[[Scribe], list[str]]


def _line(s: Scribe, label: str, *sentences: str) -> str:
    told = "; ".join(filter(None, sentences))
    return f"{s.say(label)} {told}" if told else ""


def _plan(s: Scribe, *more: str) -> str:
    return s.say("by_protocol", {"items": s.listed([*filter(None, (*s.changes(), *s.practice.steps, *more))])})


def _clinic(s: Scribe) -> list[str]:
    visit, dice = s.visit, s.voice.dice
    is_over = visit.is_acute and visit.trend == "better"
    known = ", ".join(visit.background[:2])
    return [
        _line(s, "l_history", s.say(f"history_{visit.trend}"), s.say("denies") if dice.chance(0.3) else ""),
        _line(s, "l_known", known),
        _line(s, "l_takes", s.prescribed(visit.taken)),
        _line(s, "l_seen", s.slots["vitals"], s.say("seen_well" if is_over else "seen")),
        _line(s, "l_tests", s.results()),
        _line(s, "l_thought", s.say(f"thought_{visit.trend}")),
        _plan(s, s.say("advised") if dice.chance(0.4) else ""),
        s.say("review"),
        s.say("sign"),
    ]


def _nursing(s: Scribe) -> list[str]:
    return [
        "; ".join((s.say("nurse_open"), s.say("nurse_comfort"), s.say("nurse_care"))),
        _line(s, "l_seen", s.slots["vitals"]),
        s.say("nurse_gave") if s.visit.prescriptions else "",
        s.say("sign_nurse"),
    ]


def _letter(s: Scribe) -> list[str]:
    told = [s.say("letter_open"), s.say("letter_course"), s.say("letter_seen")]
    told += [s.say("letter_takes")] if s.visit.prescriptions else []
    return [". ".join([*told, s.say("letter_ask")]) + ".", s.say("review"), s.say("sign")]


def _call(s: Scribe) -> list[str]:
    visit = s.visit
    return [
        f"{s.say('call_open')}, {s.say('call_mood')}",
        _line(s, "l_history", s.say(f"history_{visit.trend}"), s.say("denies")),
        _plan(s, s.say("safety")),
        s.say("review"),
        s.say("sign"),
    ]


KINDS = (
    Kind("Clinic note", lambda v: 5.0, _clinic),
    Kind("Nursing note", lambda v: 1.4, _nursing),
    Kind("Discharge letter", lambda v: 2.0 if v.is_acute or "admits" in v.condition.tags else 0.3, _letter),
    Kind("Telephone call", lambda v: 0.0 if v.trend == "new" else 1.2, _call),
)
"""Common to all hospitals."""
