"""Structured output with every pair of features: small models, all answers checked against what public values allow."""

import threading
from collections import Counter
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch

from curator.joined import leaving
from paclm.curator.curator import Charge, Releaser
from paclm.curator.decoder import Decoder
from paclm.engine import decode_step
from paclm.engine.decode_step import top_tokens
from paclm.engine.engine import Engine
from paclm.engine.worker import run_worker
from paclm.errors import UnsoundState
from structured.answers import IS_ANSWER
from structured.checks import check_run
from structured.covering import combinations_of, covering_array, possible_combinations
from structured.features import FEATURES, is_possible
from structured.runs import MIXED, MOST_SEQUENCES, PAGE, kinds_of

ROWS = covering_array(FEATURES, is_possible)


@pytest.fixture(scope="module")
def runs(lab):
    """Each row's run, once."""
    done = {}

    def run(number):
        if number not in done:
            done[number] = lab.run(ROWS[number], number)
        return done[number]

    return run


def name_of(number):
    row = ROWS[number]
    return "-".join(str(row[name]) for name in ("release", "grammar", "model", "streams")) + f"-{number}"


def test_rows_hold_every_pair_of_values_that_may_stand_together_and_are_few():
    """Each release and the promise `corpus` with each kind of grammar take 25 rows at least."""
    pairs = possible_combinations(FEATURES, is_possible, 2)
    assert all(map(is_possible, ROWS))
    assert pairs == {pair for row in ROWS for pair in combinations_of(row, 2)}
    assert 25 == len(FEATURES["release"]) * len(FEATURES["grammar"]) <= len(ROWS) <= 30
    assert pairs > {pair for row in ROWS[:-1] for pair in combinations_of(row, 2)}, "no row is there for nothing"


def test_every_two_kinds_of_grammar_stand_side_by_side_in_a_batch():
    together = {pair for row in ROWS for pair in combinations_with_replacement(sorted(set(kinds_of(row))), 2)}
    assert together == set(combinations_with_replacement(sorted(FEATURES["grammar"]), 2))


@pytest.mark.parametrize("number", range(len(ROWS)), ids=name_of)
def test_answers_masks_ballots_and_charges_of_a_row(lab, runs, number):
    check_run(lab, runs(number))


def test_the_rows_have_met_what_masks_can_do(runs):
    """Or else the checks above would prove little."""
    met = Counter()
    for number in range(len(ROWS)):
        run = runs(number)
        met["refused"] += run.num_refused
        met["prompts read while others decode"] += len(run.recorder.steps[0]) < min(MOST_SEQUENCES, len(run.streams))
        for stream, kind, rows in zip(run.streams, run.kinds, run.rows, strict=True):
            if kind == "none":
                continue
            is_complete = IS_ANSWER[kind](stream.text)
            met[run.row["release"] == "dp", kind, stream.finish_reason, is_complete] += 1
            met["cut by a stop string"] += stream.finish_reason == "stop" and not is_complete
            for row, mark in zip(rows, stream.marks, strict=True):
                size = (row.support >= 0).sum()
                what = "forced" if size == 1 else "all of it" if size < len(row.support) else "part of it"
                met[run.row["charge"], what, mark] += 1
    assert sum(row["workers"] == 2 and (row["model"], row["page"]) == ("gpt2", PAGE) for row in ROWS) >= 2  # processes
    assert met["refused"] >= 2
    assert met["prompts read while others decode"] >= 3
    assert met["cut by a stop string"] >= 3
    complete = {
        (is_dp, kind): met[is_dp, kind, "stop", True] for is_dp in (False, True) for kind in FEATURES["grammar"]
    }
    assert min(complete[False, kind] + complete[True, kind] for kind in FEATURES["grammar"][1:]) >= 3
    assert min(sum(complete[is_dp, kind] for kind in FEATURES["grammar"]) for is_dp in (False, True)) >= 5
    for charge in ("every-token", "dissent"):
        assert met[charge, "forced", "disputed"] == 0
        assert met[charge, "forced", "agreed"] >= 10
        assert min(met[charge, "all of it", mark] for mark in ("agreed", "disputed")) >= 2
        assert met[charge, "part of it", "disputed"] >= 5
    for what in ("forced", "all of it", "part of it"):
        assert sum(met[charge, what, "public"] for charge in ("every-token", "dissent")) >= 1


# --- against runs of another shape ------------------------------------------------------------------------------------

SHARED = [number for number, row in enumerate(ROWS) if row["workers"] == 2 and row["streams"] == 4]


def test_two_workers_give_the_tokens_and_charges_of_one_process(lab, runs):
    """Where a vote was decided by less than rounding, the run is checked against the models alone."""
    num_same = 0
    for number in SHARED:
        two, one = runs(number), lab.run({**ROWS[number], "workers": 1}, number)
        check_run(lab, one)
        if np.array_equal(votes_of(one), votes_of(two)):
            assert [stream.tokens for stream in one.streams] == [stream.tokens for stream in two.streams]
            assert [stream.marks for stream in one.streams] == [stream.marks for stream in two.streams]
            assert one.state.account == two.state.account
            num_same += 1
    assert num_same >= len(SHARED) - 1 >= 3


