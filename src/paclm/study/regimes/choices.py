"""Forced choice: does an answer that is limited to a few values say more about the corpus than free text?

Prefixes of a record are prompted for one token. In free text a caller sees whether it is the record's own next token.
In a forced choice (`enum`, a grammar) the answer is limited: to that token and decoys to which the public model gives
about the same probability, or a little more, others in every draw; to the record's next words and those of another
record; to true or false. Where two texts differ, one token decides and the rest is fixed, so one token is released.

The same prefixes, the same number of queries; members are records of the corpus, others are held-out records. Each
query is answered under a uniform belief against one secret, as in `meter`.

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

    from paclm.curator.grammar import Grammars
    from paclm.engine.decode_step import MaskArray
    from paclm.engine.engine import Engine

PER_TOKEN = 2.0**-16
FREE, TEXTS, BOOLEAN = "free text", "2 texts", "boolean"
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
    margins: tuple[float, ...]  # of two tokens: by how many nats the public model prefers the decoy
    words: int  # tokens of each of two texts
    sequences: int  # records in a part: what a stopped run repeats


class LimitedQuery(NamedTuple):
    """What is asked at n prefixes: the tokens that may be voted for, and those that are looked for."""

    support: Tensor  # (n, c) by public logit, largest first, then −1
    wanted: Tensor  # (n, w) padded by −2


def run(lab: Lab, scale: ChoicesScale) -> Findings:
    """Put every query at every prefix, and score every record by what the answers were."""
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


def asked_in(scale: ChoicesScale) -> dict[str, tuple[int, float] | None]:
    """The queries as rows name them, with the number of values and the margin of a forced choice."""
    forced = {f"{size} tokens": (size, 0.0) for size in scale.choices}
    forced |= {f"2 tokens, decoy {margin:g} nats ahead": (2, margin) for margin in scale.margins}
    return {FREE: None, **forced, TEXTS: None, BOOLEAN: None}


def _observe(lab: Lab, scale: ChoicesScale, start: int, some: list[list[int]]) -> Arrays:
    """How often each answer was the one looked for: counts (n,) by decoder, query and source; public features."""
    single = [name for name in ("dp", "full") if adapters_file(name) in lab.workspace.manifest.adapters]
    engine = lab.engine(lab.worlds_name, *single, context=max(scale.tokens, _FEWEST))
    ask = _Asker(lab, scale, engine, some)
    coins = {d.name: Coins(lab.seed_for("choices", "coins", d.name, start)) for d in (GREEDY, GUMBEL)}
    ballots: dict[str, list[Ballots]] = {}
    chances: dict[str, list[FloatArray]] = {}
    record, features = [], []
    for number, tokens in enumerate(some):
        for prefixes in _prefixes(engine, number, tokens, scale.stride):
            record.append(np.full(len(prefixes.truth), start + number))
            features.append(_features(prefixes))
            for asked, queries in ask.all(prefixes):
                chances.setdefault(asked, []).append(np.mean([_chance(prefixes, q) for q in queries], axis=0))
                for decoding in (GREEDY, GUMBEL):
                    for query in queries:
                        votes = restricted_votes(engine, prefixes.hidden, query.support, decoding, coins[decoding.name])
                        wanted = query.wanted.cpu().numpy()
                        ballots.setdefault(f"{decoding.name}|{asked}", []).append(Ballots(votes, wanted))
    found: Arrays = {"record": np.concatenate(record), "features": np.concatenate(features)}
    found |= {f"chance|{asked}": np.concatenate(values) for asked, values in chances.items()}
    for name, given in ballots.items():
        seed = lab.seed_for("choices", "noise", name, start)
        for source, hits in _hits(lab, single, _joined(given), seed).items():
            counts = np.zeros(len(found["record"]), dtype=np.int32)
            np.add.at(counts, _rows_of(given, scale.draws), hits)
            found[f"{name}|{source}"] = counts
    return found


class Prefixes(NamedTuple):
    """Some prefixes of one record."""

    hidden: Tensor  # (W, c, d) of all worlds, the public model last
    log_public: Tensor  # (c, V) the public model's log probabilities of the next token
    truth: Tensor  # (c,) the record's next token
    length: Tensor  # (c,) tokens of the prefix
    number: int  # of the record in its part


class Ballots(NamedTuple):
    """Votes on one query at n prefixes."""

    votes: IntArray  # (n, W) the public model last
    wanted: IntArray  # (n, w)


def _joined(given: Sequence[Ballots]) -> Ballots:
    widest = max(one.wanted.shape[1] for one in given)
    wanted = [np.pad(one.wanted, ((0, 0), (0, widest - one.wanted.shape[1])), constant_values=-2) for one in given]
    return Ballots(np.concatenate([one.votes for one in given]), np.concatenate(wanted))


def _rows_of(given: Sequence[Ballots], draws: int) -> IntArray:
    """Which prefix of the part each row belongs to; the draws of the same prefixes follow one another."""
    rows, first = [], 0
    for at in range(0, len(given), draws):
        size = len(given[at].votes)
        rows += [np.arange(first, first + size)] * draws
        first += size
    return np.concatenate(rows)


def _prefixes(engine: Engine, number: int, tokens: Sequence[int], stride: int) -> Iterator[Prefixes]:
    """Every stride-th prefix of a record, in chunks."""
    import torch

    targets = torch.tensor(list(tokens[1:]), device=engine.head.device)
    for first, hidden in engine.hidden_states(tokens[:-1]):
        at = torch.arange(first, first + hidden.shape[1], device=targets.device)
        kept = torch.nonzero(at % stride == stride - 1)[:, 0]
        if len(kept):
            part = hidden[:, kept]
            log_public = engine.whole_logits(part[-1:])[0].log_softmax(-1)
            yield Prefixes(part, log_public, targets[at[kept]], at[kept] + 1, number)


class _Asker:
    """All queries at some prefixes, as many draws of each."""

    def __init__(self, lab: Lab, scale: ChoicesScale, engine: Engine, some: list[list[int]]) -> None:
        from paclm.curator.grammar import Grammars

        self._scale, self._engine, self._some, self._tokenizer = scale, engine, some, lab.tokenizer
        self._grammars = Grammars(lab.tokenizer, engine.vocabulary)
        first = [int(lab.tokenizer.encode(text, add_special_tokens=False)[0]) for text in ("true", "false")]
        self._true, self._false = first

    def all(self, prefixes: Prefixes) -> Iterator[tuple[str, list[LimitedQuery]]]:
        """Each query by name, once for every draw."""
        import torch

        draws, log_public = self._scale.draws, prefixes.log_public
        for asked, forced in asked_in(self._scale).items():
            if forced is not None:
                yield asked, forced_queries(log_public, prefixes.truth, *forced, draws)
            elif asked == TEXTS:
                yield asked, [self._texts(prefixes)] * draws
            elif asked == BOOLEAN:
                pair = torch.tensor([self._true, self._false], device=log_public.device).expand(len(log_public), 2)
                yield asked, [LimitedQuery(by_logit(log_public, pair), pair[:, :1])] * draws
            else:
                support = self._engine.restricted(prefixes.hidden)[0]
                yield asked, [LimitedQuery(support, prefixes.truth[:, None])] * draws

    def _texts(self, prefixes: Prefixes) -> LimitedQuery:
        """The record's next words or those of the next record of the part, through the grammar of a choice."""
        import torch

        from paclm.engine.decode_step import top_tokens

        own, other = self._some[prefixes.number], self._some[(prefixes.number + 1) % len(self._some)]
        masks, wanted = [], []
        for length in prefixes.length.tolist():
            start = min(length, len(other) - self._scale.words)
            true, false = (
                self._text(tokens[at : at + self._scale.words]) for tokens, at in ((own, length), (other, start))
            )
            mask, decides = first_tokens(self._grammars, true, false)
            masks.append(mask)
            wanted.append(decides)
        widest = max(map(len, wanted))
        device = prefixes.truth.device
        allowed = torch.from_numpy(np.stack(masks).view(np.int32)).to(device)
        support = top_tokens(prefixes.log_public, self._engine.support_size, allowed)
        padded = [[*tokens, *[-2] * (widest - len(tokens))] for tokens in wanted]
        support = support[:, : int((support >= 0).sum(1).max())]
        return LimitedQuery(support, torch.tensor(padded, device=device).reshape(len(padded), widest))

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text


