"""Per-sequence sweep (`tab:sweep`): both attacks on greedy sequences, over budgets and lengths, beside their bounds.

Every trial draws a world, noise and a prompt of its own. A total is committed, so that a large budget per token stops
a sequence early; the bound of the length it then has is fixed beforehand, and is the guarantee. Shorter lengths are
read off longer sequences: cells of one budget share trials.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from paclm.config import format_budget
from paclm.privacy.accounting import Account
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import mean_and_stderr
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import rule_named
from paclm.study.attacks.belief import guesses_right
from paclm.study.decoding import GREEDY
from paclm.study.history import Arrays, join_sessions
from paclm.study.lab import Advance, Lab
from paclm.study.parts import Parts
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Result, Row
from paclm.study.serving import EngineStreams, begin, draw_secrets, engine_for, play
from paclm.study.violations import ENOUGH, FALSE_ALARMS, break_ties, is_violation, p_of_hits, p_of_mean

NOTES = [
    "The attacks read the curator's own belief, more than any user sees: an upper envelope.",
    "Lengths of one budget share trials: a shorter length is the beginning of longer sequences.",
    "Where unanimity rises with the length, greedy text falls into loops: that is no merit of the mechanism.",
]


@dataclass(frozen=True, slots=True)
class SweepScale:
    """How much is generated."""

    trials: int
    long_trials: int
    """At the longest length."""
    lengths: tuple[int, ...] = (16, 64, 256)
    budgets: tuple[float, ...] = tuple(2.0**-n for n in range(4, 33, 4))
    total: float = 1.0
    """Nats committed per sequence."""
    prompt: int = 32
    together: int = 300
    """Sequences in a batch, or as many as fit; speed only."""

    def realized(self, per_token: float, length: int) -> int:
        """Tokens until the total is spent: the stop rule is fixed before the first one."""
        return min(length, Account.open(self.total).remaining_tokens(per_token))

    def trials_at(self, length: int) -> int:
        """How many sequences reach this length."""
        return self.long_trials if length == max(self.lengths) else self.trials


class Run(NamedTuple):
    """Trials first … last of one budget, next to others in a batch."""

    budget: int
    first: int
    last: int


class Sweep:
    """All trials: trial i of budget b has the same prompt, world and noise in whatever batch it runs."""

    def __init__(self, lab: Lab, scale: SweepScale) -> None:
        self.lab, self.scale = lab, scale
        self.prompts = [lab.prompts(scale.trials, scale.prompt, "sweep", b) for b in scale.budgets]
        self.secrets = [draw_secrets(lab.num_worlds, self._seed(b), scale.trials) for b in scale.budgets]
        self._fitting: dict[int, int] = {}  # sequences by context, once it is known how many fit

    @cached_property
    def parts(self) -> Parts:
        """What was finished before on the same prompts."""
        digest = hashlib.sha256(repr(self.prompts).encode()).hexdigest()
        return self.lab.parts("sweep", [asdict(self.scale), digest])

    def play(self) -> dict[tuple[int, int], tuple[FloatArray, IntArray]]:
        """By budget (its index) and nominal length: beliefs (trials, m) and distinct votes (trials, tokens)."""
        scale = self.scale
        groups = self.groups()
        work = sum(length * (run.last - run.first) for length, runs in groups.items() for run in runs)
        advance = self.lab.start_task("sweep", work)
        found: dict[tuple[int, int, int], tuple[FloatArray, IntArray]] = {}  # by budget, trial and tokens
        for length, runs in sorted(groups.items()):
            horizons = [h for h in self.horizons() if h <= length]
            for number, batch in enumerate(cut_runs(runs, scale.together)):
                make = partial(self._play_batch, batch, length, horizons, advance)
                made = self.parts.arrays(f"sweep-{length}-{number}", make)
                trials = [(run.budget, trial) for run in batch for trial in range(run.first, run.last)]
                for row, (budget, trial) in enumerate(trials):
                    for h, horizon in enumerate(horizons):
                        found[budget, trial, horizon] = made["beliefs"][h, row], made["distinct"][row, :horizon]
        return self._cells(found)

    def _cells(
        self, found: dict[tuple[int, int, int], tuple[FloatArray, IntArray]]
    ) -> dict[tuple[int, int], tuple[FloatArray, IntArray]]:
        scale, cells = self.scale, {}
        for b, per_token in enumerate(scale.budgets):
            for nominal in scale.lengths:
                length = scale.realized(per_token, nominal)
                own = [found[b, trial, length] for trial in range(scale.trials_at(nominal))]
                cells[b, nominal] = np.stack([one[0] for one in own]), np.stack([one[1] for one in own])
        return cells

    def horizons(self) -> list[int]:
        """Every realized length of any budget."""
        return sorted({self.scale.realized(b, nominal) for b in self.scale.budgets for nominal in self.scale.lengths})

    def groups(self) -> dict[int, list[Run]]:
        """Which trials run to which length: the first ones to the longest, the others to the next."""
        scale = self.scale
        longest, *shorter = sorted(scale.lengths, reverse=True)
        groups: dict[int, list[Run]] = {}
        for b, per_token in enumerate(scale.budgets):
            far = scale.realized(per_token, longest)
            near = scale.realized(per_token, shorter[0]) if shorter else far
            groups.setdefault(far, []).append(Run(b, 0, scale.long_trials))
            if shorter:
                groups.setdefault(near, []).append(Run(b, scale.long_trials, scale.trials))
        return groups

    def _play_batch(self, batch: list[Run], length: int, horizons: list[int], advance: Advance) -> Arrays:
        scale, rule = self.scale, rule_named("gaussian")
        context = scale.prompt + min(n for n in sorted(scale.lengths)[-2:] if n >= length)  # two engines, not three
        wanted = self._fitting.get(context, scale.together)
        engine, fitting = engine_for(self.lab, sequences=wanted, context=context)
        self._fitting[context] = fitting
        done = []
        for smaller in cut_runs(batch, fitting):
            sessions = []
            for run in smaller:
                per_token = scale.budgets[run.budget]
                secrets = self.secrets[run.budget][run.first : run.last]
                sessions.append(begin(self.lab.num_worlds, rule, per_token, self._seed(per_token), run.first, secrets))
            prompts = [prompt for run in smaller for prompt in self.prompts[run.budget][run.first : run.last]]
            streams = EngineStreams(engine, GREEDY, [Coins(0)] * len(prompts))  # greedy: no coin is ever drawn
            done.append(play(streams, prompts, sessions, length, horizons, advance).arrays())
        return join_sessions(done)

    def _seed(self, per_token: float) -> int:
        return self.lab.seed_for("sweep", "noise", per_token)


def cut_runs(runs: list[Run], size: int) -> Iterator[list[Run]]:
    """The same trials in batches of at most `size` sequences."""
    batch: list[Run] = []
    room = size
    for run in runs:
        first = run.first
        while first < run.last:
            last = min(run.last, first + room)
            batch.append(Run(run.budget, first, last))
            room -= last - first
            first = last
            if not room:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


def run(lab: Lab, scale: SweepScale) -> Findings:
    """Play everything, then every cell."""
    lab.need_all_worlds()
    sweep = Sweep(lab, scale)
    rows = []
    cells = sweep.play()
    for (b, nominal), (beliefs, distinct) in cells.items():
        rows.append(measure(lab, scale, nominal, scale.budgets[b], beliefs, distinct, sweep.secrets[b], len(cells)))
    rows.sort(key=lambda row: (row["length"], -row["per_token_nats"]))
    looks = 2 * len(rows)
    allowed = (
        f"A cell counts as a violation when its one-sided p-value is under {FALSE_ALARMS} ÷ {looks} looks (two attacks "
        f"in {len(rows)} cells, every collection by itself): with no bound broken, all of them together raise a false "
        f"alarm with probability {FALSE_ALARMS:.0%} at most."
    )
    return Findings(rows, [*NOTES, allowed])


def measure(
    lab: Lab,
    scale: SweepScale,
    nominal: int,
    per_token: float,
    beliefs: FloatArray,
    distinct: IntArray,
    secrets: IntArray,
    num_cells: int,
) -> Row:
    """Both attacks on one cell, beside the bound of the realized length and the paper's nominal one."""
    length = scale.realized(per_token, nominal)
    records, worlds = guesses_right(beliefs, secrets[: len(beliefs)], lab.membership)
    hits = break_ties(worlds, lab.rng("sweep", "ties", nominal, per_token))
    row: Row = {
        "budget": format_budget(per_token),
        "per_token_nats": per_token,
        "length": nominal,
        "realized_length": length,
        "is_stopped": length < nominal,
        "trials": len(beliefs),
    }
    row["unanimity"], row["unanimity_stderr"] = mean_and_stderr((distinct == 1).mean(axis=1))
    for name, shares, prior in (("membership", records, 0.5), ("world", worlds, 1.0 / lab.num_worlds)):
        row[f"{name}_rate"], row[f"{name}_stderr"] = mean_and_stderr(shares)
        row[f"{name}_bound"] = success_bound(length * per_token, prior)
        row[f"{name}_nominal_bound"] = success_bound(nominal * per_token, prior)
    row["membership_p"] = p_of_mean(records, row["membership_bound"])
    row["world_p"] = p_of_hits(hits, len(beliefs), row["world_bound"])
    row["is_violation"] = is_violation(min(row["membership_p"], row["world_p"]), 2 * num_cells)
    return row


