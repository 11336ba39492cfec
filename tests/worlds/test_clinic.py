"""The notes of made-up hospitals: the same everywhere, no two alike, true to their patients and to their house."""

import re
from collections import Counter, defaultdict
from datetime import date
from hashlib import sha256
from statistics import mean, median, quantiles
from unittest.mock import Mock

import pytest

from paclm.errors import InvalidInput
from paclm.worlds.clinic import generate_notes, house_questions, house_terms
from paclm.worlds.clinic import notes as notes_module
from paclm.worlds.clinic.conditions import ACUTE, CHRONIC, SPECIALITIES
from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.grammar import Habits, Voice, add_rules, expand, parse_phrase
from paclm.worlds.clinic.hospital import draw_hospital
from paclm.worlds.clinic.measurements import ANALYTES
from paclm.worlds.clinic.medicines import MEDICINES
from paclm.worlds.clinic.notes import plain, written_visits
from paclm.worlds.clinic.phrases import RULES
from paclm.worlds.clinic.scribe import END, FACT, FACTS, KINDS, STOP, Scribe
from paclm.worlds.clinic.tables import read_blocks

AGE = re.compile(
    r"\b(\d{1,3})-year-old\b|\baged (\d{1,3})\b|\((\d\d)\)|Age: (\d{1,3})|is (\d{1,3}),|, (\d\d), |(\d\d)y,"
)
HOSPITAL = draw_hospital(12)


@pytest.fixture(scope="module")
def marked():
    return list(written_visits(HOSPITAL, 2000, Dice(3)))


@pytest.fixture(scope="module")
def written(marked):
    return [(visit, plain(text), fact) for visit, text, fact in marked]


@pytest.fixture(scope="module")
def texts(written):
    return [text for _, text, _ in written]


def test_a_seed_names_the_same_notes_on_every_machine_and_another_others():
    joined = "\n".join(note["text"] for note in generate_notes(300, seed=7))
    assert sha256(joined.encode()).hexdigest()[:16] == "97f74ba6b23002c1"
    ours = {note["text"] for note in generate_notes(200, seed=3)}
    assert ours.isdisjoint(note["text"] for note in generate_notes(200, seed=4))


def test_a_shorter_corpus_is_the_beginning_of_a_longer_one():
    assert list(generate_notes(40)) == list(generate_notes(60))[:40]


def test_every_note_has_its_four_fields_in_order():
    notes = list(generate_notes(150))
    assert [note["id"] for note in notes] == [f"note-{number:06d}" for number in range(1, 151)]
    assert all(list(note) == ["id", "patient", "date", "text"] for note in notes)
    assert all(date.fromisoformat(note["date"]) for note in notes)


@pytest.mark.parametrize("num_records", [0, -5, 1_000_001])
def test_a_number_of_notes_out_of_range_is_refused_at_once(num_records):
    with pytest.raises(InvalidInput, match="ask for 1 to 1,000,000"):
        generate_notes(num_records)


def test_no_two_of_ten_thousand_notes_are_alike():
    notes = [note["text"] for note in generate_notes(10_000, seed=12)]
    assert len(set(notes)) == 10_000


def test_a_text_that_was_written_before_is_written_again(monkeypatch):
    drafts = iter(["the same", "the same", "the same", "another", "a third"])
    monkeypatch.setattr(notes_module, "_write", lambda *_: next(drafts))
    assert [text for _, text, _ in written_visits(HOSPITAL, 3, Dice(1))] == ["the same", "another", "a third"]


def test_a_rare_fact_stands_in_one_note_only(written, texts):
    facts = [(fact, text) for _, text, fact in written if fact]
    assert 0.04 < len(facts) / len(written) < 0.09
    everything = "\n\n".join(texts).lower()
    for fact, text in facts:
        shown = notes_module._ARTICLE.sub(r"\1n ", fact).lower()
        assert shown in text.lower()
        assert everything.count(shown) == 1


