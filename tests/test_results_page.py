"""The results page matches the committed result files; no number in it is typed by hand."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import jinja2
import numpy as np
import pytest
from jinja2 import nodes

ROOT = Path(__file__).parent.parent

NAMES = re.compile(  # figures that are part of a name, a label or a formula
    r"SmolLM2-135M-Instruct|smollm2|GPT-2-small|GPT-2|--base gpt2|H100|4 bits|bfloat16|float32|float64"
    r"|2\^-\d+|1/√b|1 − 1/ā|1 − 1/a|rep-3|--stage 1|eps2"
)
TWINS = {  # one column of every result that the page shows
    "wiki/ablation": "unanimity",
    "wiki/accuracy": "gain_points",
    "cables/accuracy": "gain_points",
    "wikitext/accuracy": "gain_points",
    "earlier_wiki/accuracy": "retained_gain",
    "earlier_cables/accuracy": "retained_gain",
    "wiki/canaries": "gap_nats",
    "wiki/census": "argmax_coverage",
    "cables/census": "unanimity",
    "wiki/cost": "tokens_per_second",
    "wiki/dp": "retained_gain",
    "cables/dp": "retained_gain",
    "wiki/flatness": "truth_not_voted_given_dissent",
    "cables/flatness": "flip_dissent",
    "wiki/forgetting": "can_tell_over_charged_most",
    "cables/forgetting": "can_tell_over_charged_most",
    "wiki/generation": "rep3",
    "collections/accuracy": "retained_gain",
    "wiki/capacity": "gap_nats",
    "wiki/coupling": "ceiling",
    "wiki/pmixed": "headroom",
    "wiki/precision": "accuracy_float32",
    "wiki/sweep": "world_rate",
    "wiki/universe": "auc_stderr",
    "wiki/releases": "retained_gain",
    "cables/releases": "retained_gain",
    "wiki/sessions": "leaked_over_charged",
    "cables/sessions": "leaked_over_charged",
    "wiki/tokens_only": "leaked_tokens_nats",
    "cables/tokens_only": "tokens_over_history",
}
LINKED_ONLY = {"wikitext/flatness", "earlier_wiki/census", "earlier_cables/census"}
"""Of these the page shows a link and the command."""


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


def change(studies, result, column, factor):
    name, regime = result.split("/")
    path = studies / name / "results" / f"{regime}.json"
    found = json.loads(path.read_text())
    for row in found["rows"]:
        if row.get(column) is not None:
            row[column] *= factor
    path.write_text(json.dumps(found))


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
    for child in node.iter_child_nodes(exclude=chosen.get(type(node), ())):
        yield from _literals(child)


def test_both_pages_are_what_the_results_give_also_elsewhere(tool, studies):
    page = tool.PAGE.read_text(encoding="utf-8")
    assert page == tool.render() == tool.render(studies), "run: python tools/make_results.py"
    assert tool.TABLES.read_text(encoding="utf-8") == tool.render_tables(page), "run: python tools/make_results.py"


def test_exactly_the_figures_that_the_page_shows_are_kept(tool):
    shown = re.findall(r"!\[.*?\]\((.*?)\)", tool.PAGE.read_text(encoding="utf-8"))
    assert len(shown) >= 4
    kept = [path.relative_to(tool.PAGE.parent).as_posix() for path in tool.RESULTS.rglob("*") if path.suffix != ".json"]
    assert sorted(shown) == sorted(path for path in kept if "." in path)
    assert all((tool.PAGE.parent / path).read_text(encoding="utf-8").startswith("<?xml") for path in shown)


@pytest.mark.parametrize(
    "line",
    [
        "It keeps 88% of the gain.",
        "{{ 88 }}",
        "{{ 0.88|percent }}",
        "{{ '88 of 100' }}",
        "{% set kept = 0.88 %}",
        "{{ wiki.seconds * 2 }}",
        "{% call holds(true) %}It keeps 88%.{% endcall %}",
        "{% if kept %}in 1,024 tokens{% endif %}",
    ],
)
def test_no_figure_is_written_by_hand_and_one_would_be_seen(tool, line):
    assert stray_figures(tool.TEMPLATE.read_text(encoding="utf-8")) == []
    assert stray_figures(f"At 2^-32 {{{{ wiki.row('census', support_size=200).unanimity|percent(1) }}}}. {line}") != []


def test_every_result_is_on_the_page_with_its_command(tool):
    page = tool.PAGE.read_text(encoding="utf-8")
    shown = {f"{study}/{name}" for study in tool.STUDIES for name in tool.Evaluation(tool.RESULTS / study).results}
    assert shown == set(TWINS) | LINKED_ONLY
    for study in tool.STUDIES:
        evaluation = tool.Evaluation(tool.RESULTS / study)
        for name in evaluation.results:
            assert f"(results/{study}/results/{name}.json)" in page
            assert f"results/{name}.json): `{evaluation.command(name)}`\n" in page
        for name in evaluation.never_run():
            assert f"`{name}`" in page.split("## What was cut")[1]


def test_every_command_on_the_page_is_one_that_the_script_takes(tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikitext-test.tokens.xz").touch()
    for study in tool.STUDIES:
        evaluation = tool.Evaluation(tool.RESULTS / study)
        for name in evaluation.results:
            monkeypatch.setattr(sys, "argv", evaluation.command(name).split()[1:])
            if name == "dp":
                import dp_run  # beside paper_options

                assert study in [corpus[0] for corpus in dp_run.parse_arguments().corpus]
                continue
            options = tool.paper_options.parse_arguments(None)
            assert name in tool.paper_options.chosen_regimes(options), name


@pytest.mark.parametrize(("result", "column"), TWINS.items())
def test_another_result_gives_another_page(tool, studies, result, column):
    change(studies, result, column, 1.02)
    assert tool.render(studies) != tool.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("result", "column", "factor"),
    [
        ("wiki/sessions", "gap", 9.0),
        ("cables/sessions", "world_rate", 9.0),
        ("wiki/sessions", "agreement_realized_stderr", 0.01),
        ("wiki/precision", "unanimity_stderr", 2.0),
        ("wiki/precision", "accuracy_difference", 9.0),
        ("wiki/sweep", "world_p", 0.001),
        ("wiki/sweep", "world_rate", 9.0),
        ("wiki/pmixed", "headroom", 0.5),
        ("wiki/pmixed", "headroom_stderr", 0.1),
        ("wiki/pmixed", "delta_of_example", 0.1),
        ("wiki/pmixed", "stderr_of_draws", 99.0),
        ("wiki/coupling", "unanimity_stderr", 2.0),
        ("wiki/coupling", "retained_gain_stderr", 0.1),
        ("wiki/coupling", "accuracy_full", 1.001),
        ("wiki/universe", "auc", 1.1),
        ("wiki/capacity", "argmax_share", 0.5),
        ("collections/accuracy", "retained_gain_stderr", 0.5),
        ("earlier_cables/accuracy", "retained_gain", 0.8),
        ("wiki/generation", "ratio", 1.2),
        ("wiki/canaries", "rank_member", 9.0),
        ("wiki/canaries", "advantage_stderr", 0.8),
        ("wiki/ablation", "distinct_given_dissent_stderr", 9.0),
        ("wiki/flatness", "change", 9.0),
        ("cables/accuracy", "retained_gain", 0.5),
        ("cables/accuracy", "retained_gain_stderr", 2.0),
        ("cables/releases", "lead_points", 0.1),
        ("wiki/releases", "lead_stderr", 1.3),
        ("wiki/releases", "leaked_nats", 1.1),
        ("cables/releases", "accuracy_noiseless", 1.02),
        ("wiki/dp", "retained_gain", 1.5),
        ("cables/dp", "retained_gain_stderr", 9.0),
        ("cables/dp", "accuracy_public", 1.01),
        ("wiki/dp", "accuracy_full", 1.01),
        ("wiki/forgetting", "charged_dissent_nats", 0.9),
        ("cables/tokens_only", "world_tokens", 20.0),
        ("wiki/tokens_only", "membership_history", 1.5),
        ("cables/tokens_only", "tokens_over_history", 0.5),
        ("wiki/tokens_only", "tokens_over_history_stderr", 9.0),
    ],
)
def test_a_claim_that_the_results_contradict_is_not_written(tool, studies, result, column, factor):
    change(studies, result, column, factor)
    with pytest.raises(tool.Overturned, match="contradict"):
        tool.render(studies)


def test_the_error_of_a_gap_leaves_out_what_leak_and_charge_have_in_common(tool):
    """For sessions that leak their own charge on average, the gap in standard errors is standard normal.

    400 sets: their standard deviation is within 0.15 of 1 but with probability 3e-5. In errors of the leak it is not.
    """
    rng = np.random.default_rng(0)
    charges = rng.uniform(0.0, 2.0, (400, 100))
    told = charges + rng.normal(0.0, 0.5, charges.shape)
    error_of_leak, error_of_charge = (found.std(axis=1, ddof=1) / 10.0 for found in (told, charges))
    rows = [
        {"leaked_nats": t, "charged_dissent": c, "leaked_stderr": e, "can_tell_stderr": f}
        for t, c, e, f in zip(told.mean(axis=1), charges.mean(axis=1), error_of_leak, error_of_charge, strict=True)
    ]
    spread = np.sqrt(np.mean([tool.QUESTIONS["leak_gap"](row) ** 2 for row in rows]))
    assert abs(spread - 1.0) < 0.15
    naive = (told.mean(axis=1) - charges.mean(axis=1)) / error_of_leak
    assert np.sqrt(np.mean(naive**2)) < 0.8
    saturated = {**rows[0], "leaked_stderr": 0.01, "can_tell_stderr": 0.02}  # every session leaked everything
    assert tool.QUESTIONS["leak_gap"](saturated) == np.inf


@pytest.mark.parametrize(("column", "factor"), [("loss", -1.0), ("kept_accuracy", -1.0), ("clip_norm", 2.0)])
def test_a_search_that_says_something_else_is_not_passed_over(tool, studies, column, factor):
    path = studies / "dp-search.json"
    found = json.loads(path.read_text())
    for row in found["rows"]:
        row[column] *= factor
    path.write_text(json.dumps(found))
    with pytest.raises(tool.Overturned, match="contradict"):
        tool.render(studies)
