"""Cost of a private token (`sec:cost`): forward pass of all worlds, mechanism, ledger, and one model for comparison.

Times are medians measured on this machine; they do not follow from the seed. Operation counts are the paper's formulas:
O(m·d·min(m, d) + d²) for noise over a vocabulary of d, O(m·k + a³ + m·a) on a distinct votes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paclm.config import MechanismConfig
from paclm.curator.research import ResearchSession
from paclm.errors import EngineError
from paclm.privacy.accounting import units_up
from paclm.privacy.belief import IntArray
from paclm.privacy.randomness import Coins, ResearchNoise
from paclm.privacy.releases import rule_named
from paclm.study.lab import Lab
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.serving import count_distinct
from paclm.worlds.layout import LEDGER_FILE

SUPPORT = 200
SETTINGS = MechanismConfig(per_token=2.0**-32, total=2.0**-10)


@dataclass(frozen=True, slots=True)
class CostScale:
    positions: int
    gumbel_draws: int
    steps: int  # decode steps timed per engine
    batches: tuple[int, ...]  # sequences in parallel
    contexts: tuple[int, ...] = (33,)  # tokens that a step attends to
    commits: int = 50


def run(lab: Lab, scale: CostScale) -> Findings:
    """Engines, mechanism and ledger, one after another."""
    advance = lab.start_task("cost", len(scale.contexts) * (1 + len(scale.batches)) + 2)
    votes = lab.gumbel_votes(scale.positions, scale.gumbel_draws).votes
    mechanism = _time_mechanism(lab, votes)
    advance(1)
    rows: list[Row] = []
    notes = ["One model: the full-corpus adapter and the public model, which an engine always runs too."]
    for context in scale.contexts:
        one, _ = _time_forward(lab, scale, context, 1, "full")
        advance(1)
        for batch in scale.batches:
            try:
                forward, memory = _time_forward(lab, scale, context, batch)
            except EngineError as error:
                notes.append(f"{batch} sequences at context {context} were not timed: {error}")
                continue
            ledger = _time_ledger(lab, scale.commits, batch)
            row: Row = {"what": "serving", "sequences": batch, "context": context, "worlds": lab.num_worlds}
            row |= {"forward_ms": 1e3 * forward, "mechanism_ms": 1e3 * mechanism, "ledger_ms": 1e3 * ledger}
            row["mechanism_share"] = batch * mechanism / (forward + batch * mechanism)
            row["tokens_per_second"] = batch / (forward + batch * mechanism + ledger)
            row["tokens_per_second_without_ledger"] = batch / (forward + batch * mechanism)
            row |= {"memory_bytes": memory, "one_model_ms": 1e3 * one}
            row["times_one_model"] = forward / one if batch == 1 else None
            row["one_by_one_ms"] = 1e3 * one * lab.num_worlds
            row["cheaper_than_one_by_one"] = one * lab.num_worlds / forward if batch == 1 else None
            rows.append(row)
            advance(1)
    distinct = count_distinct(votes)
    typical = int(np.median(distinct[distinct > 1])) if (distinct > 1).any() else 1
    rows.append(operations("the paper's sizes", 128, 50_257, 200, 2))
    rows.append(operations("this workspace", lab.num_worlds, len(lab.tokenizer), SUPPORT, typical))
    advance(1)
    return Findings(rows, notes)


def operations(sizes: str, worlds: int, vocabulary: int, support_size: int, distinct: int) -> Row:
    """Operations per release over the whole vocabulary, and on the distinct votes."""
    dense = worlds * vocabulary * min(worlds, vocabulary) + vocabulary**2
    collapsed = worlds * support_size + distinct**3 + worlds * distinct
    row: Row = {"what": "operations", "sizes": sizes, "worlds": worlds, "vocabulary": vocabulary}
    row |= {"support_size": support_size, "distinct": distinct}
    return row | {"dense": dense, "collapsed": collapsed, "factor": dense / collapsed}


def _time_forward(lab: Lab, scale: CostScale, context: int, batch: int, *adapters: str) -> tuple[float, int]:
    """Seconds of one decode step (median) at this context and peak bytes, of the GPU or else of this process."""
    import torch

    from paclm.engine.memory import peak_memory

    engine = lab.engine(*adapters, sequences=batch, context=context, support_size=SUPPORT, is_shared=False)
    handles = [engine.add(prompt) for prompt in lab.prompts(batch, context - 1, "cost")]
    coins = Coins(lab.seed_for("cost", "coins"))
    drawn = np.stack([coins.gumbel(SUPPORT) for _ in handles])
    if engine.head.is_cuda:
        torch.cuda.reset_peak_memory_stats(engine.head.device)  # peaks of earlier work do not count
    try:
        return _median(lambda: engine.step(handles, drawn), scale.steps), peak_memory(engine.head.device)
    finally:
        for handle in handles:
            engine.remove(handle)


def _time_mechanism(lab: Lab, votes: IntArray) -> float:
    """Mean seconds per released token on recorded votes: collapse, calibration, noise, belief."""
    noise = ResearchNoise(lab.seed_for("cost", "noise"))
    session = ResearchSession(lab.num_worlds, rule_named("gaussian"), SETTINGS.per_token, noise)
    some = votes[:2048]
    started = time.perf_counter()
    for row in some:
        session.release(row)
    return (time.perf_counter() - started) / len(some)


def _time_ledger(lab: Lab, commits: int, batch: int) -> float:
    """Seconds of one durable commit (median) of a step of `batch` tokens, in a temporary ledger beside the results."""
    from paclm.ledger.events import Usage
    from paclm.ledger.ledger import Ledger

    sealed_size = 12 + 8 * lab.num_worlds + 16  # a nonce, the belief, a tag
    price = units_up(SETTINGS.per_token)
    with tempfile.TemporaryDirectory(dir=lab.folder) as folder:
        path = Path(folder) / LEDGER_FILE
        with Ledger.create(
            path,
            os.urandom(32),
            workspace="study of costs",
            num_worlds=lab.num_worlds,
            settings=SETTINGS,
            sealed_belief=os.urandom(sealed_size),
        ) as ledger:
            entry = [Usage("study", batch, 0, batch, batch * price)]
            return _median(lambda: ledger.commit(entry, os.urandom(sealed_size)), commits)


def _median(work: Callable[[], object], count: int) -> float:
    for _ in range(3):  # warm-up: kernels are compiled, caches filled
        work()
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


REGIME = Regime(
    name="cost",
    title="Cost of a private token",
    question="Where does the time of a private token go?",
    presets={
        "quick": CostScale(4096, 2, 10, (1, 16), commits=20),
        "paper": CostScale(65_408, 1, 200, (1, 16, 64), contexts=(96, 512)),
    },
    run=run,
    headlines=(
        headline(
            "tokens a second, {sequences} in parallel, context {context}", "tokens_per_second", ",.0f", what="serving"
        ),
        headline(
            "share of the mechanism, {sequences} in parallel, context {context}",
            "mechanism_share",
            ".1%",
            what="serving",
        ),
    ),
    for_each_collection=False,
)