def test_a_rare_fact_that_was_used_before_is_drawn_again():
    scribe, seen = Mock(say=Mock(side_effect=["a", "a", "b"])), set()
    assert [notes_module._rare_fact(scribe, seen), notes_module._rare_fact(scribe, seen)] == ["a", "b"]


# What is a hospital's own


def test_what_a_note_says_about_the_house_is_what_the_house_does(marked):
    seen = Counter()
    for visit, text, _ in marked:
        ward = HOSPITAL.wards[visit.condition.speciality]
        practice = HOSPITAL.practices[visit.condition.name]
        right = {
            "hospital": HOSPITAL.name,
            "ward": ward,
            "clinic day": HOSPITAL.clinic_days[ward],
            "signature": HOSPITAL.consultants[visit.day.weekday()],
            "ward sister": HOSPITAL.sisters[ward],
            "protocol": practice.protocol,
            "review interval": practice.interval,
            "medicine": HOSPITAL.formulary[practice.medicines[0]] if practice.medicines else None,
        }
        for kind, said in FACTS.findall(text):
            assert said == right[kind]
            seen[kind] += 1
    assert set(seen) == set(right)
    assert min(seen.values()) > 100


def test_another_hospital_tells_nothing_about_this_one():
    """Of 300 hospitals about one in sixty agrees by chance on a ward, fewer on the rest."""
    ours, others = draw_hospital(7), [draw_hospital(seed) for seed in range(1_000_000, 1_000_300)]
    assert all(one.name != ours.name for one in others)
    assert mean(one.wards["heart"] == ours.wards["heart"] for one in others) < 0.05
    assert mean(one.consultants[0] == ours.consultants[0] for one in others) == 0
    local = [name for name, said in ours.formulary.items() if said != name]
    assert 0.65 < len(local) / len(MEDICINES) < 0.95
    assert mean(one.formulary[name] == ours.formulary[name] for one in others for name in local) < 0.001
    assert len({one.formulary["metformin"] for one in others}) > 200
    assert len({tuple(one.chronic) for one in others}) == 300


def test_hospitals_share_their_kinds_of_note_and_differ_in_style():
    firsts = [next(iter(generate_notes(1, seed))) for seed in range(100, 140)]
    titles = {kind.title for kind in KINDS}
    assert {note["text"].split("\n")[1].split(":")[0] for note in firsts} <= titles
    labels = {tuple(re.findall(r"(?m)^[A-Z/]+[a-z ]*(?::| -)", note["text"])) for note in firsts}
    assert len(labels) > 25


def test_a_house_always_writes_dates_and_headings_the_same_way(texts):
    clinic = [text for text in texts if text.split("\n")[1].startswith("Clinic note")]
    plans = Counter(line.split()[0] for text in clinic for line in text.split("\n") if re.search(r"BP \d|/min", line))
    assert len(plans) == 1


def test_every_hospital_has_a_ward_for_every_speciality():
    for seed in range(50):
        house = draw_hospital(seed)
        assert set(house.wards) == set(SPECIALITIES)
        assert len(set(house.wards.values())) == len(SPECIALITIES)
        assert set(house.practices) == {one.name for one in (*house.chronic, *house.acute)}
        assert len({practice.protocol for practice in house.practices.values()}) == len(house.practices)


def test_a_question_is_the_beginning_of_a_new_note_and_its_answer_stands_in_notes_of_several_patients():
    notes = list(generate_notes(1500, seed=12))
    corpus = {note["text"] for note in notes}
    questions = house_questions(12)
    assert len(questions) == 600
    kinds = {"ward", "medicine", "signature", "protocol", "ward sister", "clinic day", "review interval"}
    assert {one["kind"] for one in questions} == kinds
    for one in questions:
        assert not any(text.startswith(one["prompt"] + one["answer"]) for text in corpus if one["kind"] != "ward")
        assert not one["prompt"].endswith(" ")
        assert one["answer"].strip() not in one["prompt"]
        assert one["answer"].strip()
        assert not set(one["prompt"] + one["answer"]) & {FACT, STOP, END}
    answers = {one["answer"].strip() for one in questions}
    told_by = {answer: {note["patient"] for note in notes if answer in note["text"]} for answer in answers}
    assert mean(len(patients) >= 3 for patients in told_by.values()) > 0.95


