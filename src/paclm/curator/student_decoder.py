"""A student answers: ordinary decoding of the adapter in a published folder. Nothing is charged.

Whatever is done with a student is post-processing of tokens that were released before it was trained. There is no
workspace here: no records, no secret, no ledger, and nothing is written into the folder. What it claims about the
corpus is repeated, not proven.
"""

from __future__ import annotations

from pathlib import Path

from paclm.config import RuntimeConfig
from paclm.curator.plain_decoder import PlainDecoder, check_plain
from paclm.curator.streams import Mark, StudentFigures, Tokenizer
from paclm.curator.vote_source import VoteSource
from paclm.errors import WorkspaceError
from paclm.privacy.bounds import success_bound
from paclm.worlds.fingerprints import Base
from paclm.worlds.student_folder import StudentFolder, read_student

_ROUNDING = 1e-12


class StudentDecoder(PlainDecoder):
    """Streams of a student. Open it with `StudentDecoder.open`, use it as a context manager."""

    mark: Mark = "student"

    def __init__(self, student: StudentFolder, engine: VoteSource, tokenizer: Tokenizer) -> None:
        super().__init__(engine, tokenizer, student.voting)
        self.figures = StudentFigures(
            promise=student.promise,
            mia_bound=student.mia_bound,
            world_id_bound=student.world_id_bound,
            total_nats=student.committed_nats,
            worlds=student.worlds,
            epsilon=student.epsilon,
            delta=student.delta,
            unit=student.unit_name,
        )
        """As student.json has them."""

    @classmethod
    def open(
        cls,
        student: StudentFolder | str | Path,
        base: str | Base | None = None,
        *,
        runtime: RuntimeConfig | None = None,
        engine: VoteSource | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> StudentDecoder:
        """Check the folder, hash both adapter files and the base model, and load them.

        `base`: where the base model is, if its name in student.json does not lead to it; or one from `base_of_student`.
        `engine`: one that is loaded already; the caller vouches that it has this student.
        """
        from paclm.engine.base_model import base_of_student, load_tokenizer
        from paclm.engine.loading import open_on_base
        from paclm.engine.peft_io import import_peft

        student = student if isinstance(student, StudentFolder) else read_student(Path(student))
        check_claims(student)
        base = base if isinstance(base, Base) else base_of_student(student, base)
        support_size = student.voting.support_size
        student.verify()  # last before it is read
        if engine is None:
            stack = import_peft([student.path], base.fingerprint).as_public()
            engine = open_on_base(base, stack, support_size, runtime or RuntimeConfig())
        check_plain(engine, support_size)
        return cls(student, engine, tokenizer or load_tokenizer(base))

    def promise_figures(self) -> StudentFigures:
        """What the folder claims; it does not change."""
        return self.figures

    def __repr__(self) -> str:
        return f"<StudentDecoder under {self.figures['promise']}, {self.num_active} streams>"


def check_claims(student: StudentFolder) -> None:
    """Refuse bounds below those that follow from the committed total beside them; (ε, δ) imply no single bound."""
    if student.committed_nats is None or student.worlds is None or student.promise != "half":
        return
    for name, claimed, prior in (
        ("mia_bound", student.mia_bound, 1 / 2),
        ("world_id_bound", student.world_id_bound or 0.0, 1 / student.worlds),
    ):
        least = success_bound(student.committed_nats, prior)
        if claimed < least - _ROUNDING or student.nats > student.committed_nats:
            raise WorkspaceError(
                f"The student.json of {student.path} contradicts itself: {name} is {claimed:.6g}, with "
                f"{student.nats:.6g} nats charged of a committed total of {student.committed_nats:.6g}, from which "
                f"{least:.6g} follows. It was edited or damaged: fetch the folder again."
            )
