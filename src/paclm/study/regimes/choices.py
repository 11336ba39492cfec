"""Forced choice: does an answer that is limited to a few values say more about the corpus than free text?

Prefixes of a record are prompted for one token. In free text a caller sees whether it is the record's own next token; in
a forced choice (`enum`, a grammar) the answer is limited to that token and decoys to which the public model gives about
the same probability, other decoys in every draw. The same prefixes, the same number of queries; members are records of
the corpus, others are held-out records. Each query is answered under a uniform belief against one secret, as in `meter`.

The public model is the null check: it has seen no record, so it must not separate members from others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray, uniform_belief
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import RULES, Rule
from paclm.study.attacks.prefix_queries import Seen, excess_over, score_records
from paclm.study.attacks.record_scores import difference, separate
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.decoding import GREEDY, GUMBEL, Decoding
from paclm.study.history import Arrays
from paclm.study.lab import Lab
from paclm.study.regime import Findings, Regime, headline
from paclm.study.regimes.universe import Candidates, choose_candidates
from paclm.study.results import Result, Row
from paclm.worlds.layout import adapters_file

if TYPE_CHECKING:
    from torch import Tensor

    from paclm.engine.engine import Engine

PER_TOKEN = 2.0**-16
FREE, BOOLEAN = "free text", "boolean"
_TOGETHER = 4096  # releases at a time
_FEWEST = 16  # tokens of a record that is attacked
_ALARM = 4.0  # standard errors


@dataclass(frozen=True, slots=True)
class ChoicesScale:
    records: int  # at most, of members and of others
    tokens: int  # of each record: prefixes up to this length are prompted
    stride: int  # every prefix, every second one …
    draws: int  # queries of each prefix, with fresh coins and other decoys
    choices: tuple[int, ...]  # values of a forced choice, the true one included
    sequences: int  # records in a part: what a stopped run repeats


class Question(NamedTuple):
    """What is asked at n prefixes: the tokens that may be voted for, and the one that is looked for."""

    support: Tensor  # (n, c) by public logit, largest first
    truth: Tensor  # (n,)


def run(lab: Lab, scale: ChoicesScale) -> Findings:
    """Ask every question at every prefix, and score every record by what the answers were."""
    lab.need_all_worlds()
    if min(scale.choices, default=0) < 2 or min(scale.stride, scale.draws) < 1:
        raise InvalidInput("A forced choice needs at least 2 values; stride and draws are at least 1.")
    lab.ensure("full")
    candidates = choose_candidates(lab, scale.records, scale.tokens, _FEWEST)
    parts = lab.parts("choices", asdict(scale))
    advance = lab.start_task("choices, records", len(candidates.tokens))
    found: list[Arrays] = []
    for start in range(0, len(candidates.tokens), scale.sequences):
        some = candidates.tokens[start : start + scale.sequences]
        found.append(parts.arrays(f"choices-{start}-{len(some)}", partial(_observe, lab, scale, start, some)))
        advance(len(some))
    observed = {column: np.concatenate([one[column] for one in found]) for column in found[0]}
    return Findings(_score(lab, scale, candidates, observed), _notes(lab, candidates, scale))


def asked_in(scale: ChoicesScale) -> list[str]:
    """The questions, as rows name them."""
    return [FREE, *(f"{size} tokens" for size in scale.choices), BOOLEAN]


def _observe(lab: Lab, scale: ChoicesScale, start: int, some: list[list[int]]) -> Arrays:
    """How often each answer was the one looked for: counts (n,) by decoder, question and source; public features."""
    single = [name for name in ("dp", "full") if adapters_file(name) in lab.workspace.manifest.adapters]
    engine = lab.engine(lab.worlds_name, *single, context=max(scale.tokens, _FEWEST))
    words = _boolean_tokens(lab)
    ballots: dict[str, list[IntArray]] = {}
    record, features = [], []
    coins = {d.name: Coins(lab.seed_for("choices", "coins", d.name, start)) for d in (GREEDY, GUMBEL)}
    for number, tokens in enumerate(some):
        for hidden, log_public, truth, place in _prefixes(engine, tokens, scale.stride):
            near = decoys(log_public, truth, scale.draws * (max(scale.choices) - 1))
            record.append(np.full(len(truth), start + number))
            features.append(_features(log_public, truth, place))
            for asked in asked_in(scale):
                chances = []
                for draw in range(scale.draws):
                    question = _ask(engine, asked, hidden, log_public, truth, near, words, draw)
                    chances.append(_chance(log_public, question))
                    for decoding in (GREEDY, GUMBEL):
                        votes = restricted_votes(engine, hidden, question.support, decoding, coins[decoding.name])
                        kept = np.column_stack([votes, question.truth.cpu().numpy()])
                        ballots.setdefault(f"{decoding.name}|{asked}|{draw}", []).append(kept)
                ballots.setdefault(f"chance|{asked}", []).append(np.mean(chances, axis=0))
    joined = {name: np.concatenate(values) for name, values in ballots.items()}
    counts = _counts(lab, scale, single, joined, start)
    chance = {f"chance|{asked}": joined[f"chance|{asked}"] for asked in asked_in(scale)}
    return {**counts, **chance, "record": np.concatenate(record), "features": np.concatenate(features)}


def _prefixes(
    engine: Engine, tokens: Sequence[int], stride: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Every stride-th prefix: hidden states (W, c, d), the public model's log probabilities (c, V), next token, place."""
    import torch

    targets = torch.tensor(list(tokens[1:]), device=engine.head.device)
    for first, hidden in engine.hidden_states(tokens[:-1]):
        at = torch.arange(first, first + hidden.shape[1], device=targets.device)
        kept = torch.nonzero(at % stride == stride - 1)[:, 0]
        if len(kept):
            part = hidden[:, kept]
            yield part, engine.whole_logits(part[-1:])[0].log_softmax(-1), targets[at[kept]], at[kept] + 1