def test_the_same_questions_have_other_answers_in_another_house():
    ours = {one["answer"] for one in house_questions(12) if one["kind"] in ("medicine", "signature", "protocol")}
    others = {one["answer"] for one in house_questions(13)}
    assert len(ours & others) < 0.15 * len(ours)


def test_house_terms_are_names_that_stand_in_its_notes_and_not_in_those_of_another(texts):
    terms, joined = house_terms(12), "\n".join(texts)
    assert {HOSPITAL.name, *HOSPITAL.wards.values(), *HOSPITAL.consultants} <= terms
    assert mean(term in joined for term in terms) > 0.9
    elsewhere = "\n".join(note["text"] for note in generate_notes(500, seed=13))
    assert mean(term in elsewhere for term in terms) < 0.1
    assert not terms & set(MEDICINES)


# Patients


def test_name_and_birthday_never_change(written):
    people = defaultdict(set)
    for visit, _, _ in written:
        people[visit.patient.id].add((visit.patient.name, visit.patient.born, visit.patient.town))
    assert all(len(faces) == 1 for faces in people.values())


def test_every_note_names_its_patient_and_the_age_on_that_day():
    for seed in range(100, 130):
        for visit, text, _ in written_visits(draw_hospital(seed), 20, Dice(seed)):
            line = next(line for line in plain(text).split("\n") if visit.patient.name in line)
            assert re.search(rf"\b{visit.age}(?:\b|y)", line), line
            titled = re.findall(r"\b(?:Mr|Mrs) ([A-Z][\w'-]+)", text)
            assert set(titled) <= {visit.patient.surname}


def test_visits_of_a_patient_go_forward_in_time(written):
    last = {}
    for visit, _, _ in written:
        assert visit.day >= last.get(visit.patient.id, visit.day)
        last[visit.patient.id] = visit.day


def test_patients_have_few_notes_mostly_and_many_sometimes(written):
    counts = sorted(Counter(visit.patient.id for visit, _, _ in written).values())
    assert counts[0] == 1
    assert 1 <= median(counts) <= 3
    assert 6 <= counts[-1] <= 12


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
    assert moved > 50


def test_blood_pressure_and_fever_follow_the_illness():
    pressure, warmth = defaultdict(list), defaultdict(list)
    for seed in range(100, 160):
        for visit, _, _ in written_visits(draw_hospital(seed), 30, Dice(seed)):
            pressure["high blood pressure" in (visit.condition.name, *visit.background)].append(visit.vitals.systolic)
            warmth["fever" in visit.condition.tags and visit.trend == "new"].append(visit.vitals.temperature)
    assert mean(pressure[True]) > mean(pressure[False]) + 10
    assert mean(warmth[True]) > mean(warmth[False]) + 0.5


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
    assert all(text.startswith("[synthetic note]\n") for text in texts)


def test_lengths_suit_a_small_model(texts):
    words = [len(text.split()) for text in texts]
    cuts = quantiles(words, n=100)
    assert 55 <= median(words) <= 100
    assert cuts[0] >= 25
    assert max(words) <= 200


def test_no_line_is_empty_and_no_slot_is_left_open():
    for seed in range(100, 160):
        for note in generate_notes(25, seed):
            text = note["text"]
            assert not re.search(r"[{}<>|¶]|\n\n|\n$", text), text
            assert not re.search(r"  | [,;.](?:\s|$)|[,;]\.|\bNone\b|\b[aA] [aei]\w", text), text
            assert not re.search(r"(?m)(?::| -)$", text), text


