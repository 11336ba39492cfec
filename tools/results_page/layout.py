"""Tables of docs/research/results.md that set evaluations side by side. Computes nothing but sums of seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from paclm.study.cell import make_cell, write_label
from paclm.study.regime import scale_in_words
from paclm.study.regimes import regime_named
from paclm.study.results import Row, plain
from results_page.claims import Claim, Finding
from results_page.evaluation import Evaluation
from results_page.headlines import HEADLINES, Change, Figure

__all__ = [
    "bases",
    "beside",
    "changes_table",
    "claim_table",
    "evaluation_table",
    "headline_table",
    "minutes_table",
    "notes",
    "sessions_of",
    "setup_table",
]
"""What templates use."""
SPEED_ONLY = ("together", "queries_per_part", "universe.sequences")
"""Sizes that a regime's numbers do not depend on: of any, or of the one before the dot."""


def anchor(regime: str) -> str:
    """Where the section of a regime begins."""
    return re.sub(r"[^\w\s-]", "", regime_named(regime).title.lower()).replace(" ", "-")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ([cell.replace("|", "\\|") for cell in row] for row in (columns, ["---"] * len(columns), *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def beside(
    studies: Sequence[Evaluation], regime: str, line: str, columns: Mapping[str, Mapping[str, Any]], **where: Any
) -> str:
    """Rows of a regime by the label `line`, with these columns for every evaluation.

    A column has a `value` and a `style`, as in `Column`, perhaps `is_bound`, and the values that select its row. A list
    in `where` selects rows with any of its values.
    """
    several = {name: where.pop(name) for name in list(where) if isinstance(where[name], list)}
    heads, found = [], []
    for study in studies:
        for heading, column in columns.items():
            chosen = {name: value for name, value in column.items() if name not in ("value", "style", "is_bound")}
            rows = study.rows(regime, **where, **chosen)
            rows = [row for row in rows if all(row[name] in values for name, values in several.items())]
            heads.append(f"{study.title}, {heading}" if len(studies) > 1 else heading)
            found.append({write_label(line, row): _shown(row, column) for row in rows})
    lines = dict.fromkeys(label for cells in found for label in cells)
    kept = [index for index, cells in enumerate(found) if any(text != "–" for text in cells.values())]
    return markdown(
        ["", *(heads[index] for index in kept)],
        [[label, *(found[index].get(label, "–") for index in kept)] for label in lines],
    )


def _shown(row: Row, column: Mapping[str, Any]) -> str:
    cell = make_cell(row, column["value"], column["style"])
    return replace(cell, is_bound=column.get("is_bound", False)).ours()


def headline_table(studies: Sequence[Evaluation]) -> str:
    """Every headline that one of these has, linked to its section, with the paper's figure and its definition."""
    rows = []
    for name, headline in HEADLINES.items():
        found = [headline.figure(study) for study in studies]
        if any(found):
            theirs = next((figure.cell.theirs() for figure in found if figure), "")
            ours = [_with_context(figure) if figure else "–" for figure in found]
            rows.append(
                [
                    f"**[{name}](#{anchor(headline.regime)})**",
                    *ours,
                    theirs or "–",
                    headline.meaning,
                ]
            )
    return markdown(["", *(study.title for study in studies), "the paper", "definition"], rows)


def bases(studies: Iterable[Evaluation]) -> str:
    """Positions and passages of the accuracy of each, by decoder where they differ."""
    words = []
    for study in studies:
        found = {name: HEADLINES[f"kept, {name}"].figure(study) for name in ("greedy", "Gumbel")}
        each = {name: figure.basis.removesuffix(", in expectation") for name, figure in found.items() if figure}
        same = len(set(each.values())) == 1
        told = next(iter(each.values())) if same else "; ".join(f"{name} {basis}" for name, basis in each.items())
        words.append(f"{study.title} {told}")
    return "; ".join(words)


def sessions_of(studies: Iterable[Evaluation]) -> str:
    """Sessions of `releases` and their lengths."""
    scales = [study.results["releases"].scale for study in studies if "releases" in study.results]
    return " or ".join(dict.fromkeys(f"{s['sessions']} sessions of {s['tokens']:,} tokens" for s in scales))


def _with_context(figure: Figure) -> str:
    """A figure of speed says at which context it was timed."""
    return f"{figure.cell.ours()} ({figure.basis})" if figure.basis.startswith("context") else figure.cell.ours()


def claim_table(studies: Sequence[Evaluation], claims: Iterable[Claim]) -> str:
    """Every claim that one of these can decide: whether it holds, and the figures; nothing without one."""
    found = {claim.text: [claim.check(study) for study in studies] for claim in claims}
    found = {text: cells for text, cells in found.items() if any(cells)}
    places = [i for i in range(len(studies)) if any(cells[i] for cells in found.values())]
    rows = [[text, *(_verdict(cells[i]) for i in places)] for text, cells in found.items()]
    return markdown(["claim", *(studies[i].title for i in places)], rows) if rows else ""


def _verdict(found: Finding | None) -> str:
    return f"**{found.verdict}**: {found.evidence}" if found else "–"


def changes_table(changed: Iterable[Change]) -> str:
    """What differs from the earlier page."""
    rows = []
    for one in changed:
        errors = "–" if one.errors is None else f"{one.errors:+.1f}"
        basis = one.basis_now if one.basis_now == one.basis_before else f"{one.basis_before} → {one.basis_now}"
        rows.append([one.name, one.study, one.before, one.now, errors, basis])
    return markdown(["", "evaluation", "earlier", "now", "standard errors", "rests on"], rows)


def evaluation_table(studies: Iterable[Evaluation], names: Sequence[str]) -> str:
    """Some headlines of every evaluation and collection, one line each."""
    rows = []
    for study in studies:
        numbers = sorted({row.get("collection", 1) for result in study.results.values() for row in result.rows})
        for number in numbers:
            found = [HEADLINES[name].figure(study, number) for name in names]
            if any(found):
                title = study.title if len(numbers) == 1 else f"{study.title}, collection {number}"
                worlds = f"{study.origin['worlds']}" if "worlds" in study.origin else "–"
                rows.append([title, worlds, *(figure.shown() if figure else "–" for figure in found)])
    return markdown(["", "worlds", *names], rows)


def minutes_table(studies: Iterable[Evaluation]) -> str:
    """Minutes of every stage: each regime, then all of them, and the training that the stage did."""
    rows = []
    for study in studies:
        for number, log in sorted(study.stages.items()):
            took = {name: one["seconds"] for name, one in log["regimes"].items() if "seconds" in one}
            each = ", ".join(f"`{name}` {seconds / 60:.1f}" for name, seconds in took.items())
            training = log.get("training", {}).get("seconds")
            trained = f"{training / 60:.1f}" if training else "–"
            rows.append([study.title, str(number), f"{sum(took.values()) / 60:.1f}", trained, each])
    return markdown(["evaluation", "stage", "minutes", "training", "of these"], rows)


def setup_table(studies: Iterable[Evaluation]) -> str:
    """Sizes, base and machine; evaluations that share them are on one line."""
    found: dict[tuple[str, ...], list[str]] = {}
    for study in studies:
        origin = study.origin
        given = origin.get("arguments", {})
        sizes = (origin["worlds"], origin.get("records"), given.get("canaries"), origin.get("held_out"))
        cells = [*sizes, given.get("max_record_tokens"), origin["base_name"], origin["machine"]]
        words = tuple("–" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell for cell in cells)
        found.setdefault(words, []).append(study.title)
    columns = ["evaluation", "worlds", "records", "canaries of them", "held out", "tokens of each", "base", "machine"]
    return markdown(columns, [["; ".join(titles), *words] for words, titles in found.items()])


def command_table(studies: Iterable[Evaluation]) -> str:
    """Every result file with its commit and its command, in full; each command once."""
    made: dict[tuple[str, str], list[str]] = {}
    for study in studies:
        for regime, result in study.results.items():
            commit = result.provenance.get("commit") or "not recorded"
            link = f"[{study.folder.name}/{regime}]({study.file(regime)})"
            made.setdefault((commit, study.command(regime)), []).append(link)
    rows = [[", ".join(files), commit, f"`{command}`"] for (commit, command), files in made.items()]
    return markdown(["results", "commit", "command"], rows)


def notes(studies: Iterable[Evaluation], regime: str) -> list[str]:
    """What a reader of the results must know, each note once."""
    return list(dict.fromkeys(note for study in studies for note in study.results[regime].notes))


def search_table(search: Mapping[str, Any]) -> str:
    """The runs of the search for settings of DP-SGD."""
    columns = {"ε": "epsilon", "factors": "factors", "learning rate": "learning_rate", "C": "clip_norm"}
    columns |= {
        "q": "sampling_rate",
        "T": "steps",
        "σ": "noise_multiplier",
        "loss": "loss",
        "gain kept": "kept_accuracy",
    }
    return markdown(
        list(columns),
        [
            [f"{row[name]:.4g}" if name != "factors" else row[name] for name in columns.values()]
            for row in search["rows"]
        ],
    )


def cuts_table(studies: Iterable[Evaluation]) -> str:
    """What was run at another size than the preset's; how many run side by side is no size."""
    found: dict[tuple[str, ...], list[str]] = {}
    for study in studies:
        for name, result in study.results.items():
            preset = plain(asdict(regime_named(name).presets["paper"]))
            other = [
                size for size in preset if size in result.scale and result.scale[size] != preset[size]
            ]  # some are new
            other = [size for size in other if size not in SPEED_ONLY and f"{name}.{size}" not in SPEED_ONLY]
            if other:
                words = (scale_in_words({size: sizes[size] for size in other}) for sizes in (result.scale, preset))
                regimes = found.setdefault((study.title, *words), [])
                regimes.append(f"`{name}`")
    rows = [[title, ", ".join(regimes), *words] for (title, *words), regimes in found.items()]
    return markdown(["evaluation", "regimes", "run at", "preset"], rows) if rows else ""
