"""Which rows a table shows, with columns added where needed, and the notes below it; for `tables.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paclm.privacy.dp import format_up
from paclm.study.expectation import IN_EXPECTATION
from paclm.study.leak_tests import FALSE_ALARMS
from paclm.study.paper_numbers import SPREAD_OF_RATIO
from paclm.study.regimes.depth import in_points
from paclm.study.regimes.releases import MODELS, RARE, SAME_FOR_ALL
from paclm.study.regimes.sessions import spread_of_ratio
from paclm.study.results import Result, Row


def own_notes(result: Result) -> Sequence[str]:
    """With a note where only some of the worlds were studied."""
    some = first_worlds(result.provenance)
    return [*result.notes, f"Worlds: {some}."] if some else result.notes


def first_worlds(origin: Mapping[str, Any]) -> str | None:
    """What is studied if not all worlds of a design are; None if all are."""
    drawn = origin.get("arguments", {}).get("worlds")
    studied = origin.get("worlds", drawn)
    if drawn is None or studied == drawn:
        return None
    return f"the first {studied} of {drawn}, which are no design of {studied}: a record is in about half of them"


def notes_of_releases(result: Result) -> Sequence[str]:
    """In today's words, and of expectations only where the result has them."""
    return [*(note for note in result.notes if note == IN_EXPECTATION), RARE, SAME_FOR_ALL]


def _heading(name: str, row: Row) -> str:
    return name if row["collection"] == 1 else f"{name}, collection {row['collection']}"


def by_decoder(result: Result) -> dict[str, Row]:
    """Rows of `accuracy` at 2^-32 by decoder and collection, with the positions of both decoders."""
    own = {decoder: result.select(decoder=decoder, budget="2^-32") for decoder in ("greedy", "gumbel")}
    counts = {f"positions_{decoder}": rows[0]["positions"] for decoder, rows in own.items()}
    names = {"greedy": "greedy", "gumbel": "coupled Gumbel"}
    return {_heading(names[decoder], row): {**row, **counts} for decoder, rows in own.items() for row in rows}


def organic(result: Result) -> list[Row]:
    rows = result.select(part="organic", collection=1)
    return sorted(rows, key=lambda row: (row["kind"], row["repetitions"]))


def by_sequences(result: Result) -> dict[str, Row]:
    rows = [{**row, "memory_gb": row["memory_bytes"] / 1e9} for row in result.select(what="serving")]
    return {
        f"{row['sequences']} sequence{'s' if row['sequences'] > 1 else ''}, context {row['context']}": row
        for row in rows
    }


def operations(result: Result) -> list[Row]:
    rows = result.select(what="operations")
    return [{**row, **{name: float(row[name]) for name in ("dense", "collapsed", "factor")}} for row in rows]


def by_training(result: Result) -> dict[str, Row]:
    """Rows of `coupling` by decoder and way of training; the ceiling does not depend on the decoder."""
    found = {}
    for decoder in ("greedy", "gumbel"):
        for row in result.select(decoder=decoder, collection=1):
            ceiling = result.select(decoder="any", training=row["training"], collection=1)
            found[f"{decoder}, {row['training']}"] = {**(ceiling[0] if ceiling else {}), **row}
    return found


def without_errors_of_no_noise(result: Result) -> list[Row]:
    """Rows of `flatness`; without noise nothing is drawn that would have an error."""
    rows = []
    for row in result.rows:
        is_noiseless = row["budget"] == "inf"
        without = {"accuracy_stderr": None, "flip_dissent_stderr": None} if is_noiseless else {}
        rows.append({**row, **without, "b": "∞" if is_noiseless else row["budget"]})
    return rows


def at_both_ends(result: Result) -> dict[str, Row]:
    """Rows of `flatness` at 2^-32, with what is compared at 2^-4 and without noise, by decoder and collection."""
    found = {}
    for decoder, number in sorted({(row["decoder"], row["collection"]) for row in result.rows}):
        tight, loose, noiseless = (
            result.one(decoder=decoder, collection=number, budget=budget) for budget in ("2^-32", "2^-4", "inf")
        )
        row = {**tight}
        for name, end, other in (("flip_dissent", "loose", loose), ("accuracy_dissent", "noiseless", noiseless)):
            row |= {f"{name}_{end}": other[name], f"{name}_{end}_stderr": other[f"{name}_stderr"]}
        found[_heading(decoder, row)] = row
    return found


def with_names(result: Result) -> list[Row]:
    """Rows of `generation`, named by source, decoder and budget where they have one."""
    names = {"private": "private", "public": "public model", "full": "full corpus (not private)", "human": "human text"}
    parts = [(names[row["source"]], row["decoder"], row["budget"]) for row in result.rows]
    return [{**row, "text": ", ".join(filter(None, each))} for row, each in zip(result.rows, parts, strict=True)]


def neighbours(result: Result) -> list[Row]:
    """GNMax chooses among the public top 200: public model and ceiling of the others are not its own."""
    none = dict.fromkeys(("accuracy_public", "accuracy_ceiling", "headroom", "headroom_stderr"))
    rows = result.select(kind="neighbour")
    return [{**row, **(none if row["method"].startswith("GNMax") else {})} for row in rows]