def decoys(log_public: Tensor, truth: Tensor, count: int) -> Tensor:
    """Tokens whose public probability is nearest to that of the true one, nearest first: (c, V), (c,) → (c, count)."""
    import torch

    own = log_public.gather(1, truth[:, None])
    distance = (log_public - own).abs().scatter(1, truth[:, None], torch.inf)
    return distance.topk(count, dim=1, largest=False).indices


def _ask(
    engine: Engine,
    asked: str,
    hidden: Tensor,
    log_public: Tensor,
    truth: Tensor,
    near: Tensor,
    words: tuple[int, int],
    draw: int,
) -> Question:
    import torch

    if asked == FREE:
        return Question(engine.restricted(hidden)[0], truth)
    if asked == BOOLEAN:
        pair = torch.tensor(words, device=truth.device).expand(len(truth), 2)
        return Question(by_logit(log_public, pair), pair[:, 0])
    size = int(asked.split()[0])
    values = torch.cat([truth[:, None], near[:, draw * (size - 1) : (draw + 1) * (size - 1)]], 1)
    return Question(by_logit(log_public, values), truth)


def by_logit(log_public: Tensor, values: Tensor) -> Tensor:
    """Tokens (c, n) in the order of a support: by public logit, largest first, equal ones by token id."""
    values = values.sort(1).values
    order = log_public.gather(1, values).argsort(dim=1, descending=True, stable=True)
    return values.gather(1, order)


def restricted_votes(engine: Engine, hidden: Tensor, support: Tensor, decoding: Decoding, coins: Coins) -> IntArray:
    """Votes of all worlds and the public model (n, W) among these tokens, as a masked step of the engine casts them."""
    import torch

    from paclm.engine.decode_step import coupled_votes, support_logits

    drawn = None
    if decoding.temperature:
        size = max(engine.support_size, support.shape[1])
        rows = np.stack([coins.gumbel(size)[: support.shape[1]] for _ in range(len(support))])
        drawn = torch.from_numpy(rows.astype(np.float32)).to(support.device)
    logits = support_logits(hidden, engine.head, support)
    votes: IntArray = coupled_votes(logits, support, drawn, decoding.temperature).cpu().numpy()
    return votes


