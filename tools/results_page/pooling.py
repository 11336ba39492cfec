"""The same result over several collections of worlds: means, and errors that contain how much collections differ.

    pooled = pool_results([load_results(folder / "results")["accuracy"] for folder in folders])
    row = pooled.one(decoder="gumbel", budget="2^-32")
    row["retained_gain"], row["retained_gain_stderr"], interval(row, "retained_gain")

Collections partition records of one corpus and train on them in other ways. The value of collection k is θ + D_k + C_k:
D_k is the luck of the scored documents, C_k that of the collection. With K collections, their standard errors e_k over
documents, and a share ρ of the documents of each two in common (1 where the held-out records are the same; where each
draws its own, the probability of a record to be held out), the mean has

    variance   W + B,  W = ρ · mean of e_k²   what documents have in common: more collections do not make it smaller
                       B = s² ÷ K             s² is the variance of the K values: what they share cancels in it
    freedom    P − 1 for W (P documents), K − 1 for B
    interval   mean ± √(t(P − 1)² W + t(K − 1)² B), a quantile of Student's t for each part

This interval (Banerjee 1960) covers θ at least as often as stated, whatever the ratio of W to B: given the two
estimates, the coverage is a concave function of them, and each part alone has the stated one. Three collections leave
two degrees of freedom, and t(2) is 4.3 at 95 %. W is too large where e_k also contains what differs between
collections: other coins, other sessions. Then the error is too large, never too small. What collections have in common,
as the adapter on all records of one workspace, is in neither part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from paclm.errors import InvalidInput
from paclm.study.results import Result, Row

CONFIDENCE = 0.95
"""Of an interval."""
REGIMES = ("accuracy", "census", "releases", "flatness")
"""Regimes whose rows are the same in every collection."""
KEYS = ("decoder", "budget", "release", "support_size")
"""Columns by which rows are the same."""


def pool_results(results: Sequence[Result]) -> Result:
    """One result with the pooled rows; its table and figures are made as those of a single collection."""
    _refuse_unlike(results)
    shared = shared_documents(results)
    rows = [pool_rows(group, shared) for group in zip(*(result.rows for result in results), strict=True)]
    notes = [f"Means over {len(results)} collections of worlds; errors contain how much these differ."]
    return replace(results[0], rows=rows, notes=[*results[0].notes, *notes], seconds=sum(r.seconds for r in results))


def shared_documents(results: Sequence[Result]) -> float:
    """ρ: 1 for the same held-out records, and where seeds of the split differ the share of records that is held out."""
    origins = [result.provenance for result in results]
    splits = {origin["corpus"]["corpus/heldout.jsonl"]: origin["arguments"]["seed"] for origin in origins}
    if len(splits) < len(origins) or len(set(splits.values())) < len(origins):
        return 1.0
    return max(float(origin["held_out"] / (origin["held_out"] + origin["records"])) for origin in origins)


def pool_rows(rows: Sequence[Row], shared: float = 1.0) -> Row:
    """The mean of every number, with its error where the rows have one; other values as they are, or all that differ.

    `E_between` of an error column E is √B, for `interval`.
    """
    keys = [{name: row.get(name) for name in KEYS} for row in rows]
    if any(key != keys[0] for key in keys):
        raise InvalidInput(f"These rows are not of one kind: {' and '.join(map(str, keys))}.")
    pooled: Row = {name: _merge([row.get(name) for row in rows]) for name in rows[0]}
    for name in rows[0]:
        if error := error_name(rows[0], name):
            values, errors = ([row[column] for row in rows] for column in (name, error))
            is_known = None not in (*values, *errors)
            between = float(np.std(values, ddof=1)) / math.sqrt(len(rows)) if is_known else None
            pooled[f"{error}_between"] = between
            pooled[error] = math.hypot(between, math.sqrt(shared) * _rms(errors)) if between is not None else None
    return pooled | {"collection": 1, "collections": len(rows)}


def interval(row: Row, name: str, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """A confidence interval of a pooled value (module docstring)."""
    error = error_name(row, name)
    if error is None or row[error] is None:
        raise InvalidInput(f"{name} has no error in this row, so it has no interval.")
    between = row[f"{error}_between"]
    within = math.sqrt(max(0.0, row[error] ** 2 - between**2))
    freedom = row["passages"] - 1 if row.get("passages") else math.inf  # some rows do not say how many there are
    tails = student_t.ppf(0.5 + confidence / 2.0, [row["collections"] - 1, freedom])
    half = float(np.hypot(*(tails * (between, within))))
    return row[name] - half, row[name] + half


def error_name(row: Mapping[str, Any], name: str) -> str | None:
    """The column with the standard error of another, if there is one: regimes name them in four ways."""
    ways = (("_points", "_stderr"), ("_nats", "_stderr"), ("accuracy_", "stderr_"))
    names = [f"{name}_stderr", *(name.replace(old, new) for old, new in ways if old in name)]
    return next((found for found in names if found in row), None)


def _merge(values: Sequence[Any]) -> Any:
    """Their one value; the mean of numbers; else all that differ, as text: an alarm of one collection is not lost."""
    known = [value for value in values if value is not None]
    if all(value == values[0] for value in values):
        return values[0]
    if any(isinstance(value, bool | str) for value in known):
        return ", ".join(dict.fromkeys(map(str, known)))
    return float(np.mean(known)) if len(known) == len(values) else None


def _rms(errors: Sequence[float]) -> float:
    return math.sqrt(np.mean(np.square(errors)))


def _refuse_unlike(results: Sequence[Result]) -> None:
    """Refuse fewer than two, other regimes, sizes, records or bases, and one collection twice."""
    if len(results) < 2:
        raise InvalidInput(f"One cannot see how much collections differ from {len(results)} of them. Give 2 or more.")
    first = results[0]
    for other in results[1:]:
        for what, mine, theirs in (
            ("regime", first.regime, other.regime),
            ("scale", first.scale, other.scale),
            ("number of rows", len(first.rows), len(other.rows)),
            ("base model", first.provenance.get("base"), other.provenance.get("base")),
            ("worlds", first.provenance.get("worlds"), other.provenance.get("worlds")),
            ("corpus", *(result.provenance.get("arguments", {}).get("corpus_digest") for result in (first, other))),
        ):
            if mine != theirs:
                raise InvalidInput(f"These results cannot be pooled: they differ in {what} ({mine} and {theirs}).")
    for one, two in itertools.combinations(results, 2):
        if [{**row, "collection": 1} for row in one.rows] == [{**row, "collection": 1} for row in two.rows]:
            raise InvalidInput(f"The same collection is given twice: all rows of {one.regime} are equal.")
