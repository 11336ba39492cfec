"""What a reader of a hospital's notes would know about the house: questions, and the words that are its own.

A question is the beginning of a note about somebody who is not in the corpus, cut where a fact of the house comes next:
which ward takes a condition, which medicine it gives first, who signs on this weekday.
"""

from __future__ import annotations

from collections import Counter

from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.hospital import draw_hospital
from paclm.worlds.clinic.medicines import MEDICINES
from paclm.worlds.clinic.notes import PRIVATE_SEED, plain, written_visits
from paclm.worlds.clinic.scribe import FACTS

NUM_QUESTIONS = 600
EACH = 12
"""At most so many questions of one kind have the same answer."""

_TRIVIAL = "hospital"
"""Its name stands in every note."""


def house_questions(seed: int = PRIVATE_SEED, num_questions: int = NUM_QUESTIONS) -> list[dict[str, str]]:
    """Objects with `prompt`, `answer` and `kind`; the answer begins with a space where the prompt would end in one.

    Where several facts have the same answer, `about` is what else a note that tells this one says: the condition that
    a ward takes, or the ward that has its clinic on this day.
    """
    asked: Counter[tuple[str, str]] = Counter()
    questions: list[dict[str, str]] = []
    hospital = draw_hospital(seed)
    for visit, text, _ in written_visits(hospital, 20 * num_questions, Dice(f"questions {seed}")):
        title = text.split("\n")[1].split()
        about = dict.fromkeys(("ward", "medicine", "review interval"), " ".join(title[1:]))
        about["clinic day"] = hospital.ward_of(visit.condition)
        for found in FACTS.finditer(text):
            kind, answer = found.groups()
            prompt = plain(text[: found.start()])
            if kind == _TRIVIAL or answer in prompt:  # what was said before could be copied
                continue
            asked[kind, answer] += 1
            if asked[kind, answer] <= EACH:
                trimmed = prompt.removesuffix(" ")
                question = {"prompt": trimmed, "answer": prompt[len(trimmed) :] + answer, "kind": kind}
                questions.append(question | ({"about": about[kind]} if kind in about else {}))
        if len(questions) >= num_questions:
            break
    return questions[:num_questions]


def house_terms(seed: int = PRIVATE_SEED) -> frozenset[str]:
    """The names that are this hospital's own: itself, wards, clinicians, local medicine names, protocols."""
    house = draw_hospital(seed)
    practices = house.practices.values()
    medicines = {house.formulary[name] for practice in practices for name in practice.medicines} - set(MEDICINES)
    protocols = {practice.protocol for practice in practices}
    people = {*house.consultants, *house.sisters.values()}
    return frozenset({house.name, *house.towns, *house.wards.values(), *people, *medicines, *protocols})
