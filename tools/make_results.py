"""Write docs/results.md, and the tables and figures it shows, from the result files in docs/results.

    python tools/make_results.py

The words are tools/templates/results.md.j2. Every number in them is an expression over the results, and every verdict
that data could overturn is a block that refuses to be written once it has. A test fails when the page is out of date.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from scipy.stats import binom, chi2, norm, spearmanr

sys.path.insert(0, str(Path(__file__).parent))

import paper_run
from evaluation import TIGHT, Evaluation
from paclm.privacy.bounds import success_bound
from paclm.study.figure import save_figure
from paclm.study.figures import all_figures
from paclm.study.regimes import regime_named
from paclm.study.regimes.releases import TARGET
from paclm.study.results import Row, plain
from paclm.study.table import file_name_of, to_csv, to_latex, to_markdown
from paclm.study.violations import excess_in_errors

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "docs" / "results"
STUDIES = ("wiki", "cables", "wikitext", "earlier_wiki", "earlier_cables")
"""Folders of it, which are also what the template calls them: two corpora, another test text for the worlds of the
first, and what an earlier training of the same worlds left."""
TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE = "results.md.j2"
SPEED_ONLY = ("together", "queries_per_part")
"""Sizes of a regime that its numbers do not depend on."""
ALARM = 0.01
"""All looks at attacks together may raise a false alarm so often."""
PAPER_ACCURACY_ERROR = 0.0036
"""The paper's standard error of an accuracy under Gumbel, from its text; paired differences have none there."""


class Overturned(Exception):
    """The results no longer bear out what the template says of them."""


def largest_gap(rows: Sequence[Row]) -> float:
    """By how many standard errors leak ÷ charged and dissent part, at most."""
    return max(float(abs(row["gap"]) / row["gap_stderr"]) for row in rows)


def largest_parting(rows: Sequence[Row]) -> float:
    """By how many standard errors the two estimators of the leak part, at most."""
    return max(float(abs(row["estimators_parting"]) / row["estimators_parting_stderr"]) for row in rows)


def largest_excess(rows: Sequence[Row]) -> float:
    """By how many standard errors an attack beats its bound, at most; negative where none does."""
    return max(excess_in_errors(row, attack) for row in rows for attack in ("membership", "world"))


def told_gap(row: Row) -> float:
    """By how many standard errors the leak and the charge of disputed tokens part, in sessions on recorded votes."""
    charged = row["charged_dissent_nats"] if "charged_dissent_nats" in row else row["charged_dissent"]
    return float(abs(row["leaked_nats"] - charged) / row["leaked_stderr"])


def share_told(row: Row) -> str:
    """Leaked ÷ charged with its error."""
    return " ± ".join(f"{row[name] / row['charged_every_token']:.1%}" for name in ("leaked_nats", "leaked_stderr"))


def gain_gap(row: Row, theirs: float, their_error: float = 0.0) -> float:
    """By how many standard errors a retained gain differs from another."""
    return float(abs(row["retained_gain"] - theirs) / math.hypot(row["retained_gain_stderr"], their_error))


def times_disputed(unanimity: float, theirs: float) -> float:
    """How many times as many positions are disputed as there."""
    return (1.0 - unanimity) / (1.0 - theirs)


def training_gap(study: Evaluation, other: Evaluation) -> float:
    """By how many standard errors another training of the same worlds keeps another share of the gain, at most."""
    pairs = [[one.row("accuracy", decoder=d, budget="2^-32") for one in (study, other)] for d in ("greedy", "gumbel")]
    return max(gain_gap(ours, theirs["retained_gain"]) for ours, theirs in pairs)


def agrees_less(row: Row) -> float:
    """By how many standard errors worlds agree less often in bfloat16."""
    return float(-row["unanimity_difference"] / row["unanimity_stderr"])


def largest_fall(study: Evaluation) -> float:
    """By how many standard errors fewer tokens are the realized world's own at the end of sessions than at their start.

    At the budget where it is most; negative where there are more at all of them.
    """
    horizons = study.results["sessions"].scale["horizons"]
    starts, ends = (study.rows("sessions", horizon=choose(horizons)) for choose in (min, max))
    falls = []
    for start, end in zip(starts, ends, strict=True):
        error = math.hypot(*(row["agreement_realized_stderr"] for row in (start, end)))
        falls.append(float(start["agreement_realized"] - end["agreement_realized"]) / error)
    return max(falls)


