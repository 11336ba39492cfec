"""Puts one visit into words: the slots of the grammar, and sentences drawn from its rules.

Knows nothing about the order of a note; `registers` decides that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paclm.worlds.clinic.clinicians import Clinician
from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.grammar import Phrase, expand
from paclm.worlds.clinic.names import TOWN_ENDS, TOWN_STARTS
from paclm.worlds.clinic.phrases import LINES, RULES
from paclm.worlds.clinic.visits import Change, Prescription, Reading, Visit

_TOLD = {"new": ("told_new", "told_ill"), "worse": ("told_ill",), "same": ("told_ill",), "better": ("told_better",)}
_WORDS_FOR_COUNT = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Scribe:
    """One clinician writing about one visit."""

    def __init__(self, visit: Visit, writer: Clinician, dice: Dice) -> None:
        self.visit = visit
        self.writer = writer
        self.dice = dice
        self._slots = _person_slots(visit, writer, dice)
        self._fill_condition()
        self._fill_treatment()
        if visit.trend != "new":
            for slot in ("have", "is"):
                self._slots[f"{slot}_trend"] = expand(RULES[f"{slot}_{visit.trend}"], dice, self._slots)

    def say(self, rule: str, extra: Mapping[str, str] | None = None) -> str:
        """A sentence without its full stop."""
        slots = self._slots if extra is None else {**self._slots, **extra}
        return expand(RULES[rule], self.dice, slots)

    def several(self, count: int, *rules: str) -> list[str]:
        """Different sentences out of all the lines of these rules."""
        lines = [line for rule in rules for line in LINES[rule]]
        return [expand(line, self.dice, self._slots) for line in self.dice.several(lines, count)]

    def told(self, base: float) -> list[str]:
        """What the patient tells, as much as this writer takes down."""
        return self.several(self.amount(base), "told_any", *_TOLD[self.visit.trend])

    def amount(self, base: float) -> int:
        """How many sentences this writer spends where an average one spends `base`."""
        return int(base * self.writer.wordiness * (0.3 + 0.7 * self.dice.uniform() + 3.4 * self.dice.tail()) + 0.5)

    def labs(self) -> str:
        """The readings of the visit in one line, or nothing."""
        return self._join([self._reading(one) for one in self.visit.readings])

    def changes(self) -> list[str]:
        """What is done to the tablets, each fit for 'we agreed to …'."""
        return [self.say(f"{one.kind}_{_OBJECT[one.kind]}", _change_slots(one)) for one in self.visit.changes]

    def noted_changes(self) -> list[str]:
        """The same as short notes."""
        return [
            self.say(f"{one.kind}_{_OBJECT[one.kind]}{self.dice.pick(('', '_note', '_note'))}", _change_slots(one))
            for one in self.visit.changes
        ]

    def last_change(self) -> str:
        """A look back at what was changed last time; empty when nothing was."""
        changed = [one for one in self.visit.last_changes if one.kind in ("raise", "lower")]
        return self.say("last_change", _change_slots(changed[0])) if changed else ""

    def last_lab(self) -> str:
        """A look back at an earlier value; empty without one."""
        for one in self.visit.readings:
            if one.previous is not None and one.previous_day is not None:
                name = one.analyte.short if self.writer.is_terse else one.analyte.name
                day = self.writer.write_date(one.previous_day)
                return self.say(
                    "last_lab", {"lab_name": name, "lab_old": one.analyte.write(one.previous), "lab_date": day}
                )
        return ""

    def picks(self, phrases: Sequence[Phrase], count: int) -> list[str]:
        """Different ones of a condition's phrases."""
        return [expand(phrase, self.dice, self._slots) for phrase in self.dice.several(phrases, count)]

    def _fill_condition(self) -> None:
        visit, dice, slots = self.visit, self.dice, self._slots
        one = visit.condition
        slots["side"] = visit.side
        slots["condition"] = one.name.replace("<side>", visit.side)
        if self.writer.is_terse and dice.chance(0.6):
            slots["condition"] = one.short
        kind = next((tag for tag in ("joint", "lungs", "mind", "wound", "fever") if tag in one.tags), "other")
        slots["trigger"], slots["trigger2"] = self.several(2, f"trigger_{kind}")
        slots["easing"] = self.say(f"easing_{kind}")
        slots["since"] = self.say("acute_since" if visit.is_acute else "chronic_since")
        slots["interval"] = self.say("soon" if visit.is_acute else "later")
        slots["clinic_name"] = one.clinic or "medical clinic"
        for slot, phrases in (
            ("symptom", one.symptoms),
            ("finding", one.findings),
            ("plan", one.plans),
            ("advice", one.advice),
        ):
            first, *rest = self.picks(phrases, 2)
            slots[slot] = first
            slots[f"{slot}2"] = rest[0] if rest else first
        if one.scans:
            slots["scan_text"] = expand(dice.pick(one.scans), dice, slots)

    def _fill_treatment(self) -> None:
        visit, dice, slots = self.visit, self.dice, self._slots
        slots["chronic_list"] = self._join(list(visit.background)) if visit.background else ""
        taken = visit.prescriptions
        slots["medicine_count"] = _WORDS_FOR_COUNT[min(10, len(taken))]
        shown = dice.several(taken, 5)
        slots["medicine_list"] = self._join([self._prescription(one) for one in shown])
        if taken:
            slots.update(drug=taken[0].medicine.name, dose=taken[0].dose, rhythm=taken[0].rhythm)
        else:
            slots.update(drug="paracetamol", dose="1 g", rhythm="as needed")

    def _prescription(self, one: Prescription) -> str:
        words = f"{one.medicine.name} {one.dose}"
        if one.medicine.form not in ("tablet", "capsule", "sachet") and self.dice.chance(0.4):
            words += f" {one.medicine.form}"
        return f"{words} {one.rhythm}" if self.dice.chance(0.6) else words

    def _reading(self, one: Reading) -> str:
        analyte, dice = one.analyte, self.dice
        name = analyte.short if self.writer.is_terse or dice.chance(0.4) else analyte.name
        words = f"{name} {analyte.write(one.value)}"
        if self.writer.writes_units and analyte.unit:
            words += f" {analyte.unit}"
        if one.previous is None or dice.chance(0.45):
            return words
        old = analyte.write(one.previous)
        word = "up from" if one.value > one.previous else "down from" if one.value < one.previous else "as before,"
        return dice.pick(
            (f"{words} (was {old})", f"{words}, {word} {old}", f"{words} ({old} before)", f"{words} [{old}]")
        )

    def _join(self, items: list[str]) -> str:
        if len(items) < 2 or self.writer.list_style % 2:
            return "; ".join(items) if self.writer.list_style == 3 else ", ".join(items)
        return ", ".join(items[:-1]) + " and " + items[-1]


