"""`paclm generate` as a user types it."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from cli.commands import figures_of, invoke
from curator.deployments import set_mechanism
from curator.memory import dumpable
from paclm.curator.curator import Curator
from paclm.errors import InvalidInput
from paclm.worlds.manifest import load_manifest
from plugin_packages import first_on_path, install_hostile

KEYS = [
    *("text", "tokens", "finish_reason", "private_tokens", "public_tokens", "charged_nats", "spent_nats", "total_nats"),
    *("remaining_tokens", "mia_bound", "world_id_bound", "token_ids"),
]

run = partial(invoke, "generate")
figures = partial(figures_of, "generate")
ONE = ("--prompt", "the patient", "--max-tokens", "1")


def test_json_has_the_keys_of_the_contract_and_the_budget_is_kept_between_calls(clinic):
    first = figures(clinic, "--prompt", "the patient", "--max-tokens", "6")
    second = figures(clinic, "--prompt", "the patient", "--max-tokens", "4")
    assert list(first) == list(second) == KEYS
    count = first["tokens"]
    assert first["private_tokens"] == len(first["token_ids"]) == count <= 6
    assert first["charged_nats"] == first["spent_nats"] == count * 2**-16
    assert second["spent_nats"] == (count + second["private_tokens"]) * 2**-16
    assert second["mia_bound"] == first["mia_bound"] == pytest.approx(0.674909, abs=1e-6)
    assert (first["public_tokens"], first["total_nats"]) == (0, 2**-4)


def test_an_answer_is_json_that_the_schema_accepts_and_one_cut_off_says_so(clinic, tmp_path):
    schema = tmp_path / "visit.json"
    schema.write_text('{"type": "array", "items": {"enum": ["flu", "cold"]}, "minItems": 2, "maxItems": 3}')
    said = figures(clinic, "--prompt", "the patient", "--max-tokens", "30", "--json-schema", schema)
    assert said["finish_reason"] == "stop"
    assert set(json.loads(said["text"])) <= {"flu", "cold"}
    assert said["charged_nats"] == said["tokens"] * 2**-16  # every token, also those that were forced
    cut = run(clinic, "--prompt", "the patient", "--max-tokens", "2", "--json-schema", schema)
    assert "not complete: --max-tokens ended it" in cut.stderr
    assert cut.exit_code == 1


def test_a_crash_of_a_command_that_holds_the_secret_leaves_no_core_file(clinic, monkeypatch):
    for command in (("generate", clinic, *ONE), ("ledger", "rotate-key", clinic), ("ledger", "verify", clinic)):
        limits = {}
        monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
        dumpable(1)
        assert invoke(*command).exit_code == 0
        assert limits[resource.RLIMIT_CORE] == (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
        assert dumpable() == 0


def test_text_goes_to_standard_output_and_figures_to_standard_error(clinic):
    result = run(clinic, "--prompt", "the patient", "--max-tokens", "5", "--greedy")
    assert result.exit_code == 0
    assert "nats" not in result.stdout
    for words in ("charged", "spent so far", "at the committed total", "67.50%", "a record was"):
        assert words in result.stderr
    manifest = load_manifest(clinic)
    replace(manifest, arguments={**manifest.arguments, "group_by": "patient"}).write(clinic)
    assert "the records of one patient were" in run(clinic, *ONE).stderr


def test_an_answer_of_an_end_token_alone_is_reported(clinic, monkeypatch):
    assert "empty answer" not in run(clinic, *ONE).stderr
    result = Curator.result
    monkeypatch.setattr(Curator, "result", lambda *both: replace(result(*both), text="", finish_reason="stop"))
    assert "empty answer" in run(clinic, *ONE).stderr


def test_a_prompt_can_come_from_standard_input(clinic):
    set_mechanism(clinic, per_token="2^-16", total="2^-4", support_size=40, release="plurality")
    typed = run(clinic, "--prompt", "the old nurse", "--max-tokens", "5", "--greedy")
    piped = run(clinic, "--prompt", "-", "--max-tokens", "5", "--greedy", input="the old nurse")
    assert piped.stdout == typed.stdout


def test_public_tokens_are_counted_and_explained_when_the_budget_is_exhausted(clinic):
    set_mechanism(clinic, per_token="2^-16", total=3 * 2.0**-16, support_size=40)
    found = figures(clinic, "--prompt", "the", "--max-tokens", "8")
    assert found["private_tokens"] <= 3
    assert found["remaining_tokens"] == 3 - found["private_tokens"]
    assert "public model alone: the budget is exhausted" in run(clinic, "--prompt", "the", "--max-tokens", "8").stderr


def test_a_price_above_what_is_left_is_not_called_an_exhausted_budget(clinic):
    assert run(clinic, *ONE).exit_code == 0
    set_mechanism(clinic, per_token="2^-4", total="2^-4", support_size=40)  # raised after serving began
    shown = run(clinic, "--prompt", "the", "--max-tokens", "4").stderr
    assert "2^-4 nats and only 0.0624847" in shown
    assert "exhausted" not in shown


def test_a_weak_total_is_a_warning_that_a_smaller_total_does_not_remove(clinic):
    for total in (0.7, 0.5):
        set_mechanism(clinic, per_token="2^-16", total=total, support_size=40)
        result = run(clinic, *ONE)
        assert (result.exit_code, "Warning: " in result.stderr, "0.7 nats" in result.stderr) == (0, True, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--greedy", "--temperature", "1"), "--temperature"),
        *((("--temperature", value), "temperature") for value in ("-1", "1e39", "1e-46")),
        (("--max-tokens", "1000"), "context"),
        (("--json-schema", "none.json"), "cannot be read"),
        (("--json-schema", "/dev/null"), "is not JSON"),
    ],
)
def test_mistakes_are_refused_and_cost_nothing(clinic, options, words):
    with pytest.raises(InvalidInput, match=words):
        run(clinic, *ONE, *options)
    assert figures(clinic, *ONE)["spent_nats"] == 2**-16


def test_an_answer_needs_no_transformers_and_neither_it_nor_help_looks_for_plugins(clinic, tmp_path):
    """A package that claims built-in names in every group of plugins is on the path: nothing sees it."""
    site = install_hostile(tmp_path / "site")
    program = f"""
import sys
from paclm.cli.main import main
answer = ["generate", {str(clinic)!r}, "--prompt", "the patient", "--max-tokens", "2"]
for words in (["--help"], ["replay", "--help"], answer):
    sys.argv = ["paclm", *words]
    try:
        main()
    except SystemExit as left:
        assert not left.code
assert "torch" in sys.modules
unwanted = {{"transformers", "torch._dynamo", "sympy", "pandas", "hostile", "paclm.plugins"}} & set(sys.modules)
import importlib.metadata
assert importlib.metadata.entry_points(group="paclm.releases"), "it was there to be found"
sys.exit(", ".join(unwanted) or 0)
"""
    environment = {**os.environ, "PYTHONPATH": first_on_path(site)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-600:]
    assert not (site / "imported").exists()