def forgetting_losses(study: Evaluation) -> list[float]:
    """How much less often the forgetting curator is right than the tracking one at loose budgets, in long sessions."""
    longest = max(study.results["forgetting"].scale["horizons"])
    pairs = [
        [study.row("forgetting", curator=name, budget=budget, tokens=longest) for name in ("tracking", "forgetting")]
        for budget in ("2^-4", "2^-8")
    ]
    return [float(tracking["accuracy"] - forgetting["accuracy"]) for tracking, forgetting in pairs]


def emission_rates(study: Evaluation) -> list[float]:
    """How often a payload forced into half of the worlds is emitted at 2^-16, whoever is realized."""
    rows = study.rows("canaries", part="forced", others="agree", budget="2^-16")
    return [float(row[name]) for row in rows for name in ("emitted_member", "emitted_other")]


def canary_deviations(study: Evaluation) -> list[float]:
    """By how many standard errors the advantage of a forced payload is above what theory says, cell by cell."""
    rows = [row for row in study.rows("canaries", part="forced", others="agree") if row["budget"] != "inf"]
    return [float((row["advantage"] - row["advantage_even_split"]) / row["advantage_stderr"]) for row in rows]


def canary_p(study: Evaluation) -> float:
    """How likely deviations as large in all, or larger, are by chance."""
    found = canary_deviations(study)
    return float(chi2.sf(sum(deviation**2 for deviation in found), len(found)))


def repetition_trend(study: Evaluation, kind: str) -> float:
    """Rank correlation of a canary's repetitions with the gap between the worlds that hold it and the others."""
    rows = study.rows("canaries", part="organic", kind=kind)
    return float(spearmanr([row["repetitions"] for row in rows], [row["gap_nats"] for row in rows]).statistic)


def cuts(study: Evaluation) -> list[str]:
    """What was run at another size than the preset's, in words; how many run side by side is no size."""
    found = []
    for name, result in study.results.items():
        preset = plain(asdict(regime_named(name).presets["paper"]))
        sizes = [size for size in preset if size not in SPEED_ONLY and result.scale[size] != preset[size]]
        if sizes:
            changes = [f"{size} {result.scale[size]} instead of {preset[size]}" for size in sizes]
            found.append(f"`{name}`: {', '.join(changes)}")
    return found


def leads(study: Evaluation) -> bool:
    """Whether plurality and mixture tell nothing and are ahead of the paper's release at 2^-32 on the text."""
    both = [study.row("releases", release=name) for name in ("plurality", "mixture")]
    return all(abs(row["leaked_nats"]) < 1e-9 and row["lead_points"] > 2.0 * row["lead_stderr"] for row in both)


def noiseless_share(study: Evaluation) -> float:
    """What the realized world itself keeps of the gain, in the sessions of the releases."""
    row = study.row("releases", release="plurality")
    return float((row["accuracy_noiseless"] - row["accuracy_public"]) / (row["accuracy_full"] - row["accuracy_public"]))


def tokens_over_charged(study: Evaluation) -> float:
    """What the tokens alone show of the charge, at 2^-16."""
    row = study.row("tokens_only", release="gaussian", budget="2^-16")
    return float(row["leaked_tokens_nats"] / row["charged_nats"])


def tokens_share_low(study: Evaluation) -> float:
    """What the tokens show of the history's leak at the least, two standard errors below the estimate."""
    rows = study.rows("tokens_only", release="gaussian")
    return min(float(row["tokens_over_history"] - 2.0 * row["tokens_over_history_stderr"]) for row in rows)


def attack_ps(study: Evaluation) -> list[float]:
    """One-sided p-values of the attacks on the sessions of `tokens_only` against their bounds.

    Left out are looks that could find nothing: bounds of certainty, and the channel's tokens, which are its history.
    """
    found = []
    for row in study.rows("tokens_only"):
        of_member, of_world = (success_bound(row["charged_nats"], p) for p in (1 / 2, 1 / paper_run.PAPER.worlds))
        for view in ("history", "tokens") if row["release"] == "gaussian" else ("history",):
            excess, error = row[f"membership_{view}"] - of_member, row[f"membership_{view}_stderr"]
            if of_member < 1.0:
                found.append(float(norm.sf(excess / error)) if error else float(excess <= 0.0))
            if of_world < 1.0:
                hits = round(row[f"world_{view}"] * row["sessions"])
                found.append(float(binom.sf(hits - 1, row["sessions"], of_world)))
    return found