def first_tokens(grammars: Grammars, true: str, false: str) -> tuple[MaskArray, list[int]]:
    """The mask of the first token of one of two texts, and the tokens that leave only the true one.

    Texts that are equal, or of which one begins the other, decide nothing.
    """
    from paclm.curator.grammar import choice_grammar

    masks = [grammars.start(choice_grammar(texts)).allowed for texts in ([true, false], [true], [false])]
    bits = [np.unpackbits(mask.view(np.uint8), bitorder="little") for mask in masks]
    return masks[0], np.flatnonzero(bits[1] & ~bits[2]).tolist()


def forced_queries(log_public: Tensor, truth: Tensor, size: int, margin: float, draws: int) -> list[LimitedQuery]:
    """The true token and the decoys whose log probability is nearest to its own + margin; others in every draw."""
    import torch

    own = truth[:, None]
    distance = (log_public - log_public.gather(1, own) - margin).abs().scatter(1, own, torch.inf)
    near = distance.topk(draws * (size - 1), dim=1, largest=False).indices.chunk(draws, dim=1)
    return [LimitedQuery(by_logit(log_public, torch.cat([own, decoys], 1)), own) for decoys in near]


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


def _chance(prefixes: Prefixes, query: LimitedQuery) -> FloatArray:
    """How likely the public model gives what is looked for, among the tokens that are allowed: (n,)."""
    import torch

    support, wanted = query.support, query.wanted
    inside = prefixes.log_public.gather(1, support.clamp(min=0)).masked_fill(support < 0, -torch.inf).softmax(1)
    chance: FloatArray = (inside * (support[:, :, None] == wanted[:, None, :]).any(2)).sum(1).double().cpu().numpy()
    return chance


