"""The results page follows from the committed result files, whichever there are; no number in it is typed by hand."""

import ast
import importlib.util
import json
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
import pytest
from jinja2 import nodes

from paclm.privacy.calibration import calibrate_noise, information_bound
from paclm.study.results import Result

ROOT = Path(__file__).parent.parent
MOST_WORDS = 9579  # two thirds of the page before it was made shorter
NAMES = re.compile(  # figures that are part of a name, a label or a formula
    r"GPT-2-small|H100|smollm2|--stage 1|4 bits|bfloat16|float32|float64|2\^-\d+|1/ā|rep-3|0\.00%"
)


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "tools" / "make_results.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def studies(tool, tmp_path):
    """A copy of the results that a test may change."""
    return Path(shutil.copytree(tool.RESULTS, tmp_path / "results"))


def edit(path, change):
    """Apply `change` to every row of a result file that exists; else skip the test."""
    if not path.exists():
        pytest.skip(f"{path.name} was not run")
    found = json.loads(path.read_text())
    for row in found["rows"]:
        change(row)
    path.write_text(json.dumps(found))


def section(page, heading):
    """The text under a heading of the second level."""
    return next((part for part in re.split(r"\n## ", page) if part.startswith(heading + "\n")), "")


def stray_figures(source):
    """Digits in the text of a template, and literals that its expressions would print or compute with."""
    tree = jinja2.Environment().parse(source)
    words = "".join(text.data for text in tree.find_all(nodes.TemplateData))
    return [*re.findall(r"\S*\d\S*", NAMES.sub("", words)), *_literals(tree)]


def _literals(node):
    """Constants with figures; those that only choose or test (arguments of calls and filters, places) do not count."""
    if isinstance(node, nodes.Const) and re.search(r"\d", NAMES.sub("", str(node.value))):
        yield str(node.value)
    chosen = {nodes.Call: ("args", "kwargs"), nodes.Filter: ("args", "kwargs"), nodes.Getitem: ("arg",)}
    chosen[nodes.Compare] = ("ops",)
    for child in node.iter_child_nodes(exclude=chosen.get(type(node), ())):
        yield from _literals(child)


