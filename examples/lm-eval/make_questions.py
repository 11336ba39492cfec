"""Write questions.jsonl: what the notes of the embedded hospital say, for both tasks of this folder.

    python make_questions.py                 300 questions, into the folder of this file

Everything is synthetic: prompts and answers come from the generator of the embedded corpus. A line has the beginning of
a note (`prompt`), how it goes on (`answer`), and for the multiple-choice task four answers of one kind (`choices`) and
which of them is right (`label`).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from paclm.worlds.clinic import house_questions

TARGET = Path(__file__).parent / "questions.jsonl"


def main(num_questions: int = 300, num_choices: int = 4, seed: int = 0) -> None:
    """Shuffle questions and choices by a seed, so that the file is always the same."""
    draw = random.Random(seed)
    questions = house_questions()
    draw.shuffle(questions)
    lines = []
    for question in questions:
        others = {other["answer"] for other in questions if other["kind"] == question["kind"]} - {question["answer"]}
        if len(others) < num_choices - 1 or len(lines) == num_questions:
            continue
        choices = [question["answer"], *draw.sample(sorted(others), num_choices - 1)]
        draw.shuffle(choices)
        kept = {name: question[name] for name in ("prompt", "answer", "kind")}
        lines.append(json.dumps(kept | {"choices": choices, "label": choices.index(question["answer"])}) + "\n")
    TARGET.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} questions in {TARGET.name}")


if __name__ == "__main__":
    main()
