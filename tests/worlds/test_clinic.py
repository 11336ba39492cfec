"""The synthetic clinic notes: the same everywhere, no two alike, true to their patients, and not a template."""

import lzma
import re
from collections import Counter, defaultdict
from datetime import date
from hashlib import sha256
from statistics import mean, median, quantiles
from unittest.mock import Mock

import pytest

from paclm.errors import InvalidInput
from paclm.worlds.clinic import generate_notes
from paclm.worlds.clinic import notes as notes_module
from paclm.worlds.clinic.clinicians import MARKS
from paclm.worlds.clinic.conditions import ACUTE, CHRONIC
from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.grammar import add_rules, expand, parse_phrase
from paclm.worlds.clinic.measurements import ANALYTES
from paclm.worlds.clinic.medicines import MEDICINES
from paclm.worlds.clinic.notes import written_visits
from paclm.worlds.clinic.phrases import RULES

AGE = re.compile(r"\b(\d{1,3})(?:-year-old|-yo)\b|\baged (\d{1,3})\b|\bis (\d{1,3})(?: now|[,;])")


@pytest.fixture(scope="module")
def written():
    return list(written_visits(4000, seed=7))


@pytest.fixture(scope="module")
def texts(written):
    return [text for _, text, _ in written]


def test_a_seed_names_the_same_notes_on_every_machine_and_another_others():
    joined = "\n".join(note["text"] for note in generate_notes(300, seed=7))
    assert sha256(joined.encode()).hexdigest()[:16] == "98c2d06cda13e610"
    ours = {note["text"] for note in generate_notes(200, seed=3)}
    assert ours.isdisjoint(note["text"] for note in generate_notes(200, seed=4))


def test_every_note_has_its_four_fields_in_order():
    notes = list(generate_notes(150))
    assert [note["id"] for note in notes] == [f"note-{number:06d}" for number in range(1, 151)]
    assert all(list(note) == ["id", "patient", "date", "text"] for note in notes)
    assert all(date.fromisoformat(note["date"]) for note in notes)


@pytest.mark.parametrize("num_records", [0, -5, 1_000_001])
def test_a_number_of_notes_out_of_range_is_refused_at_once(num_records):
    with pytest.raises(InvalidInput, match="ask for 1 to 1,000,000"):
        generate_notes(num_records)


def test_no_two_of_twenty_thousand_notes_are_alike():
    notes = [note["text"] for note in generate_notes(20_000, seed=12)]
    assert len(set(notes)) == 20_000


def test_a_text_that_was_written_before_is_written_again(monkeypatch):
    drafts = iter(["the same", "the same", "the same", "another", "a third"])
    monkeypatch.setattr(notes_module, "_write", lambda *_: next(drafts))
    assert [text for _, text, _ in written_visits(3, seed=1)] == ["the same", "another", "a third"]


def test_a_rare_fact_stands_in_one_note_only(written, texts):
    facts = [(fact, text) for _, text, fact in written if fact]
    assert 0.15 < len(facts) / len(written) < 0.25
    everything = "\n\n".join(texts).lower()
    for fact, text in facts[:400]:
        shown = notes_module._tidy(fact).lower()
        assert shown in text.lower()
        assert everything.count(shown) == 1


def test_a_rare_fact_that_was_used_before_is_drawn_again():
    scribe, seen = Mock(say=Mock(side_effect=["a", "a", "b"])), set()
    assert [notes_module._rare_fact(scribe, seen), notes_module._rare_fact(scribe, seen)] == ["a", "b"]


def test_name_and_birthday_never_change(written):
    people = defaultdict(set)
    for visit, _, _ in written:
        people[visit.patient.id].add((visit.patient.name, visit.patient.born))
    assert all(len(faces) == 1 for faces in people.values())
    for visit, text, _ in written:
        for year in re.findall(r", born (\d{4})\n", text):
            assert int(year) == visit.patient.born.year


def test_every_age_in_a_text_fits_birthday_and_date(written):
    found = 0
    for visit, text, _ in written:
        for groups in AGE.findall(text):
            found += 1
            assert int("".join(groups)) == visit.age, text
    assert found > 1500


def test_most_notes_name_their_patient_and_none_names_another(written):
    surnames = {visit.patient.surname for visit, _, _ in written}
    titled = re.compile(r"\b(?:Mr|Mrs|Ms) ([A-Z][\w'-]+)")
    named = 0
    for visit, text, _ in written:
        named += visit.patient.surname in text or visit.patient.given in text
        assert {name for name in titled.findall(text) if name in surnames} <= {visit.patient.surname}
    assert named / len(written) > 0.75


