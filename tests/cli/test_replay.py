"""`paclm replay` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from paclm.cli.main import app
from paclm.errors import InvalidInput, UnsoundState
from paclm.privacy.belief import Release
from paclm.privacy.releases import RULES, Rule

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
        "record 100.00%, world 37.71% (",
        "NOT PRIVATE",
    ):
        assert text in shown
    assert "run round" not in shown


def test_where_the_full_corpus_loses_there_is_a_reason_instead_of_a_share(tmp_path):
    truth, wrong = np.ones(4, dtype=int), np.array([1, 1, 2, 2])
    words = ["--release", "plurality", "--protocol", "fresh", "--sessions", "1"]
    for name, public, full in (("gain", wrong, truth), ("loss", truth, wrong)):
        votes = np.tile(truth[:, None], (1, 2))
        np.savez(tmp_path / f"{name}.npz", votes=votes, truth=truth, public=public, full=full)
    shown = {name: runner.invoke(app, ["replay", str(tmp_path / f"{name}.npz"), *words]) for name in ("gain", "loss")}
    assert "– (the full corpus gains nothing here)" in shown["loss"].output
    assert "gains nothing" not in shown["gain"].output
    done = runner.invoke(app, ["replay", str(tmp_path / "loss.npz"), *words, "--json"])
    assert json.loads(done.stdout)["retained_gain"] is None
    np.savez(tmp_path / "bare.npz", votes=np.array([[1, 2], [1, 1]]))
    assert "gains nothing" not in runner.invoke(app, ["replay", str(tmp_path / "bare.npz"), *words]).output


def test_sessions_longer_than_the_file_are_pointed_out(tmp_path):
    np.savez(tmp_path / "v.npz", votes=np.array([[1, 2], [1, 1]]))
    shown = runner.invoke(
        app, ["replay", str(tmp_path / "v.npz"), "--per-token", "2^-8", "--sessions", "2", "--tokens", "30"]
    ).output
    assert "sessions of 30 tokens run round the 2 recorded positions" in shown


def test_a_budget_is_required_where_the_secret_is_read_and_nowhere_else(vote_files):
    with pytest.raises(InvalidInput, match="gaussian reads the secret and needs a budget"):
        runner.invoke(app, ["replay", str(vote_files["greedy"])], catch_exceptions=False)
    words = ["replay", str(vote_files["greedy"]), "--release", "plurality", "--sessions", "2", "--tokens", "300"]
    assert "0 nats (no budget)" in runner.invoke(app, words).output
    figures = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    assert (figures["per_token_nats"], figures["charged_nats"], figures["leaked_nats"]) == (None, 0.0, 0.0)


def test_an_estimate_that_misses_rare_events_is_pointed_out(vote_files):
    words = ["replay", str(vote_files["gumbel"]), "--sessions", "4", "--tokens", "300", "--per-token", "2^-20"]
    assert "rare events that 4 secrets seldom show" in runner.invoke(app, [*words, "--release", "channel"]).output
    assert "rare events" not in runner.invoke(app, words).output  # gaussian tells a little at every step


def test_a_rule_that_is_registered_runs_though_it_may_not_be_deployed(vote_files, monkeypatch):
    words = ["replay", str(vote_files["gumbel"]), "--sessions", "2", "--tokens", "300", "--release", "median"]
    with pytest.raises(InvalidInput, match="median"):
        runner.invoke(app, words, catch_exceptions=False)
    median = Rule("median", lambda votes, belief, *_: Release(int(np.sort(votes)[4]), belief, True), reads_secret=False)
    monkeypatch.setitem(RULES, "median", median)
    assert json.loads(runner.invoke(app, [*words, "--json"]).stdout)["release"] == "median"


def test_a_rule_that_tells_more_than_it_was_charged_for_is_warned_of_and_a_sound_one_is_not(vote_files, monkeypatch):
    """Noise for 64 times the budget, and a step that declares the budget alone; 1e-4 is the rate of false alarms."""

    def loud(votes, belief, secret, per_token, noise):
        step = RULES["gaussian"].release(votes, belief, secret, 64.0 * per_token, noise)
        return step._replace(information=step.information / 64.0)

    monkeypatch.setitem(RULES, "loud", Rule("loud", loud, reads_secret=True))
    words = ["replay", str(vote_files["gumbel"]), "--sessions", "40", "--tokens", "300", "--per-token", "2^-16"]
    shown = runner.invoke(app, [*words, "--release", "loud"])
    assert shown.exit_code == 0
    assert "Warning: The release loud" in shown.stderr
    assert "nats that the steps declare" in shown.stdout
    assert "Trust the larger number" not in shown.stdout
    done = runner.invoke(app, [*words, "--release", "loud", "--json"])
    assert json.loads(done.stdout)["tells_more_than"] == ["budget", "declared"]
    assert "Warning" in done.stderr
    sound = runner.invoke(app, words)
    assert sound.stderr.count("Warning") == 0
    assert "nats that the steps can tell" in sound.stdout
    assert json.loads(runner.invoke(app, [*words, "--json"]).stdout)["tells_more_than"] == []


def test_a_rule_that_says_it_never_reads_the_secret_and_does_is_refused(vote_files, monkeypatch):
    cheat = Rule(
        "cheat", lambda votes, belief, secret, *_: Release(int(votes[secret]), belief, True), reads_secret=False
    )
    monkeypatch.setitem(RULES, "cheat", cheat)
    for protocol in ("session", "fresh"):
        with pytest.raises(UnsoundState, match="cheat"):
            runner.invoke(
                app,
                ["replay", str(vote_files["gumbel"]), "--release", "cheat", "--protocol", protocol],
                catch_exceptions=False,
            )
