"""Generation quality (`fig:degeneracy`): repetition, diversity, perplexity by length; references of equal length.

A shorter text is the beginning of a longer one. The hazard this regime shows: greedy text falls into loops, all worlds
agree in a loop, no noise is drawn there, and the measured cost of privacy falls for a reason that is no merit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from paclm.config import format_budget
from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.leak import mean_and_stderr
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import rule_named
from paclm.study.decoding import GREEDY, GUMBEL, Decoding
from paclm.study.history import Arrays, join_sessions
from paclm.study.lab import Lab
from paclm.study.quality import measure_text, public_surprise
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.serving import (
    EngineStreams,
    begin,
    continue_alone,
    draw_secrets,
    engine_for,
    play,
)

PRIVATE = ((GREEDY, 2.0**-16), (GUMBEL, 2.0**-16), (GUMBEL, 2.0**-24))
NOTES = [
    "Perplexity is that of the public model, and rewards predictable text: a loop scores best. Ratios are to the "
    "full-corpus model under the same decoder, on the same prompts, with the same coins, at equal length.",
    "Decoders are not comparable with each other.",
]


@dataclass(frozen=True, slots=True)
class GenerationScale:
    """How much is generated."""

    sequences: int
    lengths: tuple[int, ...] = (16, 64, 256)
    prompt: int = 32
    together: int = 300
    """Sequences in a batch, or as many as fit; speed only."""


class Generation:
    """The same prompts continued by everyone."""

    def __init__(self, lab: Lab, scale: GenerationScale) -> None:
        self.lab, self.scale = lab, scale
        self.longest = max(scale.lengths)
        self.context = scale.prompt + self.longest
        self.prompts = lab.prompts(scale.sequences, scale.prompt, "generation")

    def coins(self, rows: range) -> list[Coins]:
        """The same for everyone who continues prompt i."""
        return [Coins(self.lab.seed_for("generation", "coins", i)) for i in rows]

    def private(self, decoding: Decoding, per_token: float) -> Arrays:
        """What the mechanism makes of the prompts: the columns of `Played`, (n, T)."""
        lab, n = self.lab, self.scale.sequences
        engine, together = engine_for(lab, sequences=min(n, self.scale.together), context=self.context)
        seed = lab.seed_for("generation", "noise", per_token)
        secrets = draw_secrets(lab.num_worlds, seed, n)
        advance = lab.start_task(f"generate, {decoding.name} at {format_budget(per_token)}", n * self.longest)
        done = []
        for start in range(0, n, together):
            rows = range(start, min(start + together, n))
            own = secrets[rows.start : rows.stop]
            sessions = [begin(lab.num_worlds, rule_named("gaussian"), per_token, seed, start, own)]
            streams = EngineStreams(engine, decoding, self.coins(rows))
            prompts = self.prompts[rows.start : rows.stop]
            done.append(play(streams, prompts, sessions, self.longest, advance=advance).arrays())
        return join_sessions(done)

    def alone(self, source: str, decoding: Decoding) -> IntArray:
        """Tokens (n, T) of the public model or of the full-corpus adapter."""
        engine = self.lab.engine("full", sequences=self.scale.sequences, context=self.context)
        streams = EngineStreams(engine, decoding, self.coins(range(self.scale.sequences)))
        is_public = source == "public"
        return continue_alone(
            streams, self.prompts, self.longest, lambda panel: panel.public if is_public else panel.worlds[:, 0]
        )

    def surprise(self, prompts: list[list[int]], tokens: IntArray) -> FloatArray:
        """Of every token, under the public model."""
        engine = self.lab.engine("full", sequences=self.scale.sequences, context=self.context)
        return public_surprise(engine, prompts, tokens)


def run(lab: Lab, scale: GenerationScale) -> Findings:
    """Private variants first, with all worlds; then everything that one model can do."""
    generation = Generation(lab, scale)
    parts = lab.parts("generation", [asdict(scale), generation.prompts])
    private = {
        (decoding, per_token): parts.arrays(
            f"generation-{decoding.name}-{format_budget(per_token)}",
            partial(generation.private, decoding, per_token),
        )
        for decoding, per_token in PRIVATE
    }
    rows: list[Row] = []
    references: dict[str, FloatArray] = {}  # by decoder: what the full-corpus model's own text scores
    for decoding in (GREEDY, GUMBEL):
        for source in ("full", "public"):
            tokens = generation.alone(source, decoding)
            surprise = generation.surprise(generation.prompts, tokens)
            references.setdefault(decoding.name, surprise)
            rows += _rows(lab, scale, source, decoding.name, None, tokens, surprise, references[decoding.name])
    for (decoding, per_token), played in private.items():
        surprise = generation.surprise(generation.prompts, played["tokens"])
        found = _rows(
            lab, scale, "private", decoding.name, per_token, played["tokens"], surprise, references[decoding.name]
        )
        for row in found:
            unanimous = (played["distinct"][:, : row["length"]] == 1).mean(axis=1)
            row["unanimity"], row["unanimity_stderr"] = mean_and_stderr(unanimous)
        rows += found
    human, notes = _human(generation)
    return Findings(rows + human, NOTES + notes)


def _rows(
    lab: Lab,
    scale: GenerationScale,
    source: str,
    decoder: str | None,
    per_token: float | None,
    tokens: IntArray,
    surprise: FloatArray,
    reference: FloatArray | None,
) -> list[Row]:
    rows = []
    for length in scale.lengths:
        rng = lab.rng("generation", "bootstrap", source, decoder, per_token, length)
        row: Row = {
            "source": source,
            "decoder": decoder,
            "budget": None if per_token is None else format_budget(per_token),
            "length": length,
        }
        against = None if reference is None else reference[:, :length]
        rows.append(row | measure_text(tokens[:, :length], surprise[:, :length], against, rng))
    return rows


def _human(generation: Generation) -> tuple[list[Row], list[str]]:
    """Stretches of the test text of each length, scored after as long a prompt; and what is missing."""
    lab, scale = generation.lab, generation.scale
    rows: list[Row] = []
    for length in scale.lengths:
        try:
            texts = lab.prompts(scale.sequences, scale.prompt + length, "generation", "human", length)
        except InvalidInput:
            longer = scale.prompt + length
            return rows, [
                f"No test text is {longer} tokens long, so there is no human text of {length} to compare with."
            ]
        tokens = np.array([text[scale.prompt :] for text in texts])
        surprise = generation.surprise([text[: scale.prompt] for text in texts], tokens)
        one = GenerationScale(scale.sequences, (length,))
        rows += _rows(lab, one, "human", None, None, tokens, surprise, None)
    return rows, []


REGIME = Regime(
    name="generation",
    title="Generation quality",
    question="Does private text degenerate, and is that the mechanism's doing?",
    presets={
        "quick": GenerationScale(sequences=4, prompt=16),
        "paper": GenerationScale(sequences=100),
    },
    run=run,
    headlines=(
        headline("rep-3, {source}, {decoder}, {budget}", "rep3 ±", ".3f", largest="length"),
        headline("unanimity, {decoder}, {budget}", "unanimity ±", ".3f", largest="length"),
    ),
)