def test_vocabularies_are_long_tailed(written):
    names = Counter(visit.patient.surname for visit in {v.patient.id: v for v, _, _ in written}.values())
    conditions = Counter(visit.condition.name for visit, _, _ in written)
    assert len(names) > 200
    assert len(conditions) == len(HOSPITAL.practices)
    assert conditions.most_common(1)[0][1] > 3 * median(conditions.values())


# The grammar


VOICE = Voice(Dice(5), Habits(1))


def test_early_choices_come_more_often_and_flat_ones_alike():
    tailed, flat = parse_phrase("{a|b|c|d}"), parse_phrase("{a|b|c|d}", None)
    first = [sum(expand(phrase, VOICE, {}) == "a" for _ in range(4000)) / 4000 for phrase in (tailed, flat)]
    assert first == [pytest.approx(0.707, abs=0.04), pytest.approx(0.25, abs=0.04)]  # 5 standard errors: below 1e-6


def test_a_house_keeps_its_habits_and_houses_differ():
    phrase = parse_phrase("{a|b|c|d}", 1.0)
    chosen = [{expand(phrase, Voice(Dice(n), Habits(seed)), {}) for n in range(20)} for seed in range(60)]
    assert all(len(one) == 1 for one in chosen)
    assert set.union(*chosen) == set("abcd")
    mostly = parse_phrase("{a|b|c|d}", 0.8)
    often = Counter(expand(mostly, Voice(VOICE.dice, Habits(1)), {}) for _ in range(2000)).most_common(1)[0][1]
    assert often / 2000 > 0.75


def test_a_slot_beats_a_rule_and_a_rule_does_not_repeat_itself():
    assert expand(parse_phrase("<negative>"), VOICE, {"negative": "never"}) == "never"
    pairs = [expand(parse_phrase("<negative>, <negative>"), VOICE, {}).split(", ") for _ in range(200)]
    assert sum(first == second for first, second in pairs) < 10


@pytest.mark.parametrize("broken", ["{a|b", "a}", "[a", "<slot", "a|b", "a]"])
def test_a_broken_phrase_and_a_second_rule_of_a_name_are_refused(broken):
    with pytest.raises(ValueError):
        parse_phrase(broken)
    with pytest.raises(KeyError, match="twice"):
        add_rules({"negative": "never"}, None)


def test_every_slot_of_every_rule_leads_somewhere(written):
    scribe = Scribe(next(visit for visit, _, _ in written if visit.prescriptions), HOSPITAL, VOICE)
    known = set(RULES) | set(scribe.slots) | {"items", "lab", "value", "unit", "before", "old_dose"}
    for name in ("style", "wording", "vocabulary", "rarities", "chronic", "acute"):
        text = "\n".join(line for _, lines in read_blocks(name) for line in lines)
        assert set(re.findall(r"<([^<>]*)>", text)) <= known, name


def test_every_rule_is_used():
    text = "\n".join(
        line
        for name in ("style", "wording", "vocabulary", "rarities", "chronic", "acute")
        for _, lines in read_blocks(name)
        for line in lines
    )
    named = set(re.findall(r"<([^<>]*)>", text))
    said = {"rarity", "header", "between", "result", "prescription", "vitals", "review", "sign", "sign_nurse", "denies"}
    said |= {"seen", "seen_well", "advised", "safety", "by_protocol", "start", "raise", "lower", "stop", "keep"}
    said |= {"occupation", "since_acute", "since_chronic", "nurse_open"}
    said |= {"nurse_comfort", "nurse_care", "nurse_gave", "call_open", "call_mood"}
    prefixes = ("l_", "history_", "thought_", "trigger_", "letter_")
    assert {name for name in RULES if name not in named | said and not name.startswith(prefixes)} == set()


def test_conditions_use_medicines_and_analytes_that_exist():
    for condition in (*CHRONIC, *ACUTE):
        assert set(condition.medicines) <= set(MEDICINES), condition.name
        assert set(condition.labs) <= set(ANALYTES), condition.name
        assert len(condition.symptoms) >= 3, condition.name
        assert condition.speciality in SPECIALITIES, condition.name
