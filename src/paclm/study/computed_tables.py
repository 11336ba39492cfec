"""Tables that are more than columns of rows: the setup, the regimes, forced canaries, PMixED at matched bounds, …"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

from paclm.privacy.bounds import round_up
from paclm.study import paper_numbers
from paclm.study.cell import Cell, Column
from paclm.study.paper_numbers import PAPER
from paclm.study.questions import ALL
from paclm.study.regime import scale_in_words
from paclm.study.regimes import NAMES, regime_named
from paclm.study.regimes.knowledge import OTHERS
from paclm.study.regimes.releases import TARGET
from paclm.study.results import Result, Row
from paclm.study.table import Table, TableData
from paclm.study.table_rows import dp_promise, first_worlds, only_releases


def _setup(results: Mapping[str, Result]) -> TableData:
    """One line per component. Any result will do: all were run on the same workspace."""
    origin = next(iter(results.values())).provenance
    arguments, training = origin["arguments"], origin["training"]
    worlds, held_out = arguments["worlds"], origin.get("held_out")
    canaries = f", {arguments['canaries']} of them canaries" if arguments.get("canaries") else ""
    grouped = f", grouped by {arguments['group_by']}" if arguments.get("group_by") else ""
    where = "" if training.get("layers", "all") == "all" else f", decoder layers {training['layers']}"
    start = "the same start for every world" if training["coupled"] else "a start of its own for every world"
    collections = max(int(row.get("collection", 1)) for result in results.values() for row in result.rows)
    here = {
        "worlds": first_worlds(origin) or f"m = {worlds}; each record in exactly {worlds // 2}",
        "prior": "uniform over worlds; 1/2 per record",
        "universe": f"{origin['records']:,} records{canaries}{grouped}",
        "held out": f"{arguments['holdout'] if held_out is None else held_out:,} records",  # whole groups: may be more
        "base model": f"{origin['base_name']}, frozen; {origin['machine']}",
        "adapters": f"LoRA r = {training['rank']}, α = {training['alpha']:g}, targets {training['targets']}{where}",
        "training": f"AdamW, lr {training['learning_rate']:g}, epochs {training['epochs']}, "
        f"batch {training['batch_size']}, {start}",
        "support": "k = 200 unless a table says otherwise",
        "decoders": "greedy; coupled Gumbel at τ = 1",
        "budgets": "2^-4 … 2^-32 nats a token",
        "arithmetic of the release": "float64",
        "collections": f"{collections} (first seed {arguments['seed']})",
    }
    lines = [(component, text, paper_numbers.SETUP[component]) for component, text in here.items()]
    return TableData("The setup. All budgets are in nats.", ["component", "here", "the paper"], lines)


def _eval_regimes(results: Mapping[str, Result]) -> TableData:
    """One line per regime that was run."""
    lines = []
    for name in NAMES:
        if name in results:
            regime, result = regime_named(name), results[name]
            paper = scale_in_words(asdict(regime.presets["paper"]))
            scale, seconds = scale_in_words(result.scale), f"{result.seconds:,.0f} s"
            lines.append((regime.title, scale, paper, seconds, regime.question))
    return TableData(
        "Regimes that were run. Trials draw a fresh realized world and fresh noise.",
        ["regime", "scale here", "scale of the preset paper", "time", "question"],
        lines,
    )


def _canary(results: Mapping[str, Result]) -> TableData:
    """One line per budget, one column per decoder and canary; then the same with the other worlds voting freely."""
    result = results["canaries"]
    forced = result.select(part="forced", collection=1)
    canaries = list(dict.fromkeys(row["canary"] for row in forced))  # none if no payload is in any support
    budgets = list(dict.fromkeys(row["budget"] for row in forced))
    columns = [f"{decoder}, canary {i + 1}" for decoder in ("greedy", "Gumbel") for i in range(len(canaries))]
    rows: list[list[Cell | str]] = []
    for others, words in (("agree", ""), ("own", ", others vote freely")):
        for budget in budgets:
            line: list[Cell | str] = [("no noise" if budget == "inf" else budget) + words]
            found = [row for row in forced if row["others"] == others and row["budget"] == budget]
            for decoder in ("greedy", "gumbel"):
                for canary, column in zip(canaries, ("first_canary", "second_canary", *canaries), strict=False):
                    (row,) = (row for row in found if row["decoder"] == decoder and row["canary"] == canary)
                    advantage, stderr = row["advantage"], row["advantage_stderr"]
                    mark = "†" if abs(advantage) < 1.96 * stderr else ""
                    theirs = PAPER["tab:canary"].beside(row).get(column)
                    line.append(Cell(advantage, stderr, theirs, ".3f", mark))
            line.append(Cell(found[0]["advantage_even_split"], style=".4f") if others == "agree" else "")
            rates = [row[name] for row in found for name in ("emitted_member", "emitted_other")]
            rows.append([*line, f"{min(rates):.0%} – {max(rates):.0%}"])
    return TableData(
        f"Forced memorization: P(emit | member) − P(emit | not) of one token, {forced[0]['trials'] if forced else 0:,} "
        "trials per cell, uniform belief; beside it 2Φ(√(2b)) − 1 and the range of emission rates under both "
        "hypotheses. In brackets: the paper.",
        ["b", *columns, "theory (even split)", "payload emitted"],
        rows,
        (
            "†: the 95 % interval contains zero.",
            "Lines without a remark: worlds that do not hold the canary vote as most of them do, so the split is even. "
            "Where they vote freely, a third candidate takes part of the noise: fewer emissions, less advantage.",
        ),
    )


_MATCHED = (
    Column("T", "{queries:,}"),
    Column("b (nats)", "{b}"),
    Column("method", "{method}, {variant}"),
    Column("accuracy", "accuracy ± stderr", ".5f"),
    Column("headroom", "headroom ±", ".1%"),
    Column("N", "num_shards"),
    Column("order", "order"),
    Column("q", "rate", ".4g"),
    Column("f∅", "empty", ".3f"),
    Column("mean λ", "mean_weight", ".3f"),
    Column("accuracy in the top 200", "accuracy_inside", ".5f"),
    Column("δ of an example", "delta_of_example", ".1e", mark="† is_broken"),
)


def _pmixed_full(epsilon: float, results: Mapping[str, Result]) -> TableData:
    """One line per horizon and method at one ε; the paper's release is `gaussian`."""
    result = results["pmixed"]
    pac = result.select(kind="pac", epsilon=epsilon)
    rows: list[list[Cell | str]] = []
    for queries in sorted({row["queries"] for row in pac}):
        for row in result.select(kind="pac", epsilon=epsilon, queries=queries):
            shown = {**row, **dict.fromkeys(("num_shards", "order", "rate", "empty", "mean_weight"), "")}
            shown |= {"b": f"{row['per_token_nats']:.2e}", "method": "PAC", "variant": row["release"]}
            shown |= {"accuracy_inside": row["accuracy"], "delta_of_example": ""}  # PAC draws in the top 200
            theirs = PAPER["tab:pmixed-full, PAC"].beside(row)
            rows.append([c._replace(style=c.style.replace("5", "4")).cell(shown, theirs) for c in _MATCHED])
        for row in result.select(kind="matched", epsilon=epsilon, queries=queries, is_selected=True):
            is_broken = row["reading"] != "generous" and row["delta_of_example"] > row["delta"]
            shown = {**row, "b": "", "method": "PMixED", "variant": row["reading"], "is_broken": is_broken}
            rows.append([column.cell(shown, PAPER["tab:pmixed-full, PMixED"].beside(row)) for column in _MATCHED])
        ink = result.select(kind="ink", epsilon=epsilon, queries=queries, is_selected=True, adjacency="any")
        for row in sorted(ink, key=lambda row: bool(row["is_searched"])):
            none = dict.fromkeys(
                ("b", "order", "rate", "empty", "mean_weight", "accuracy_inside", "delta_of_example"), ""
            )
            shown = {**row, **none, "variant": "searched" if row["is_searched"] else "τ = 1"}
            rows.append([column.cell(shown) for column in _MATCHED])
    ensembles = result.select(kind="ensemble")
    first, bound = ensembles[0], pac[0]
    ceilings = ", ".join(f"{row['accuracy_ceiling']:.4f} (N = {row['num_shards']})" for row in ensembles)
    return TableData(
        f"Matched at a bound of {round_up(bound['mia_bound'], 4)} on membership inference from even odds "
        f"(ε = {epsilon:g}, δ = 1e-5; {bound['per_token_nats'] * bound['queries']:.3f} nats). Headroom: of the "
        "selected configuration's own ceiling. Errors are over passages of the text. In brackets: the paper.",
        [column.heading for column in _MATCHED],
        rows,
        [
            f"Public model: {first['accuracy_public']:.4f} over the vocabulary, {first['accuracy_public_inside']:.4f} "
            f"in its top 200 (both expected over coins), {bound['accuracy_public']:.4f} with PAC's coins. Ceilings: "
            f"PAC {bound['accuracy_ceiling']:.4f}; PMixED {ceilings}.",
            "δ of an example: what a two-token ensemble reaches at this operating point, exactly; marked † where it is "
            "more than the δ that is promised. The generous reading promises none.",
        ],
    )


