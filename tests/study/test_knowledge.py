"""Recall of house knowledge: who completes a prompt by the answer, counted without generating anything."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import RULES
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.decoding import GREEDY
from paclm.study.lab import Lab
from paclm.study.questions import (
    AskedQuestion,
    Question,
    count_units,
    embedded_questions,
    encode_questions,
    is_embedded,
    read_questions,
    share_texts,
    supported,
)
from paclm.study.regimes import knowledge
from paclm.study.regimes.knowledge import KnowledgeScale, all_right, answer_votes, release_matches
from paclm.study.report import write_report
from paclm.study.run import run_regime
from paclm.study.serving import EngineStreams, continue_by, play
from paclm.study.tables import table_named
from paclm.worlds.clinic import generate_notes, house_questions
from paclm.worlds.readers import read_corpus
from paclm.worlds.records import ReadOptions, Record
from study.small_lab import RUNTIME

SCALE = KnowledgeScale(questions=8, sessions=3, budgets=(2.0**-4, 2.0**-16), examples=3)
HOUSE = [
    Question("the old house and the", " night", "house"),
    Question("the patient reports mild", " fever", "patient"),
    Question("review of the", " clinic", "patient"),
    Question("a new", " unicorn", "house"),  # in no record
    Question("the end of one", " school", "house"),
]


def asking(lab, questions=HOUSE):
    return Lab(lab.workspace, runtime=RUNTIME, questions=questions)


def streams_of(engine, count, with_full=False):
    return EngineStreams(engine, GREEDY, [Coins(0)] * count, with_full=with_full)


def test_teacher_forced_matches_are_those_of_free_decoding(small_lab, texts):
    lab, sessions, length = small_lab, 6, 4
    prompts = [lab.tokenizer(text)["input_ids"][:5] for text in texts[:6]]
    engine = lab.engine("worlds", "full", sequences=len(prompts) * sessions, context=16)
    picks = {"public": lambda panel: panel.public, "full": lambda panel: panel.worlds[:, -1]}
    written = {
        name: continue_by(streams_of(engine, len(prompts)), prompts, length, pick) for name, pick in picks.items()
    }
    drawn = ResearchSessions.seeded(8, RULES["gaussian"], 2.0**-4, 7, len(prompts) * sessions)
    every = [prompt for prompt in prompts for _ in range(sessions)]
    released = play(streams_of(engine, len(every), with_full=True), every, drawn, length).tokens.reshape(
        -1, sessions, length
    )
    # answers that someone gives: the public model, the full-corpus adapter, one session; and one that nobody does
    answers = [
        *(written["public"][i, :3] for i in (0, 1)),
        *(written["full"][i, :4] for i in (2, 3)),
        released[4, 0, :4],
        (written["public"][5, :3] + 1) % 700,
    ]
    asked = [
        AskedQuestion(Question("", ""), tuple(prompt), tuple(map(int, answer)))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    votes = answer_votes(engine, asked)
    for name, column in (("public", votes.public), ("full", votes.full)):
        free = [(written[name][i, : len(answer)] == answer).all() for i, answer in enumerate(answers)]
        assert all_right(column, votes).tolist() == free
        assert 0 < sum(free) < len(free)
    free = [(released[i, :, : len(answer)] == answer).all(axis=1).mean() for i, answer in enumerate(answers)]
    shares = release_matches(votes, RULES["gaussian"], 2.0**-4, sessions, 7)
    assert shares.tolist() == free
    assert any(0.0 < share < 1.0 for share in free), "sessions that all agree would prove nothing"
    assert all_right(votes.votes, votes).shape == (len(asked), 8)


def test_questions_of_one_text_are_read_with_the_longest_and_get_the_same_votes(small_lab):
    tokens = tuple(small_lab.tokenizer("the patient reports mild fever since morning")["input_ids"])
    cuts = [(4, 5), (2, 4), (5, 7), (1, 3)]
    asked = [AskedQuestion(Question("", ""), tokens[:a], tokens[a:b]) for a, b in cuts]
    asked.append(AskedQuestion(Question("", ""), tokens[:3], (9,)))  # goes on differently
    assert len(share_texts(asked)) == 2
    engine = small_lab.engine("worlds", "full")
    together = answer_votes(engine, asked)
    alone = [answer_votes(engine, [one]) for one in asked]
    for name in ("votes", "public", "full", "truth"):
        assert np.array_equal(together.column(name), np.concatenate([one.column(name) for one in alone])), name
    assert np.bincount(together.passage).tolist() == [1, 2, 2, 2, 1]


def test_a_question_counts_only_if_its_answer_is_in_the_records_of_several_units():
    groups = {"Maple": ["p1", "p1", "p1", "p2"], "Oak": ["p1", "p2", "p3"]}
    records = [
        Record(f"{name}-{i}", f"moved to\n{name} ward. Oakley", group)
        for name, owners in groups.items()
        for i, group in enumerate(owners)
    ]
    questions = [Question("to", " Maple ward"), Question("to", " Oak"), Question("to", " Elm")]
    units = count_units(questions, records)
    assert list(units.values()) == [2, 3, 0]
    assert supported(questions, units, 3) == questions[1:2]
    alone = count_units(questions, [replace(record, group=None) for record in records])
    assert alone[questions[0]] == 4, "without groups every record is its own unit"
    with pytest.raises(InvalidInput, match="at least 4"):
        supported(questions, units, 4)
    told = [replace(questions[1], about="moved to Oak"), replace(questions[1], about="Maple")]
    assert list(count_units(told, records).values()) == [3, 0], "a record tells it only if it names what it is about"
    with pytest.raises(InvalidInput):
        KnowledgeScale(8, 2, least_units=1)


def test_an_answer_begins_where_the_tokens_of_its_prompt_end(small_tokenizer):
    def ids(text):
        return tuple(small_tokenizer(text, add_special_tokens=False)["input_ids"])

    apart = Question("the pati", "ent")
    assert ids("the patient")[: len(ids("the pati"))] != ids("the pati"), "a token crosses the border"
    together, spaced = Question("the old", " house"), Question("the old  ", "house")
    asked = encode_questions([together, spaced, apart], small_tokenizer, 64)
    assert [(one.prompt, one.answer) for one in asked] == [
        (ids("the old"), ids(" house")),
        (ids("the old"), ids("the old  house")[len(ids("the old")) :]),
        (ids("the pati"), ids("ent")),
    ]
    long = Question(" ".join(["the old water"] * 40), " house")
    (cut,) = encode_questions([long], small_tokenizer, 16)
    assert (len(cut.prompt) + len(cut.answer), cut.prompt) == (16, ids(long.prompt)[-len(cut.prompt) :])
    with pytest.raises(InvalidInput):
        encode_questions([Question("the", " the old water" * 8)], small_tokenizer, 16)


def test_a_file_of_questions_is_read_and_its_errors_name_the_line(tmp_path):
    path = tmp_path / "questions.jsonl"
    lines = [{"prompt": "to ward", "answer": " Maple", "kind": "ward"}, {"prompt": "a", "answer": "b", "id": 3}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_questions(path) == [Question("to ward", " Maple", "ward"), Question("a", "b")]
    for bad in (
        "{",
        "[1]",
        '{"prompt": "private words"}',
        '{"prompt": "private words", "answer": " "}',
        '{"prompt": 3, "answer": "b"}',
        '{"prompt": "private words", "answer": "b", "kind": "all"}',
        '{"prompt": "private words", "answer": "b", "kind": 3}',
    ):
        path.write_text(f"{json.dumps(lines[0])}\n{bad}\n")
        with pytest.raises(InvalidInput, match=r'questions\.jsonl:2 .*"answer": " Maple"') as error:
            read_questions(path)
        assert "private" not in str(error.value)
    for content in (b"", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(InvalidInput):
            read_questions(path)
    with pytest.raises(InvalidInput, match="--questions"):
        read_questions(tmp_path / "none.jsonl")


def test_rows_are_by_kind_release_and_budget_and_unsupported_questions_are_left_out(small_lab):
    result = run_regime(asking(small_lab), knowledge.REGIME, "quick", scale=SCALE)
    scores = result.select(part="score")
    releases = [("public", None), *((r, b) for r in ("gaussian",) for b in ("2^-4", "2^-16")), ("plurality", None)]
    releases += [("mixture", None), ("channel", "2^-4"), ("channel", "2^-16"), ("noiseless", None), ("full", None)]
    assert [(row["release"], row["budget"]) for row in scores if row["kind"] == "all"] == releases
    assert {row["kind"]: row["questions"] for row in scores} == {"all": 4, "house": 2, "patient": 2}
    assert all(0.0 <= row["exact_match"] <= 1.0 and row["units_least"] >= 3 for row in scores)
    assert "4 of 5 questions were asked; left out are 1 " in result.notes[0]
    table = table_named("tab:knowledge").build({"knowledge": result})
    assert list(table.columns) == ["release", "b", "all (4)", "house (2)", "patient (2)", "kept"]
    assert len(table.rows) == len(releases)


def test_a_report_holds_no_text_of_records_that_are_not_synthetic(small_lab, monkeypatch):
    lab = asking(small_lab)
    result = run_regime(lab, knowledge.REGIME, "quick", scale=SCALE)
    assert not result.select(part="example")
    page = write_report(lab.folder).page.read_text()
    assert "tab:knowledge" in page
    assert "tab:knowledge-examples" not in page
    monkeypatch.setattr(knowledge, "is_embedded", lambda workspace: True)
    result = run_regime(asking(small_lab), knowledge.REGIME, "quick", scale=SCALE)
    shown = result.select(part="example")
    assert (len(shown), {row["kind"] for row in shown[:2]}) == (3, {"house", "patient"})
    assert all(row["said_public"] and row["said_gaussian"] for row in shown)
    assert "tab:knowledge-examples" in write_report(lab.folder).page.read_text()


def test_more_questions_than_the_scale_allows_are_drawn_from(small_lab):
    result = run_regime(asking(small_lab), knowledge.REGIME, "quick", scale=replace(SCALE, questions=2))
    assert {row["questions"] for row in result.select(kind="all")} == {2}


def test_only_the_embedded_corpus_is_recognized_by_its_name_its_sources_and_its_hospital():
    note = next(generate_notes(1))["text"]

    def opened(name, source, text=note):
        manifest = SimpleNamespace(arguments={"corpus": name})
        return SimpleNamespace(manifest=manifest, records=lambda part: [Record("1", text, source=source)])

    assert embedded_questions(opened("notes.jsonl", "notes.jsonl:1")) is None
    assert {"ward", "medicine", "signature"} <= {
        one.kind for one in embedded_questions(opened("clinic:90", "clinic:17"))
    }
    assert is_embedded(opened("clinic:90", "clinic:17"))
    assert not is_embedded(opened("clinic:90", "letter.txt:1"))  # a folder of that name
    assert not is_embedded(opened("notes.jsonl", "notes.jsonl:1"))
    older = next(generate_notes(1, seed=1))["text"]  # `clinic:N` was another hospital once
    assert embedded_questions(opened("clinic:90", "clinic:17", older)) is None


def test_without_questions_the_regime_says_what_to_write(small_lab):
    with pytest.raises(InvalidInput, match=r'--questions.*"prompt"'):
        run_regime(small_lab, knowledge.REGIME, "quick", scale=SCALE)


def test_the_embedded_corpus_answers_the_embedded_questions():
    records = read_corpus("clinic:150", ReadOptions(group_by="patient")).records
    questions = [Question(**fields) for fields in house_questions()]
    units = count_units(questions, records)
    kept = supported(questions, units, 3)
    assert len(kept) > len(questions) / 2
    assert {question.kind for question in kept} == {question.kind for question in questions}
    other = count_units(questions, [Record(note["id"], note["text"]) for note in generate_notes(150, seed=100)])
    assert sum(other[question] >= 3 for question in kept) < len(kept) / 2, "they are about this hospital"
