"""Many clients, one secret: whatever the order of arrival, charges add up and the belief is the sequential one."""

import random
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from curator.deployments import WORLDS, ScriptedEngine, set_mechanism
from curator.sequential import Reference, belief_of, recorded_noise, world_of
from paclm import Curator
from paclm.errors import BudgetExceeded, InvalidInput, LedgerRolledBack
from paclm.ledger.ledger import Ledger
from paclm.privacy.accounting import units_down, units_up

B = 2.0**-10


@pytest.mark.parametrize("seed", range(3))
def test_64_clients_in_random_order_leave_the_sequential_belief_and_the_exact_sum(make, open_curator, seed):
    chance = random.Random(seed)
    engine = ScriptedEngine(num_slots=16)
    workspace = make(per_token="2^-10", total="0.6", charge="dissent", on_exhausted="public")
    with recorded_noise() as draws, open_curator(workspace, engine=engine) as curator:
        draws.clear()  # those of making keys
        waiting = [curator.request("the", chance.randint(1, 12), tag=f"client {i}") for i in range(64)]
        streams = []
        reference = Reference(WORLDS, world_of(curator), draws)
        left = {}
        tokens = []
        while waiting or curator.num_active:
            for _ in range(min(len(waiting), chance.choice([0, 0, 1, 5]))):
                streams.append(curator.submit(waiting.pop()))
            if streams and chance.random() < 0.05:
                curator.cancel(chance.choice(streams))
            delivered = curator.step()
            for stream, piece in delivered:
                tokens.append(piece.token)
                price = units_up(B) if piece.mark == "disputed" else 0
                left[stream.request.tag] = left.get(stream.request.tag, 0) + price
            if delivered:
                marks = [piece.mark != "public" for _, piece in delivered]
                reference.follow(engine.ballots[-1], marks, "gaussian", B)
        assert len(streams) == 64
        assert reference.tokens == tokens
        assert belief_of(curator).tobytes() == reference.belief.tobytes()
        assert np.ptp(belief_of(curator)) > 0
        ledger = curator._custody.ledger
        assert sum(left.values()) == ledger.account.spent_units > 0
        assert {key: had.units for key, had in ledger.by_key().items()} == left
        assert sum(stream.charged_units for stream in streams) == ledger.account.spent_units


def test_threads_that_all_generate_at_once_are_served_one_after_another(make, open_curator):
    engine = ScriptedEngine()
    with recorded_noise() as draws, open_curator(make(per_token="2^-10", total="0.6"), engine=engine) as curator:
        draws.clear()
        with ThreadPoolExecutor(16) as threads:
            results = list(threads.map(lambda n: curator.generate("the", 6, tag=f"{n}"), range(16)))
        reference = Reference(WORLDS, world_of(curator), draws)
        for ballot in engine.ballots:
            reference.follow(ballot, [True] * len(ballot.votes), "gaussian", B)
        assert belief_of(curator).tobytes() == reference.belief.tobytes()
        assert [out.private_tokens for out in results] == [6] * 16
        assert curator.account.spent_units == 16 * 6 * units_up(B)