_DP = (
    Column("method", "{method}"),
    Column("promises", "{promise}"),
    Column("accuracy", "accuracy ±", ".2%"),
    Column("gain kept", "retained_gain ±", ".1%"),
    Column("queries", "{queries}"),
    Column("membership inference", "mia_bound", ".3f", is_bound=True),
    Column("TPR at 0.1 % FPR", "tpr_at_fpr_0_1_percent", ".3f", is_bound=True),
    Column("TPR at 1 % FPR", "tpr_at_fpr_1_percent", ".3f", is_bound=True),
    Column("training (s)", "training_seconds", ",.0f"),
)


def _dp(results: Mapping[str, Result]) -> TableData:
    """DP adapters beside the full-corpus adapter, and beside the releases and shard methods if those were run."""
    own = results["dp"].select(collection=1, decoder="gumbel")
    first, endless = own[0], {"queries": "no limit"}
    rows: list[Row] = [
        {"method": "public model", "promise": "no private record is used", "accuracy": first["accuracy_public"]},
        {"method": "full corpus", "promise": "nothing about the corpus", "accuracy": first["accuracy_full"]},
    ]
    for row, kept in zip(rows, (0.0, 1.0), strict=True):
        row |= {**endless, "retained_gain": kept}
    rows[1]["training_seconds"] = first.get("full_training_seconds")
    rows += [{**row, **endless, "method": f"dp:{row['epsilon']:g}", "promise": dp_promise(row)} for row in own]
    for row in only_releases(results["releases"]) if "releases" in results else ():
        if row["budget"] not in (None, "2^-32"):
            continue
        promised = {"promise": "which half was used", "method": row["release"], **endless, "mia_bound": 0.5}
        if row["reads_secret"]:
            promised |= {"queries": f"{row['tokens_until_every_token']:,} tokens", "mia_bound": TARGET}
        rows.append({**row, **promised})
    matched = results["pmixed"].select(kind="matched", is_selected=True) if "pmixed" in results else []
    ink = results["pmixed"].select(kind="ink", is_selected=True, adjacency="any") if matched else []
    named = [(f"PMixED, {row['reading']}", row) for row in matched if row["reading"] != "generous"]
    named += [("InvisibleInk, searched" if row["is_searched"] else "InvisibleInk, τ = 1", row) for row in ink]
    for method, row in named:
        if row["queries"] in (matched[0]["queries"], matched[-1]["queries"]):
            shown = {name: row[name] for name in ("accuracy", "mia_bound")}
            shown |= {"accuracy_stderr": row["stderr"], "retained_gain": row["headroom"]}
            shown |= {"retained_gain_stderr": row["headroom_stderr"], "queries": f"{row['queries']:,}"}
            rows.append({**shown, "method": method, "promise": dp_promise(row)})
    return TableData(
        f"What each promise costs. Accuracy of sampled tokens (coupled Gumbel) at {first['positions']:,} positions; "
        "errors are over passages of the text. Queries: how many tokens the promise allows (releases: until the bound "
        "in the next column, every token charged at 2^-32). Membership inference: the largest success from even odds, "
        "about the corpus for dp and PMixED, about which half was used for releases; TPR: the largest share of members "
        "recognized at that rate of false accusations, from the privacy loss distribution.",
        [column.heading for column in _DP],
        [[column.cell(row) for column in _DP] for row in rows],
        [
            *results["dp"].notes,
            "Releases were scored in sessions over the same positions. PMixED: share of its own ceiling, probability "
            "of the true token over the whole vocabulary; for `rigorous` examples exceed the promised δ "
            "(`tab:pmixed-full`).",
        ],
    )


