"""A small collection of worlds on records that occur once, several times, or are planted: what do copies change?

Copies are in the same worlds if they are one unit (a group), and each in half of the worlds on its own if they are not.
The adapters are not kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray
from paclm.study.depth_points import Trainer
from paclm.study.lab import Lab
from paclm.worlds.assignment import assign_worlds
from paclm.worlds.canaries import make_canaries

if TYPE_CHECKING:
    from paclm.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class CopiesScale:
    worlds: int
    others: int  # records that occur once and are not attacked
    attacked: int  # records of each kind
    copies: int  # of a record that is copied
    canaries: int  # planted records
    visits: int  # of a planted record in one epoch
    record_tokens: int


@dataclass(frozen=True, slots=True)
class Questioned:
    """A text that was trained on, and the worlds in which what is asked about it is true."""

    kind: str
    tokens: list[int]
    is_member: BoolArray  # (m,)


@dataclass(frozen=True, slots=True)
class _CopiedText:
    kind: str
    tokens: list[int]
    rows: BoolArray  # (copies, m) the worlds of each copy
    visits: int = 1


def train_copies(lab: Lab, scale: CopiesScale) -> tuple[Engine, list[Questioned]]:
    """Train the worlds; an engine over them, and what may be asked."""
    from paclm.engine.loading import open_engine
    from paclm.engine.training_order import make_blocks

    texts = list(_texts(lab, scale))
    trainer = Trainer(lab)
    settings = dataclasses.replace(lab.workspace.training, coupled=True)
    records = [(text, row) for text in texts for row in text.rows]
    blocks = make_blocks(
        [text.tokens for text, _ in records],
        settings.block_tokens or lab.window,
        scale.record_tokens,
        [text.visits for text, _ in records],
    )
    membership = np.stack([row for _, row in records])
    stack, _ = trainer.train(blocks, membership, settings, lab.seed_for("copies", "training") % 2**32, "copies")
    lab.release_engine()
    runtime = dataclasses.replace(lab.runtime, max_sequences=1, context=scale.record_tokens)
    engine = open_engine(lab.workspace, 200, runtime, stack)
    return engine, [asked for text in texts for asked in _questions(text)]


def _texts(lab: Lab, scale: CopiesScale) -> Iterator[_CopiedText]:
    """The corpus: other records, records of each kind, canaries."""
    from paclm.worlds.blocks import encode_texts

    records = lab.workspace.records("train")
    wanted = scale.others + 3 * scale.attacked
    if len(records) < wanted:
        raise InvalidInput(f"{wanted} records are needed to copy some of them; the workspace has {len(records)}.")
    chosen = lab.rng("copies", "records").permutation(len(records))[:wanted]
    encoded = encode_texts(lab.tokenizer, [records[i].text for i in chosen.tolist()])
    encoded = [tokens[: scale.record_tokens] for tokens in encoded]
    kinds = [""] * scale.others
    for kind in ("one copy", "one unit", "own units"):
        kinds += [kind] * scale.attacked
    planted = make_canaries(scale.canaries, lab.tokenizer, lab.seed_for("copies", "canaries"))
    units = len(kinds) + (scale.copies - 1) * scale.attacked + len(planted)
    rows = iter(assign_worlds(units, scale.worlds, lab.seed_for("copies", "worlds")))
    for kind, tokens in zip(kinds, encoded, strict=True):
        count = scale.copies if kind.endswith(("unit", "units")) else 1
        own = [next(rows)] * count if kind == "one unit" else [next(rows) for _ in range(count)]
        yield _CopiedText(kind if count == 1 else f"{count} copies, {kind}", tokens, np.stack(own))
    for canary in planted:
        tokens = [*canary.trigger_ids, *canary.payload_ids]
        yield _CopiedText(f"planted, {scale.visits} visits", tokens, next(rows)[None], scale.visits)


def _questions(text: _CopiedText) -> Iterator[Questioned]:
    """Is the record (of copies with units of their own, the first one) in the world? Is any of them?"""
    if text.kind:
        yield Questioned(text.kind, text.tokens, text.rows[0])
        if not (text.rows == text.rows[0]).all():
            yield Questioned(f"{text.kind}: any of them", text.tokens, np.logical_or.reduce(text.rows))
