"""The tables of the regime `student`: what students keep, by which recipe, and what attacks on them find."""

from __future__ import annotations

from paclm.study.cell import Column
from paclm.study.regimes.student import NO_NOISE, PUBLIC
from paclm.study.results import Result, Row
from paclm.study.table import Table, rows_table
from paclm.study.table_rows import own_notes

_NAMES = {NO_NOISE: "no noise (control)", PUBLIC: "public text (control)"}
_ATTACKS = {
    "loss": "loss",
    "reference": "loss against the public model",
    "min-k": "least likely 20 % of tokens",
    "lira": "LiRA, worlds as shadow models",
    "worlds": "whose losses are most alike",
}


def _both_decoders(result: Result, **wanted: str | int | bool) -> list[Row]:
    """One row for both decoders: shares and accuracies of greedy votes have a name of their own."""
    rows = []
    for row in result.select(part="gain", decoder="gumbel", **wanted):
        same = {name: row[name] for name in ("source", "tokens", "recipe")}
        greedy = result.one(part="gain", decoder="greedy", **same)
        columns = ("retained_gain", "retained_gain_stderr")
        source = _NAMES.get(str(row["source"]), row["source"])
        rows.append({**row, **{f"{name}_greedy": greedy[name] for name in columns}, "source": source})
    return rows


def _students(result: Result) -> list[Row]:
    """The full-corpus adapter, then DP adapters, then students by source and tokens."""
    first = result.select(part="gain", decoder="gumbel")[0]
    full: Row = {"source": "full corpus (not private)", "accuracy": first["accuracy_full"], "loss": first["loss_full"]}
    full |= {"retained_gain": 1.0, "retained_gain_greedy": 1.0, "budget": None, "tokens": None}
    public: Row = {"source": "public model", "accuracy": first["accuracy_public"], "loss": first["loss_public"]}
    public |= {"retained_gain": 0.0, "retained_gain_greedy": 0.0, "budget": None, "tokens": None}
    return [public, full, *_both_decoders(result, is_student=False), *_both_decoders(result, is_default=True)]


def _recipes(result: Result) -> list[Row]:
    """All recipes on the same text."""
    others = result.select(part="gain", decoder="gumbel", is_default=False)
    if not others:
        return []
    return _both_decoders(result, is_student=True, source=others[0]["source"], tokens=others[0]["tokens"])


def _named(result: Result, part: str) -> list[Row]:
    return [
        {**row, "source": _NAMES.get(str(row["source"]), row["source"]), "score": _ATTACKS[str(row["attack"])]}
        for row in result.select(part=part)
    ]


STUDENT_TABLES: tuple[Table, ...] = (
    rows_table(
        "tab:student",
        "student",
        "Students of private text, on the positions and coins of `accuracy`. Kept: share of the gain of the "
        "full-corpus adapter over the public model, errors over passages; loss in nats a token. Charged: every "
        "token, in nats; membership: the most that any attack on which half was used can reach from even odds. "
        "Seconds are per student.",
        (
            Column("text", "{source}"),
            Column("b", "{budget}"),
            Column("tokens", "tokens"),
            Column("students", "trainings"),
            Column("accuracy (Gumbel)", "accuracy ±", ".2%"),
            Column("kept (Gumbel)", "retained_gain ±", ".1%"),
            Column("kept (greedy)", "retained_gain_greedy ± retained_gain_stderr_greedy", ".1%"),
            Column("loss", "loss", ".4f"),
            Column("charged", "charged_nats", ".2e"),
            Column("membership", "membership_bound", ".3f", is_bound=True),
            Column("generation (s)", "generation_seconds", ",.0f"),
            Column("training (s)", "training_seconds", ",.0f"),
        ),
        _students,
    ),
    rows_table(
        "tab:recipes",
        "student",
        "Ways to train a student on the same text. coupled: against the student's own vote with the same coins; "
        "difference: against the public model's vote; text: plain cross-entropy.",
        (
            Column("recipe", "{recipe}"),
            Column("text", "{source}"),
            Column("tokens", "tokens"),
            Column("accuracy (Gumbel)", "accuracy ±", ".2%"),
            Column("kept (Gumbel)", "retained_gain ±", ".1%"),
            Column("kept (greedy)", "retained_gain_greedy ± retained_gain_stderr_greedy", ".1%"),
            Column("loss", "loss", ".4f"),
            Column("training (s)", "training_seconds", ",.0f"),
        ),
        _recipes,
    ),
    rows_table(
        "tab:student-half",
        "student",
        "Was a record in the realized world? Attacks on students by an attacker who holds the adapters of all worlds. "
        "Success: records guessed right, one half is a guess; place: of the realized world among all by the attack's "
        "evidence. p: the probability of so much evidence if students say no more than was charged. Errors are over "
        "deployments.",
        (
            Column("student of", "{source}"),
            Column("tokens", "tokens"),
            Column("attack", "{score}"),
            Column("deployments", "deployments"),
            Column("AUC", "auc ±", ".3f"),
            Column("members found at 1 % false positives", "true_positives ±", ".1%"),
            Column("at 0.1 %", "rare_true_positives ±", ".1%"),
            Column("success", "success ±", ".3f"),
            Column("success: bound", "membership_bound", ".3f", is_bound=True),
            Column("world named", "world_rate", ".3f"),
            Column("world: bound", "world_bound", ".3f", is_bound=True),
            Column("place", "world_rank ±", ".1f"),
            Column("p", "p", ".2g"),
        ),
        lambda result: _named(result, "half"),
        own_notes,
    ),
    rows_table(
        "tab:student-corpus",
        "student",
        "Is a record in the corpus at all? {members} members against {others} held-out records, by the losses of one "
        "student each, of the full-corpus adapter and of DP adapters. Only the last promise anything here.",
        (
            Column("adapter", "{source}"),
            Column("tokens", "tokens"),
            Column("score", "{score}"),
            Column("AUC", "auc ±", ".3f"),
            Column("members found at 1 % false positives", "true_positives ±", ".1%"),
            Column("at 0.1 %", "rare_true_positives ±", ".1%"),
        ),
        lambda result: _named(result, "corpus"),
    ),
)