def _chance(log_public: Tensor, question: Question) -> FloatArray:
    """How likely the public model gives the token looked for, among those allowed: (n,)."""
    inside = log_public.gather(1, question.support).softmax(1) * (question.support == question.truth[:, None])
    chance: FloatArray = inside.sum(1).double().cpu().numpy()
    return chance


def _features(log_public: Tensor, truth: Tensor, place: Tensor) -> FloatArray:
    """What the public model says at each prefix (n, 5), as in `meter`."""
    import torch

    own, top = log_public.gather(1, truth[:, None])[:, 0], log_public.max(1).values
    entropy = -(log_public.exp() * log_public).sum(1)
    columns = [own, entropy, top, (own == top).float(), place.float().log()]
    found: FloatArray = torch.stack(columns, 1).double().cpu().numpy()
    return found


def _boolean_tokens(lab: Lab) -> tuple[int, int]:
    """How the answers true and false begin."""
    first = [int(lab.tokenizer.encode(f" {word}", add_special_tokens=False)[0]) for word in ("true", "false")]
    if first[0] == first[1]:
        first = [int(lab.tokenizer.encode(letter, add_special_tokens=False)[0]) for letter in "tf"]
    return first[0], first[1]


def _counts(lab: Lab, scale: ChoicesScale, single: Sequence[str], ballots: Arrays, start: int) -> Arrays:
    """How often each source answered by the token looked for: counts (n,) named decoder|question|source."""
    found: Arrays = {}
    for decoder in (GREEDY.name, GUMBEL.name):
        for asked in asked_in(scale):
            each = np.stack([ballots[f"{decoder}|{asked}|{draw}"] for draw in range(scale.draws)])  # (draws, n, W + 1)
            truth, worlds = each[..., -1], each[..., : lab.num_worlds]
            names = [*single, "public"]
            seen: dict[str, BoolArray] = {
                name: each[..., lab.num_worlds + i] == truth for i, name in enumerate(names)
            }
            for rule in RULES.values():
                seed = lab.seed_for("choices", "noise", decoder, asked, rule.name, start)
                seen[rule.name] = _released(lab, rule, worlds, seed) == truth
            for name, hits in seen.items():
                found[f"{decoder}|{asked}|{name}"] = hits.sum(axis=0).astype(np.int32)
    return found


def _released(lab: Lab, rule: Rule, votes: IntArray, seed: int) -> IntArray:
    """One token for each row of votes (draws, n, m), each under a uniform belief and against the same secret."""
    flat = votes.reshape(-1, votes.shape[-1]).astype(np.int64)
    sessions = ResearchSessions.seeded(flat.shape[1], rule, PER_TOKEN, seed, min(_TOGETHER, len(flat)))
    sessions.secrets[:] = lab.rng("choices", "secret").integers(flat.shape[1])
    tokens = np.empty(len(flat), dtype=np.int64)
    for at in range(0, len(flat), _TOGETHER):
        part = flat[at : at + _TOGETHER]
        sessions.beliefs[:] = uniform_belief(flat.shape[1])
        tokens[at : at + _TOGETHER] = sessions.release(part, np.arange(len(part))).tokens
    return tokens.reshape(votes.shape[:-1])


