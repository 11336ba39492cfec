"""From visits to finished text: headings, punctuation, abbreviations, the synthetic mark, and no text twice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import date
from hashlib import blake2b

from paclm.errors import InvalidInput
from paclm.worlds.clinic.clinicians import Clinician, draw_staff
from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.people import draw_patient
from paclm.worlds.clinic.registers import Section, choose_register
from paclm.worlds.clinic.scribe import Scribe
from paclm.worlds.clinic.tables import read_blocks
from paclm.worlds.clinic.visits import Course, Visit

MAX_RECORDS = 1_000_000
RARE_SHARE = 0.22
"""How many of the notes hold a fact found nowhere else."""

_FIRST_DAY = date(2012, 1, 2).toordinal()
_LAST_DAY = date(2023, 6, 30).toordinal()

_HEADINGS = (
    {"subjective": "S:", "objective": "O:", "assessment": "A:", "plan": "P:"},
    {"subjective": "History:", "objective": "Examination:", "assessment": "Impression:", "plan": "Plan:"},
    {"subjective": "SUBJECTIVE", "objective": "OBJECTIVE", "assessment": "ASSESSMENT", "plan": "PLAN"},
    {"subjective": "HPC", "objective": "O/E", "assessment": "Imp", "plan": "Plan"},
    {"subjective": "Story -", "objective": "Found -", "assessment": "Thoughts -", "plan": "To do -"},
    {"subjective": "", "objective": "Exam:", "assessment": "", "plan": "Plan:"},
)

_SHORTER = {title: dict(line.split(" = ") for line in lines) for title, lines in read_blocks("abbreviations")}
_SHORT_FOR = _SHORTER["usual"] | _SHORTER["signs"]
_LABEL = re.compile(
    r"^(?:impression|assessment|(?:working )?diagnosis|Dx|Imp|plan|today|findings|exam(?:ination)?|O/E|to examine)[:,] "
    r"|^on examination,? "
)


def _any_word(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"\b({'|'.join(sorted(words, key=len, reverse=True))})\b")


_ABBREVIATE = _any_word(_SHORTER["usual"])
_ABBREVIATE_MORE = _any_word(_SHORT_FOR)
_ARTICLE = re.compile(r"\b([aA]) (?=[aeio]|u(?!ni|se|su|r[io])|8\d?-|11-|18-)(?!one\b|eu)")
_BLANKS = re.compile(r" {2,}")
_BEFORE_MARK = re.compile(r" +([,;:.])")
_DOUBLE_MARK = re.compile(r"([,;:.])[,;.]+(?=\s|$)")


def generate_notes(num_records: int, seed: int = 7) -> Iterator[dict[str, str]]:
    """Synthetic clinic notes, patient by patient; the same for the same arguments on every machine.

    Each has `id`, `patient` (all notes of one invented person share it), `date` and `text`. No two texts are alike.
    """
    if not 1 <= num_records <= MAX_RECORDS:
        raise InvalidInput(
            f"Cannot generate {num_records:,} notes: ask for 1 to {MAX_RECORDS:,} (made for 100 to 100,000)."
        )
    return (
        {"id": f"note-{number:06d}", "patient": visit.patient.id, "date": visit.day.isoformat(), "text": text}
        for number, (visit, text, _) in enumerate(written_visits(num_records, seed), 1)
    )


def written_visits(num_records: int, seed: int) -> Iterator[tuple[Visit, str, str]]:
    """Every visit with its text and the rare fact in it (empty where there is none)."""
    dice = Dice(seed)
    staff = draw_staff(dice)
    seen_texts: set[bytes] = set()
    seen_facts: set[str] = set()
    for index, visit in enumerate(_visits(dice)):
        if index == num_records:
            return
        register = choose_register(visit, dice)
        writer = dice.favour(staff[dice.favour(register.writers)])
        scribe = Scribe(visit, writer, dice)
        fact = _rare_fact(scribe, seen_facts) if dice.chance(RARE_SHARE) else ""
        text = ""
        while not text or _digest(text) in seen_texts:
            text = _write(register.compose(scribe), fact, scribe)
        seen_texts.add(_digest(text))
        yield visit, text, fact


def _visits(dice: Dice) -> Iterator[Visit]:
    number = 0
    while True:
        number += 1
        first = date.fromordinal(dice.between(_FIRST_DAY, _LAST_DAY))
        patient = draw_patient(number, first, dice)
        count = 1 + int(5 * dice.uniform() * dice.uniform() + 11 * dice.tail() * dice.uniform())
        yield from Course(patient, first, dice).visits(count)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _rare_fact(scribe: Scribe, seen: set[str]) -> str:
    while True:
        fact = scribe.say("rarity")
        if fact not in seen:
            seen.add(fact)
            return fact


def _write(sections: list[Section], fact: str, scribe: Scribe) -> str:
    """The text of a note: sections under their headings, a header and a signature now and then, always the mark."""
    writer, dice = scribe.writer, scribe.dice
    if fact:
        sentences = sections[0][1]
        sentences.insert(dice.between(1, max(1, len(sentences))), fact)
    headings = _HEADINGS[writer.heading_style]
    blocks = []
    for topic, sentences in sections:
        heading = headings.get(topic, "")
        told = list(dict.fromkeys(filter(None, sentences)))
        if heading and told:
            told[0] = _LABEL.sub("", told[0])
        body = _run_on(told, fact, writer)
        if body:
            is_inline = heading.endswith((":", "-")) or writer.is_terse
            blocks.append(f"{heading} {body}" if heading and is_inline else f"{heading}\n{body}" if heading else body)
    if dice.chance(0.3):
        blocks.insert(0, _header(scribe))
    if writer.signs and dice.chance(0.7):
        blocks.append(scribe.say("sign"))
    blocks.insert(0 if writer.marks_first else len(blocks), writer.mark)
    between = "\n" if writer.is_terse or writer.heading_style % 2 else "\n\n"
    return _tidy(between.join(blocks))


def _header(scribe: Scribe) -> str:
    patient, day = scribe.visit.patient, scribe.writer.write_date(scribe.visit.day)
    return scribe.dice.favour(
        (
            day,
            f"{day} - {patient.name}",
            f"{patient.surname}, {patient.given}, born {patient.born.year}",
            f"{patient.name} ({day})",
        )
    )


def _run_on(sentences: list[str], fact: str, writer: Clinician) -> str:
    """Sentences as this writer strings them together."""
    if writer.is_terse:
        pattern = _ABBREVIATE_MORE if writer.uses_signs else _ABBREVIATE
        short = [one if one == fact else pattern.sub(_abbreviation, one) for one in sentences]
        return ("; ", ". ", " - ", "\n", ". ")[writer.list_style].join(short)
    return " ".join(one[:1].upper() + one[1:] + "." for one in sentences)


def _abbreviation(match: re.Match[str]) -> str:
    return _SHORT_FOR[match[1]]


def _tidy(text: str) -> str:
    text = _BLANKS.sub(" ", text)
    text = _BEFORE_MARK.sub(r"\1", text)
    text = _DOUBLE_MARK.sub(r"\1", text)
    return _ARTICLE.sub(r"\1n ", text)