def per_token_ms(serving: Row) -> float:
    """One stream, the ledger included."""
    return 1e3 / float(serving["tokens_per_second"])


def holds(condition: bool, caller: Callable[[], str]) -> str:
    """The sentence in the block if it is true; an error if it is not."""
    if not condition:
        raise Overturned(f"The results do not bear this out any more; say what they do: {caller().strip()!r}")
    return caller()


FILTERS: dict[str, Callable[..., Any]] = {
    "percent": lambda value, digits=0: f"{value:.{digits}%}",
    "points": lambda value, digits=2: f"{100 * value:.{digits}f}".replace("-", "−"),
    "number": lambda value, digits=0: f"{value:,.{digits}f}",
    "figures": lambda value, digits=3: f"{value:.{digits}g}",
    "minutes": lambda seconds, digits=0: f"{seconds / 60:.{digits}f}",
    "hours": lambda seconds, digits=1: f"{seconds / 3600:.{digits}f}",
    "millions": lambda value, digits=2: f"{value / 1e6:.{digits}f}",
    "file_name": file_name_of,
    "told_gap": told_gap,
    "agrees_less": agrees_less,
    "exp": math.exp,
    "names": lambda names: ", ".join(f"`{name}`" for name in names),
    "titles": lambda names: ", ".join(f"`{name}` ({regime_named(name).title})" for name in names),
}


def render(folder: Path = RESULTS) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,  # Markdown
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    return environment.get_template(TEMPLATE).render(
        **{name: Evaluation(folder / name) for name in STUDIES},
        size=paper_run.PAPER,
        stages=paper_run.STAGES,
        holds=holds,
        cuts=cuts,
        training_gap=training_gap,
        largest_fall=largest_fall,
        forgetting_losses=forgetting_losses,
        emission_rates=emission_rates,
        canary_deviations=canary_deviations,
        canary_p=canary_p,
        repetition_trend=repetition_trend,
        largest_gap=largest_gap,
        largest_parting=largest_parting,
        largest_excess=largest_excess,
        share_told=share_told,
        told_gap=told_gap,
        tight_charge=TIGHT,
        gain_gap=gain_gap,
        times_disputed=times_disputed,
        leads=leads,
        noiseless_share=noiseless_share,
        tokens_over_charged=tokens_over_charged,
        tokens_share_low=tokens_share_low,
        paper_accuracy_error=PAPER_ACCURACY_ERROR,
        attack_ps=attack_ps,
        alarm=ALARM,
        per_token_ms=per_token_ms,
        target=TARGET,
    )


def table_files(folder: Path) -> dict[str, str]:
    """Every table that a study allows as Markdown, CSV and LaTeX, by file name."""
    files: dict[str, str] = {}
    for label, data in Evaluation(folder).tables.items():
        name = file_name_of(label)
        files |= {f"{name}.md": to_markdown(data), f"{name}.csv": to_csv(data), f"{name}.tex": to_latex(data, label)}
    return files


def write_tables(folder: Path = RESULTS) -> None:
    """Write those of all studies, and remove those that no result allows any more."""
    for study in STUDIES:
        place = _empty(folder / study / "tables")
        for name, text in table_files(folder / study).items():
            (place / name).write_text(text, encoding="utf-8")


def write_figures(folder: Path = RESULTS) -> None:
    """Draw every figure that the results allow."""
    for study in STUDIES:
        place, results = _empty(folder / study / "figures"), Evaluation(folder / study).results
        for figure in all_figures():
            is_drawing = not figure.regimes  # of no result: one of it is enough
            if all(name in results for name in figure.regimes) and (study == STUDIES[0] or not is_drawing):
                save_figure(figure, results, place)


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


if __name__ == "__main__":
    write_tables()
    write_figures()
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