def test_a_worker_that_comes_back_gets_the_mask_of_its_step(lab):
    """It leaves in the middle of a step, which is computed again; tokens and charges are those of one process."""
    row, is_gone = {**MIXED, "workers": 2}, threading.Event()

    def lose_it(curator):
        engine, launch = curator._engine, curator._engine.launch

        def launch_and_lose(*arguments):
            if len(engine.steps) == 4:
                is_gone.set()
            launch(*arguments)

        engine.launch = launch_and_lose

    two = lab.run(row, 1, change=lose_it, worker=leaving(run_worker, is_gone))
    assert is_gone.is_set()
    check_run(lab, two)
    one = lab.run({**row, "workers": 1}, 1)
    assert [stream.tokens for stream in one.streams] == [stream.tokens for stream in two.streams]
    assert one.state.account == two.state.account


def votes_of(run):
    return np.concatenate([[*row.votes, row.public] for rows in run.rows for row in rows])


@pytest.mark.parametrize(("release", "workers"), [("plurality", 1), ("plurality", 2), ("dp", 1)])
def test_answers_without_a_grammar_are_the_same_beside_answers_with_one(lab, release, workers):
    """Of releases that draw nothing; what others release is a function of votes, which are checked row by row."""
    number = next(i for i, row in enumerate(ROWS) if row["release"] == release and row["model"] == "gpt2")
    row = {
        **ROWS[number],
        "workers": workers,
        "page": 64,
        "streams": 4,
        "budget": "none" if release == "dp" else "ample",
    }
    beside = lab.run(row, number, ["none", "json", "none", "regex"])
    alone = lab.run(row, number, ["none", None, "none", None])
    assert [stream.tokens for stream in beside.streams[::2]] == [stream.tokens for stream in alone.streams]
    assert all(row.mask is None for rows in alone.rows for row in rows)
    assert all(row.mask is not None for row in beside.rows[0][:3])


# --- the checks can fail ----------------------------------------------------------------------------------------------


def masks_of_a_neighbour(patch):
    masks_of = Decoder._masks_of
    patch.setattr(Decoder, "_masks_of", lambda self, streams: np.roll(masks_of(self, streams), 1, axis=0))


def support_cut_before_the_mask(patch):
    def cut(logits, k, allowed=None):
        support, best = top_tokens(logits, k, allowed), top_tokens(logits, k)
        for row, whole in zip(support, best, strict=True):
            kept = row[torch.isin(row, whole)]
            row[1:] = -1  # one must be left
            row[: len(kept)] = kept
        return support

    patch.setattr(decode_step, "top_tokens", cut)


def votes_of_worlds_in_another_order(patch):
    collect = Engine.collect

    def turned(self):
        ballot = collect(self)
        return type(ballot)(ballot.support, ballot.votes[:, ::-1], ballot.public, ballot.logprobs)

    patch.setattr(Engine, "collect", turned)


def votes_without_the_mask(patch):
    launch = Engine.launch
    patch.setattr(Engine, "launch", lambda self, handles, coins, tau, allowed: launch(self, handles, coins, tau, None))


def agreed_tokens_are_free(patch):
    charges = Releaser.charges
    patch.setattr(
        Releaser,
        "charges",
        lambda *args: [Charge(mark, units * (mark != "agreed")) for mark, units in charges(*args)],
    )


def agreed_tokens_are_charged(patch):
    price = Releaser.price
    patch.setattr(Releaser, "price", lambda self, is_dissent: price(self, is_dissent=True))


WRONG = {
    masks_of_a_neighbour: "every-token",
    support_cut_before_the_mask: "every-token",
    votes_without_the_mask: "every-token",
    votes_of_worlds_in_another_order: "every-token",
    agreed_tokens_are_free: "every-token",
    agreed_tokens_are_charged: "dissent",
}


@pytest.mark.parametrize("sabotage", WRONG, ids=lambda sabotage: sabotage.__name__)
def test_the_checks_notice(lab, sabotage, monkeypatch):
    row = {**MIXED, "charge": WRONG[sabotage]}
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, UnsoundState)):  # the curator refuses some by itself
        check_run(lab, lab.run(row, 1))


def test_nothing_is_released_or_charged_where_a_vote_is_for_a_forbidden_token(lab, monkeypatch):
    votes_without_the_mask(monkeypatch)
    opened = []
    with pytest.raises(UnsoundState):
        lab.run(MIXED, 1, change=opened.append)
    (curator,) = opened
    assert len(curator._engine.steps) == 1
    assert (curator.account.tokens, curator.account.spent_units) == (0, 0)


@pytest.mark.parametrize("charge", ["every-token", "dissent"])
def test_without_a_fault_the_checks_notice_nothing(lab, charge):
    check_run(lab, lab.run({**MIXED, "charge": charge}, 1))
