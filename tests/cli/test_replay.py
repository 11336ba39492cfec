"""`paclm replay` as a user types it."""

import json
from functools import partial

import numpy as np
import pytest

from cli.commands import figures_of, invoke, spawn
from paclm.errors import InvalidInput, UnsoundState
from paclm.privacy.belief import Release
from paclm.privacy.releases import RULES, Rule

run = partial(invoke, "replay")
figures = partial(figures_of, "replay")
SHORT = ("--sessions", "2", "--tokens", "300")


def test_figures_are_one_json_object_on_standard_output_alone(vote_files):
    options = "--per-token 2^-16 --json --sessions 3 --tokens 200 --seed 1 --release gaussian --charge dissent"
    figures = json.loads(spawn("replay", vote_files["gumbel"], *options.split()).out)
    assert (figures["positions"], figures["worlds"], figures["tokens"]) == (32768, 128, 600)
    assert figures["stamp"].startswith("NOT PRIVATE")


def test_an_infinite_budget_is_allowed_and_written_as_null(vote_files):
    found = figures(vote_files["greedy"], "--per-token", "inf", "--protocol", "fresh", "--tokens", "500")
    assert (found["charged_nats"], found["flip_given_dissent"]) == (None, 0.0)


def test_the_table_names_the_figures_and_the_stamp(vote_files):
    shown = run(vote_files["greedy"], "--per-token", "2^-8", *SHORT).output
    for text in ("retained gain", "charged per session", "record 100.00%, world 37.71% (", "NOT PRIVATE"):
        assert text in shown
    assert "Note" not in shown


def test_a_retained_gain_is_a_share_of_a_gain_and_of_nothing_else(tmp_path):
    truth, wrong = np.ones(4, dtype=int), np.array([1, 1, 2, 2])
    votes, words = np.tile(truth[:, None], (1, 2)), ["--release", "plurality", "--protocol", "fresh", "--sessions", "1"]
    np.savez(tmp_path / "gain.npz", votes=votes, truth=truth, public=wrong, full=truth)
    np.savez(tmp_path / "loss.npz", votes=votes, truth=truth, public=truth, full=wrong)
    np.savez(tmp_path / "bare.npz", votes=np.array([[1, 2], [1, 1]]))
    for name, gain in (("gain", 1.0), ("loss", None), ("bare", None)):
        assert figures(tmp_path / f"{name}.npz", *words)["retained_gain"] == gain
        assert ("gains nothing" in run(tmp_path / f"{name}.npz", *words).output) == (name == "loss")
    shown = run(tmp_path / "bare.npz", "--per-token", "2^-8", "--sessions", "2", "--tokens", "30").output
    assert "Note: sessions of 30 tokens" in shown


def test_a_budget_is_required_only_if_the_secret_is_read(vote_files):
    with pytest.raises(InvalidInput, match="gaussian"):
        run(vote_files["greedy"])
    words = [vote_files["greedy"], "--release", "plurality", *SHORT]
    assert "0 nats (no budget)" in run(*words).output
    found = figures(*words)
    assert (found["per_token_nats"], found["charged_nats"], found["leaked_nats"]) == (None, 0.0, 0.0)


def test_an_estimate_that_misses_rare_events_is_pointed_out(vote_files):
    words = [vote_files["gumbel"], "--sessions", "4", "--tokens", "300", "--per-token", "2^-20"]
    assert "rare events that 4 secrets" in run(*words, "--release", "channel").output
    assert "rare events" not in run(*words).output  # gaussian leaks a little at every step


def test_a_registered_rule_runs_although_it_may_not_be_deployed(vote_files, monkeypatch):
    words = [vote_files["gumbel"], *SHORT, "--release", "median"]
    with pytest.raises(InvalidInput, match="median"):
        run(*words)
    median = Rule("median", lambda votes, belief, *_: Release(int(np.sort(votes)[4]), belief, True), reads_secret=False)
    monkeypatch.setitem(RULES, "median", median)
    assert figures(*words)["release"] == "median"


def test_a_rule_that_leaks_more_than_it_was_charged_for_is_warned_of_and_a_sound_one_is_not(vote_files, monkeypatch):
    """Noise for 64 times the budget, and a step that declares the budget alone; 1e-4 is the rate of false alarms."""

    def loud(votes, belief, secret, per_token, noise):
        step = RULES["gaussian"].release(votes, belief, secret, 64.0 * per_token, noise)
        return step._replace(information=step.information / 64.0)

    monkeypatch.setitem(RULES, "loud", Rule("loud", loud, reads_secret=True))
    words = [vote_files["gumbel"], "--sessions", "40", "--tokens", "300", "--per-token", "2^-16"]
    shown = run(*words, "--release", "loud")
    assert shown.exit_code == 0
    assert "Warning: The release loud" in shown.stderr
    assert "Trust the larger number" not in shown.stdout
    done = run(*words, "--release", "loud", "--json")
    assert json.loads(done.stdout)["tells_more_than"] == ["budget", "declared"]
    assert "Warning" in done.stderr
    assert "Warning" not in run(*words).stderr
    assert figures(*words)["tells_more_than"] == []


@pytest.mark.parametrize("protocol", ["session", "fresh"])
def test_a_rule_that_claims_not_to_read_the_secret_and_does_is_refused(vote_files, monkeypatch, protocol):
    cheat = Rule(
        "cheat", lambda votes, belief, secret, *_: Release(int(votes[secret]), belief, True), reads_secret=False
    )
    monkeypatch.setitem(RULES, "cheat", cheat)
    with pytest.raises(UnsoundState, match="'cheat'"):
        run(vote_files["gumbel"], "--release", "cheat", "--protocol", protocol)


@pytest.mark.parametrize("protocol", ["session", "fresh"])
def test_the_mean_information_of_the_channel_has_an_error_and_is_not_called_exact(vote_files, protocol):
    """A step's information is computed; the mean over sessions or positions is a sample mean, and says so."""
    words = [vote_files["gumbel"], "--release", "channel", "--per-token", "2^-8", "--protocol", protocol]
    words += ["--tokens", "300", "--sessions", "6"]
    found = figures(*words)
    mean, error = found["conditional_information_nats"], found["conditional_information_stderr"]
    assert 0.0 < error < mean
    shown = next(line for line in run(*words).output.splitlines() if line.startswith("information"))
    assert f"{mean:.4g} ± {error:.2g} nats" in shown
    assert "sample mean over" in shown
    assert "exact" not in shown