def _knowledge(results: Mapping[str, Result]) -> TableData:
    """One line per release and budget, one column per kind of question."""
    result = results["knowledge"]
    scores = result.select(part="score")
    first = scores[0]
    kinds = {row["kind"]: f"{row['kind']} ({row['questions']:,})" for row in scores}
    who = (Column("release", "{name}{of_collection}"), Column("b", "{budget}"))
    match, kept = Column("", "exact_match ±", ".1%"), Column("", "retained_gain ±", ".0%")
    lines = []
    for row in result.select(part="score", kind=ALL):
        same = {name: row[name] for name in ("collection", "release", "budget")}
        own = [result.one(part="score", kind=kind, **same) for kind in kinds]
        named = {**row, "name": OTHERS.get(row["release"], row["release"])}
        lines.append([*(c.cell(named) for c in who), *(match.cell(one) for one in own), kept.cell(row)])
    return TableData(
        f"Recall of what the records say: the share of questions (in brackets: how many) whose answer a greedy "
        f"completion begins with. Every answer stands in the training records of at least {first['units_least']:,} "
        f"units, {first['units_median']:,.0f} in the median. Releases: {first['sessions']} sessions a question, each "
        "with a fresh secret. Errors are over different answers. Kept: of the gain of the full-corpus adapter.",
        [*(column.heading for column in who), *kinds.values(), "kept"],
        lines,
        result.notes,
    )


SETUP = Table("tab:setup", (), _setup)
EVAL_REGIMES = Table("tab:eval-regimes", (), _eval_regimes)
CANARY = Table("tab:canary", ("canaries",), _canary)
KNOWLEDGE = Table("tab:knowledge", ("knowledge",), _knowledge)
DP = Table("tab:dp", ("dp",), _dp)
PMIXED_FULL = Table("tab:pmixed-full", ("pmixed",), partial(_pmixed_full, 1.0))
PMIXED_FULL_EPS2 = Table("tab:pmixed-full-eps2", ("pmixed",), partial(_pmixed_full, 2.0))
