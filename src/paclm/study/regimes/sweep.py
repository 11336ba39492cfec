"""Per-sequence sweep (`tab:sweep`): both attacks on greedy sequences, over budgets and lengths, beside their bounds.

Every trial draws its own world, noise and prompt. A total is committed, so a large budget per token stops a sequence
early; the bound of the realized length is fixed beforehand and is the guarantee. Shorter lengths are read off longer
sequences: cells of one budget share trials.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from paclm.config import format_budget
from paclm.privacy.accounting import Account
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import mean_and_stderr
from paclm.study.attacks.belief import guesses_right
from paclm.study.continuations import Continuations
from paclm.study.decoding import GREEDY
from paclm.study.lab import Lab
from paclm.study.leak_tests import FALSE_ALARMS, MIN_SAMPLES, break_ties, is_violation, p_of_hits, p_of_mean
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Result, Row
from paclm.study.serving import draw_secrets

NOTES = [
    "The attacks read the curator's belief, which no user sees: they are an upper envelope.",
    "Lengths of one budget share trials: a shorter length is the beginning of longer sequences.",
    "Where unanimity rises with the length, greedy text falls into loops: no merit of the mechanism.",
]


@dataclass(frozen=True, slots=True)
class SweepScale:
    trials: int
    long_trials: int  # at the longest length
    lengths: tuple[int, ...] = (16, 64, 256)
    budgets: tuple[float, ...] = tuple(2.0**-n for n in range(4, 33, 4))
    total: float = 1.0  # nats committed per sequence
    prompt: int = 32
    together: int = 300  # sequences in a batch, or as many as fit; speed only

    def realized(self, per_token: float, length: int) -> int:
        """Tokens until the total is spent: the stop rule is fixed before the first one."""
        return min(length, Account.open(self.total).remaining_tokens(per_token))


def play_sweep(lab: Lab, scale: SweepScale) -> dict[tuple[float, int], tuple[FloatArray, IntArray]]:
    """By budget and nominal length: beliefs (trials, m) and distinct votes (trials, tokens).

    The first trials run to the longest length, the others to the next one; shorter lengths are read off them.
    """
    prompts = {b: lab.prompts(scale.trials, scale.prompt, "sweep", b) for b in scale.budgets}
    parts = lab.parts("sweep", [asdict(scale), hashlib.sha256(repr(prompts).encode()).hexdigest()])
    longest, *shorter = sorted(scale.lengths, reverse=True)
    groups = {longest: range(scale.long_trials)}
    groups |= {length: range(scale.long_trials, scale.trials) for length in shorter[:1]}
    found: dict[tuple[float, int], list[tuple[FloatArray, IntArray]]] = {}
    for nominal, trials in groups.items():
        texts = Continuations(lab, "sweep", scale.prompt + nominal, scale.together)
        for b in scale.budgets:
            lengths = {n: scale.realized(b, n) for n in scale.lengths if n <= nominal}
            horizons, seed = sorted(set(lengths.values())), lab.seed_for("sweep", "noise", b)  # the same in any batch
            for first in range(trials.start, trials.stop, scale.together):
                own = prompts[b][first : min(first + scale.together, trials.stop)]
                make = partial(texts.released, own, GREEDY, b, seed, horizons[-1], first=first, horizons=horizons)
                played = parts.arrays(f"sweep-{nominal}-{format_budget(b)}-{first}", make)
                for n, tokens in lengths.items():
                    part = played["beliefs"][horizons.index(tokens)], played["distinct"][:, :tokens]
                    found.setdefault((b, n), []).append(part)
    return {
        cell: (np.concatenate([one[0] for one in some]), np.concatenate([one[1] for one in some]))
        for cell, some in found.items()
    }


def run(lab: Lab, scale: SweepScale) -> Findings:
    """Play everything, then every cell."""
    lab.need_all_worlds()
    cells = play_sweep(lab, scale)
    secrets = {b: draw_secrets(lab.num_worlds, lab.seed_for("sweep", "noise", b), scale.trials) for b in scale.budgets}
    rows = [
        measure(lab, scale, nominal, b, beliefs, distinct, secrets[b], len(cells))
        for (b, nominal), (beliefs, distinct) in cells.items()
    ]
    rows.sort(key=lambda row: (row["length"], -row["per_token_nats"]))
    tests = 2 * len(rows)
    allowed = (
        f"A cell is a violation when its one-sided p-value is under {FALSE_ALARMS} ÷ {tests} tests (two attacks in "
        f"{len(rows)} cells, every collection by itself): if no bound is broken, the probability of any false alarm is "
        f"{FALSE_ALARMS:.0%} at most."
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
        few = f"; with {trials} trials only a gross fault would show" if trials < MIN_SAMPLES else ""
        lines.append(
            f"{'ALARM: ' if broken else ''}bounds exceeded in collection {number}: {', '.join(broken) or 'none'} "
            f"(smallest of {2 * len(rows)} p-values {least:.2g}, alarm below {FALSE_ALARMS / (2 * len(rows)):.1g}{few})"
        )
    return lines


REGIME = Regime(
    name="sweep",
    title="Per-sequence sweep",
    question="Does any attack on a released sequence exceed its bound?",
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
