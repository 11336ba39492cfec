"""`paclm replay` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
from typer.testing import CliRunner

from paclm.cli.main import app

runner = CliRunner()


def test_figures_are_one_json_object_on_standard_output_alone(vote_files):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "paclm", "replay", str(vote_files["gumbel"]), "--per-token", "2^-16", "--json"),
            *("--sessions", "3", "--tokens", "200", "--seed", "1", "--release", "gaussian", "--charge", "dissent"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout)
    assert (figures["positions"], figures["worlds"], figures["tokens"]) == (32768, 128, 600)
    assert figures["stamp"].startswith("NOT PRIVATE")


def test_an_infinite_budget_is_allowed_and_written_as_null(vote_files):
    done = runner.invoke(
        app,
        ["replay", str(vote_files["greedy"]), "--per-token", "inf", "--protocol", "fresh", "--tokens", "500", "--json"],
    )
    figures = json.loads(done.stdout)
    assert figures["charged_nats"] is None
    assert figures["flip_given_dissent"] == 0.0


def test_table_for_people_names_the_figures_and_the_stamp(vote_files):
    shown = runner.invoke(
        app, ["replay", str(vote_files["greedy"]), "--per-token", "2^-8", "--sessions", "2", "--tokens", "300"]
    ).output
    for text in (
        "retained gain",
        "flips given dissent",
        "charged per session",
        "information per session",
        "NOT PRIVATE",
    ):
        assert text in shown
    assert "run round" not in shown


def test_sessions_longer_than_the_file_are_pointed_out(tmp_path):
    np.savez(tmp_path / "v.npz", votes=np.array([[1, 2], [1, 1]]))
    shown = runner.invoke(
        app, ["replay", str(tmp_path / "v.npz"), "--per-token", "2^-8", "--sessions", "2", "--tokens", "30"]
    ).output
    assert "sessions of 30 tokens run round the 2 recorded positions" in shown


def test_a_budget_is_required(vote_files):
    assert runner.invoke(app, ["replay", str(vote_files["greedy"])]).exit_code == 2
