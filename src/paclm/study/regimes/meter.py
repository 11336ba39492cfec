"""The dissent meter: can a caller tell that a record is in the corpus by the bill, or by the tokens?

Every prefix of a record is prompted for one token, several times with fresh coins. Under `charge = "dissent"` a bill
that follows the votes says where the worlds differ; a server that shows tokens × per-token budget instead shows every
caller the same. The tokens themselves stay: they are what is served. Members are records of the corpus, others are
held-out records. Each query is answered under a uniform belief against one secret; no budget stops the attacker.

Shadow corpora are for LiRA: each is a random half of all records, held-out ones included, with worlds of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.accounting import charge_units
from paclm.privacy.belief import BoolArray, FloatArray, IntArray, uniform_belief
from paclm.privacy.releases import rule_named
from paclm.study.attacks.prefix_queries import Seen, score_records, shadow_features
from paclm.study.attacks.record_scores import roc, separate
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.decoding import GUMBEL
from paclm.study.eval_text import Passage
from paclm.study.history import Arrays
from paclm.study.lab import Lab
from paclm.study.parts import Parts
from paclm.study.recorded_votes import collect_votes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.regimes.universe import Candidates, choose_candidates
from paclm.study.results import Row
from paclm.worlds.assignment import assign_groups, units_of
from paclm.worlds.layout import adapters_file

PER_TOKEN = 2.0**-16
_ROC_POINTS = 60
_TOGETHER = 4096  # releases at a time
_FEWEST = 16  # tokens of a record that is attacked

Observer = Callable[[int, list[list[int]]], Arrays]


@dataclass(frozen=True, slots=True)
class MeterScale:
    records: int  # at most, of members and of others
    tokens: int  # of each record: every prefix up to this length is prompted
    draws: int  # queries of each prefix, with fresh coins
    shadows: int  # corpora; even, 0: none
    shadow_worlds: int  # of each shadow corpus
    sequences: int  # records in a part: what a stopped run repeats


def run(lab: Lab, scale: MeterScale) -> Findings:
    """Take the votes, count what each source shows, and score every record by every attack."""
    lab.need_all_worlds()
    lab.ensure("full")
    candidates = choose_candidates(lab, scale.records, scale.tokens, _FEWEST)
    parts = lab.parts("meter", asdict(scale))
    observed = _in_parts("worlds", candidates, scale, parts, partial(_observe, lab, scale))
    public = _in_parts("public", candidates, scale, parts, partial(_public_features, lab))["features"]
    record = np.repeat(np.arange(len(candidates.tokens)), [len(tokens) - 1 for tokens in candidates.tokens])
    shadows = _shadows(lab, candidates, scale, parts, record)
    clusters, is_member = candidates.clusters, candidates.is_member
    rows: list[Row] = []
    for source, counts in _views(observed, scale.draws).items():
        seen = Seen(counts, scale.draws, record)
        scores = {"rate": seen.rates()}
        if counts.min() < counts.max():
            known = {"": public} | ({} if shadows is None else {", shadows": np.hstack([public, shadows[source]])})
            for name, features in known.items():
                rng = lab.rng("meter", "folds", source)
                found = score_records(seen, features, is_member, clusters, rng)
                scores |= {f"{attack}{name}": values for attack, values in found.items()}
        for attack, values in scores.items():
            rows += _rows(lab, source, attack, values, candidates, scale, seen)
    return Findings(rows, _notes(rows, scale))


def _views(observed: Arrays, draws: int) -> dict[str, IntArray]:
    """What a caller can count at each position, (n,) each: bills by release, bills after the closing, tokens."""
    found: dict[str, IntArray] = {}
    for release in ("gaussian", "plurality"):
        price = charge_units("dissent", PER_TOKEN, reads_secret=rule_named(release).reads_secret, is_dissent=True)
        found[f"bill, {release}"] = observed["dissent"].astype(np.int64) * (price > 0)
    found["bill, tokens × budget"] = np.full(len(observed["dissent"]), draws)
    for name in ("gaussian", "plurality", "full", "dp"):
        if name in observed:
            found[f"tokens, {name}"] = observed[name].astype(np.int64)
    return found


def _rows(
    lab: Lab, source: str, attack: str, scores: FloatArray, candidates: Candidates, scale: MeterScale, seen: Seen
) -> list[Row]:
    is_member, rates = candidates.is_member, seen.rates()
    key: Row = {"source": source, "attack": attack}
    found = separate(scores, is_member, candidates.clusters, lab.rng("meter", "bootstrap", source, attack))
    row: Row = {"part": "score", **key, "queries": scale.draws, "is_constant": bool(np.ptp(seen.counts) == 0)}
    row["members"], row["others"] = int(is_member.sum()), int((~is_member).sum())
    row["rate_members"], row["rate_others"] = float(rates[is_member].mean()), float(rates[~is_member].mean())
    for name, estimate in found._asdict().items():
        row[name], row[f"{name}_stderr"] = estimate
    false, true = roc(scores, is_member)
    kept = np.unique(np.linspace(0, len(false) - 1, _ROC_POINTS).round().astype(int))
    points = [{"part": "roc", **key, "false_positives": false[i], "true_positives": true[i]} for i in kept]
    return [row, *points]


def _notes(rows: Sequence[Row], scale: MeterScale) -> list[str]:
    others = rows[0]["others"]
    notes = [
        "The promise `half` does not cover this question. A bill of tokens × budget is the same for every record, and "
        "so is that of a release that charges nothing: every score ties, and the AUC is one half exactly.",
        f"Every prefix was prompted {scale.draws} times, each answer under a uniform belief: a budget stops a real "
        "attacker earlier. Calibrated scores know other members and others, and what the public model says.",
    ]
    if others < 1000:
        notes.append(
            f"With {others} records held out, 0.1 % false positives means none: true positives are then the members "
            "above every held-out record."
        )
    return notes


def _in_parts(name: str, candidates: Candidates, scale: MeterScale, parts: Parts, make: Observer) -> Arrays:
    """Arrays over the positions of all records; `make` gets the number of its first record, and some records."""
    found = []
    for start in range(0, len(candidates.tokens), scale.sequences):
        some = candidates.tokens[start : start + scale.sequences]
        found.append(parts.arrays(f"meter-{name}-{start}-{len(some)}", partial(make, start, some)))
    return {column: np.concatenate([one[column] for one in found]) for column in found[0]}


def _take_votes(
    lab: Lab, adapters: Sequence[str], scale: MeterScale, start: int, some: list[list[int]]
) -> tuple[IntArray, IntArray]:
    """Votes of all adapters (draws, n, adapters), and the records' next tokens (n,)."""
    engine = lab.engine(*adapters, context=max(scale.tokens, _FEWEST))
    seeds = [lab.seed_for("meter", "coins", adapters[0], start)]
    passages = [replace(Passage.of(tokens), document=number) for number, tokens in enumerate(some)]
    is_odd = engine.num_worlds % 2 == 1  # recorded votes are of an even number; the last one then has its own column
    found = collect_votes(engine, passages, [GUMBEL.times(scale.draws)], seeds, is_odd)[GUMBEL.name]
    votes = np.column_stack([found.votes, found.column("full")]) if is_odd else found.votes
    n = len(votes) // scale.draws
    return votes.reshape(scale.draws, n, -1), found.truth[:n]


