"""How many worlds: dissent, retained gain, leak and priors for fewer worlds than were trained.

Two ways to have m worlds. *Columns*: random subsets of the trained worlds, many of them. They vote as m worlds would,
but they are no design of m worlds: a record is in about half of them, not in exactly half, so its prior is not 1/2 and
no attack is judged on them. *Balanced*: m worlds that were drawn and trained for themselves (`design-m`). Secret and
noise are in expectation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

import numpy as np

from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.bounds import nats_for, success_bound
from paclm.privacy.leak import mean_and_stderr
from paclm.privacy.releases import rule_named
from paclm.study.decoding import GREEDY, GUMBEL, Decoding
from paclm.study.expectation import IN_EXPECTATION, ExpectedReleases, score_hits
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes, collect_votes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Result, Row
from paclm.study.serving import count_distinct
from paclm.study.statistics import clustered_mean, retained_gain

TARGET = 0.51  # the bound on membership inference whose total is taken for the bound on naming the world
BUDGETS = {"at_8": 2.0**-8, "at_16": 2.0**-16, "at_32": 2.0**-32}  # by the end of their columns
TIGHT = "at_32"
NOTES = [
    "Columns are random subsets of the trained worlds, averaged over subsets. For votes they are what so many worlds "
    "would vote; a record is in a random number of them, so they are no design and no attack is judged on them.",
    IN_EXPECTATION,
]


@dataclass(frozen=True, slots=True)
class WorldsScale:
    positions: int
    gumbel_draws: int
    sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 256)  # those up to the number of trained worlds
    subsets: int = 32  # random subsets of each size
    designs: tuple[int, ...] = ()  # sizes of balanced designs, trained for this regime


def run(lab: Lab, scale: WorldsScale) -> Findings:
    """Every size and decoder from the trained worlds, then the balanced designs."""
    decodings = (GREEDY, GUMBEL.times(scale.gumbel_draws))
    found = lab.text_votes(scale.positions, decodings)
    digests = [votes.digest for votes in found.values()]
    parts = lab.parts("worlds", [asdict(scale), digests])
    sizes = [size for size in scale.sizes if size <= lab.num_worlds]
    advance = lab.start_task("fewer worlds", len(sizes) * len(found))
    rows: list[Row] = []
    tight = {name: cache(partial(_tight_hits, votes)) for name, votes in found.items()}
    for name, votes in found.items():
        for size in sizes:
            make = partial(_of_columns, lab, votes, size, scale.subsets, tight[name])
            rows += [{"decoder": name, **row} for row in parts.rows(f"columns-{name}-{size}", make)]
            advance(1)
    for size in scale.designs:
        rows += parts.rows(f"balanced-{size}", partial(_of_design, lab, scale.positions, decodings, size, tight))
    return Findings(rows, NOTES)


Hits = Callable[[], FloatArray]
"""What all trained worlds hit at the tightest budget, position by position: what fewer are compared with."""


def _of_columns(lab: Lab, votes: TextVotes, size: int, subsets: int, tight: Hits) -> list[Row]:
    """One row: subsets of the trained worlds, or all of them."""
    rng, trained = lab.rng("worlds", "subsets", size), votes.num_worlds
    if size == trained:
        return [{"design": "all trained", **measure(lab, votes, [np.arange(trained)], tight)}]
    chosen = [rng.permutation(trained)[:size] for _ in range(subsets)]
    # of how many of `size` worlds a record is a member: hypergeometric
    prior_sd = math.sqrt((trained - size) / (trained - 1) / (4 * size))
    return [{"design": "columns", **measure(lab, votes, chosen, tight), "record_prior_sd": prior_sd}]


def _of_design(
    lab: Lab, positions: int, decodings: Sequence[Decoding], size: int, tight: Mapping[str, Hits]
) -> list[Row]:
    """One row per decoder: worlds drawn and trained for this size, on the same text and coins."""
    name = f"design-{size}"
    lab.ensure(name, "full")
    passages = lab.passages(positions)
    advance = lab.start_task(f"votes of {size} worlds", sum(passage.num_scored for passage in passages))
    seeds = [lab.seed_for("coins", decoding.name) for decoding in decodings]  # the coins of the other votes
    found = collect_votes(lab.engine(name, "full"), passages, decodings, seeds, True, advance)
    return [
        {"decoder": decoder, "design": "balanced", **measure(lab, votes, [np.arange(size)], tight[decoder])}
        for decoder, votes in found.items()
    ]


def _tight_hits(votes: TextVotes) -> FloatArray:
    return ExpectedReleases(votes).under(rule_named("gaussian"), BUDGETS[TIGHT]).hits


def measure(lab: Lab, votes: TextVotes, subsets: Sequence[IntArray], tight: Hits) -> Row:
    """Figures of so many worlds, averaged over subsets of columns; errors over passages, spread over subsets."""
    size = len(subsets[0])
    columns = [_values(replace(votes, votes=votes.votes[:, chosen])) for chosen in subsets]
    values = {name: np.mean([one[name] for one in columns], axis=0) for name in columns[0]}  # (n,) each
    row: Row = {
        "worlds": size,
        "subsets": len(subsets),
        "positions": votes.num_positions,
        "record_prior_sd": 0.0,
        "world_prior": 1.0 / size,
        "world_bound": success_bound(nats_for(TARGET, 0.5), 1.0 / size),
        "most_nats": math.log(size),  # all that there is to learn about the secret
    }
    rng = lab.rng("hits", "bootstrap")
    row["dissent"], row["dissent_stderr"] = clustered_mean(values["dissent"], votes.passage, rng)
    row["distinct_given_dissent"] = _ratio(values["distinct_in_dissent"], values["dissent"])
    row["flip_dissent"] = _ratio(values["flips"], values["dissent"])
    for end in ("noiseless", "plurality", *BUDGETS):
        scored = score_hits(lab, votes, values[end])
        for name in ("accuracy", "retained_gain"):
            row |= {f"{name}_{end}": scored[name], f"{name}_{end}_stderr": scored[f"{name}_stderr"]}
    public = (votes.public == votes.truth).astype(np.float64)
    full = (votes.column("full") == votes.truth).astype(np.float64)
    more = retained_gain(values[TIGHT] - tight() + public, public, full, votes.passage, lab.rng("hits", "bootstrap"))
    row[f"kept_change_{TIGHT}"], row[f"kept_change_{TIGHT}_stderr"] = more or (None, None)
    row["passages"] = len(np.unique(votes.passage))
    shares = [score_hits(lab, votes, one[TIGHT])["retained_gain"] for one in columns]
    row["retained_gain_between"] = None  # standard deviation of one draw of so many worlds
    if len(shares) > 1 and shares[0] is not None:
        row["retained_gain_between"] = between_draws(shares, size, votes.num_worlds)
    row["leak_per_token"] = BUDGETS[TIGHT] * row["dissent"]  # of the charge b, the share that dissents
    return row


def between_draws(shares: Sequence[float], size: int, trained: int) -> float:
    """Standard deviation of one draw of `size` worlds, from subsets of the trained ones, which share some worlds."""
    within = mean_and_stderr(shares).stderr * math.sqrt(len(shares))
    return within * math.sqrt(trained / (trained - size))


def _values(votes: TextVotes) -> dict[str, FloatArray]:
    """What is averaged at every position."""
    expected = ExpectedReleases(votes)
    dissent = votes.is_dissent.astype(np.float64)
    found = {name: expected.under(rule_named("gaussian"), b) for name, b in BUDGETS.items()}
    tight = found[TIGHT]
    return {
        "dissent": dissent,
        "distinct_in_dissent": dissent * count_distinct(votes.votes),
        "flips": tight.flips,
        "noiseless": tight.noiseless,
        "plurality": expected.under(rule_named("plurality"), math.inf).hits,
        **{name: one.hits for name, one in found.items()},
    }


def _ratio(part: FloatArray, whole: FloatArray) -> float | None:
    return float(part.sum() / whole.sum()) if whole.any() else None


def in_short(result: Result) -> list[str]:
    """What the smallest number of worlds keeps beside the largest."""
    lines = []
    for decoder in ("greedy", "gumbel"):
        rows = [row for row in result.select(decoder=decoder) if row["retained_gain_at_32"] is not None]
        if len(rows) > 1:
            few, many = (pick(rows, key=lambda row: row["worlds"]) for pick in (min, max))
            lines.append(
                f"kept at 2^-32, {decoder}: {few['retained_gain_at_32']:.0%} with {few['worlds']} worlds, "
                f"{many['retained_gain_at_32']:.0%} with {many['worlds']}; dissent {few['dissent']:.1%} and "
                f"{many['dissent']:.1%}"
            )
    return lines


REGIME = Regime(
    name="worlds",
    title="Number of worlds",
    question="What do fewer worlds keep of the gain, how often do they dissent, and what does the attacker start from?",
    presets={
        "quick": WorldsScale(4096, 1, subsets=8),
        "paper": WorldsScale(65_408, 1, designs=(8, 16, 32, 64)),
    },
    run=run,
    headlines=(headline("dissent, {decoder}, {worlds} worlds", "dissent ±", ".1%", design="all trained"),),
    in_short=in_short,
    for_each_collection=False,
)
