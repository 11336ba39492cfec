"""Students of distilled text, trained and kept, and how likely adapters find records. For the regime `student`.

Training reads texts, coins and the public model, as `paclm distill` does; the study then attacks what came of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paclm.privacy.belief import FloatArray
from paclm.privacy.randomness import coins_of
from paclm.study.attacks.record_scores import informed_scores
from paclm.study.distilled_text import SUPPORT, TextSource, WrittenText
from paclm.study.history import Arrays
from paclm.study.lab import Advance, Lab
from paclm.study.parts import Parts
from paclm.study.quality import score_targets

if TYPE_CHECKING:
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.student_training import RecipeName, StudentText

_RECORDS_IN_A_PART = 64


class Name(NamedTuple):
    """Of a student: whose text, which deployment's, how much of it, and how it was trained."""

    source: str
    deployment: int
    tokens: int
    recipe: RecipeName

    def __str__(self) -> str:
        return f"{self.source.replace(' ', '-')}-{self.deployment}-{self.tokens}-{self.recipe}"


class Student(NamedTuple):
    stack: AdapterStack  # one world
    seconds: float  # to train it


def default_recipe() -> RecipeName:
    """The kind that `paclm distill` trains with."""
    from paclm.engine.student_training import Recipe

    return Recipe().kind


class Group(NamedTuple):
    """Students that differ by secret, coins and noise alone."""

    source: TextSource
    tokens: int
    recipe: RecipeName
    students: list[Student]
    written: list[WrittenText]

    @property
    def is_default(self) -> bool:
        return self.recipe == default_recipe()


def train_students(lab: Lab, texts: Mapping[Name, list[StudentText]], parts: Parts) -> dict[Name, Student]:
    """Train on these texts what was not trained before; the base model is loaded once."""
    from paclm.engine.memory import release_memory
    from paclm.engine.student_training import Recipe

    school, found = _School(lab), {}
    count = Recipe().epochs * sum(len(one.tokens) for each in texts.values() for one in each)
    advance = lab.start_task("training students, tokens", count)
    for name, own in texts.items():
        digest = hashlib.sha256(repr(own).encode()).hexdigest()[:16]
        arrays = parts.arrays(f"student-{name}-{digest}", partial(school.train, own, name.recipe, advance))
        found[name] = _student_of(lab, arrays)
    del school
    release_memory()
    return found


class _School:
    """The public model, loaded when the first student is trained."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._model: Any = None

    def train(self, texts: Sequence[StudentText], recipe: RecipeName, advance: Advance) -> Arrays:
        from paclm.engine.base_model import base_of
        from paclm.engine.student_training import Recipe, train_student

        workspace = self._lab.workspace
        if self._model is None:
            self._model = self._load()
        began = time.perf_counter()
        stack = train_student(
            self._model,
            texts,
            workspace.training,
            Recipe(kind=recipe),
            base=base_of(workspace).fingerprint,
            coins_of=coins_of,
            support_size=SUPPORT,
            on_step=advance,
        )
        seconds = time.perf_counter() - began
        pairs = {f"A.{layer}": a for layer, a in stack.A.items()} | {f"B.{layer}": b for layer, b in stack.B.items()}
        return {name: tensor.float().numpy() for name, tensor in pairs.items()} | {"seconds": np.array(seconds)}

    def _load(self) -> Any:
        import torch

        from paclm.engine.base_model import base_of, load_model
        from paclm.engine.determinism import set_deterministic
        from paclm.engine.loading import pick_device

        self._lab.release_engine()
        set_deterministic()
        dtype = getattr(torch, self._lab.arithmetic[0])
        return load_model(base_of(self._lab.workspace), dtype).to(pick_device(self._lab.runtime.device))


def _student_of(lab: Lab, arrays: Arrays) -> Student:
    import torch

    from paclm.engine.adapters import AdapterStack
    from paclm.engine.base_model import base_of
    from paclm.engine.training import adapter_spec

    sides: dict[str, dict[str, Any]] = {"A": {}, "B": {}}
    for name, array in arrays.items():
        side, _, layer = name.partition(".")
        if layer:
            sides[side][layer] = torch.from_numpy(array)
    spec, base = adapter_spec(lab.workspace.training), base_of(lab.workspace).fingerprint
    return Student(AdapterStack(spec, base, sides["A"], sides["B"]), float(arrays["seconds"]))


class RecordScores(NamedTuple):
    """How likely each of W adapters finds each of n records."""

    loss: FloatArray  # (n, W) mean log probability, nats a token
    min_k: FloatArray  # (n, W) of the least likely tokens
    public: FloatArray  # (n,) mean log probability under the public model


def score_records(
    lab: Lab, name: str, stack: AdapterStack, records: Sequence[Sequence[int]], parts: Parts
) -> RecordScores:
    """Every adapter of the stack on every record; finished parts are read."""
    from paclm.engine.loading import open_engine

    advance = lab.start_task(f"losses of {name}, tokens", sum(map(len, records)))
    context = max(map(len, records))
    runtime = dataclasses.replace(lab.runtime, max_sequences=1, context=context)
    engine: Any = None

    def make(some: Sequence[Sequence[int]]) -> Arrays:
        nonlocal engine
        if engine is None:
            lab.release_engine()
            engine = open_engine(lab.workspace, runtime=runtime, stack=stack)
        found: dict[str, list[Any]] = {field: [] for field in RecordScores._fields}
        for tokens in some:
            *own, public = score_targets(engine, tokens).log_probability
            scores = [informed_scores(np.stack([one, public])) for one in own]
            found["loss"].append([one["loss"] for one in scores])
            found["min_k"].append([one["min-k"] for one in scores])
            found["public"].append(public.mean())
            advance(len(tokens))
        return {field: np.array(values) for field, values in found.items()}

    done = []
    for start in range(0, len(records), _RECORDS_IN_A_PART):
        some = records[start : start + _RECORDS_IN_A_PART]
        done.append(parts.arrays(f"student-losses-{name}-{start}", partial(make, some)))
    return RecordScores(*(np.concatenate([one[field] for one in done]) for field in RecordScores._fields))
