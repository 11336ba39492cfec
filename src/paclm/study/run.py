"""Run regimes on a workspace and write their results. Knows no regime by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paclm.curator.research import STAMP
from paclm.engine.loading import pick_device
from paclm.errors import PaclmError
from paclm.study.extensions import identify
from paclm.study.lab import Lab
from paclm.study.regime import Preset, Regime
from paclm.study.regimes import NAMES, ON_REQUEST, check_names, regime_named
from paclm.study.results import Result, Row, plain, provenance
from paclm.worlds.storage import make_private_folder


def regimes_named(names: Sequence[str], *, left_out: Sequence[str] = ON_REQUEST) -> list[Regime]:
    """Regimes by name, `all` for every built-in one but those left out; each once, in the order of the paper.

    Plugins come last, in the order named.
    """
    check_names(names)
    own = [name for name in NAMES if name in names or ("all" in names and name not in left_out)]
    plugged = [name for name in dict.fromkeys(names) if name not in (*NAMES, "all")]
    return [regime_named(name) for name in (*own, *plugged)]


def results_folder(lab: Lab) -> Path:
    """Where the results of a workspace are."""
    return make_private_folder(lab.folder / "results")


def run_regime(lab: Lab, regime: Regime, preset: Preset, collections: int = 1, scale: Any = None) -> Result:
    """Run one regime, for every collection of worlds, and write its result."""
    started = time.perf_counter()
    lab.kept.begin()
    scale = scale if scale is not None else regime.presets[preset]
    rows: list[Row] = []
    notes: list[str] = []
    for number in range(1, (collections if regime.for_each_collection else 1) + 1):
        with lab.of_collection(number) as other:
            found = regime.run(other, scale)
        rows += [{"collection": number, **row} for row in found.rows]
        notes += [note for note in found.notes if note not in notes]
    result = Result(
        regime=regime.name,
        preset=preset,
        seed=lab.seed,
        scale=asdict(scale),
        rows=plain(rows),  # returned as it will be read back
        notes=notes,
        seconds=time.perf_counter() - started,
        provenance={
            **provenance(lab.workspace, device_name(lab)),
            "worlds": lab.num_worlds,
            "kept_from_before": len(lab.kept.from_before),
            "votes_from": lab.votes_from,
            "plugins": [identify(loaded) for loaded in lab.plugins],
            "stamp": STAMP,
        },
    )
    result.save(results_folder(lab))
    lab.kept.end()
    return result


def run_regimes(
    lab: Lab,
    regimes: Sequence[Regime],
    preset: Preset,
    collections: int = 1,
    on_result: Callable[[Regime, Result], None] = lambda _, __: None,
    on_failure: Callable[[Regime, PaclmError], None] | None = None,
) -> list[Result]:
    """Run several, in order. With `on_failure`, a regime that fails is reported to it and the others still run."""
    results = []
    for regime in regimes:
        try:
            results.append(run_regime(lab, regime, preset, collections))
        except PaclmError as error:
            if on_failure is None:
                raise
            on_failure(regime, error)
        else:
            on_result(regime, results[-1])
    return results


def device_name(lab: Lab) -> str:
    """The device of the engine, in words, also where only its votes are studied."""
    if lab.votes_from is not None:
        return lab.votes_from
    device = pick_device(lab.runtime.device)
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {lab.arithmetic[0]}"
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' * (threads != 1)}, {lab.arithmetic[0]}"
