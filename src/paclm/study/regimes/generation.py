"""Generation quality (`fig:degeneracy`): repetition, diversity, perplexity by length; references of equal length.

A shorter text is the beginning of a longer one. The hazard this regime shows: greedy text falls into loops, all worlds
agree in a loop, no noise is drawn there, and the measured cost of privacy falls although privacy got no cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from paclm.config import format_budget
from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.leak import mean_and_stderr
from paclm.study.continuations import Continuations
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.lab import Lab
from paclm.study.quality import measure_text
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row

PRIVATE = ((GREEDY, 2.0**-16), (GUMBEL, 2.0**-16), (GUMBEL, 2.0**-24))
NOTES = [
    "Perplexity is that of the public model, and rewards predictable text: a loop scores best. Ratios are to the "
    "full-corpus model under the same decoder, on the same prompts, with the same coins, at equal length.",
    "Decoders are not comparable with each other.",
]


@dataclass(frozen=True, slots=True)
class GenerationScale:
    sequences: int
    lengths: tuple[int, ...] = (16, 64, 256)
    prompt: int = 32
    together: int = 300  # sequences in a batch, or as many as fit; speed only


def run(lab: Lab, scale: GenerationScale) -> Findings:
    """Private variants first, with all worlds; then everything that one model can do."""
    longest = max(scale.lengths)
    texts = Continuations(lab, "generation", scale.prompt + longest, min(scale.sequences, scale.together))
    prompts = lab.prompts(scale.sequences, scale.prompt, "generation")
    parts = lab.parts("generation", [asdict(scale), prompts])
    private = {}
    for decoding, per_token in PRIVATE:
        seed = lab.seed_for("generation", "noise", per_token)
        make = partial(texts.released, prompts, decoding, per_token, seed, longest)
        name = f"generation-{decoding.name}-{format_budget(per_token)}"
        private[decoding, per_token] = parts.arrays(name, make)
    rows: list[Row] = []
    references: dict[str, FloatArray] = {}  # by decoder: what the full-corpus model's own text scores
    for decoding in (GREEDY, GUMBEL):
        for source in ("full", "public"):
            tokens = texts.alone(prompts, source, decoding, longest)
            surprise = texts.surprise(prompts, tokens)
            reference = references.setdefault(decoding.name, surprise)
            rows += _rows(lab, scale.lengths, (source, decoding.name, None), tokens, surprise, reference)
    for (decoding, per_token), played in private.items():
        surprise = texts.surprise(prompts, played["tokens"])
        key, reference = ("private", decoding.name, per_token), references[decoding.name]
        for row in _rows(lab, scale.lengths, key, played["tokens"], surprise, reference):
            unanimous = (played["distinct"][:, : row["length"]] == 1).mean(axis=1)
            row["unanimity"], row["unanimity_stderr"] = mean_and_stderr(unanimous)
            rows.append(row)
    human, notes = _human(texts, scale)
    return Findings(rows + human, NOTES + notes)


def _rows(
    lab: Lab,
    lengths: Sequence[int],
    key: tuple[str, str | None, float | None],
    tokens: IntArray,
    surprise: FloatArray,
    reference: FloatArray | None,
) -> list[Row]:
    """One row per length; the key is source, decoder and budget."""
    rows = []
    source, decoder, per_token = key
    budget = None if per_token is None else format_budget(per_token)
    for length in lengths:
        rng = lab.rng("generation", "bootstrap", *key, length)
        row: Row = {"source": source, "decoder": decoder, "budget": budget, "length": length}
        against = None if reference is None else reference[:, :length]
        rows.append(row | measure_text(tokens[:, :length], surprise[:, :length], against, rng))
    return rows


def _human(texts: Continuations, scale: GenerationScale) -> tuple[list[Row], list[str]]:
    """Stretches of the test text of each length, scored after a prompt; and which lengths are missing."""
    rows: list[Row] = []
    for length in scale.lengths:
        try:
            found = texts.lab.prompts(scale.sequences, scale.prompt + length, "generation", "human", length)
        except InvalidInput:
            needed = scale.prompt + length
            return rows, [f"No test text has {needed} tokens, so there is no human text of {length} to compare with."]
        tokens = np.array([text[scale.prompt :] for text in found])
        surprise = texts.surprise([text[: scale.prompt] for text in found], tokens)
        rows += _rows(texts.lab, (length,), ("human", None, None), tokens, surprise, None)
    return rows, []


REGIME = Regime(
    name="generation",
    title="Generation quality",
    question="Does private text degenerate, and does the mechanism cause it?",
    presets={"quick": GenerationScale(sequences=4, prompt=16), "paper": GenerationScale(sequences=100)},
    run=run,
    headlines=(
        headline("rep-3, {source}, {decoder}, {budget}", "rep3 ±", ".3f", largest="length"),
        headline("unanimity, {decoder}, {budget}", "unanimity ±", ".3f", largest="length"),
    ),
)