def test_visits_of_a_patient_go_forward_in_time(written):
    last = {}
    for visit, _, _ in written:
        assert visit.day >= last.get(visit.patient.id, visit.day)
        assert visit.last_seen is None or visit.last_seen < visit.day
        last[visit.patient.id] = visit.day


def test_patients_have_few_notes_mostly_and_many_sometimes(written):
    counts = sorted(Counter(visit.patient.id for visit, _, _ in written).values())
    assert counts[0] == 1
    assert 1 <= median(counts) <= 3
    assert 9 <= counts[-1] <= 16


def test_side_stays_and_a_background_illness_is_never_lost(written):
    seen = defaultdict(set)
    for visit, _, _ in written:
        if not visit.is_acute:
            seen[visit.patient.id, visit.condition.name].add(visit.side)
    assert all(len(sides) == 1 for sides in seen.values())
    lasting = defaultdict(set)
    for visit, _, _ in written:
        names = set(visit.background) | (
            set() if visit.is_acute else {visit.condition.name.replace("<side>", visit.side)}
        )
        lasting[visit.patient.id].add(frozenset(names))
    assert all(len(sets) == 1 for sets in lasting.values())


def test_a_dose_moves_one_step_at_a_time_and_only_by_a_written_change(written):
    steps = {}
    moved = 0
    for visit, _, _ in written:
        names = [one.medicine.name for one in visit.prescriptions]
        assert len(set(names)) == len(names)
        changed = {one.now.medicine.name: one.kind for one in visit.changes}
        before = steps.get(visit.patient.id, {})
        for one in visit.prescriptions:
            name = one.medicine.name
            if name in before and before[name] != one.step and changed.get(name) != "start":
                moved += 1
                assert abs(one.step - before[name]) == 1
                assert changed[name] == ("raise" if one.step > before[name] else "lower")
        steps[visit.patient.id] = {one.medicine.name: one.step for one in visit.prescriptions}
    assert moved > 100


def test_blood_pressure_and_sugar_follow_the_illness(written):
    with_it = [v.vitals.systolic for v, _, _ in written if v.condition.name == "high blood pressure"]
    without = [
        v.vitals.systolic for v, _, _ in written if "high blood pressure" not in (v.condition.name, *v.background)
    ]
    assert mean(with_it) > mean(without) + 10
    sugar = defaultdict(list)
    for visit, _, _ in written:
        ill = any("diabetes" in name for name in (visit.condition.name, *visit.background))
        sugar[ill].extend(one.value for one in visit.readings if one.analyte.short == "glucose")
    assert mean(sugar[True]) > mean(sugar[False]) + 1.5


def test_a_quoted_earlier_value_is_the_value_that_was_measured_then(written):
    measured = {}
    quoted = 0
    for visit, _, _ in written:
        for one in visit.readings:
            key = (visit.patient.id, one.analyte.short)
            assert one.previous == measured.get(key)
            quoted += one.previous is not None
            measured[key] = one.value
    assert quoted > 200


def test_every_note_says_that_it_is_synthetic(texts):
    assert all(any(mark in text for mark in MARKS) for text in texts)
    assert all("synthetic" in mark.lower() and len(mark) < 30 for mark in MARKS)


def test_lengths_are_long_tailed_around_a_hundred_words(texts):
    words = [len(text.split()) for text in texts]
    cuts = quantiles(words, n=100)
    assert 95 <= median(words) <= 125
    assert cuts[0] >= 35
    assert cuts[98] > 1.7 * median(words)
    assert min(words) >= 25
    assert max(words) <= 400


def test_no_section_is_empty_and_no_slot_is_left_open(texts):
    for text in texts:
        assert not re.search(
            r"(?m)^(?:S|O|A|P|History|Examination|Impression|Plan|Exam|Story -|Found -|To do -):?\s*$\n\s*$", text
        )
        assert not re.search(r"[{}<>|]", text), text
        assert not re.search(r"  |\n{3}| [,;.](?:\s|$)|[,;]\.|\bNone\b|\ba [aei]\w", text), text


def test_registers_and_date_styles_vary(texts):
    joined = "\n".join(texts)
    for trace in ("\nSUBJECTIVE\n", "HPC", "TC ", "physio", "ear colleague", "triage", "OBJECTIVE", "tds", "Discharge"):
        assert trace in joined, trace
    for style in (r"\d{4}-\d\d-\d\d", r"\d\d/\d\d/\d{4}", r"\d{1,2} [A-Z][a-z]+ \d{4}", r"[A-Z][a-z]+ \d{1,2}, \d{4}"):
        assert len(re.findall(style, joined)) > 50


