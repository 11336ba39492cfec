"""`paclm generate` as a user types it."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from curator.deployments import set_mechanism
from paclm.cli.main import app
from paclm.curator.curator import Curator
from paclm.curator.streams import Generation, Stream
from paclm.errors import InvalidInput, WorkspaceError
from paclm.worlds.manifest import load_manifest

KEYS = [
    *("text", "tokens", "private_tokens", "public_tokens", "charged_nats", "spent_nats", "total_nats"),
    *("remaining_tokens", "mia_bound", "world_id_bound", "token_ids"),
]


def run(path: Path, *options: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", str(path), *options], input=text)


def figures_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def test_json_has_the_keys_of_the_contract_and_the_budget_is_kept_between_calls(clinic: Path) -> None:
    first = figures_of(run(clinic, "--prompt", "the patient", "--max-tokens", "6", "--json"))
    second = figures_of(run(clinic, "--prompt", "the patient", "--max-tokens", "4", "--json"))
    assert list(first) == list(second) == KEYS
    count = first["tokens"]
    assert first["private_tokens"] == len(first["token_ids"]) == count <= 6
    assert first["charged_nats"] == first["spent_nats"] == count * 2**-16
    assert second["spent_nats"] == (count + second["private_tokens"]) * 2**-16
    assert second["mia_bound"] == first["mia_bound"] == pytest.approx(0.674909, abs=1e-6)
    assert (first["public_tokens"], first["total_nats"]) == (0, 2**-4)


def test_a_crash_of_a_command_that_holds_the_secret_leaves_no_core_file(
    clinic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [["generate", str(clinic), "--prompt", "a", "--max-tokens", "1"], ["ledger", "rotate-key", str(clinic)]]
    for command in commands:
        limits: dict[int, tuple[int, int]] = {}
        monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
        assert CliRunner().invoke(app, command).exit_code == 0
        assert limits[resource.RLIMIT_CORE] == (0, resource.getrlimit(resource.RLIMIT_CORE)[1])


def test_text_goes_to_standard_output_and_figures_to_standard_error(clinic: Path) -> None:
    result = run(clinic, "--prompt", "the patient", "--max-tokens", "5", "--greedy")
    assert result.exit_code == 0
    assert "nats" not in result.stdout
    for words in ("charged", "spent so far", "remain", "at the committed total", "succeeds more than 67.50% of"):
        assert words in result.stderr


def test_the_guarantee_speaks_of_the_group_where_the_workspace_has_groups(clinic: Path) -> None:
    options = ("--prompt", "the patient", "--max-tokens", "1", "--greedy")
    assert "whether a record was in the secretly drawn half" in run(clinic, *options).stderr
    manifest = load_manifest(clinic)
    replace(manifest, arguments={**manifest.arguments, "group_by": "patient"}).write(clinic)
    assert "whether the records of one patient were in the secretly drawn half" in run(clinic, *options).stderr


def test_an_answer_that_ends_at_once_is_no_riddle(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--prompt", "the patient", "--max-tokens", "1")
    assert "ended its answer at once" not in run(clinic, *options).stderr
    found = Curator.result

    def only_an_end_token(curator: Curator, stream: Stream) -> Generation:
        return replace(found(curator, stream), text="", finish_reason="stop")

    monkeypatch.setattr(Curator, "result", only_an_end_token)
    assert "(the model ended its answer at once)" in run(clinic, *options).stderr


def test_a_prompt_can_come_from_standard_input(clinic: Path) -> None:
    set_mechanism(clinic, per_token="2^-16", total="2^-4", support_size=40, release="plurality")
    options = ("--max-tokens", "5", "--greedy", "--json")
    typed = figures_of(run(clinic, "--prompt", "the old nurse", *options))
    piped = figures_of(run(clinic, "--prompt", "-", *options, text="the old nurse"))
    assert piped["token_ids"] == typed["token_ids"]


def test_when_the_budget_is_gone_public_tokens_are_counted_and_said(clinic: Path) -> None:
    set_mechanism(clinic, per_token="2^-16", total=3 * 2.0**-16, support_size=40)
    figures = figures_of(run(clinic, "--prompt", "the", "--max-tokens", "8", "--json"))
    assert figures["private_tokens"] <= 3
    assert figures["remaining_tokens"] == 3 - figures["private_tokens"]
    again = run(clinic, "--prompt", "the", "--max-tokens", "8")
    assert "of the public model alone, because the budget is gone" in again.stderr


def test_a_price_above_what_is_left_is_not_called_a_budget_that_is_gone(clinic: Path) -> None:
    assert run(clinic, "--prompt", "the", "--max-tokens", "1").exit_code == 0
    set_mechanism(clinic, per_token="2^-4", total="2^-4", support_size=40)  # raised after serving began
    said = run(clinic, "--prompt", "the", "--max-tokens", "4").stderr
    assert "of the public model alone, because one token costs 2^-4 nats, more than the 0.0624847 that are" in said
    assert "is gone" not in said


def test_a_missing_budget_says_what_to_write(clinic: Path) -> None:
    set_mechanism(clinic)
    result = run(clinic, "--prompt", "the", "--max-tokens", "8")
    assert isinstance(result.exception, InvalidInput)
    assert 'per_token = "2^-32"' in str(result.exception)


def test_a_weak_total_is_said_as_a_caution(clinic: Path) -> None:
    set_mechanism(clinic, per_token="2^-16", total=0.7, support_size=40)
    result = run(clinic, "--prompt", "the", "--max-tokens", "1")
    assert result.exit_code == 0
    assert "Caution: The committed total, 0.7 nats," in result.stderr
    set_mechanism(clinic, per_token="2^-16", total=0.5, support_size=40)
    again = run(clinic, "--prompt", "the", "--max-tokens", "1")
    assert "Caution: The committed total, 0.7 nats," in again.stderr  # the bound stays where it was


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--greedy", "--temperature", "1"), "not both"),
        (("--temperature", "-1"), "temperature"),
        (("--max-tokens", "1000"), "context"),
    ],
)
def test_mistakes_get_one_sentence_and_cost_nothing(clinic: Path, options: tuple[str, ...], reason: str) -> None:
    result = run(clinic, "--prompt", "the", "--max-tokens", "3", *options)
    assert isinstance(result.exception, InvalidInput)
    assert reason in str(result.exception)
    assert figures_of(run(clinic, "--prompt", "the", "--max-tokens", "1", "--json"))["spent_nats"] == 2**-16


def test_a_folder_that_is_no_workspace_is_named(tmp_path: Path) -> None:
    result = run(tmp_path / "nowhere", "--prompt", "the", "--max-tokens", "3")
    assert isinstance(result.exception, WorkspaceError)