def _features(prefixes: Prefixes) -> FloatArray:
    """What the public model says at each prefix (n, 5), as in `meter`."""
    import torch

    log_public = prefixes.log_public
    own, top = log_public.gather(1, prefixes.truth[:, None])[:, 0], log_public.max(1).values
    entropy = -(log_public.exp() * log_public).sum(1)
    columns = [own, entropy, top, (own == top).float(), prefixes.length.float().log()]
    found: FloatArray = torch.stack(columns, 1).double().cpu().numpy()
    return found


def _hits(lab: Lab, single: Sequence[str], ballots: Ballots, seed: int) -> dict[str, BoolArray]:
    """Whether each source answered by what is looked for: (n,) each."""
    m = lab.num_worlds
    tokens = {name: ballots.votes[:, m + i] for i, name in enumerate([*single, "public"])}
    for number, rule in enumerate(RULES.values()):
        tokens[rule.name] = _released(lab, rule, ballots.votes[:, :m], seed + number)
    return {name: (own[:, None] == ballots.wanted).any(axis=1) for name, own in tokens.items()}


def _released(lab: Lab, rule: Rule, votes: IntArray, seed: int) -> IntArray:
    """One token for each row of votes (n, m), each under a uniform belief and against the same secret."""
    flat = votes.astype(np.int64)
    sessions = ResearchSessions.seeded(flat.shape[1], rule, PER_TOKEN, seed, min(_TOGETHER, len(flat)))
    sessions.secrets[:] = lab.rng("choices", "secret").integers(flat.shape[1])
    tokens = np.empty(len(flat), dtype=np.int64)
    for at in range(0, len(flat), _TOGETHER):
        part = flat[at : at + _TOGETHER]
        sessions.beliefs[:] = uniform_belief(flat.shape[1])
        tokens[at : at + _TOGETHER] = sessions.release(part, np.arange(len(part))).tokens
    return tokens


def _score(lab: Lab, scale: ChoicesScale, candidates: Candidates, observed: Arrays) -> list[Row]:
    """A row for each decoder, query, source and attack, with the difference to the same attack on free text."""
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
        "The promise `half` does not cover this question. Gain: AUC less that of the same attack on free text, at the "
        "same prefixes and as many queries, errors over the same resampled groups of records.",
        "reference: how much more often than the public model would, without knowing any other record. The public "
        "model's own answers are the null check.",
    ]
    if others < 100:
        notes.append(f"With {others} records held out, 1 % false positives means none.")
    return notes


def _verdicts(result: Result) -> list[str]:
    """The null check, the DP bound, and whether forced choice beats free text."""
    rows, lines = result.rows, []
    null = max(abs(row["auc"] - 0.5) / max(row["auc_stderr"], 1e-12) for row in rows if row["source"] == "public")
    lines.append(
        f"{'ALARM: ' * (null > _ALARM)}public model, largest distance from a guess: {null:.1f} standard errors."
    )
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
        "quick": ChoicesScale(
            records=24, tokens=64, stride=2, draws=2, choices=(2, 4), margins=(1.0,), words=6, sequences=16
        ),
        "paper": ChoicesScale(
            records=512, tokens=256, stride=1, draws=4, choices=(2, 4, 16), margins=(1.0, 2.0), words=6, sequences=32
        ),
    },
    run=run,
    verdicts=_verdicts,
    headlines=(
        headline("AUC gained over free text, {asked}, {source}, {decoder}", "gain ±", ".3f", attack="reference"),
    ),
    for_each_collection=False,
)
