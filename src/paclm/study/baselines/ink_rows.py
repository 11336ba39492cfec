"""Rows of InvisibleInk for the regime `pmixed`: settings found on public text, scored on the text of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paclm.study.baselines.accountants import success_at_half
from paclm.study.baselines.distributions import text_distributions
from paclm.study.baselines.ink_search import (
    InkChoice,
    InkFigures,
    InkPlayer,
    InkTable,
    InkTarget,
    clips_for,
    unsearched,
)
from paclm.study.baselines.invisible_ink import ADJACENCIES
from paclm.study.lab import Lab
from paclm.study.results import Row
from paclm.study.statistics import accuracy_row


class InkSearch(NamedTuple):
    """What is searched, and on how much public text."""

    positions: int
    temperatures: tuple[float, ...]


def ink_choices(lab: Lab, num_shards: int, targets: Sequence[InkTarget], search: InkSearch) -> list[list[InkChoice]]:
    """Every target as fixed beforehand, and a second time as a search has it, where public text was given.

    The search reads the public text alone, never a record or the text that is scored.
    """
    fixed = unsearched(targets, num_shards)
    passages = lab.public_passages(search.positions)
    if not passages:
        return [fixed]
    advance = lab.start_task(f"InvisibleInk, search, {num_shards} shard models", search.positions)
    clips = clips_for(targets, num_shards, search.temperatures)
    table = InkTable(num_shards, search.temperatures, clips=clips)
    for part in text_distributions(lab.engine(f"shards-{num_shards}"), passages):
        table.see(part)
        advance(part.num_positions)
    return [fixed, table.choose(targets)]


def ink_rows(lab: Lab, choices: Sequence[Sequence[InkChoice]], player: InkPlayer) -> list[Row]:
    """A row for every choice; the player has their settings, list by list."""
    played = iter(player.figures())
    return [_row(lab, choice, next(played)) for some in choices for choice in some]


def ink_near_rows(lab: Lab, choices: Sequence[InkChoice], player: InkPlayer) -> list[Row]:
    """A row beside the neighbours for every choice, on the first queries that the player has seen."""
    return [_near_row(lab, choice, figures) for choice, figures in zip(choices, player.figures(), strict=True)]


def _row(lab: Lab, choice: InkChoice, figures: InkFigures) -> Row:
    target, settings = choice.target, choice.settings
    other = {kind: replace(settings, adjacency=kind).epsilon(target.queries, target.delta) for kind in ADJACENCIES}
    return {
        "kind": "ink",
        "method": "InvisibleInk",
        "is_searched": choice.gain is not None,
        "adjacency": target.adjacency,
        "epsilon": target.epsilon,
        "queries": target.queries,
        "mia_bound": success_at_half(target.epsilon, target.delta),
        "num_shards": settings.num_shards,
        "clip": settings.clip,
        "temperature": settings.temperature,
        "score": settings.score,
        "top_k": settings.top_k,
        "rho": settings.rho,
        "epsilon_any": other["any"],
        "epsilon_public": other["public"],
        **_ink_figures(lab, choice, figures),
        "expected_gain": choice.gain,
        "guarantee": target.guarantee,
        "delta": target.delta,
    }


def _near_row(lab: Lab, choice: InkChoice, figures: InkFigures) -> Row:
    first = figures.first(choice.target.queries)
    return {
        "kind": "neighbour",
        "method": f"InvisibleInk, {choice.target.adjacency}",
        "guarantee": choice.target.guarantee,
        "epsilon": choice.target.epsilon,
        "num_shards": choice.settings.num_shards,
        "queries": len(first.truth),
        **_ink_figures(lab, choice, first),
        "private_share": 1.0,
    }


def _ink_figures(lab: Lab, choice: InkChoice, figures: InkFigures) -> Row:
    """Accuracy with errors over passages; public model and ceiling have the temperature and support of the setting."""
    names = (choice.settings.num_shards, *choice.target, choice.gain is not None)
    rngs = [lab.rng("pmixed", "ink", *names, name) for name in ("bootstrap", "headroom")]
    return accuracy_row(*figures, *rngs)


def select_ink(rows: list[Row]) -> None:
    """Mark one B at every point: the largest expected gain on public text, or without a search the largest B."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["kind"] == "ink":
            row["is_selected"] = False
            point = (row["epsilon"], row["queries"], row["adjacency"], row["is_searched"])
            rank = (row["expected_gain"] or 0.0, row["num_shards"])
            if point not in best or rank > (best[point]["expected_gain"] or 0.0, best[point]["num_shards"]):
                best[point] = row
    for row in best.values():
        row["is_selected"] = True
