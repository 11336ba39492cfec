"""Tokens leave after their charge is durable, in order, as many as the budget affords, and marked for what they are."""

import pytest

from curator.deployments import ScriptedEngine, Talkative
from paclm import Noise
from paclm.errors import CuratorError, LedgerError, UnsoundState, WitnessMissing
from paclm.ledger.verify import verify
from paclm.privacy.accounting import units_up

B = 2.0**-16


def test_an_answer_says_what_left_what_it_cost_and_what_is_promised(make, open_curator):
    with open_curator(make()) as curator:
        out = curator.generate("the patient", 50)
        again = curator.generate("the patient", 3)
    assert len(out.tokens) == len(out.marks) == out.private_tokens == 50
    assert set(out.marks) == {"agreed", "disputed"}  # worlds differ at half of all tokens: of one kind once in 2^49
    assert (out.public_tokens, out.finish_reason) == (0, "length")
    assert out.charged_nats == out.spent_nats == 50 * B
    assert (again.charged_nats, again.spent_nats) == (3 * B, 53 * B)
    assert out.total_nats == 2.0**-4
    assert again.remaining_tokens == 4096 - 53
    assert out.mia_bound == pytest.approx(0.674909, abs=1e-6)  # at the total, whatever was spent
    assert again.mia_bound == out.mia_bound
    assert 1 / 8 < out.world_id_bound < 1


def test_a_stream_gives_the_same_pieces_one_by_one_and_the_text_is_that_of_the_tokens(
    make, open_curator, small_tokenizer
):
    with open_curator(make(release="plurality")) as curator:  # no noise: the same coins give the same tokens
        whole = curator.generate(small_tokenizer.encode("the patient"), 20, coins_seed=9)
        pieces = list(curator.stream("the patient", 20, coins_seed=9))
    assert tuple(piece.token for piece in pieces) == whole.tokens
    assert tuple(piece.mark for piece in pieces) == whole.marks
    text = small_tokenizer.decode(list(whole.tokens), clean_up_tokenization_spaces=False)
    assert "".join(piece.text for piece in pieces) == whole.text == text


def test_coins_can_be_set_and_noise_cannot(make, open_curator):
    with open_curator(make(release="plurality")) as curator:
        first, second = (curator.generate("the", 20, coins_seed=1).tokens for _ in range(2))
        third = curator.generate("the", 20, coins_seed=2).tokens
        fresh = {curator.generate("the", 20).tokens for _ in range(2)}
        with pytest.raises(TypeError, match="seed"):
            curator.generate("the", 20, seed=1)
        assert isinstance(curator._releaser._noise, Noise)
    assert first == second != third
    assert len(fresh) == 2


def test_greedy_and_temperature_come_from_the_request_or_else_from_the_settings(make, open_curator):
    with open_curator(make(temperature=0.7)) as curator:
        assert curator.request("the", 1).temperature == 0.7
        assert curator.request("the", 1, temperature=1.3).temperature == 1.3
        assert curator.request("the", 1, temperature=0).temperature == 0.0
        assert curator.request("the", 1, greedy=True).temperature == 0.0
    with open_curator(make(temperature=0.7, decoder="greedy")) as curator:
        assert curator.request("the", 1).temperature == 0.0
        assert curator.request("the", 1, temperature=1.3).temperature == 1.3
        assert curator.request("the", 1, greedy=False).temperature == 0.7


def test_a_prompt_is_encoded_as_records_are(make, open_curator, small_tokenizer):
    """Tokenizers that put a start token before every text did not do so in training."""

    class Starting:
        eos_token_id, bos_token_id = small_tokenizer.eos_token_id, 7

        def encode(self, text, add_special_tokens=True, **_):
            return [7] * add_special_tokens + list(small_tokenizer.encode(text, add_special_tokens=False))

        def decode(self, ids, **options):
            return str(small_tokenizer.decode(ids, **options))

    with open_curator(make(), tokenizer=Starting()) as curator:
        plain = tuple(small_tokenizer.encode("the patient", add_special_tokens=False))
        assert curator.request("the patient", 1).prompt == plain
        assert curator.request("", 1).prompt == curator.request([], 1).prompt == (7,)


def test_the_end_token_is_charged_and_ends_the_answer(make, open_curator, small_tokenizer):
    words = small_tokenizer.encode(" fever cough")
    with open_curator(make(), engine=Talkative([*words, small_tokenizer.eos_token_id])) as curator:
        out = curator.generate([1], 40)
    assert out.tokens == (*words, small_tokenizer.eos_token_id)
    assert (out.text, out.finish_reason) == (" fever cough", "stop")
    assert out.charged_nats == len(out.tokens) * B


