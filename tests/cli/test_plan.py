"""`paclm plan` as a user types it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paclm.cli.main import app

runner = CliRunner()


def plan(*arguments):
    return runner.invoke(app, ["plan", *arguments])


def test_json_has_exactly_the_contract_keys():
    figures = json.loads(plan("--tokens", "1000000", "--per-token", "2^-32", "--rate", "20000", "--json").output)
    assert list(figures) == ["tokens", "per_token_nats", "total_nats", "mia_bound", "world_id_bound", "charge", "days"]
    assert figures["mia_bound"] == pytest.approx(0.510789, abs=1e-6)
    assert figures["days"] == 50.0
    assert figures["charge"] == "every-token"


def test_days_are_null_without_a_rate():
    assert json.loads(plan("--tokens", "10", "--per-token", "2^-32", "--json").output)["days"] is None


@pytest.mark.parametrize("target", ["0.51", "51%", "51/100"])
def test_target_can_be_written_three_ways(target):
    assert json.loads(plan("--mia", target, "--per-token", "2^-32", "--json").output)["tokens"] == 859_050


def test_table_shows_both_charges_and_says_what_is_promised():
    shown = plan("--mia", "51%", "--per-token", "2^-32", "--dissent-rate", "0.24", "--rate", "20000").output
    assert "859,050" in shown
    assert "dissent (at 0.24)" in shown
    assert "3,579,375" in shown
    assert "no attack on a record succeeds more than 51.00% of the time" in shown
    assert "before the first token" in shown
    assert "per_token = 2.3283064365386963e-10, total = " in shown


def test_dissent_without_a_rate_is_labelled_as_the_worst_case():
    shown = plan("--mia", "51%", "--per-token", "2^-32").output
    assert "dissent (worst case)" in shown


def test_json_is_of_the_chosen_charge():
    figures = json.loads(
        plan("--mia", "51%", "--per-token", "2^-32", "--charge", "dissent", "--dissent-rate", "0.24", "--json").output
    )
    assert (figures["charge"], figures["tokens"]) == ("dissent", 3_579_375)


def test_a_bound_that_says_nothing_is_called_so():
    assert "says nothing" in plan("--tokens", "1000", "--per-token", "0.01").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mia", "x", "--tokens", "5"), "is none of"),
        (("--mia", "0.51", "--per-token", "2^"), "a power such as 2"),
        (("--mia", "0.51", "--per-token", "-1"), "positive number"),
        (("--mia", "1.5", "--tokens", "5"), "strictly between 0 and 1"),
    ],
)
def test_bad_numbers_are_refused_with_the_ways_to_write_them(arguments, message):
    assert message in str(plan(*arguments).exception)
