"""From visits to finished text: title, header, sections, abbreviations, the synthetic mark, and no text twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from hashlib import blake2b

from paclm.errors import InvalidInput
from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.grammar import Voice
from paclm.worlds.clinic.hospital import Hospital, draw_hospital
from paclm.worlds.clinic.people import draw_patient
from paclm.worlds.clinic.scribe import END, FACT, FACTS, KINDS, Kind, Scribe
from paclm.worlds.clinic.visits import Course, Visit

MAX_RECORDS = 1_000_000
PRIVATE_SEED = 7
"""The hospital of `clinic:N`: no base model has seen a note of it."""
RARE_SHARE = 0.06
"""How many of the notes hold a fact found nowhere else."""
SYNTHETIC = "[synthetic note]"

_FIRST_DAY = date(2012, 1, 2).toordinal()
_LAST_DAY = date(2023, 6, 30).toordinal()
_WHOLE_FACT = re.compile(f"({FACT}[^{END}]*{END})")
_ARTICLE = re.compile(r"\b([aA]) (?=[aeio]|u(?!ni|se|su|r[io])|8\d?-|11-|18-)(?!one\b|eu)")


def generate_notes(num_records: int, seed: int = PRIVATE_SEED) -> Iterator[dict[str, str]]:
    """Notes of the hospital that the seed names, patient by patient; the same for the same arguments on every machine.

    Each has `id`, `patient` (all notes of one invented person share it), `date` and `text`. No two texts are alike.
    """
    if not 1 <= num_records <= MAX_RECORDS:
        raise InvalidInput(
            f"Cannot generate {num_records:,} notes: ask for 1 to {MAX_RECORDS:,} (made for 100 to 100,000)."
        )
    hospital = draw_hospital(seed)
    return (
        {"id": f"note-{number:06d}", "patient": visit.patient.id, "date": visit.day.isoformat(), "text": plain(text)}
        for number, (visit, text, _) in enumerate(written_visits(hospital, num_records, Dice(f"notes {seed}")), 1)
    )


def written_visits(hospital: Hospital, num_records: int, dice: Dice) -> Iterator[tuple[Visit, str, str]]:
    """Every visit with its marked text and the rare fact in it (empty where there is none)."""
    voice = Voice(dice, hospital.habits)
    seen_texts: set[bytes] = set()
    seen_facts: set[str] = set()
    for index, visit in enumerate(_visits(hospital, voice)):
        if index == num_records:
            return
        text = ""
        while not text or _digest(text) in seen_texts:
            scribe = Scribe(visit, hospital, voice)
            fact = _rare_fact(scribe, seen_facts) if dice.chance(RARE_SHARE) else ""
            text = _write(_choose_kind(visit, dice), fact, scribe)
        seen_texts.add(_digest(text))
        yield visit, text, fact


def plain(text: str) -> str:
    """Without the marks around what is the house's own."""
    return FACTS.sub(r"\2", text)


def _visits(hospital: Hospital, voice: Voice) -> Iterator[Visit]:
    dice = voice.dice
    number = 0
    while True:
        number += 1
        first = date.fromordinal(dice.between(_FIRST_DAY, _LAST_DAY))
        patient = draw_patient(number, first, hospital, voice)
        count = 1 + int(4 * dice.uniform() * dice.uniform() + 8 * dice.tail() * dice.uniform())
        yield from Course(patient, first, hospital, dice).visits(count)


def _choose_kind(visit: Visit, dice: Dice) -> Kind:
    weights = [kind.weight(visit) for kind in KINDS]
    rest = dice.uniform() * sum(weights)
    for kind, weight in zip(KINDS, weights, strict=True):
        rest -= weight
        if rest < 0:
            return kind
    return KINDS[0]


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _rare_fact(scribe: Scribe, seen: set[str]) -> str:
    while True:
        fact = scribe.say("rarity")
        if fact not in seen:
            seen.add(fact)
            return fact


def _write(kind: Kind, fact: str, scribe: Scribe) -> str:
    """The text of a note, with marks around what is the house's own."""
    lines = [scribe.say("header"), *filter(None, kind.write(scribe))]
    lines = [_in_house_style(line, scribe.hospital.abbreviations) for line in lines]
    if fact:
        lines.insert(2, fact[:1].upper() + fact[1:])
    text = "\n".join([SYNTHETIC, f"{kind.title}: {scribe.slots['title']}", *lines])
    return _ARTICLE.sub(r"\1n ", text)


def _in_house_style(line: str, shorter: dict[str, str]) -> str:
    """Begin with a capital letter, and abbreviate as the house does, names excepted."""
    parts = _WHOLE_FACT.split(line[:1].upper() + line[1:])
    for index in range(0, len(parts), 2):
        for word, short in shorter.items():
            if word in parts[index]:
                parts[index] = re.sub(rf"\b{word}\b", short, parts[index])
    return "".join(parts)