def figures_in_evidence(source):
    """Digits that the evidence of a claim would print without computing them: text of an f-string in a function."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    inside = [node for one in functions for node in ast.walk(one)]
    formats = [node.format_spec for node in inside if isinstance(node, ast.FormattedValue)]
    strings = [node for node in inside if isinstance(node, ast.JoinedStr) and node not in formats]
    words = [part.value for string in strings for part in string.values if isinstance(part, ast.Constant)]
    return [found for text in words for found in re.findall(r"\S*\d\S*", NAMES.sub("", text))]


def test_both_pages_are_what_the_results_give_also_elsewhere(tool, studies):
    page = tool.PAGE.read_text(encoding="utf-8")
    assert page == tool.render() == tool.render(studies), "run: python tools/make_results.py"
    assert tool.TABLES.read_text(encoding="utf-8") == tool.render_tables(), "run: python tools/make_results.py"


def test_the_page_is_short(tool):
    page = tool.PAGE.read_text(encoding="utf-8")
    assert len(page.split()) <= MOST_WORDS
    assert page.index("## Headlines") < 2500


def test_exactly_the_figures_that_the_page_shows_are_kept(tool):
    shown = re.findall(r"!\[.*?\]\((.*?)\)", tool.PAGE.read_text(encoding="utf-8"))
    assert len(shown) >= 4
    kept = [path.relative_to(tool.PAGE.parent).as_posix() for path in tool.RESULTS.rglob("*.svg")]
    assert sorted(shown) == sorted(kept)
    assert all((tool.PAGE.parent / path).read_text(encoding="utf-8").startswith("<?xml") for path in shown)


@pytest.mark.parametrize(
    "line",
    [
        "It keeps 88% of the gain.",
        "{{ 88 }}",
        "{{ 0.88|percent }}",
        "{{ '88 of 100' }}",
        "{% set kept = 0.88 %}",
        "{{ study.seconds * 2 }}",
        "{% if kept %}in 1,024 tokens{% endif %}",
    ],
)
def test_no_figure_is_written_by_hand_and_one_would_be_seen(tool, line):
    for path in tool.TEMPLATES.rglob("*.j2"):
        assert stray_figures(path.read_text(encoding="utf-8")) == []
    assert stray_figures(f"At 2^-32 {{{{ study.summary('census')[:5] }}}}. {line}") != []


def test_evidence_of_a_claim_is_computed_and_a_typed_figure_would_be_seen(tool):
    source = (tool.TEMPLATES / "claims.py").read_text(encoding="utf-8")
    assert figures_in_evidence(source) == []
    assert figures_in_evidence('def find():\n    return f"{rate}, 88% in the paper"') == ["88%"]


def test_every_result_is_linked_from_its_section_and_its_command_is_in_the_tables(tool):
    page, tables = tool.PAGE.read_text(encoding="utf-8"), tool.TABLES.read_text(encoding="utf-8")
    for study in tool.find_studies():
        for name in study.results:
            assert f"]({study.place}/results/{name}.json)" in section(page, tool.regime_named(name).title)
            (line,) = [row for row in tables.split("\n") if f"[{study.folder.name}/{name}](" in row]
            assert line.endswith(f"| `{study.command(name)}` |")
            assert all(f"## {study.folder.name}: `{label}`\n" in tables for label in study.labels(name))
        for stage in study.stages:
            assert f"| {study.title} | {stage} |" in section(page, "Minutes of each stage")


def test_every_link_to_a_table_or_section_has_a_target(tool):
    page, tables = (path.read_text(encoding="utf-8") for path in (tool.PAGE, tool.TABLES))

    def anchors(text):
        return {
            re.sub(r"[^\w\s-]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^## (.*)$", text, re.M)
        }

    assert set(re.findall(r"\(tables\.md#(.*?)\)", page)) <= anchors(tables)
    assert set(re.findall(r"\(#(.*?)\)", page)) <= anchors(page)
    for path in (ROOT / "docs").rglob("*.md"):
        assert set(re.findall(r"results\.md#([\w-]+)", path.read_text(encoding="utf-8"))) <= anchors(page), path


def test_every_command_of_the_tables_is_one_that_the_script_takes(tool, tmp_path, monkeypatch):
    """At its commit a regime may have belonged to another stage."""
    import dp_run
    import paper_options
    import recorded_votes

    def takes(words, name):
        monkeypatch.setattr(sys, "argv", words)
        try:
            return name in paper_options.chosen_regimes(paper_options.parse_arguments(None))
        except SystemExit:
            return False

    monkeypatch.chdir(tmp_path)
    for study in tool.find_studies():
        for name in study.results:
            words = study.command(name).split()[1:]
            for option in ("--test-text", "--public-text", "--other-text"):
                if option in words:
                    (tmp_path / Path(words[words.index(option) + 1]).name).touch()
            monkeypatch.setattr(sys, "argv", words)
            if "recorded_votes.py" in words[0]:
                assert recorded_votes.parse_arguments().votes.name == "votes"
                assert name in recorded_votes.SCALES
            elif "dp_run.py" in words[0]:
                assert study.folder.name in [corpus[0] for corpus in dp_run.parse_arguments().corpus]
            else:
                at = words.index("--stage") + 1
                every = [[*words[:at], str(stage), *words[at + 1 :]] for stage in paper_options.STAGES]
                assert any(takes(one, name) for one in every), name


@pytest.mark.parametrize(
    "name", ["accuracy", "census", "cost", "dp", "releases", "sessions", "tokens_only", "universe"]
)
def test_another_result_gives_other_pages(tool, studies, name):
    def change(row):
        for column, value in row.items():
            row[column] = 1.02 * value if isinstance(value, float) else value

    edit(studies / "wiki" / "results" / f"{name}.json", change)
    assert tool.render(studies) != tool.PAGE.read_text(encoding="utf-8")
    assert tool.render_tables(studies) != tool.TABLES.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["accuracy", "census", "releases", "sessions", "pmixed", "dp", "worlds", "temperature"]
)
def test_a_section_without_a_result_is_left_out(tool, studies, name):
    title = tool.regime_named(name).title
    for path in studies.glob(f"*/results/{name}.json"):
        path.unlink()
    page = tool.render(studies)
    assert section(page, title) == ""
    assert f"(#{tool.layout.anchor(name)})" not in page
    assert page.count("\n## ") > 10


def test_a_regime_without_a_written_section_is_shown_by_its_own_summary(tool, monkeypatch):
    (name, having, _) = next(one for one in tool.sections(tool.find_studies()) if one[0] == "census")
    title = tool.regime_named(name).title
    assert having[0].summary(name)[0] not in section(tool.render(), title)
    monkeypatch.setattr(tool, "written", list)
    assert f"- {having[0].summary(name)[0]}\n" in section(tool.render(), title)


def verdict(text, page, title):
    """What the page says of a claim for an evaluation; nothing where it says nothing."""
    lines = [line.split(" | ") for line in page.split("\n") if line.startswith(("| claim", f"| {text}"))]
    (heads, cells) = next(pair for pair in pairwise(lines) if pair[1][0].startswith(f"| {text}"))
    found = dict(zip([head.strip(" |") for head in heads], cells, strict=True)).get(title, "")
    return found.strip("| ").partition("**:")[0].removeprefix("**")


HOLDS, FAILS, OPEN = "holds", "does not hold", "not refuted"


@pytest.mark.parametrize(
    ("claim", "regime", "cases"),
    [
        (
            "A dissenting token",
            "sessions",
            {OPEN: {"gap": 0.0, "estimators_parting": 0.0}, FAILS: {"gap": 1.0}},
        ),
        (
            "No attack",
            "sessions",
            {OPEN: {"membership_rate": 0.4, "world_rate": 0.0}, FAILS: {"membership_rate": 1.0}},
        ),
        (
            "Most of the gain",
            "accuracy",
            {
                HOLDS: {"retained_gain": 0.9, "retained_gain_stderr": 0.1},
                OPEN: {"retained_gain": 0.7},
                FAILS: {"retained_gain": 0.1},
            },
        ),
        (
            "The share kept",
            "accuracy",
            {OPEN: {"retained_gain": 0.8, "retained_gain_stderr": 0.1}, FAILS: {"retained_gain": 0.3}},
        ),
        ("Noise at 2^-32", "accuracy", {OPEN: {"noise_points": 0.0}, FAILS: {"noise_points": -0.5}}),
        (
            "Most of the cost",
            "accuracy",
            {OPEN: {"noise_points": 0.0}, HOLDS: {"noise_points": -0.5}},
        ),
        ("Worlds agree", "census", {OPEN: {"unanimity": 0.834}, FAILS: {"unanimity": 0.5}}),
        ("The support", "census", {HOLDS: {"argmax_coverage": 0.99}, FAILS: {"argmax_coverage": 0.9}}),
        ("Where worlds differ, flips", "flatness", {HOLDS: {"flip_unanimous": 0.0}, FAILS: {"flip_unanimous": 0.001}}),
        (
            "Where worlds differ, mostly",
            "flatness",
            {
                HOLDS: {"truth_not_voted_given_dissent": 0.6},
                OPEN: {"truth_not_voted_given_dissent": 0.51},
                FAILS: {"truth_not_voted_given_dissent": 0.4},
            },
        ),
        (
            "At tight budgets",
            "flatness",
            {
                HOLDS: {"flip_dissent": 0.5, "flip_limit_per_position": 0.5},
                OPEN: {"flip_limit_per_position": 0.54},
                FAILS: {"flip_limit_per_position": 0.9},
            },
        ),
        (
            "A long session",
            "sessions",
            {
                HOLDS: {"agreement_realized": 0.8, "agreement_realized_stderr": 0.001},
                OPEN: {"agreement_realized_stderr": 0.5},
            },
        ),
        (
            "Releases that never",
            "releases",
            {
                HOLDS: {"lead_points": 0.1, "leaked_nats": 0.0},
                OPEN: {"lead_points": 0.0},
                FAILS: {"lead_points": 0.1, "leaked_nats": 0.1},
            },
        ),
        ("The tokens alone", "tokens_only", {HOLDS: {"tokens_over_history": 0.9}, OPEN: {"tokens_over_history": 0.4}}),
        (
            "A curator that forgets",
            "forgetting",
            {
                OPEN: {"leaked_stderr": 1e3, "can_tell_over_charged_most": 9.0},  # a bound that is no leak
                HOLDS: {"leaked_stderr": 1e-9, "leaked_nats": 0.0},
                FAILS: {"leaked_nats": 100.0},
            },
        ),
        ("An attacker who holds", "universe", {HOLDS: {"auc": 0.99}, FAILS: {"auc": 0.6}}),
        ("Two simple attacks", "universe", {OPEN: {"auc": 0.5}, FAILS: {"auc": 0.8}}),
        ("Canaries are not", "canaries", {OPEN: {"gap_nats": 0.0}, FAILS: {"gap_nats": 5.0}}),
        (
            "A forced canary",
            "canaries",
            {OPEN: {"advantage": 0.0, "advantage_even_split": 0.0}, FAILS: {"advantage": 1.0}},
        ),
        ("No number of", "capacity", {OPEN: {"argmax_share": 0.9}, FAILS: {"argmax_share": 1.0}}),
        ("The release itself", "cost", {HOLDS: {"mechanism_share": 0.001}, FAILS: {"mechanism_share": 0.1}}),
        (
            "Rounding",
            "precision",
            {
                HOLDS: {"unanimity_difference": -1.0},
                OPEN: {"unanimity_difference": 0.0},
                FAILS: {"unanimity_difference": 1.0},
            },
        ),
        (
            "An adapter that hides",
            "dp",
            {OPEN: {"retained_gain": 0.5}},
        ),
    ],
)
def test_a_claim_is_decided_by_the_results(tool, studies, claim, regime, cases):
    """Whatever the committed results say: some rows bear a claim out, some contradict it, and some do neither."""
    path = studies / "wiki" / "results" / f"{regime}.json"
    for expected, values in cases.items():
        edit(path, lambda row, values=values: row.update({name: values[name] for name in values if name in row}))
        assert verdict(claim, tool.render(studies), "Wikipedia") == expected


GUARDED = {"part": "forced", "quorum": 1, "lacking": 50, "emitted_lacking": 0}
PROMPTS = {"target": "record", "attacker": "belief", "pool": "all records", "choice": "chosen", "is_last": True}
PROMPTS |= {"records": 64, "budget": "2^-8", "worst_over_charged": 0.5, "worst_over_charged_stderr": 0.1}
PROMPTS |= {"record_over_charged_stderr": 0.01, "broken": None}
PROMPTS |= {"p_membership": 0.5, "p_any_record": 1.0, "p_worst_record": None, "p_leak": 0.2}


@pytest.mark.parametrize(
    ("text", "regime", "rows", "column", "cases"),
    [
        (
            "A quorum raises",
            "content",
            [{"part": "text", "quorum": 1, "decoder": "greedy", "change_at_32_stderr": 0.001}],
            "change_at_32",
            {HOLDS: 0.02, OPEN: 0.001, FAILS: -0.02},
        ),
        (
            "Other text",
            "controls",
            [{"trained_on": "other text", "decoder": "greedy", "share_stderr": 0.05, "passages": 100}],
            "share",
            {HOLDS: 0.2, OPEN: 0.5, FAILS: 0.8},
        ),
        (
            "Prompts chosen among",
            "chosen_prompts",
            [PROMPTS],
            "record_over_charged",
            {HOLDS: 0.3, OPEN: 0.5, FAILS: 0.7},
        ),
        (
            "No attack by chosen",
            "chosen_prompts",
            [PROMPTS, {**PROMPTS, "broken": "noise for four times the budget", "p_membership": 1e-9}],
            "p_leak",
            {OPEN: 0.2, FAILS: 1e-9},
        ),
        (
            "A temperature lowered",
            "temperature",
            [{"rule": "1/4", "lead_change_at_32_stderr": 0.001}],
            "lead_change_at_32",
            {HOLDS: 0.01, OPEN: 0.001, FAILS: -0.01},
        ),
    ],
)
def test_a_claim_that_no_committed_result_need_decide_is_decided_by_rows(
    tool, tmp_path, text, regime, rows, column, cases
):
    for expected, value in cases.items():
        assert decided(tool, text, regime, [{**row, column: value} for row in rows]) == expected
    assert claim_named(tool, text).check(tool.Evaluation(tmp_path)) is None


def claim_named(tool, text):
    (claim,) = [one for one in tool.claims.CLAIMS if one.text.startswith(text)]
    return claim


def decided(tool, text, regime, rows):
    """What a claim says of these rows alone."""
    own = [{"collection": 1, **row} for row in rows]
    result = Result(regime=regime, preset="paper", seed=0, scale={}, rows=own, seconds=0.0)
    found = claim_named(tool, text).find(Alone({regime: result}))
    return found and found.verdict


class Alone(NamedTuple):
    """An evaluation that is nothing but its results."""

    results: dict

    def rows(self, regime, **wanted):
        return self.results[regime].select(**wanted) if regime in self.results else []


def cost_rows(cost_at_12):
    row = {"decoder": "gumbel", "noise_stderr": 5e-4, "passages": 16}
    return [{**row, "budget": "2^-12", "noise_points": -cost_at_12}, {**row, "budget": "2^-32", "noise_points": -0.01}]


def headroom_rows(at_last):
    ours, theirs = {"kind": "pac", "release": "gaussian"}, {"kind": "matched", "reading": "generous"}
    cells = [(ours, 10, 0.8), (ours, 100, at_last), (theirs, 10, 0.7), (theirs, 100, 0.1)]
    row = {"epsilon": 1.0, "headroom_stderr": 0.005}
    return [{**row, **method, "queries": queries, "headroom": value} for method, queries, value in cells]


def coin_rows(shared):
    cells = {"greedy": 0.8, "Gumbel, τ = 1.0": shared, "independent": 0.01}
    row = {"budget": "2^-16", "unanimity_stderr": 0.01, "sequences": 50}
    return [{**row, "variant": variant, "unanimity": value} for variant, value in cells.items()]


@pytest.mark.parametrize(
    ("text", "regime", "rows", "cases"),
    [
        ("Most of the cost", "accuracy", cost_rows, {HOLDS: 0.0095, OPEN: 0.008, FAILS: 0.003}),
        ("At one bound PMixED", "pmixed", headroom_rows, {HOLDS: 0.8, OPEN: 0.76, FAILS: 0.6}),
        ("Shared coins", "ablation", coin_rows, {HOLDS: 0.8, OPEN: 0.71, FAILS: 0.5}),
    ],
)
def test_a_comparison_is_decided_only_beyond_its_errors(tool, text, regime, rows, cases):
    """The open ones are on the side of the claim: a rule that compares points would say that they hold."""
    for expected, value in cases.items():
        assert decided(tool, text, regime, rows(value)) == expected


@pytest.mark.parametrize(
    ("text", "regime", "rows", "expected"),
    [
        ("No payload", "content", [GUARDED, {**GUARDED, "quorum": 0, "emitted_lacking": 9}], OPEN),
        ("No payload", "content", [GUARDED, {**GUARDED, "quorum": 0}], None),
        ("No payload", "content", [{**GUARDED, "quorum": 0, "emitted_lacking": 9}], None),
        ("No payload", "content", [{**GUARDED, "emitted_lacking": 1}], FAILS),
        ("No attack by chosen", "chosen_prompts", [PROMPTS], None),
        ("No attack by chosen", "chosen_prompts", [PROMPTS, {**PROMPTS, "broken": "not found"}], None),
        ("No attack by chosen", "chosen_prompts", [{**PROMPTS, "p_leak": 1e-9}], FAILS),
    ],
)
def test_what_was_not_tested_is_no_claim_that_is_not_refuted(tool, text, regime, rows, expected):
    """Without an emission in the control, or a broken mechanism that is found; what is refuted stays so."""
    assert decided(tool, text, regime, rows) == expected


def test_a_true_claim_with_a_margin_fails_in_at_most_one_result_of_a_hundred(tool):
    """3,000 results of 16 passages whose true gap is just inside the margin of five points.

    The rule allows 0.5 %, so more than 1 % is seen with probability 1e-4. Tested against zero, the same results fail.
    """
    rng = np.random.default_rng(7)
    gaps = 0.049 + 0.01 * rng.normal(size=3000)
    errors = 0.01 * np.sqrt(rng.chisquare(15, size=3000) / 15)
    row = {"decoder": "gumbel", "budget": "2^-32", "passages": 16, "flip_limit_per_position": 0.5}
    told = [
        decided(
            tool, "At tight budgets", "flatness", [{**row, "flip_dissent": 0.5 - gap, "flip_dissent_stderr": error}]
        )
        for gap, error in zip(gaps, errors, strict=True)
    ]
    assert 0 < told.count(FAILS) <= 30
    assert np.mean(gaps > tool.claims.most_errors(1, [row]) * errors) > 0.9


def test_the_step_of_a_curator_that_forgets_can_exceed_its_charge_by_what_the_page_says(tool):
    """Against the bound that the study itself computes at that belief, at a small charge."""
    prior, belief, charge = np.array([1.0, 127.0]) / 128.0, np.array([0.5, 0.5]), 1e-9
    found = information_bound(belief, calibrate_noise(prior, charge)) / charge
    assert tool.forgetful_step(128) == pytest.approx(found, rel=1e-6)
    assert f"about {found:.0f} b" in section(tool.render(), tool.regime_named("forgetting").title)


def test_a_design_of_as_many_worlds_does_not_hide_the_trained_ones(tool, studies):
    path = studies / "recorded" / "results" / "worlds.json"
    found = json.loads(path.read_text())
    found["rows"] += [{**row, "dissent": 0.123, "design": "balanced"} for row in found["rows"] if row["worlds"] == 128]
    path.write_text(json.dumps(found))
    lines = section(tool.render(studies), "Number of worlds").split("\n")
    (trained,), (design,) = (
        [line for line in lines if line.startswith(f"| 128, {name} |")] for name in ("all trained", "balanced")
    )
    assert "12.3%" in design
    assert "12.3%" not in trained


def test_a_failed_test_of_a_regime_is_on_the_page(tool, studies):
    assert "ALARM" not in section(tool.render(studies), "Persistent-secret sessions")
    edit(studies / "wiki" / "results" / "sessions.json", lambda row: row.update(membership_rate=1.0))
    assert "ALARM" in section(tool.render(studies), "Persistent-secret sessions")


def test_a_payload_outside_the_support_is_a_tautology_only_while_it_is_never_emitted(tool, studies):
    assert "tautology" in section(tool.render(studies), "Canaries")
    edit(
        studies / "wiki" / "results" / "canaries.json", lambda row: row.update(emitted=1) if "emitted" in row else None
    )
    assert "tautology" not in section(tool.render(studies), "Canaries")


def test_what_changed_compares_with_the_earlier_page_and_gives_each_figure_a_reason(tool, studies):
    from results_page.headlines import record

    path = studies / "earlier.json"
    mains = [study for study in tool.find_studies(studies) if study.folder.name in tool.MAIN]
    path.write_text(json.dumps(record(mains)))
    found = section(tool.render(studies), "What changed")
    assert "Why:" not in found
    assert "New evaluations: Wikipedia, recorded votes" in found
    earlier = json.loads(path.read_text())
    earlier["wiki"]["figures"]["kept, Gumbel"] |= {"value": 0.123, "basis": "64 positions, 2 passages"}
    earlier["cables"]["figures"]["worlds agree"]["value"] = 0.5
    earlier["wiki"]["worlds"] = "other"
    path.write_text(json.dumps(earlier))
    found = section(tool.render(studies), "What changed")
    assert "| kept, Gumbel | Wikipedia | 12%" in found
    assert "64 positions, 2 passages → " in found
    assert "- The worlds were trained again: other adapters from the same records. kept, Gumbel (Wikipedia).\n" in found
    assert "- No reason is on record. worlds agree (diplomatic papers).\n" in found


def test_every_change_of_the_committed_page_has_a_reason(tool):
    found = section(tool.PAGE.read_text(encoding="utf-8"), "What changed")
    assert "No reason is on record" not in found
    assert ("\nWhy:\n\n- " in found) is ("| evaluation | earlier |" in found)


def test_headlines_of_one_meaning_are_one_number(tool):
    """Noiseless is the budget ∞, under both names; where secrets were drawn, one is drawn for all budgets."""
    for study in tool.find_studies():
        for row in study.rows("accuracy", budget="inf"):
            (tight,) = study.rows("accuracy", budget="2^-32", decoder=row["decoder"])
            assert row["accuracy_private"] == pytest.approx(row["accuracy_noiseless"], abs=1e-12)
            assert row["accuracy_private"] == pytest.approx(tight["accuracy_noiseless"], abs=1e-12)
            assert row["noise_points"] == pytest.approx(0.0, abs=1e-12)


def test_an_evaluation_of_another_base_is_beside_the_main_ones_and_decides_what_they_cannot(tool, studies):
    shutil.rmtree(studies / "tiny-wiki", ignore_errors=True)
    shutil.copytree(studies / "wiki", studies / "tiny-wiki")
    for name in ("worlds", "temperature"):
        path = shutil.copy(studies / "recorded" / "results" / f"{name}.json", studies / "tiny-wiki" / "results")
        found = json.loads(Path(path).read_text())
        found["provenance"] |= {"base_name": "small base", "records": 7}
        Path(path).write_text(json.dumps(found))
    page, title = tool.render(studies), "Wikipedia, `tiny`"
    assert f"\n| {title} | " in section(page, "Other texts, collections and bases")
    assert f"| {title} | 1 |" in section(page, "Minutes of each stage")
    assert title in section(page, "What was run")
    assert title not in section(page, "Headlines") + section(page, "The paper's claims and figures")
    for name in ("worlds", "temperature", "accuracy"):
        assert "](results/tiny-wiki/results/" in section(page, tool.regime_named(name).title)
    assert f"{title}, dissent |" in section(page, "Number of worlds")
    assert f"{title}, kept" not in section(page, "Teacher-forced accuracy")
    assert verdict("Fewer worlds", page, title) == verdict("Fewer worlds", page, "Wikipedia, recorded votes") != ""
    assert verdict("Most of the gain", page, title) == ""
    assert "## tiny-wiki: `tab:worlds`" in tool.render_tables(studies)
    copied = studies / "tiny-wiki-collection-2" / "results"
    copied.mkdir(parents=True)
    shutil.copy(studies / "wiki" / "results" / "accuracy.json", copied)
    assert f"| {title}, collection 2 |" in tool.render(studies)


def test_later_collections_are_pooled_with_the_first(tool, studies):
    shutil.copytree(studies / "wiki", studies / "wiki-collection-2")
    edit(
        studies / "wiki-collection-2" / "results" / "accuracy.json",
        lambda row: row.update(retained_gain=row["retained_gain"] + 0.1),
    )
    page = section(tool.render(studies), "Other texts, collections and bases")
    assert "| Wikipedia, collection 2 |" in page
    (mean,) = [line for line in page.split("\n") if line.startswith("| Wikipedia, mean of 2 collections |")]
    assert re.search(r"\| \d+% \(-?\d+% to \d+%\) \|", mean)
    assert "±" not in mean
    (studies / "wiki-collection-2" / "results" / "accuracy.json").unlink()
    edit(studies / "wiki-collection-2" / "results" / "census.json", lambda row: row.update(worlds=7))
    assert "Wikipedia, collection 2" in tool.render(studies)


def test_the_error_of_a_gap_leaves_out_what_leak_and_charge_have_in_common(tool):
    """For sessions that leak their own charge on average, the gap in standard errors is standard normal.

    400 sets: their standard deviation is within 0.15 of 1 but with probability 3e-5. In errors of the leak it is not.
    """
    rng = np.random.default_rng(0)
    charges = rng.uniform(0.0, 2.0, (400, 100))
    told = charges + rng.normal(0.0, 0.5, charges.shape)
    error_of_leak, error_of_charge = (found.std(axis=1, ddof=1) / 10.0 for found in (told, charges))
    rows = [
        {"leaked_nats": t, "charged_dissent_nats": c, "leaked_stderr": e, "can_tell_stderr": f}
        for t, c, e, f in zip(told.mean(axis=1), charges.mean(axis=1), error_of_leak, error_of_charge, strict=True)
    ]
    spread = np.sqrt(np.mean([tool.claims.leak_gap(row) ** 2 for row in rows]))
    assert abs(spread - 1.0) < 0.15
    naive = (told.mean(axis=1) - charges.mean(axis=1)) / error_of_leak
    assert np.sqrt(np.mean(naive**2)) < 0.8
    saturated = {**rows[0], "leaked_stderr": 0.01, "can_tell_stderr": 0.02}  # every session leaked everything
    assert tool.claims.leak_gap(saturated) == np.inf
