"""The kinds of note: what comes in which order, and who writes it. Knows nothing about wording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.scribe import Scribe
from paclm.worlds.clinic.visits import Visit

Section = tuple[str, list[str]]
"""What it is about (subjective, objective, assessment, plan or nothing) and its sentences."""


@dataclass(frozen=True, slots=True)
class Register:
    """A kind of note."""

    name: str
    writers: tuple[str, ...]
    weight: Callable[[Visit], float]
    compose: Callable[[Scribe], list[Section]]


def choose_register(visit: Visit, dice: Dice) -> Register:
    weights = [one.weight(visit) for one in REGISTERS]
    mark = dice.uniform() * sum(weights)
    for one, weight in zip(REGISTERS, weights, strict=True):
        mark -= weight
        if mark < 0:
            return one
    return REGISTERS[0]


# The four quarters of a consultation, each a list of sentences


def _subjective(s: Scribe, base: float = 2.6) -> list[str]:
    visit = s.visit
    said = [s.say(_opening(s))]
    told = s.told(base)
    if visit.trend != "new" and s.dice.chance(0.8):
        told.append(s.say(f"course_{visit.trend}"))
    for chance, sentence in ((0.55, s.last_change), (0.25, s.last_lab)):
        if s.dice.chance(chance):
            told.append(sentence())
    return said + s.dice.several(told + _around(s), 99)


def _opening(s: Scribe) -> str:
    if s.visit.trend == "new":
        return "open_new"
    return "open_again" if s.visit.last_seen and (s.visit.is_acute or s.dice.chance(0.55)) else "open_review"


def _around(s: Scribe) -> list[str]:
    """Background, family, home: what varies from writer to writer."""
    visit, wordy = s.visit, s.writer.wordiness
    return [
        s.say("background") if visit.background and s.dice.chance(0.45 * wordy) else "",
        s.say("medication") if visit.prescriptions and s.dice.chance(0.35 * wordy) else "",
        s.say("family") if s.dice.chance(0.16 * wordy) else "",
        s.say("social") if s.dice.chance(0.5 * wordy) else "",
        s.say("allergies") if s.dice.chance(0.16 * wordy) else "",
    ]


def _objective(s: Scribe) -> list[str]:
    visit = s.visit
    seen = [s.say(_vitals(s))] if s.dice.chance(0.8) else []
    is_over = visit.is_acute and visit.trend == "better"
    seen.append(s.say("exam_well" if is_over else "exam"))
    if s.dice.chance(0.2 * s.writer.wordiness):
        seen.append(s.say("look"))
    seen = s.dice.several(seen, 3)
    return seen + _tests(s)


def _vitals(s: Scribe) -> str:
    return "vitals_short" if s.writer.is_terse and s.dice.chance(0.6) else "vitals_full"


def _tests(s: Scribe) -> list[str]:
    told = [s.say("results", {"labs": s.labs()})] if s.visit.readings else []
    if s.visit.condition.scans and s.dice.chance(0.22):
        told.append(s.say("scan"))
    return told


def _assessment(s: Scribe) -> list[str]:
    told = [s.say(f"impression_{s.visit.trend}")]
    if s.visit.background and s.dice.chance(0.12):
        told.append(s.say("background"))
    return told


def _plan_items(s: Scribe, is_list: bool) -> list[str]:
    items = s.noted_changes() if is_list else s.changes()
    items += s.picks(s.visit.condition.plans, s.dice.between(1, 1 + s.amount(0.9)))
    items += s.several(s.amount(0.5), "any_plan")
    return s.dice.several(items, 99) if s.dice.chance(0.3) else items


def _plan(s: Scribe) -> list[str]:
    style = s.writer.list_style
    if style in (1, 4) or s.writer.is_terse:
        told = _plan_items(s, is_list=True)
        told = [f"{number}) {item}" for number, item in enumerate(told, 1)] if style == 4 else told
    else:
        items = _plan_items(s, is_list=False)
        told = [s.say("intend", {"items": f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]})]
    ending = [
        s.say("advise") if s.dice.chance(0.6) else "",
        s.say("safety") if s.dice.chance(0.35) else "",
        s.say("understanding") if s.dice.chance(0.12 * s.writer.wordiness) else "",
        s.say("follow_up") if s.dice.chance(0.75) else "",
    ]
    return told + ending


# The registers


def _consultation(s: Scribe) -> list[Section]:
    sections: list[Section] = [
        ("subjective", _subjective(s)),
        ("objective", _objective(s)),
        ("assessment", _assessment(s)),
        ("plan", _plan(s)),
    ]
    if s.dice.chance(0.12):
        del sections[2]
    return sections


def _prose(s: Scribe) -> list[Section]:
    told = _subjective(s) + _objective(s) + (_assessment(s) if s.dice.chance(0.8) else [])
    return [("", told), ("", _plan(s))] if s.dice.chance(0.5) else [("", told + _plan(s))]


def _phone(s: Scribe) -> list[Section]:
    told = [s.say("phone")]
    told += [s.say("phone_mood")] if s.dice.chance(0.5) else []
    told += s.told(1.8)
    told += [s.say(f"course_{s.visit.trend}") if s.visit.trend != "new" else s.say("complaint")]
    told += [s.last_change(), *_tests(s)]
    return [("", told + _plan(s))]


def _nursing(s: Scribe) -> list[Section]:
    told = [s.say("nurse_open")]
    body = s.several(2 + s.amount(2.6), "nurse_care")
    body += [s.say(_vitals(s))]
    body += [s.say("exam")] if s.dice.chance(0.4) else []
    body += [s.say("social")] if s.dice.chance(0.25) else []
    body += s.told(0.8)
    end = [s.say("advise")] if s.dice.chance(0.5) else []
    end += [s.say("safety")] if s.dice.chance(0.2) else []
    return [("", told + s.dice.several(body, 99) + end + [s.say("follow_up")])]


def _physio(s: Scribe) -> list[Section]:
    body = s.several(2 + s.amount(2.2), "physio_work") + s.told(1.2)
    body += [s.say("exam")] if s.dice.chance(0.5) else []
    body += [s.say(f"course_{s.visit.trend}")] if s.visit.trend != "new" else []
    plan = [s.say("advise"), s.say("follow_up")] if s.dice.chance(0.7) else [s.say("follow_up")]
    return [("", [s.say("physio_open"), *s.dice.several(body, 99)]), ("plan", plan)]


def _laboratory(s: Scribe) -> list[Section]:
    told = [s.say("lab_open"), s.labs(), *s.several(3 + s.amount(1.6), "lab_view"), s.last_lab()]
    told += _plan_items(s, is_list=True) if s.dice.chance(0.4) else []
    return [("", [*told, s.say("medication") if s.visit.prescriptions and s.dice.chance(0.2) else ""])]


def _discharge(s: Scribe) -> list[Section]:
    course = s.several(1 + s.amount(1.5), "discharge_course") + _objective(s)
    leaving = [s.say("medication")] if s.visit.prescriptions else []
    asked = s.several(1 + s.amount(0.9), "discharge_ask")
    told = [s.say("discharge_open"), *s.told(1.2), *_around(s)]
    return [("", told), ("", course), ("", leaving + s.noted_changes() + asked)]


def _referral(s: Scribe) -> list[Section]:
    opening = [s.say("refer_open"), *s.dice.several(s.told(2.6) + _around(s), 99)]
    asked = s.several(1 + s.amount(1.0), "refer_ask") if s.visit.prescriptions else []
    return [("", opening), ("", _objective(s) + asked)]


def _clinic_letter(s: Scribe) -> list[Section]:
    told = [s.say("clinic_open"), *_subjective(s, 2.0)[1:]]
    told += [s.say(f"course_{s.visit.trend}")] if s.visit.trend != "new" else []
    return [("", told), ("", _objective(s) + _assessment(s)), ("", _plan(s))]


def _pharmacy(s: Scribe) -> list[Section]:
    body = [*s.several(2 + s.amount(2.0), "pharmacist_view"), s.say("medication"), s.last_change()]
    body += [*_tests(s), s.say("allergies") if s.dice.chance(0.5) else ""]
    return [
        ("", [s.say("pharmacist_open"), *s.dice.several(body, 99)]),
        ("plan", [*s.noted_changes(), s.say("follow_up")]),
    ]


def _triage(s: Scribe) -> list[Section]:
    body = [s.say(_vitals(s)), *s.several(2 + s.amount(1.2), "triage_work")]
    body += s.told(1.8) + _around(s)
    end = [s.say("exam")] if s.dice.chance(0.6) else []
    return [("", [s.say("triage_open"), *s.dice.several(body, 99), *end]), ("plan", s.noted_changes())]


def _imaging(s: Scribe) -> list[Section]:
    told = [s.say("imaging_open"), s.say("scan"), *s.several(4 + s.amount(1.2), "imaging_view")]
    return [("", told + ([s.say("discharge_ask")] if s.dice.chance(0.3) else []))]


REGISTERS = (
    Register("consultation", ("doctor",), lambda v: 3.2, _consultation),
    Register("prose", ("doctor",), lambda v: 3.2, _prose),
    Register("phone", ("doctor", "nurse", "pharmacist"), lambda v: 1.2, _phone),
    Register("nursing", ("nurse",), lambda v: 2.6 if "wound" in v.condition.tags else 1.0, _nursing),
    Register("physio", ("physiotherapist",), lambda v: 3.0 if "joint" in v.condition.tags else 0.0, _physio),
    Register("laboratory", ("laboratory", "doctor"), lambda v: 0.9 if len(v.readings) > 1 else 0.0, _laboratory),
    Register("discharge", ("consultant",), lambda v: 1.6 if "admits" in v.condition.tags else 0.0, _discharge),
    Register("referral", ("doctor",), lambda v: 0.7 if v.condition.clinic and v.trend != "better" else 0.0, _referral),
    Register(
        "clinic letter",
        ("consultant",),
        lambda v: 0.9 if v.condition.clinic and not v.is_acute else 0.1,
        _clinic_letter,
    ),
    Register("pharmacy", ("pharmacist",), lambda v: 0.9 if len(v.prescriptions) > 1 else 0.0, _pharmacy),
    Register("triage", ("nurse", "doctor"), lambda v: 1.2 if v.trend == "new" else 0.0, _triage),
    Register("imaging", ("radiologist",), lambda v: 0.6 if v.condition.scans else 0.0, _imaging),
)