class Lifetime(RuleBasedStateMachine):
    """Serve, cancel, crash, restart, change settings, extend, put old files back: ledger ≥ left, right belief."""

    template: Path
    tokenizer: Any
    has_witness = True

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "clinic"
        self.copies = {}
        shutil.copytree(self.template, self.path)
        self.settings = {"per_token": 2.0**-10, "total": 2.0**-5, "support_size": 40}
        self.engine = ScriptedEngine()
        self.left_units = 0
        self.reference = None
        self.draws = []
        self.streams = []
        self.recording = recorded_noise()
        self.all_draws = self.recording.__enter__()

    @initialize()
    def start(self):
        self.open()
        self.reference = Reference(WORLDS, world_of(self.curator), self.draws)

    def open(self):
        set_mechanism(self.path, **self.settings)
        self.engine.clear()
        self.streams = []
        witness = self.folder / "witness" if self.has_witness else None
        self.curator = Curator.open(self.path, engine=self.engine, tokenizer=self.tokenizer, witness=witness)
        self.all_draws.clear()

    @rule(requests=st.lists(st.integers(1, 12), max_size=3), steps=st.integers(0, 6))
    def serve(self, requests, steps):
        for tokens in requests:
            try:
                self.streams.append(self.curator.submit(self.curator.request("the", tokens)))
            except BudgetExceeded:
                assert self.settings.get("on_exhausted") == "refuse"
        for _ in range(steps):
            delivered = self.curator.step()
            if delivered:
                self.record([piece.mark for _, piece in delivered])

    def record(self, marks):
        assert self.reference is not None
        price = units_up(float(self.settings["per_token"]))
        is_free = self.settings.get("charge") == "dissent"
        self.left_units += sum(price for mark in marks if mark == "disputed" or (mark == "agreed" and not is_free))
        self.draws += self.all_draws
        self.all_draws.clear()
        release = str(self.settings.get("release", "gaussian"))
        per_token = float(self.settings["per_token"])
        self.reference.follow(self.engine.ballots[-1], [mark != "public" for mark in marks], release, per_token)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cancel(self, data):
        self.curator.cancel(data.draw(st.sampled_from(self.streams)))

    @rule()
    def crash_and_restart(self):
        self.curator._custody.ledger.close()  # what the operating system does for a process that dies
        self.open()

    @precondition(lambda self: self.curator.num_active)
    @rule()
    def crash_after_the_commit(self):
        """Charged, and the tokens never left: the ledger is ahead, the belief includes the step."""

        def die(*_):
            raise KeyboardInterrupt

        self.curator._deliver = die
        spent, left = self.curator.account.spent_units, self.left_units
        with pytest.raises(KeyboardInterrupt):
            self.curator.step()
        self.record(self.marks_of_last_step(spent))
        self.left_units = left
        self.crash_and_restart()

    def marks_of_last_step(self, spent):
        """Which rows of the last ballot were released: in order, as long as the budget lasted."""
        price, is_free = units_up(float(self.settings["per_token"])), self.settings.get("charge") == "dissent"
        marks, left = [], self.curator.account.total_units - spent
        for votes in self.engine.ballots[-1].votes:
            is_dissent = len(set(votes.tolist())) > 1
            cost = 0 if is_free and not is_dissent else price
            if cost > left:
                marks.append("public")
                continue
            left -= cost
            marks.append("disputed" if is_dissent else "agreed")
        return marks

    @rule(
        change=st.sampled_from(
            [
                *({"per_token": per_token} for per_token in (2.0**-12, 2.0**-9)),
                *({"charge": charge} for charge in ("dissent", "every-token")),
                *({"release": release} for release in ("channel", "gaussian")),
                *({"on_exhausted": on_exhausted} for on_exhausted in ("refuse", "public")),
            ]
        )
    )
    def change_settings(self, change):
        self.curator.close()
        self.settings = {**self.settings, **change}
        self.open()

    @rule()
    def lower_the_total(self):
        account = self.curator.account
        lower = (account.spent_units + account.total_units) // 2 / 2**60
        self.curator.close()
        self.settings = {**self.settings, "total": lower}
        self.open()

    @precondition(lambda self: self.settings["total"] < 0.4)
    @rule()
    def raise_the_total(self):
        larger = float(self.settings["total"]) * 1.5
        committed = self.curator._custody.ledger.state.committed_units
        self.curator.close()
        old, self.settings = self.settings, {**self.settings, "total": larger}
        if units_down(larger) <= committed:  # it was lowered: raised again without a new commitment
            self.open()
            assert self.curator._custody.ledger.state.committed_units == committed
            return
        with pytest.raises(InvalidInput, match="paclm ledger extend"):
            self.open()
        self.settings = old
        self.open()
        self.curator._custody.ledger.extend(larger, confirmed_by="test")
        self.curator.close()
        self.settings = {**self.settings, "total": larger}
        self.open()

    @precondition(lambda self: len(self.copies) < 2)
    @rule()
    def copy_the_curators_folder(self):
        self.curator.close()
        copy = self.folder / f"copy-{len(self.copies)}"
        shutil.copytree(self.path / "curator", copy)
        self.open()
        self.copies[copy] = self.curator._custody.ledger.head.seq

    def put_back(self, copy):
        """The whole folder as it was: ledger, secret and key."""
        shutil.rmtree(self.path / "curator")
        shutil.copytree(copy, self.path / "curator")

    @precondition(lambda self: self.old_copies())
    @rule(data=st.data())
    def restore_an_old_file(self, data):
        copy = data.draw(st.sampled_from(self.old_copies()))
        self.curator.close()
        today = self.folder / "today"
        shutil.copytree(self.path / "curator", today)
        self.put_back(copy)
        with pytest.raises(LedgerRolledBack):
            self.open()
        self.put_back(today)
        shutil.rmtree(today)
        self.open()

    def old_copies(self):
        now = self.curator._custody.ledger.head.seq
        return [copy for copy, row in self.copies.items() if row < now]

    @invariant()
    def the_ledger_has_at_least_what_left_and_never_more_than_the_total(self):
        if self.reference is not None:
            assert self.left_units <= self.curator.account.spent_units <= self.curator.account.total_units

    @invariant()
    def the_belief_is_the_sequential_one(self):
        if self.reference is not None:
            assert belief_of(self.curator).tobytes() == self.reference.belief.tobytes()

    def check_all(self):
        self.the_belief_is_the_sequential_one()
        self.the_ledger_has_at_least_what_left_and_never_more_than_the_total()

    def teardown(self):
        self.curator.close()
        self.recording.__exit__(None, None, None)
        shutil.rmtree(self.folder)


@pytest.fixture
def machine(template, small_tokenizer):
    return type("Lifetime", (Lifetime,), {"template": template, "tokenizer": small_tokenizer})


@pytest.mark.filterwarnings("ignore:The total was lowered")
def test_any_life_of_a_workspace_keeps_the_books(machine):
    # Shrinking a failure takes minutes of file handling, and the failing steps are printed anyway.
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20, stateful_step_count=25, deadline=None, phases=[Phase.generate])
    )


def test_the_invariants_notice_a_ledger_that_forgets_the_belief_or_the_charge(machine, monkeypatch):
    original = Ledger.commit
    for forgetful in (
        lambda self, entries, sealed: original(self, entries, None),
        lambda self, entries, sealed: original(self, (), sealed),
    ):
        life = machine()
        life.start()
        life.serve([12, 12], 6)
        life.crash_and_restart()
        life.check_all()
        monkeypatch.setattr(Ledger, "commit", forgetful)
        life.serve([12, 12], 6)
        life.crash_and_restart()
        with pytest.raises(AssertionError):
            life.check_all()
        life.teardown()
        monkeypatch.undo()


def test_an_old_folder_is_refused_with_a_witness_and_the_invariants_notice_it_without(machine, monkeypatch):
    for has_witness in (True, False):
        monkeypatch.setattr(machine, "has_witness", has_witness)
        life = machine()
        life.start()
        life.copy_the_curators_folder()
        life.serve([12, 12], 6)
        (copy,) = life.old_copies()
        life.curator.close()
        life.put_back(copy)
        if has_witness:
            with pytest.raises(LedgerRolledBack):
                life.open()
        else:
            life.open()
            with pytest.raises(AssertionError):
                life.check_all()
        life.teardown()
