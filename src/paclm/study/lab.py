"""What every regime works with: the workspace, its engine, its test text, votes on it, seeds, progress.

    lab = Lab(workspace, seed=0)
    votes = lab.text_votes(8176, (GREEDY, GUMBEL))        one pass over the text for all decoders and draws
    engine = lab.engine(sequences=100, context=96)        the last one is kept and reused
    rng = lab.rng("sweep", "prompts")                     the same name gives the same stream, other names others

All randomness comes from here, by name, so the same seed gives the same numbers. Nothing here is private.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paclm.config import RuntimeConfig
from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, IntArray
from paclm.privacy.releases import RULES, Rule
from paclm.study.code import code_digest
from paclm.study.decoding import GREEDY, GUMBEL, Decoding
from paclm.study.eval_text import Passage, cut_passages, take_positions
from paclm.study.parts import Kept, Parts
from paclm.study.questions import WRITE, Question, embedded_questions
from paclm.study.recorded_votes import TextVotes, collect_votes
from paclm.worlds.layout import WORLDS_FILE, adapters_file
from paclm.worlds.storage import make_private_folder
from paclm.worlds.workspace import Workspace

if TYPE_CHECKING:
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.engine import Engine
    from paclm.engine.training_job import TrainingJob
    from paclm.engine.training_queue import Progress
    from paclm.engine.workers import WorkerGroup
    from paclm.plugins import Group, Loaded

Advance = Callable[[int], None]  # called with how many more are done
StartTask = Callable[[str, int], Advance]  # starts a progress bar: what is counted, and how many there are


class Lab:
    """One workspace under study."""

    def __init__(
        self,
        workspace: Workspace,
        *,
        seed: int = 0,
        start_task: StartTask = lambda _, __: lambda _: None,
        test_text: Sequence[Passage] | None = None,
        public_text: Sequence[Passage] | None = None,
        other_text: Sequence[str] | None = None,
        spare_text: Sequence[str] | None = None,
        questions: Sequence[Question] | None = None,
        runtime: RuntimeConfig | None = None,
        collection: int = 1,
        first_worlds: int | None = None,
        kept: Kept | None = None,
        workers: WorkerGroup | None = None,
        plugins: Sequence[Loaded] = (),
        votes_from: str | None = None,
    ) -> None:
        if first_worlds is not None and not 2 <= first_worlds <= workspace.num_worlds:
            raise InvalidInput(
                f"Of {workspace.num_worlds} worlds the first 2 or more can be studied, not {first_worlds}."
            )
        self.workspace = workspace
        self.seed = seed
        self.start_task = start_task
        self.runtime = runtime or workspace.runtime
        self.collection = collection  # 1: the workspace's own worlds; others are drawn from the same records
        self.first_worlds = first_worlds  # study (and train) only this many worlds; for votes, not for attacks
        self.kept = kept or Kept()  # which votes and parts of earlier runs may be used, and which were
        self.workers = workers  # processes that share the worlds of every engine; results do not depend on them
        self.plugins = plugins  # those that this run names
        self.other_text = other_text  # texts of another source, for `controls`; none is a record
        self.spare_text = spare_text  # records of the workspace's source that are not in it, for the same
        self.votes_from = votes_from  # the machine, in words, whose votes are studied; no engine is opened
        self._given_text = test_text
        self._public_text = public_text
        self._given_questions = questions
        self._engine: tuple[Any, Engine] | None = None

    @contextmanager
    def of_collection(self, number: int) -> Iterator[Lab]:
        """The same lab over another collection of worlds, trained if needed; 1 is this one."""
        if number == self.collection:
            yield self
            return
        self.ensure(self.named(f"collection-{number}"))
        other = self.with_runtime(self.runtime, number)
        try:
            yield other
        finally:
            other.release_engine()  # a reference to the other lab that outlives this block must hold no memory

    def with_runtime(self, runtime: RuntimeConfig, collection: int | None = None) -> Lab:
        """The same lab with other settings of speed and arithmetic, and of another collection if one is given."""
        self.release_engine()  # two engines may not fit
        return Lab(
            self.workspace,
            seed=self.seed,
            start_task=self.start_task,
            test_text=self._given_text,
            public_text=self._public_text,
            other_text=self.other_text,
            spare_text=self.spare_text,
            questions=self._given_questions,
            runtime=runtime,
            collection=collection or self.collection,
            first_worlds=self.first_worlds,
            kept=self.kept,
            workers=self.workers,
            plugins=self.plugins,
            votes_from=self.votes_from,
        )

    def seed_for(self, *names: object) -> int:
        """A seed of 63 bits for a purpose: follows from the lab's seed, its collection and the names alone."""
        text = json.dumps([self.seed, self.collection, *map(str, names)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1

    def plugged(self, group: Group) -> list[Loaded]:
        """The plugins of a group."""
        return [loaded for loaded in self.plugins if loaded.plugin.group == group]

    @property
    def rules(self) -> dict[str, Rule]:
        """The releases under study by name: the built-in ones, then plugins."""
        return RULES | {plugin.name: rule for plugin, rule in self.plugged("releases")}

    def origin_of(self, release: str) -> str | None:
        """The package and version of a release; None if it is built in."""
        return next((plugin.origin for plugin, _ in self.plugged("releases") if plugin.name == release), None)

    def rng(self, *names: object) -> np.random.Generator:
        """A generator for a purpose."""
        return np.random.default_rng(self.seed_for(*names))

    @property
    def num_worlds(self) -> int:
        return self.first_worlds or self.workspace.num_worlds

    @property
    def worlds_name(self) -> str:
        """Of the adapters under study: worlds, or collection-N; with `-first-N` where only some are studied."""
        return self.named("worlds" if self.collection == 1 else f"collection-{self.collection}")

    def named(self, adapters: str) -> str:
        """The name in this lab of adapters that exist for every world (`worlds`, `uncoupled`, …)."""
        return adapters if self.first_worlds is None else f"{adapters}-first-{self.first_worlds}"

    @cached_property
    def membership(self) -> BoolArray:
        """(records, m) which record is in which world of this collection."""
        from paclm.engine.training_job import membership_of

        self.need_all_worlds()
        return membership_of(self.workspace, self.worlds_name)

    def need_all_worlds(self) -> None:
        """Refuse an attack on some worlds alone; regimes call it first, because they may run for hours."""
        if self.first_worlds is not None:
            raise InvalidInput(
                f"A record is in half of all {self.workspace.num_worlds} worlds, and in more or fewer of the first "
                f"{self.first_worlds}: even odds for an attacker need all of them."
            )

    def ensure(self, *names: str) -> None:
        """Train the adapters (`full`, `shards-8`, `collection-2`, …) that the workspace does not have yet."""
        missing = [name for name in names if not self._has(name)]
        if missing:
            self.workspace = Workspace.open(self.workspace.path)  # another lab over it may have trained meanwhile
        for name in missing:
            if not self._has(name):
                self.workspace = self.train(name, self.workspace)

    def train(self, name: str, workspace: Workspace) -> Workspace:
        """Train adapters with the settings of `workspace`; returns the workspace that has them."""
        from paclm.engine.training_job import prepare_training

        self._need_worlds(f"Adapters {name} are missing, and would be trained here.")
        self.release_engine()
        return self.run_job(prepare_training(workspace, name))

    def run_job(self, job: TrainingJob) -> Workspace:
        """Run or resume a training, with a progress bar; returns the workspace that has the adapters."""
        done, advance = 0, self.start_task(f"train {job.name}", 0)

        def show(now: Progress) -> None:
            nonlocal done
            advance(now.step - done)
            done = now.step

        return job.run(resume=job.is_unfinished, on_progress=show)[0]

    def _has(self, name: str) -> bool:
        file, _ = _place(name)
        return file == WORLDS_FILE or file in self.workspace.manifest.adapters  # `paclm train` makes the worlds

    def stack(self, *names: str) -> AdapterStack:
        """The adapters of these names, one after another: `worlds`, `full`, `shards-8` …; trained if needed."""
        from paclm.engine.adapters import AdapterStack
        from paclm.engine.loading import join_stacks

        self.ensure(*names)
        folder = self.workspace.adapters_path
        return join_stacks([AdapterStack.load(folder / file, some) for file, some in map(_place, names)])

    def engine(
        self,
        *adapters: str,
        sequences: int = 1,
        context: int | None = None,
        support_size: int = 200,
        is_shared: bool = True,
    ) -> Engine:
        """An engine over these adapters (this collection's worlds if none are named); the last one is kept.

        Shared with the workers, if there are any; where time is measured it is not. Before its first use it must give
        the same votes for the same context and coins.
        """
        from paclm.engine.determinism import check_repeatable
        from paclm.engine.loading import open_engine

        self._need_worlds("This regime needs the worlds, or other votes than those that were taken.")
        names = adapters or (self.worlds_name,)
        runtime = dataclasses.replace(self.runtime, max_sequences=sequences, context=context or self.window)
        workers = self.workers if is_shared else None
        wanted = (names, runtime, support_size, workers)
        if self._engine is None or self._engine[0] != wanted:
            self._engine = None  # before the next one is loaded: two may not fit
            stack = self.stack(*names)
            self.release_engine()  # frees the memory that training used, too
            opened = open_engine(self.workspace, support_size, runtime, stack, workers)
            check_repeatable(opened)
            self._engine = (wanted, opened)
        return self._engine[1]

    def _need_worlds(self, why: str) -> None:
        """Raise where only votes are."""
        if self.votes_from is not None:
            raise InvalidInput(f"{why} Here are only votes that were taken on {self.votes_from}: run it there.")

    def release_engine(self) -> None:
        """Free the engine's memory, for training or for an engine opened elsewhere."""
        from paclm.engine.memory import release_memory

        self._engine = None
        if self.workers is not None:
            self.workers.free()
        release_memory()

    @cached_property
    def tokenizer(self) -> Any:
        """Of the base model."""
        from paclm.engine.base_model import base_of, load_tokenizer

        return load_tokenizer(base_of(self.workspace))

    @cached_property
    def window(self) -> int:
        """Tokens of a test window: the base model's context, 512 at most, as records were trained."""
        from paclm.engine.base_model import base_of, context_of

        return min(512, self.runtime.context or 512, context_of(base_of(self.workspace)))

    @cached_property
    def test_passages(self) -> list[Passage]:
        """The held-out records, or the text that was given, in windows."""
        from paclm.worlds.blocks import encode_texts

        passages = self._given_text
        if passages is None:
            limit = self.workspace.training.max_record_tokens
            texts = [record.text for record in self.workspace.records("heldout")]
            passages = [Passage.of(tokens[:limit]) for tokens in encode_texts(self.tokenizer, texts)]
        windows = cut_passages(passages, self.window)
        if not windows:
            raise InvalidInput("There is no text to test on. Make the workspace with --holdout, or give --test-text.")
        return windows

    @cached_property
    def questions(self) -> Sequence[Question] | None:
        """What was given to be asked, or the questions about the embedded corpus; None if there are none."""
        return embedded_questions(self.workspace) if self._given_questions is None else self._given_questions

    def need_questions(self) -> Sequence[Question]:
        """The questions; raises if there are none."""
        if self.questions is None:
            raise InvalidInput(f"There are no questions about these records. Give a file with --questions. {WRITE}")
        return self.questions

    def passages(self, num_positions: int) -> list[Passage]:
        """Stretches of all windows of the test text with this many scored targets together, or all there are."""
        return take_positions(self.test_passages, num_positions)

    def public_passages(self, num_positions: int) -> list[Passage]:
        """Windows of the public text that was given, with this many scored targets; none if none was given.

        Settings of rivals are searched on it. Refuses text that is also scored; that it is no private record either is
        for the caller to know.
        """
        windows = cut_passages(self._public_text or [], self.window)
        scored = {passage.tokens for passage in self.test_passages} if windows else set()
        if any(passage.tokens in scored for passage in windows):
            raise InvalidInput(
                "The public text and the text to score on have passages in common. Give another with --public-text."
            )
        return take_positions(windows, num_positions) if windows else []

    def prompts(self, count: int, length: int, *names: object) -> list[list[int]]:
        """Random stretches of the test text, `length` tokens each, drawn by name; each lies inside one window."""
        rng = self.rng("prompts", *names)
        long = [passage.tokens for passage in self.test_passages if len(passage) >= length]
        if not long:
            raise InvalidInput(
                f"No test text is {length} tokens long. Hold out longer records, or shorten the prompts."
            )
        weights = np.array([len(tokens) - length + 1 for tokens in long], dtype=np.float64)
        chosen = rng.choice(len(long), size=count, p=weights / weights.sum())
        starts = [int(rng.integers(len(long[i]) - length + 1)) for i in chosen]
        return [list(long[i][start : start + length]) for i, start in zip(chosen, starts, strict=True)]

    def text_votes(
        self, num_positions: int, decodings: Sequence[Decoding], *, with_full: bool = True
    ) -> dict[str, TextVotes]:
        """Every world's teacher-forced vote, per decoding; kept in the workspace and shared by all regimes.

        What is missing is taken in one pass over the text.
        """
        names = (self.worlds_name, "full") if with_full else (self.worlds_name,)
        self.ensure(*names)
        passages = self.passages(num_positions)
        code = code_digest("paclm.study.recorded_votes", "paclm.engine.loading")
        text, adapters = _digest_of(passages), self._adapters(names)
        paths = {}
        for decoding in decodings:
            key = json.dumps([repr(decoding), adapters, text, self.seed, self.arithmetic, code])
            paths[decoding] = self.folder / "votes" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
        missing = [decoding for decoding in decodings if not self.kept.has(paths[decoding])]
        taken: dict[str, TextVotes] = {}
        if missing:
            engine = self.engine(*names)
            advance = self.start_task("teacher-forced votes", sum(passage.num_scored for passage in passages))
            seeds = [self.seed_for("coins", decoding.coins or decoding.name) for decoding in missing]
            taken = collect_votes(engine, passages, missing, seeds, with_full, advance)
        found = {}
        for decoding in decodings:
            name = decoding.name
            arrays = self.kept.arrays(paths[decoding], partial(_arrays_of, taken, name))
            found[name] = TextVotes.from_arrays(arrays, name)
        return found

    def gumbel_votes(self, num_positions: int, draws: int) -> TextVotes:
        """Coupled Gumbel votes, from the votes of both decoders that `accuracy` takes and other regimes share."""
        return self.text_votes(num_positions, (GREEDY, GUMBEL.times(draws)))[GUMBEL.name]

    @property
    def folder(self) -> Path:
        """Where studies of this workspace keep their files."""
        return make_private_folder(self.workspace.study_path)

    def parts(self, regime: str, scale: Any, *, is_lasting: bool = False) -> Parts:
        """Finished parts of a regime under exactly these circumstances, made by exactly this code.

        Lasting ones are there for a later run, after the result of this one is written.
        """
        given = None if self._given_text is None else _digest_of(self._given_text)  # held out: fixed by the workspace
        text: list[Any] = [given, self.window]
        if self._public_text is not None:
            text.append(_digest_of(self._public_text))
        texts = {"other": self.other_text, "spare": self.spare_text}
        text += [[name, _hash_texts(own)] for name, own in texts.items() if own is not None]
        worlds = [self.collection, self._adapters([self.worlds_name])]
        modules = {plugin.name: plugin.module for plugin, _ in self.plugged("regimes")}
        own = modules.get(regime, f"paclm.study.regimes.{regime}")
        code = code_digest(own, *sorted({plugin.module for plugin, _ in self.plugins}))
        circumstances = [regime, scale, self.seed, worlds, text, self.arithmetic, code]
        return Parts(self.folder / "parts", circumstances, self.kept, is_lasting)

    @property
    def arithmetic(self) -> tuple[str, str]:
        """Type of numbers and of device."""
        if self.votes_from is not None:
            return self.votes_from.rpartition(", ")[2], "cpu" if " CPU thread" in self.votes_from else "cuda"
        from paclm.engine.loading import pick_device, pick_dtype

        device = pick_device(self.runtime.device)
        return pick_dtype(self.runtime.dtype, device), device.type

    def _adapters(self, names: Sequence[str]) -> list[str]:
        entries = self.workspace.manifest.adapters
        places = map(_place, names)
        return [f"{entries.get(file, {}).get('sha256')}{'' if some is None else some.stop}" for file, some in places]


def _place(adapters: str) -> tuple[str, slice | None]:
    """The file that holds adapters of this name, and which of those in it they are (all: None).

    The first of the workspace's own worlds are read from the common file; what a study trains has a file of its own.
    """
    if first := re.fullmatch(r"worlds-first-([0-9]+)", adapters):
        return WORLDS_FILE, slice(0, int(first[1]))
    return adapters_file(adapters), None


def _arrays_of(taken: Mapping[str, TextVotes], name: str) -> dict[str, IntArray]:
    return taken[name].arrays(name)


def _hash_texts(texts: Sequence[str]) -> str:
    """SHA-256 of texts in their order."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def _digest_of(passages: Sequence[Passage]) -> str:
    return hashlib.sha256(repr([(p.tokens, p.is_scored) for p in passages]).encode()).hexdigest()
