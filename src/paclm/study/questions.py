"""Questions whose answers stand in the private records: where they come from, and which of them may be asked.

A question is the beginning of a text and what the owner of the records would write next. It is asked only if its
answer stands in the records of several units (groups, or records without groups). This checks answers, not prompts:
its author sees to it that no question is about a single person.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paclm.errors import InvalidInput
from paclm.study.eval_text import read_text
from paclm.worlds.blocks import TextEncoder, encode_texts
from paclm.worlds.records import Record
from paclm.worlds.workspace import Workspace

ALL = "all"
"""The kind of all questions together."""
A_LINE = '{"prompt": "Letter: gallstones. Ward:", "answer": " Maple", "about": "gallstones", "kind": "ward"}'
WRITE = f"Write one JSON object a line, about and kind are optional: {A_LINE}"

_SYNTHETIC = re.compile("clinic:[0-9]+")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the answer that a completion has to begin with."""

    prompt: str = field(repr=False)
    answer: str = field(repr=False)
    kind: str | None = None
    about: str | None = field(default=None, repr=False)
    """What the answer is said of: a record tells it only if both stand in it."""


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question in tokens."""

    question: Question
    prompt: tuple[int, ...] = field(repr=False)
    answer: tuple[int, ...] = field(repr=False)


def is_embedded(workspace: Workspace) -> bool:
    """Whether the records are notes of the embedded hospital; folders and older corpora may have the same name."""
    if not _SYNTHETIC.fullmatch(str(workspace.manifest.arguments["corpus"])):
        return False
    from paclm.worlds.clinic import PRIVATE_SEED
    from paclm.worlds.clinic.hospital import draw_hospital

    name = draw_hospital(PRIVATE_SEED).name  # stands in every note
    return all(_SYNTHETIC.fullmatch(one.source) and name in one.text for one in workspace.records("train"))


def embedded_questions(workspace: Workspace) -> list[Question] | None:
    """The questions about the embedded corpus; None for every other corpus."""
    if not is_embedded(workspace):
        return None
    from paclm.worlds.clinic import house_questions

    return [Question(**fields) for fields in house_questions()]


def read_questions(path: Path) -> list[Question]:
    """Read a file of questions; an error names the line and never quotes it, as it may hold private text."""
    lines = read_text(path, f"Check the path after --questions. {WRITE}").split("\n")
    found = [_question_of(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise InvalidInput(f"{path} holds no question. {WRITE}")
    return found


def _question_of(where: str, line: str) -> Question:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidInput(f"{where} is not JSON. {WRITE}") from None
    if not isinstance(fields, dict):
        raise InvalidInput(f"{where} is not a JSON object. {WRITE}")
    for name in ("prompt", "answer"):
        if not isinstance(fields.get(name), str) or not fields[name].strip():
            raise InvalidInput(f"{where} has no text in {name!r}. {WRITE}")
    kind = fields.get("kind")
    if kind is not None and (not isinstance(kind, str) or not kind.strip() or kind == ALL):
        raise InvalidInput(f"{where} has a 'kind' that is not the name of one: text, and not {ALL!r}. {WRITE}")
    about = fields.get("about")
    if about is not None and (not isinstance(about, str) or not about.strip()):
        raise InvalidInput(f"{where} has no text in 'about'. {WRITE}")
    return Question(fields["prompt"], fields["answer"], kind, about)


def count_units(questions: Iterable[Question], records: Iterable[Record]) -> dict[Question, int]:
    """The records of how many different units tell each answer: it stands there, and what it is said of does, too.

    Both as whole words and however they are spaced.
    """
    wanted = {one: {_spaced(text) for text in (one.answer, one.about) if text is not None} for one in questions}
    patterns = {text: re.compile(rf"(?<!\w){re.escape(text)}(?!\w)") for texts in wanted.values() for text in texts}
    units: dict[Question, set[tuple[str, str]]] = {question: set() for question in wanted}
    for record in records:
        unit, text = ("group", record.group) if record.group is not None else ("id", record.id), _spaced(record.text)
        told = {part for part, pattern in patterns.items() if part in text and pattern.search(text)}
        for question, parts in wanted.items():
            if parts <= told:
                units[question].add(unit)
    return {question: len(found) for question, found in units.items()}


def _spaced(text: str) -> str:
    return " ".join(text.split())


def supported(questions: Sequence[Question], units: Mapping[Question, int], least_units: int) -> list[Question]:
    """The questions that are not about a few units only; raises if none is left."""
    kept = [question for question in questions if units[question] >= least_units]
    if not kept:
        raise InvalidInput(
            f"None of the {len(questions):,} questions can be asked: an answer, and what it is about, has to stand in "
            f"the training records of at least {least_units} different units (groups, or records without groups). Use "
            "more records, or ask what many of them say, never what one person's do."
        )
    return kept


def encode_questions(questions: Sequence[Question], tokenizer: TextEncoder, window: int) -> list[AskedQuestion]:
    """Questions in tokens, at most `window` of prompt and answer: a longer prompt loses its beginning.

    Prompt and answer are encoded together. Where a token would cross the border they are encoded apart, because a
    completion begins after the tokens of the prompt. Spaces at the end of a prompt are moved to its answer: tokens of
    most models begin with the space before a word.
    """
    prompts = [question.prompt.rstrip(" ") for question in questions]
    answers = [
        question.prompt[len(prompt) :] + question.answer for question, prompt in zip(questions, prompts, strict=True)
    ]
    whole = encode_texts(tokenizer, [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    asked = []
    for question, before, after, together in zip(
        questions, encode_texts(tokenizer, prompts), encode_texts(tokenizer, answers), whole, strict=True
    ):
        if together[: len(before)] == before:
            after = together[len(before) :]
        room = window - len(after)
        if room < 1:
            raise InvalidInput(f"An answer has {len(after)} tokens, and a window {window}. Shorten it.")
        asked.append(AskedQuestion(question, tuple(before[-room:]), tuple(after)))
    return asked


def share_texts(asked: Sequence[AskedQuestion]) -> list[tuple[tuple[int, ...], list[int]]]:
    """The texts to read for these questions, and which questions each serves.

    Prompt and answer of a question are often the beginning of another's prompt: those are read with the longest.
    """
    whole = [one.prompt + one.answer for one in asked]
    texts: list[tuple[tuple[int, ...], list[int]]] = []
    for i in sorted(range(len(asked)), key=whole.__getitem__, reverse=True):  # beginnings follow what they begin
        if texts and texts[-1][0][: len(whole[i])] == whole[i]:
            texts[-1][1].append(i)
        else:
            texts.append((whole[i], [i]))
    return texts