_OBJECT = {"start": "drug", "stop": "drug", "keep": "drug", "raise": "dose", "lower": "dose"}


def _change_slots(one: Change) -> dict[str, str]:
    now = one.now
    return {"drug": now.medicine.name, "dose": now.dose, "old_dose": one.old_dose or now.dose, "rhythm": now.rhythm}


def _person_slots(visit: Visit, writer: Clinician, dice: Dice) -> dict[str, str]:
    patient, vitals = visit.patient, visit.vitals
    title = "Mr" if patient.sex == "men" else dice.pick(("Mrs", "Ms"))
    slots = dict(patient.life)
    slots.update(
        name=patient.name if dice.chance(0.75) else f"{title} {patient.surname}",
        given=patient.given,
        surname_title=f"{title} {patient.surname}",
        age=str(visit.age),
        town=patient.town,
        far_town=dice.pick(TOWN_STARTS) + dice.pick(TOWN_ENDS),
        date=writer.write_date(visit.day),
        dob=writer.write_date(patient.born),
        bp=f"{vitals.systolic}/{vitals.diastolic}",
        pulse=str(vitals.pulse),
        temp=f"{vitals.temperature:.1f}",
        rr=str(vitals.breaths),
        sat=str(vitals.saturation),
        weight=f"{vitals.weight:.1f}",
        height=str(patient.height),
        bmi=f"{10_000 * vitals.weight / (patient.height * patient.height):.1f}",
        clinician=writer.name,
        role=writer.role,
        initials=writer.initials,
        past_year=str(dice.between(min(patient.born.year + 12, visit.day.year - 1), visit.day.year - 1)),
    )
    days_back = dice.between(0, 6)
    slots["lab_day"] = writer.write_date(visit.day.fromordinal(visit.day.toordinal() - days_back))
    stay = dice.between(1, 9)
    slots["stay"] = _WORDS_FOR_COUNT[stay]
    slots["admitted"] = writer.write_date(visit.day.fromordinal(visit.day.toordinal() - stay))
    if visit.last_seen is not None:
        slots["last_date"] = writer.write_date(visit.last_seen)
        slots["last_gap"] = _gap((visit.day - visit.last_seen).days)
    else:
        slots["last_date"] = slots["last_gap"] = "last time"
    return slots


def _gap(days: int) -> str:
    if days < 14:
        return f"{days} days"
    return f"{days // 7} weeks" if days < 80 else f"{days // 30} months"