def _observe(lab: Lab, scale: MeterScale, start: int, some: list[list[int]]) -> Arrays:
    """How often worlds differed, and how often each release gave the record's next token: counts (n,)."""
    single = [name for name in ("dp", "full") if adapters_file(name) in lab.workspace.manifest.adapters]
    votes, truth = _take_votes(lab, [lab.worlds_name, *single], scale, start, some)
    worlds = votes[..., : lab.num_worlds]  # (draws, n, m)
    found = {"dissent": is_dissent(worlds), "plurality": plurality(worlds) == truth}
    found["gaussian"] = _gaussian(lab, worlds, start) == truth
    found |= {name: votes[..., lab.num_worlds + i] == truth for i, name in enumerate(single)}
    return {name: seen.sum(axis=0).astype(np.int32) for name, seen in found.items()}


def is_dissent(votes: IntArray) -> BoolArray:
    """Whether the worlds of the last axis differ."""
    differs: BoolArray = (votes != votes[..., :1]).any(axis=-1)
    return differs


def plurality(votes: IntArray) -> IntArray:
    """The most frequent vote of the last axis; ties go to the smaller token."""
    tokens = votes[..., 0].copy()
    differs = is_dissent(votes)
    own = np.sort(votes[differs], axis=1)  # (r, m)
    counts = np.stack([(own == own[:, j : j + 1]).sum(axis=1) for j in range(own.shape[1])], axis=1)
    tokens[differs] = own[np.arange(len(own)), counts.argmax(axis=1)]  # the first of equals is the smallest
    return tokens


def _gaussian(lab: Lab, votes: IntArray, start: int) -> IntArray:
    """The paper's release at every position and draw, each under a uniform belief: (draws, n)."""
    flat = votes.reshape(-1, votes.shape[-1])
    seed = lab.seed_for("meter", "noise", start)
    sessions = ResearchSessions.seeded(
        flat.shape[1], rule_named("gaussian"), PER_TOKEN, seed, min(_TOGETHER, len(flat))
    )
    sessions.secrets[:] = lab.rng("meter", "secret").integers(flat.shape[1])
    tokens = np.empty(len(flat), dtype=np.int64)
    for at in range(0, len(flat), _TOGETHER):
        part = flat[at : at + _TOGETHER]
        sessions.beliefs[:] = uniform_belief(flat.shape[1])
        tokens[at : at + _TOGETHER] = sessions.release(part, np.arange(len(part))).tokens
    return tokens.reshape(votes.shape[:-1])


