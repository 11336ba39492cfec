"""An audit of the universe itself: can an attacker find out whether a record is in the corpus at all?

The guarantee hides which world was realized, from an adversary who may know the whole universe. It promises nothing
here: what is computed from all worlds alike is free of charge, and so is what it leaks about their common corpus.
Members are records of the corpus, others are held-out records of the same source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.study.attacks.record_scores import Surrogate, informed_scores, roc, separate, shared_ngrams
from paclm.study.continuations import Continuations
from paclm.study.decoding import GUMBEL
from paclm.study.history import Arrays
from paclm.study.lab import Lab
from paclm.study.parts import Parts
from paclm.study.quality import score_targets
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.worlds.layout import adapters_file

PER_TOKEN = 2.0**-16
_ROC_POINTS = 60


@dataclass(frozen=True, slots=True)
class UniverseScale:
    records: int  # at most, of members and of others
    tokens: int  # of each record that are scored by loss
    prompt: int  # tokens of a record that the black-box attacker prompts with
    released: int  # tokens released on each prompt
    sequences: int  # prompts in parallel


@dataclass(frozen=True, slots=True)
class Candidates:
    """The records that are attacked."""

    tokens: list[list[int]]
    is_member: BoolArray
    clusters: IntArray  # units that are resampled whole: groups of records where the corpus has them
    places: IntArray  # of each among the training records, then the held-out ones


def run(lab: Lab, scale: UniverseScale) -> Findings:
    """The informed attacker, then the black-box one on private and on non-private text."""
    candidates = choose_candidates(lab, scale.records, scale.tokens, scale.prompt + 8)
    lab.ensure("full")
    parts = lab.parts("universe", [asdict(scale), lab.workspace.manifest.adapters[adapters_file("full")]["sha256"]])
    scores = {("informed", "adapters", name): s for name, s in _informed(lab, candidates, scale, parts).items()}
    for (source, name), values in _black_box(lab, candidates, scale, parts).items():
        scores["black-box", source, name] = values
    rows: list[Row] = []
    for (attacker, source, name), values in scores.items():
        key = {"attacker": attacker, "source": source, "attack": name}
        rng = lab.rng("universe", "bootstrap", source, name)
        found = separate(values, candidates.is_member, candidates.clusters, rng)
        row: Row = {"part": "score", **key}
        row["members"], row["others"] = int(candidates.is_member.sum()), int((~candidates.is_member).sum())
        row["auc"], row["auc_stderr"] = found.auc
        row["true_positives"], row["true_positives_stderr"] = found.true_positives
        rows.append(row)
        false, true = roc(values, candidates.is_member)
        for i in np.unique(np.linspace(0, len(false) - 1, _ROC_POINTS).round().astype(int)):
            rows.append({"part": "roc", **key, "false_positives": false[i], "true_positives": true[i]})
    notes = [
        "The guarantee does not cover this question: it hides which world was realized, not what the corpus is.",
        f"Black-box: every candidate's first {scale.prompt} tokens were answered once, each against its own secret; "
        "the corpus is common to all secrets.",
    ]
    if rows[0]["others"] < 100:
        notes.append(
            f"With {rows[0]['others']} records held out, 1 % false positives means none: true positives are those "
            "above every held-out record, a coarse measure."
        )
    return Findings(rows, notes)


def choose_candidates(lab: Lab, most: int, tokens: int, least: int) -> Candidates:
    """Members and held-out records: at most `most` each, of at least `least` tokens, cut to `tokens`."""
    from paclm.worlds.blocks import encode_stream, encode_texts

    rng = lab.rng("universe", "records")
    kept: list[list[int]] = []
    sides, units, places, first = [], [], [], 0
    for is_member, part in ((True, lab.workspace.records("train")), (False, lab.workspace.records("heldout"))):
        encoded = encode_stream(lab.tokenizer, (record.text for record in part))
        long = [i for i, own in enumerate(encoded) if len(own) >= least]
        if not long:
            raise InvalidInput(
                f"No {'record of the corpus' if is_member else 'held-out record'} has {least} tokens. "
                "Make the workspace with --holdout and with longer records."
            )
        chosen = sorted(rng.permutation(long)[:most].tolist())
        kept += [own[:tokens] for own in encode_texts(lab.tokenizer, [part[i].text for i in chosen])]
        sides += [is_member] * len(chosen)
        units += [part[i].group or part[i].id for i in chosen]
        places += [first + i for i in chosen]
        first += len(part)
    return Candidates(kept, np.array(sides), np.unique(units, return_inverse=True)[1], np.array(places))


def _informed(lab: Lab, candidates: Candidates, scale: UniverseScale, parts: Parts) -> Arrays:
    advance = lab.start_task("universe, losses", sum(map(len, candidates.tokens)))
    context = max(map(len, candidates.tokens))

    def make(some: list[list[int]]) -> Arrays:
        engine, found = lab.engine(context=context), []
        for tokens in some:
            found.append(informed_scores(score_targets(engine, tokens).log_probability))
            advance(len(tokens))
        return {name: np.array([scores[name] for scores in found]) for name in found[0]}

    return _in_batches("losses", candidates.tokens, scale.sequences, parts, lambda _, some: make(some))


def _in_batches(
    name: str, items: list[list[int]], size: int, parts: Parts, make: Callable[[int, list[list[int]]], Arrays]
) -> Arrays:
    """Arrays over all items; `make` gets the number of its first item and at most `size` items, and makes one part."""
    found = []
    for start in range(0, len(items), size):
        some = items[start : start + size]
        found.append(parts.arrays(f"universe-{name}-{start}-{len(some)}", partial(make, start, some)))
    return {column: np.concatenate([one[column] for one in found]) for column in found[0]}


def _black_box(
    lab: Lab, candidates: Candidates, scale: UniverseScale, parts: Parts
) -> dict[tuple[str, str], FloatArray]:
    prompts = [tokens[: scale.prompt] for tokens in candidates.tokens]
    rests = [tokens[scale.prompt :] for tokens in candidates.tokens]
    texts = _texts(lab, prompts, scale, parts)
    reference = Surrogate(texts.pop("public").tolist(), len(lab.tokenizer))
    found: dict[tuple[str, str], FloatArray] = {}
    for source, answered in texts.items():
        answers = answered.tolist()
        surrogate = Surrogate(answers, len(lab.tokenizer))
        found[source, "overlap"] = np.array([shared_ngrams(a, rest) for a, rest in zip(answers, rests, strict=True)])
        found[source, "surrogate"] = np.array(
            [
                surrogate.log_likelihood(rest, prompt) - reference.log_likelihood(rest, prompt)
                for prompt, rest in zip(prompts, rests, strict=True)
            ]
        )
    return found


def _texts(lab: Lab, prompts: list[list[int]], scale: UniverseScale, parts: Parts) -> Arrays:
    """What answers the prompts: the mechanism at 2^-16 nats a token, the full-corpus adapter, the public model."""
    size, seed = min(scale.sequences, len(prompts)), lab.seed_for("universe", "noise")
    texts = Continuations(lab, "universe", scale.prompt + scale.released, size)
    advance = lab.start_task("universe, released text", len(prompts) * scale.released)

    def release(first: int, some: list[list[int]]) -> Arrays:
        played = texts.released(some, GUMBEL, PER_TOKEN, seed, scale.released, first=first, advance=advance)
        return {"released": played["tokens"]}

    def answer(first: int, some: list[list[int]]) -> Arrays:
        names = ("full", "public")
        return {name: texts.alone(some, name, GUMBEL, scale.released, first=first) for name in names}

    return _in_batches("released", prompts, size, parts, release) | _in_batches("alone", prompts, size, parts, answer)


REGIME = Regime(
    name="universe",
    title="The universe itself",
    question="Is a record in the corpus at all (which the guarantee does not hide)?",
    presets={
        "quick": UniverseScale(records=24, tokens=80, prompt=24, released=32, sequences=64),
        "paper": UniverseScale(records=512, tokens=512, prompt=64, released=128, sequences=128),
    },
    run=run,
    headlines=(headline("AUC of {attack}, {source}", "auc ±", ".2f", part="score"),),
)
