"""The results page follows from the committed result files, whichever there are; no number in it is typed by hand."""

import ast
import importlib.util
import json
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import jinja2
import numpy as np
import pytest
from jinja2 import nodes

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


def test_every_result_is_on_the_page_with_its_command(tool):
    page, tables = tool.PAGE.read_text(encoding="utf-8"), tool.TABLES.read_text(encoding="utf-8")
    for study in tool.find_studies():
        for name in study.results:
            assert f"]({study.place}/results/{name}.json)" in page
            assert f"`{tool.layout.shorten(study.command(name))}`" in page
            assert f": `{study.command(name)}`" in tables
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


def test_every_command_on_the_page_is_one_that_the_script_takes(tool, tmp_path, monkeypatch):
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
            for option in ("--test-text", "--public-text"):
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


@pytest.mark.parametrize("name", ["accuracy", "census", "releases", "sessions", "pmixed"])
def test_a_section_without_a_result_is_left_out(tool, studies, name):
    title = tool.regime_named(name).title
    for path in studies.glob(f"*/results/{name}.json"):
        path.unlink()
    page = tool.render(studies)
    assert section(page, title) == ""
    assert f"[{name}](#" not in page
    assert page.count("\n## ") > 10


def test_a_regime_without_a_written_section_is_shown_by_its_own_summary(tool, monkeypatch):
    (name, having) = next(one for one in tool.sections(tool.find_studies()) if one[0] == "census")
    title = tool.regime_named(name).title
    assert having[0].summary(name)[0] not in section(tool.render(), title)
    monkeypatch.setattr(tool, "written", list)
    assert f"- {having[0].summary(name)[0]}\n" in section(tool.render(), title)


def hold(text, page, title):
    """Whether the page says of a claim that it holds for an evaluation."""
    lines = [line.split(" | ") for line in page.split("\n") if line.startswith(("| claim", f"| {text}"))]
    (heads, cells) = next(pair for pair in pairwise(lines) if pair[1][0].startswith(f"| {text}"))
    return cells[[head.strip(" |") for head in heads].index(title)].strip("| ").startswith("**holds**")


@pytest.mark.parametrize(
    ("claim", "regime", "true", "false"),
    [
        ("A dissenting token", "sessions", {"gap": 0.0, "estimators_parting": 0.0}, {"gap": 1.0}),
        ("No attack", "sessions", {"membership_rate": 0.4, "world_rate": 0.0}, {"membership_rate": 1.0}),
        ("Most of the gain", "accuracy", {"retained_gain": 0.9, "retained_gain_stderr": 0.1}, {"retained_gain": 0.5}),
        ("Noise at 2^-32", "accuracy", {"noise_points": 0.0}, {"noise_points": -0.5}),
        ("Worlds agree", "census", {"unanimity": 0.834}, {"unanimity": 0.5}),
        ("The support", "census", {"argmax_coverage": 0.99}, {"argmax_coverage": 0.9}),
        ("Unanimous positions", "flatness", {"flip_unanimous": 0.0}, {"flip_unanimous": 0.001}),
        (
            "Where worlds differ",
            "flatness",
            {"truth_not_voted_given_dissent": 0.6},
            {"truth_not_voted_given_dissent": 0.4},
        ),
        ("Releases that never", "releases", {"lead_points": 0.1, "leaked_nats": 0.0}, {"lead_points": 0.0}),
        ("The tokens alone", "tokens_only", {"tokens_over_history": 0.9}, {"tokens_over_history": 0.5}),
        (
            "A curator that forgets",
            "forgetting",
            {"can_tell_over_charged_most": 2.0},
            {"can_tell_over_charged_most": 1.0},
        ),
        ("Whoever holds", "universe", {"auc": 0.95}, {"auc": 0.6}),
        ("Two simple attacks", "universe", {"auc": 0.5}, {"auc": 0.8}),
        ("Canaries are not", "canaries", {"gap_nats": 0.0}, {"gap_nats": 5.0}),
        ("A forced canary", "canaries", {"advantage": 0.0, "advantage_even_split": 0.0}, {"advantage": 1.0}),
        ("No number of", "capacity", {"argmax_share": 0.9}, {"argmax_share": 1.0}),
        ("The release itself", "cost", {"mechanism_share": 0.001}, {"mechanism_share": 0.1}),
        ("Rounding", "precision", {"unanimity_difference": -1.0}, {"unanimity_difference": 0.0}),
    ],
)
def test_a_claim_is_decided_by_the_results(tool, studies, claim, regime, true, false):
    """Whatever the committed results say: rows that bear a claim out give one verdict, others the other."""
    path = studies / "wiki" / "results" / f"{regime}.json"
    for values, expected in ((true, True), (false, False)):
        edit(path, lambda row, values=values: row.update({name: values[name] for name in values if name in row}))
        assert hold(claim, tool.render(studies), "Wikipedia") is expected


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


def test_what_changed_compares_with_the_earlier_page(tool, studies):
    from results_page.headlines import record

    path = studies / "earlier.json"
    mains = [study for study in tool.find_studies(studies) if study.folder.name in tool.MAIN]
    path.write_text(json.dumps(record(mains)))
    assert section(tool.render(studies), "What changed") == ""
    earlier = json.loads(path.read_text())
    earlier["wiki"]["figures"]["kept, Gumbel"] |= {"value": 0.123, "basis": "64 positions, 2 passages"}
    earlier["wiki"]["worlds"] = "other"
    path.write_text(json.dumps(earlier))
    found = section(tool.render(studies), "What changed")
    assert "| kept, Gumbel | Wikipedia | 12%" in found
    assert "64 positions, 2 passages → " in found
    assert "trained again, other adapters from the same records: Wikipedia." in found


def test_headlines_of_one_meaning_are_one_number(tool):
    """Noiseless is the budget ∞, under both names."""
    for study in tool.find_studies():
        for row in study.rows("accuracy", budget="inf"):
            assert row["accuracy_private"] == pytest.approx(row["accuracy_noiseless"], abs=1e-12)
            assert row["noise_points"] == pytest.approx(0.0, abs=1e-12)


def test_later_collections_are_pooled_with_the_first(tool, studies):
    shutil.copytree(studies / "wiki", studies / "wiki-collection-2")
    edit(
        studies / "wiki-collection-2" / "results" / "accuracy.json",
        lambda row: row.update(retained_gain=row["retained_gain"] + 0.1),
    )
    page = section(tool.render(studies), "Other texts, collections and bases")
    assert "| Wikipedia, collection 2 |" in page
    assert "| Wikipedia, mean of 2 collections |" in page
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