def test_a_stop_string_ends_the_answer_and_is_neither_shown_nor_streamed(make, open_curator, small_tokenizer):
    words = small_tokenizer.encode(" fever\n\nNext patient")
    with open_curator(make(), engine=Talkative(words)) as curator:
        out = curator.generate([1], 40, stop="\n\nN")
        pieces = list(curator.stream([1], 40, stop=["\n\nN"]))
    assert (out.text, out.finish_reason) == (" fever", "stop")
    assert "".join(piece.text for piece in pieces) == " fever"
    assert out.charged_nats == len(out.tokens) * B


@pytest.mark.parametrize("charge", ["every-token", "dissent"])
@pytest.mark.parametrize("release", ["gaussian", "channel", "plurality", "mixture"])
def test_the_charge_follows_release_and_rule(make, open_curator, release, charge):
    with open_curator(make(release=release, charge=charge)) as curator:
        out = curator.generate("the patient", 30)
        charged = {"every-token": 30, "dissent": out.marks.count("disputed")}[charge]
        assert 0 < out.marks.count("disputed") < 30
        assert out.charged_nats == (charged if release in ("gaussian", "channel") else 0) * B
        state = curator._custody.ledger.state
        assert (state.tokens, state.dissent_tokens) == (30, out.marks.count("disputed"))


def test_nothing_is_seen_before_the_commit_returned(make, open_curator, monkeypatch):
    with open_curator(make()) as curator:
        streams = [curator.submit(curator.request("the", 3, tag=f"client {i % 2}")) for i in range(5)]
        seen_at_commit = []
        commit = curator._custody.ledger.commit

        def watched(entries, sealed):
            entries = list(entries)
            seen_at_commit.append(([len(stream.tokens) for stream in streams], entries))
            commit(entries, sealed)

        monkeypatch.setattr(curator._custody.ledger, "commit", watched)
        for _ in range(3):
            assert len(curator.step()) == 5
    assert [counts for counts, _ in seen_at_commit] == [[0] * 5, [1] * 5, [2] * 5]  # one commit a step, tokens after it
    assert [(entry.key, entry.tokens) for entry in seen_at_commit[0][1]] == [("client 0", 3), ("client 1", 2)]


def test_exactly_the_affordable_tokens_are_private_and_the_rest_is_marked_public(make, open_curator):
    engine = ScriptedEngine()
    with open_curator(make(per_token="2^-16", total=str(7.9 * B)), engine=engine) as curator:
        out = curator.generate("the", 12)
        assert out.marks[:7].count("public") == 0
        assert out.marks[7:] == ("public",) * 5
        assert (out.private_tokens, out.public_tokens, out.remaining_tokens) == (7, 5, 0)
        assert out.charged_nats == 7 * B
        assert list(out.tokens[7:]) == [int(ballot.public[0]) for ballot in engine.ballots[7:]]
        belief = curator._custody.belief
        assert curator.generate("the", 4).marks == ("public",) * 4
        assert curator._custody.belief is belief
        assert curator._custody.ledger.state.public_tokens == 9


def test_when_the_budget_is_gone_marks_do_not_show_where_worlds_dissent(make, open_curator):
    """Agreed tokens would cost nothing; were they still private, the public ones would be those with dissent."""
    with open_curator(make(total=str(2 * B), charge="dissent")) as curator:
        out = curator.generate("the", 40)
    assert out.marks.count("disputed") == 2
    gone = out.marks.index("public")
    assert "agreed" in out.marks[:gone]
    assert out.marks[gone - 1] == "disputed"
    assert set(out.marks[gone:]) == {"public"}


class Stumbling(ScriptedEngine):
    def collect(self):
        if len(self.ballots) == 2:
            raise RuntimeError("out of memory")
        return super().collect()