def test_vocabularies_are_long_tailed(written):
    names = Counter(visit.patient.surname for visit in {v.patient.id: v for v, _, _ in written}.values())
    conditions = Counter(visit.condition.name for visit, _, _ in written)
    assert len(names) > 350
    assert len(conditions) > 80
    assert names.most_common(1)[0][1] > 10 * median(names.values())
    assert conditions.most_common(1)[0][1] > 5 * median(conditions.values())


def repeated_share(corpus, heldout, size=8):
    """The share of runs of `size` words in held-out texts that some text of the corpus has too."""

    def runs(text):
        words = text.split()
        return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]

    seen = {run for text in corpus for run in runs(text)}
    found = [run in seen for text in heldout for run in runs(text)]
    return sum(found) / len(found)


def bits_per_character(texts, size=1_000_000):
    data = "\n\n".join(texts).encode()[:size]
    assert len(data) == size
    return 8 * len(lzma.compress(data, preset=6)) / len(data)


def rigid_template(visit):
    """The same facts, poured into one form."""
    patient, vitals = visit.patient, visit.vitals
    pressure = f"{vitals.systolic}/{vitals.diastolic}"
    taken = ", ".join(f"{one.medicine.name} {one.dose} {one.rhythm}" for one in visit.prescriptions) or "none"
    return (
        f"Patient: {patient.name}, {visit.age}-year-old {patient.life['occupation']} from {patient.town}. The patient "
        f"complains of {visit.condition.name}. On examination the blood pressure was {pressure} and the pulse was "
        f"{vitals.pulse}. The current medication is as follows: {taken}. The patient was advised to take the "
        "medication as prescribed and to come back to the surgery if the symptoms get worse. A follow-up appointment "
        "was arranged with the practice nurse in four weeks. This is a synthetic note and no real patient is described."
    )


def test_notes_are_new_word_for_word_and_resist_compression_and_a_rigid_template_fails_both(written, texts):
    assert repeated_share(texts[:2000], texts[2100:2600]) < 0.15
    assert bits_per_character(texts) > 1.3
    rigid = [rigid_template(visit) for visit, _, _ in written]
    assert repeated_share(rigid[:2000], rigid[2100:2600]) > 0.45
    assert bits_per_character(rigid) < 0.8


def test_early_choices_come_more_often_and_flat_ones_alike():
    dice = Dice(5)
    tailed, flat = parse_phrase("{a|b|c|d}"), parse_phrase("{a|b|c|d}", is_flat=True)
    first = [sum(expand(phrase, dice, {}) == "a" for _ in range(4000)) / 4000 for phrase in (tailed, flat)]
    assert first == [pytest.approx(0.707, abs=0.04), pytest.approx(0.25, abs=0.04)]  # 5 standard errors: below 1e-6


def test_a_slot_beats_a_rule_and_a_rule_does_not_repeat_itself():
    assert expand(parse_phrase("<weekday>"), Dice(1), {"weekday": "never"}) == "never"
    days = [expand(parse_phrase("<weekday>, <weekday>"), Dice(seed), {}).split(", ") for seed in range(200)]
    assert sum(first == second for first, second in days) < 5


@pytest.mark.parametrize("broken", ["{a|b", "a}", "[a", "<slot", "a|b", "a]"])
def test_a_broken_phrase_and_a_second_rule_of_a_name_are_refused(broken):
    with pytest.raises(ValueError):
        parse_phrase(broken)
    with pytest.raises(KeyError, match="twice"):
        add_rules({"weekday": "never"})


def test_every_slot_of_every_rule_leads_somewhere(written):
    visit = written[0][0]
    scribe = notes_module.Scribe(visit, next(iter(notes_module.draw_staff(Dice(1)).values()))[0], Dice(1))
    known = set(RULES) | set(scribe._slots) | {"labs", "items", "lab_name", "lab_old", "lab_date", "old_dose"}
    known |= {"have_trend", "is_trend", "scan_text"}
    for name in ("vocabulary", "even", "history", "examination", "plan", "registers", "rarities", "chronic", "acute"):
        text = "\n".join(line for _, lines in notes_module.read_blocks(name) for line in lines)
        assert set(re.findall(r"<([^<>]*)>", text)) <= known, name


def test_conditions_use_medicines_and_analytes_that_exist():
    for condition in (*CHRONIC, *ACUTE):
        assert set(condition.medicines) <= set(MEDICINES), condition.name
        assert set(condition.labs) <= set(ANALYTES), condition.name
        assert len(condition.symptoms) >= 3, condition.name
        assert condition.short, condition.name