def verdicts(result: Result) -> list[str]:
    """How many cells of each collection break their bound by more than chance."""
    lines = []
    for number in sorted({row["collection"] for row in result.rows}):
        rows = result.select(collection=number)
        broken = [f"{row['budget']} at {row['length']} tokens" for row in rows if row["is_violation"]]
        least = min(min(row["membership_p"], row["world_p"]) for row in rows)
        trials = min(row["trials"] for row in rows)
        few = f"; with {trials} trials only a gross fault would show" if trials < ENOUGH else ""
        lines.append(
            f"{'ALARM: ' if broken else ''}bounds exceeded in collection {number}: {', '.join(broken) or 'none'} "
            f"(smallest of {2 * len(rows)} p-values {least:.2g}, alarm below {FALSE_ALARMS / (2 * len(rows)):.1g}{few})"
        )
    return lines


REGIME = Regime(
    name="sweep",
    title="Per-sequence sweep",
    question="Does any attack on a released sequence beat its bound?",
    presets={
        "quick": SweepScale(trials=10, long_trials=2, prompt=16, together=48),
        "paper": SweepScale(trials=1000, long_trials=100),
    },
    run=run,
    headlines=(
        headline("world found most often, at {budget}", "world_rate ± world_stderr", ".3f", largest="world_rate"),
        headline("unanimity at {budget}, {length} tokens", "unanimity ±", ".3f", budget="2^-16"),
    ),
    verdicts=verdicts,
)