@pytest.mark.parametrize("where", ["engine", "release", "append", "launch", "ledger", "delivery"])
def test_after_any_failure_in_a_step_nothing_more_leaves_and_a_restart_knows_what_was_committed(
    make, open_curator, monkeypatch, where
):
    workspace = make()
    curator = open_curator(workspace, engine=Stumbling() if where == "engine" else ScriptedEngine(dissent=1.0))
    stream = curator.submit(curator.request("the", 9))
    curator.step()
    curator.step()
    if where == "release":
        monkeypatch.setattr("paclm.privacy.gaussian.tally", lambda *_: 1 / 0)
    elif where == "ledger":
        monkeypatch.setattr("paclm.ledger.sqlite_store.add_sums", lambda *_: 1 / 0)
    elif where in ("append", "launch"):  # of the next step, before the commit of this one
        monkeypatch.setattr(curator._engine, where, lambda *_: 1 / 0)
    elif where == "delivery":
        monkeypatch.setattr(stream._text, "push", lambda *_: 1 / 0)
    kinds = (RuntimeError, UnsoundState, ZeroDivisionError, LedgerError)
    with pytest.raises(kinds):
        curator.step()
    monkeypatch.undo()
    charged = 2 if where in ("engine", "release", "ledger") else 3  # what was released is charged
    assert len(stream.tokens) <= charged
    for attempt in (curator.step, lambda: curator.generate("the", 1), lambda: curator.submit(stream.request)):
        with pytest.raises(CuratorError):
            attempt()
    committed = curator._custody.belief.reveal().tobytes()
    curator.close()
    with open_curator(workspace) as restarted:
        assert restarted.account.tokens == charged
        assert restarted._custody.belief.reveal().tobytes() == committed
        restarted.generate("the", 2)


@pytest.mark.parametrize("place", ["text of the second", "end of the second"])
def test_a_step_that_fails_after_its_commit_delivers_to_nobody(make, open_curator, monkeypatch, place):
    with open_curator(make()) as curator:
        first, second = (curator.submit(curator.request("the", 5)) for _ in range(2))
        if place.startswith("text"):
            monkeypatch.setattr(second._text, "push", lambda *_: 1 / 0)
        else:
            monkeypatch.setattr(second._text, "is_stopped", True)  # as if a stop string had come
            monkeypatch.setattr(curator._engine, "remove", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            curator.step()
        assert first.take() == second.take() == first.tokens == second.tokens == []
        assert first.text == ""
        assert curator.account.tokens == 2
        with pytest.raises(CuratorError, match="ZeroDivisionError"):
            curator.step()


def test_votes_of_another_shape_release_nothing(make, open_curator):
    class Short(ScriptedEngine):
        def collect(self):
            ballot = super().collect()
            return type(ballot)(ballot.support, ballot.votes[:, :-1], ballot.public)

    with open_curator(make(), engine=Short()) as curator:
        with pytest.raises(UnsoundState, match="votes"):
            curator.generate("the", 1)
        assert curator.account.tokens == 0


def test_a_real_engine_runs_many_streams_and_the_ledger_is_intact(make, engine, open_curator):
    workspace = make(charge="dissent")
    with open_curator(workspace, engine=engine) as curator:
        options = [{"greedy": True}, {"temperature": 0.5}, {}]
        streams = [curator.submit(curator.request("the patient", 8, **options[i % 3])) for i in range(9)]
        while curator.num_active:
            curator.step()
        disputed = sum(stream.marks.count("disputed") for stream in streams)
        assert 0 < disputed < sum(len(stream.tokens) for stream in streams)
        assert curator.account.spent_units == disputed * units_up(B)
        assert len({tuple(stream.tokens) for stream in streams if stream.request.temperature}) > 3
    assert verify(workspace.curator_path / "ledger.sqlite").intact


def test_a_real_engine_goes_on_when_a_stream_leaves_with_a_step_in_flight(make, engine, open_curator):
    with open_curator(make(), engine=engine) as curator:
        leaving, staying = (curator.submit(curator.request("the patient", 8, greedy=True)) for _ in range(2))
        curator.step()
        curator.cancel(leaving)
        while curator.num_active:
            curator.step()
        alone = curator.submit(curator.request("the patient", 8))
        curator.step()
        curator.cancel(alone)
        assert len(staying.tokens) + 2 == curator.account.tokens
        assert curator.generate("the patient", 2).private_tokens <= 2


def test_no_token_leaves_while_the_database_of_the_witness_is_down(make, open_curator, postgres, database):
    workspace = make()
    with open_curator(workspace, witness=database) as curator:
        stream = curator.submit(curator.request("the", 9))
        curator.step()
        received = list(stream.tokens)
        postgres.stop("immediate")
        with pytest.raises(LedgerError):
            curator.step()
        assert stream.tokens == received
        with pytest.raises(CuratorError):
            curator.step()
    with pytest.raises(WitnessMissing):
        open_curator(workspace, witness=database)
    postgres.start()
    with open_curator(workspace, witness=database, engine=ScriptedEngine()) as curator:
        assert len(received) == 1 < curator.account.tokens == 2  # charged, not received
        curator.generate("the", 2)