def invisible_ink(result: Result) -> list[Row]:
    """What InvisibleInk selects at every point, under both kinds of neighbours."""
    rows = result.select(kind="ink", is_selected=True)
    rows.sort(key=lambda row: (row["epsilon"], row["queries"], row["adjacency"], row["is_searched"]))
    ways = {False: "fixed beforehand", True: "searched on public text"}
    return [{**row, "way": ways[row["is_searched"]], "support": row["top_k"] or "all"} for row in rows]


def at_floor(result: Result) -> list[str]:
    is_at_floor = any(row["is_at_floor"] for row in result.select(kind="validation"))
    return ["A probability is at the numerical floor."] if is_at_floor else []


def by_arithmetic(result: Result) -> list[Row]:
    rows = [(row, name) for row in result.rows for name in ("unanimity", "accuracy")]
    columns = ("float32", "bfloat16", "difference", "stderr")
    return [{**row, "name": name, **{column: row[f"{name}_{column}"] for column in columns}} for row, name in rows]


def with_end(result: Result) -> list[Row]:
    """What never reads the secret uses up no budget; no release promises anything about the corpus."""
    endless = {"tokens_until_every_token": "no end"}
    rows = [row if row["reads_secret"] else {**row, **endless} for row in result.rows]
    return [{"corpus": "no record is read" if row["release"] == "public model" else "nothing", **row} for row in rows]


def with_plain_adapters(results: Mapping[str, Result]) -> Result:
    """`releases` with rows for DP adapters, which are the same for every world as the full-corpus adapter is."""
    result = results["releases"]
    nothing = dict.fromkeys(("leaked_nats", "leaked_nats_by_truth", "can_tell_nats"), 0.0)
    nothing |= dict.fromkeys(("charged_every_token", "charged_dissent"), 0.0)
    same = {"collection": 1, "reads_secret": False, "budget": None, **nothing}
    first = result.select(collection=1)[0]
    rows: list[Row] = []
    if not result.select(release="full corpus"):  # results of before it had rows of its own
        rows = [{**same, "release": "full corpus", "accuracy": first["accuracy_full"], "retained_gain": 1.0}]
    for row in results["dp"].select(collection=1, decoder="gumbel") if "dp" in results else ():
        shown = {name: row[name] for name in row if name.startswith(("accuracy", "retained_gain"))}
        rows.append({**same, **shown, "release": f"dp:{row['epsilon']:g}", "corpus": dp_promise(row)})
    return replace(result, rows=[*result.rows, *rows])


def only_releases(result: Result) -> list[Row]:
    """Rows of `releases` without those of single models."""
    return [row for row in result.select(collection=1) if row["release"] not in MODELS]


def dp_promise(row: Row) -> str:
    """(ε, δ) of a row of `dp`."""
    return f"ε = {row['epsilon']:g}, δ = {format_up(row['delta'])}"


def session_notes(result: Result) -> list[str]:
    notes = [
        "Leak: I(S; H_T) of the whole history, estimated from the entropy of the beliefs and, beside it, from the "
        "belief in the realized world; the two agree when the belief is the true posterior. Difference: leak ÷ charged "
        "minus the dissent of the same sessions up to the same horizon, session by session."
    ]
    spread = spread_of_ratio(result.select(collection=1))
    if spread is not None:
        notes.append(
            f"Across budgets, whose sessions are independent, leak ÷ charged at the longest horizon has a standard "
            f"deviation of {100 * spread:.3f} percentage points (the paper: {SPREAD_OF_RATIO})."
        )
    return notes


def with_stretch(result: Result) -> list[Row]:
    """Rows of `sessions` with the tokens since the horizon before."""
    rows, before = [], 0
    for row in result.rows:
        before = before if before < row["horizon"] else 0
        rows.append({**row, "stretch": f"{before + 1:,} – {row['horizon']:,}"})
        before = row["horizon"]
    return rows


def sweep_notes(result: Result) -> list[str]:
    looks = 2 * len(result.select(collection=1))
    return [
        "†: the committed total is spent before the nominal length.",
        f"p: one-sided, of the larger excess over the bound of the realized length. A violation (!) needs p under "
        f"{FALSE_ALARMS} ÷ {looks}: the probability of any false alarm is {FALSE_ALARMS:.0%} at most.",
    ]


def scores(result: Result) -> list[Row]:
    attackers = {
        "adapters": "holds all adapters",
        "released": "reads released text (2^-16 a token)",
        "full": "reads text of the full-corpus adapter (not private)",
    }
    scores = {
        "loss": "loss",
        "reference": "loss against the public model",
        "min-k": "least likely 20 % of tokens",
        "spread": "spread over worlds",
        "overlap": "shared 1- to 3-grams",
        "surrogate": "surrogate model",
    }
    rows = result.select(part="score")
    return [{**row, "attacker": attackers[row["source"]], "score": scores[row["attack"]]} for row in rows]


def by_depth(result: Result) -> list[Row]:
    """Points of `depth`, one decoder after the other, in points; all layers are not compared with themselves."""
    rows = sorted(result.select(kind="point"), key=lambda row: str(row["decoder"]), reverse=True)
    names = {"greedy": "greedy", "gumbel": "coupled Gumbel"}
    return [
        {name: None if row["layers"] == "all" and "_difference" in name else value for name, value in row.items()}
        | {"decoder": names[row["decoder"]], "cache_kb": row["cache_bytes_per_token"] / 1e3}
        for row in map(in_points, rows)
    ]