def _public_features(lab: Lab, start: int, some: list[list[int]]) -> Arrays:
    """What the public model says at each position (n, 5): of the next token, of all tokens, and where it is."""
    import torch

    engine, found = lab.engine("full", context=max(map(len, some))), []
    for tokens in some:
        targets = torch.tensor(tokens[1:], device=engine.head.device)
        for first, hidden in engine.hidden_states(tokens[:-1]):
            with torch.inference_mode():
                log_p = engine.whole_logits(hidden[-1:])[0].log_softmax(-1)  # (c, V); the public model is the last row
                own = log_p.gather(1, targets[first : first + len(log_p), None])[:, 0]
                top = log_p.max(1).values
                entropy = -(log_p.exp() * log_p).sum(1)
                place = torch.arange(first + 1, first + 1 + len(log_p), device=own.device).log()
                found.append(torch.stack([own, entropy, top, (own == top).float(), place], 1).double().cpu().numpy())
    return {"features": np.concatenate(found)}


def _shadows(
    lab: Lab, candidates: Candidates, scale: MeterScale, parts: Parts, record: IntArray
) -> dict[str, FloatArray] | None:
    """What shadow corpora say about each source: bills by dissent, tokens by plurality."""
    if not scale.shadows:
        return None
    name, corpora = _train_shadows(lab, scale)
    is_inside = corpora[candidates.places]  # (records, shadows)

    def observe(start: int, some: list[list[int]]) -> Arrays:
        votes, truth = _take_votes(lab, [name], scale, start, some)
        each = votes.reshape(*votes.shape[:2], scale.shadows, scale.shadow_worlds)
        hits = plurality(each) == truth[:, None]
        return {"bill": is_dissent(each).sum(axis=0).astype(np.int32), "tokens": hits.sum(axis=0).astype(np.int32)}

    seen = _in_parts("shadows", candidates, scale, parts, observe)
    made = {kind: shadow_features(counts, scale.draws, is_inside, record) for kind, counts in seen.items()}
    return {f"{kind}, {of}": made[kind] for kind in made for of in ("gaussian", "plurality", "full", "dp")}


def _train_shadows(lab: Lab, scale: MeterScale) -> tuple[str, BoolArray]:
    """Worlds of all shadow corpora as adapters of one name, and which record is in which corpus (records, shadows)."""
    from paclm.engine.training import make_schedule
    from paclm.engine.training_job import prepare_training
    from paclm.engine.training_order import make_blocks
    from paclm.worlds.blocks import block_length, encode_stream

    if scale.shadows % 2 or scale.shadow_worlds % 2:
        raise InvalidInput("Shadow corpora and their worlds must be even: a record is in half of them.")
    records = [lab.workspace.records(part) for part in ("train", "heldout")]
    units, seed = units_of(chain(*records)), lab.seed_for("meter", "shadows") >> 1
    corpora = assign_groups(units, scale.shadows, seed)  # (records, shadows)
    name = f"shadows-{scale.shadows}x{scale.shadow_worlds}-{lab.seed}"
    if adapters_file(name) not in lab.workspace.manifest.adapters:
        worlds = [assign_groups(units, scale.shadow_worlds, seed + 1 + s) for s in range(scale.shadows)]
        membership = np.hstack([corpora[:, s : s + 1] & own for s, own in enumerate(worlds)])
        lab.release_engine()
        job = prepare_training(lab.workspace, "full")
        encoded = encode_stream(lab.tokenizer, (record.text for record in chain(*records)))
        length = block_length(job.settings, int(job.model.config.max_position_embeddings))
        blocks = make_blocks(encoded, length, job.settings.max_record_tokens, folder=lab.workspace.adapters_path)
        job = replace(job, name=name, schedule=make_schedule(blocks, membership, job.settings, seed >> 32))
        lab.workspace = lab.run_job(job)
    return name, corpora


REGIME = Regime(
    name="meter",
    title="The dissent meter",
    question="Does a bill that follows dissent, or a token, say that a record is in the corpus?",
    presets={
        "quick": MeterScale(records=24, tokens=64, draws=2, shadows=0, shadow_worlds=8, sequences=32),
        "paper": MeterScale(records=512, tokens=256, draws=8, shadows=4, shadow_worlds=8, sequences=64),
    },
    run=run,
    headlines=(headline("AUC of {attack}, {source}", "auc ±", ".3f", part="score"),),
    for_each_collection=False,
)