def _score(lab: Lab, scale: ChoicesScale, candidates: Candidates, observed: Arrays) -> list[Row]:
    """A row for each decoder, question, source and attack, with the difference to the same attack on free text."""
    is_member, clusters, record = candidates.is_member, candidates.clusters, observed["record"]
    rows: list[Row] = []
    free: dict[tuple[str, str, str], FloatArray] = {}
    for name in sorted((name for name in observed if name.count("|") == 2), key=lambda name: FREE not in name):
        decoder, asked, source = name.split("|")
        seen, chance = Seen(observed[name].astype(np.int64), scale.draws, record), observed[f"chance|{asked}"]
        rates = seen.rates()
        scores = {"rate": rates, "reference": excess_over(seen, chance)}
        if seen.counts.min() < seen.counts.max():
            odds = np.log(np.clip(chance, 1e-6, 1.0) / np.clip(1.0 - chance, 1e-6, 1.0))
            known = np.column_stack([observed["features"], odds])
            scores |= score_records(seen, known, is_member, clusters, lab.rng("choices", "folds"))
        for attack, values in scores.items():
            rng = lab.rng("choices", "bootstrap", name, attack)
            row: Row = {"decoder": decoder, "asked": asked, "source": source, "attack": attack}
            row["queries"] = scale.draws * len(record) / len(is_member)
            row["members"], row["others"] = int(is_member.sum()), int((~is_member).sum())
            row["rate_members"], row["rate_others"] = float(rates[is_member].mean()), float(rates[~is_member].mean())
            for measure, estimate in separate(values, is_member, clusters, rng)._asdict().items():
                row[measure], row[f"{measure}_stderr"] = estimate
            if asked == FREE:
                free[decoder, source, attack] = values
            elif (decoder, source, attack) in free:
                gain = difference(values, free[decoder, source, attack], is_member, clusters, rng)
                row["gain"], row["gain_stderr"] = gain
            rows.append(row | _promised(lab, source))
    return rows


def _promised(lab: Lab, source: str) -> Row:
    """What the DP adapter promises of any attack: TPR ≤ FPR + t, t the total variation, bounds the area too."""
    if source != "dp":
        return {}
    alone = lab.workspace.manifest.adapters[adapters_file("dp")]["dp"]["alone"]
    rest = 2.0 - 2.0 * alone["mia_bound"]
    return {"auc_bound": 1.0 - rest * rest / 2.0, "true_positives_bound": alone["tpr_at_fpr_1_percent"]}


def _notes(lab: Lab, candidates: Candidates, scale: ChoicesScale) -> list[str]:
    others = int((~candidates.is_member).sum())
    notes = [
        "The promise `half` does not cover this question. Gain: AUC less that of the same attack on free text, at the same "
        "prefixes and as many queries, errors over the same resampled groups of records.",
        "reference: how much more often than the public model would, without knowing any other record. The public model's "
        "own answers are the null check.",
    ]
    if others < 100:
        notes.append(f"With {others} records held out, 1 % false positives means none.")
    return notes


def _verdicts(result: Result) -> list[str]:
    """The null check, the DP bound, and whether forced choice beats free text."""
    rows, lines = result.rows, []
    null = max(abs(row["auc"] - 0.5) / max(row["auc_stderr"], 1e-12) for row in rows if row["source"] == "public")
    lines.append(f"{'ALARM: ' * (null > _ALARM)}public model, largest distance from a guess: {null:.1f} standard errors.")
    if bounded := [row for row in rows if row["source"] == "dp"]:
        worst = max((row["auc"] - row["auc_bound"]) / max(row["auc_stderr"], 1e-12) for row in bounded)
        most, bound = max(row["auc"] for row in bounded), bounded[0]["auc_bound"]
        alarm = "ALARM: " * (worst > _ALARM)
        lines.append(f"{alarm}DP adapter: largest AUC {most:.3f}, at most {bound:.3f} promised.")
    return lines


REGIME = Regime(
    name="choices",
    title="Forced choice",
    question="Does an answer limited to a few values say more about the corpus than free text?",
    presets={
        "quick": ChoicesScale(records=24, tokens=64, stride=2, draws=2, choices=(2, 4), sequences=16),
        "paper": ChoicesScale(records=512, tokens=256, stride=1, draws=4, choices=(2, 4, 16), sequences=32),
    },
    run=run,
    verdicts=_verdicts,
    headlines=(
        headline("AUC gained over free text, {asked}, {source}, {decoder}", "gain ±", ".3f", attack="reference"),
    ),
    for_each_collection=False,
)
