"""Distillation: every token charged before it is kept, no token more than asked for, and none paid twice."""

import os
import shutil
from functools import reduce

import numpy as np
import pytest

from curator.deployments import ScriptedEngine
from curator.distilling import PROMPTS, distill, distiller_of, transcripts
from curator.dp_deployments import GUARANTEE, with_dp_adapter
from curator.killing import run_driver
from paclm.curator.beginnings import Beginnings
from paclm.curator.distill import check_promised, first_tokens, text_settings
from paclm.curator.dp_decoder import DpDecoder
from paclm.curator.rotation import rotate_key
from paclm.curator.transcript import TAG, ReleasedText
from paclm.errors import (
    BudgetExceeded,
    CuratorError,
    InvalidInput,
    LedgerBusy,
    PromiseConflict,
    WorkspaceError,
)
from paclm.ledger.dp_log import DpLog
from paclm.ledger.events import Usage
from paclm.privacy.accounting import nats_up, units_up
from paclm.privacy.randomness import coins_of
from paclm.worlds.layout import dp_log_path
from paclm.worlds.workspace import Workspace

PRICE = units_up(2.0**-16)
STREAMS = 4
TOKENS = 100


@pytest.fixture
def scripted():
    return ScriptedEngine(num_slots=STREAMS)


def usage_of(curator):
    """Of everything that was distilled, each text under a tag of its own."""
    tags = [usage for tag, usage in curator.usage().by_tag.items() if tag.startswith(f"{TAG}:")]
    return reduce(Usage.plus, tags, Usage(TAG))


# --- charges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["gumbel", "greedy"])
@pytest.mark.parametrize("charge", ["every-token", "dissent"])
@pytest.mark.parametrize("release", ["gaussian", "plurality", "mixture", "channel"])
def test_what_is_kept_is_what_the_ledger_charged(make, open_curator, release, charge, decoder):
    workspace = make(release=release, charge=charge, decoder=decoder)
    with open_curator(workspace) as curator:
        plan, text = distill(workspace, curator, TOKENS)
        usage, account = usage_of(curator), curator.account
    is_free = release in ("plurality", "mixture")
    charged = 0 if is_free else usage.dissent_tokens if charge == "dissent" else TOKENS
    assert (usage.tokens, usage.public_tokens, usage.units) == (TOKENS, 0, charged * PRICE)
    assert 0 < usage.dissent_tokens < TOKENS  # so that the two charges differ
    assert account.spent_units == usage.units
    assert (text.num_tokens, text.charged_nats) == (TOKENS, nats_up(usage.units))
    assert text.most_nats == plan.most_nats == (0.0 if is_free else nats_up(TOKENS * PRICE))
    assert text.settings.release == release
    assert {one.temperature for one in text.texts} == {0.0 if decoder == "greedy" else 1.0}


def test_another_release_than_the_configured_one_is_in_force_for_this_opening_alone(make, open_curator):
    workspace = make()
    with open_curator(workspace, release="plurality") as curator:
        _, text = distill(workspace, curator, 30)
        assert (usage_of(curator).units, text.settings.release) == (0, "plurality")
    with open_curator(workspace) as curator:
        assert curator.config.release == "gaussian"
        curator.generate("the", 2)
        assert curator.account.spent_units == 2 * PRICE


def test_each_text_continues_a_prompt_and_no_text_is_longer_than_asked(make, open_curator):
    workspace = make()
    with open_curator(workspace) as curator:
        _, text = distill(workspace, curator, TOKENS, length=9)
    assert [one.prompt for one in text.texts] == [PROMPTS[i % 2] for i in range(len(text.texts))]
    assert all(1 <= len(one.tokens) <= 9 for one in text.texts)
    assert len({one.coins_seed for one in text.texts}) == len(text.texts)


def test_training_gets_the_coins_that_each_token_was_voted_with(make, open_curator, monkeypatch):
    seen, launch = {}, ScriptedEngine.launch

    def record(engine, handles, coins, temperature, allowed):
        for handle, row in zip(handles, coins, strict=True):
            seen.setdefault(tuple(engine.sequences[handle]), []).append(row)
        launch(engine, handles, coins, temperature, allowed)

    monkeypatch.setattr(ScriptedEngine, "launch", record)
    workspace = make()
    with open_curator(workspace) as curator:
        _, text = distill(workspace, curator, TOKENS)
    for one in text.texts:
        for step in range(len(one.tokens)):
            context = (*one.prompt, *one.tokens[:step])
            (drawn,) = coins_of([(one.coins_seed, step)], 40)
            assert any(np.array_equal(drawn, row) for row in seen[context])


# --- more, fewer, others ------------------------------------------------------------------------------------------


def test_more_tokens_later_are_charged_for_the_difference(each_store, make, open_curator):
    workspace = make()
    with open_curator(workspace) as curator:
        _, few = distill(workspace, curator, 60)
    with open_curator(workspace) as curator:
        plan, many = distill(workspace, curator, TOKENS)
        assert usage_of(curator).tokens == TOKENS
    assert (plan.kept, plan.most_nats) == (60, nats_up((TOKENS - 60) * PRICE))
    assert (many.num_tokens, many.charged_nats) == (TOKENS, nats_up(TOKENS * PRICE))
    assert many.texts[: len(few.texts)] == few.texts


def test_the_same_or_fewer_tokens_are_charged_nothing(make, open_curator):
    workspace = make(total=TOKENS * 2.0**-16)
    with open_curator(workspace) as curator:
        _, before = distill(workspace, curator, TOKENS)
        for num_tokens in (TOKENS, 37):
            plan, text = distill(workspace, curator, num_tokens)
            assert (plan.kept, plan.most_nats, plan.seconds) == (num_tokens, 0.0, 0.0)
            assert text.num_tokens == num_tokens
            assert text.texts == first_tokens(before.texts, num_tokens)
        assert usage_of(curator).tokens == TOKENS
    assert nats_up(37 * PRICE) <= text.most_nats < before.most_nats


@pytest.mark.parametrize("other", [{"length": 13}, {"prompts": ((5,), (6, 8))}, {"release": "channel"}])
def test_other_settings_are_another_transcript(make, open_curator, other):
    workspace = make()
    with open_curator(workspace) as curator:
        distill(workspace, curator, 20)
    options = {name: other.pop(name) for name in ("release",) if name in other}
    with open_curator(workspace, **options) as curator:
        plan, _ = distill(workspace, curator, 20, **other)
        assert (plan.kept, usage_of(curator).tokens) == (0, 40)
    assert len(transcripts(workspace)) == 2


def test_a_text_that_the_context_cannot_hold_is_refused(make, open_curator):
    workspace = make()
    with open_curator(workspace) as curator:
        for length, prompt in ((64, (5,)), (None, (5,) * 64)):
            with pytest.raises(InvalidInput):
                text_settings(curator, workspace, Beginnings([prompt], ""), length)
        assert text_settings(curator, workspace, Beginnings([(5,)], ""), None).length == 63


# --- budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_exhausted", ["public", "refuse"])
def test_a_budget_that_does_not_cover_the_text_is_refused_before_any_token(make, open_curator, on_exhausted):
    workspace = make(total=50 * 2.0**-16, on_exhausted=on_exhausted)
    with open_curator(workspace) as curator, distiller_of(workspace, curator) as distiller:
        with pytest.raises(BudgetExceeded, match=r"51 more.* at most 50 tokens"):
            distiller.plan(51)
        assert usage_of(curator).tokens == 0
    with open_curator(workspace) as curator:
        assert distill(workspace, curator, 50)[1].num_tokens == 50
        with pytest.raises(BudgetExceeded, match="at most 50 tokens"):
            distill(workspace, curator, 51)
        assert usage_of(curator).tokens == 50


def test_a_public_token_is_never_kept(make, open_curator):
    """The plan makes sure that there is none: here it is not asked."""
    workspace = make(total=10 * 2.0**-16)
    with open_curator(workspace) as curator, distiller_of(workspace, curator) as distiller:
        with pytest.raises(BudgetExceeded):
            distiller.generate(TOKENS)
        assert usage_of(curator).public_tokens > 0
        assert distiller.text(TOKENS).num_tokens == 8  # two whole steps


def test_the_plan_counts_streams_that_fit_and_leaves_nothing_behind(make, open_curator, scripted):
    workspace = make()
    with open_curator(workspace) as curator, distiller_of(workspace, curator, length=12) as distiller:
        for num_tokens, streams in ((1, 1), (12, 1), (25, 3), (1000, STREAMS)):
            plan = distiller.plan(num_tokens)
            assert (plan.tokens, plan.kept, plan.streams) == (num_tokens, 0, streams)
            assert plan.seconds > 0
        assert scripted.sequences == {}
        assert scripted.ballots[-1].votes.shape[0] == STREAMS
        scripted.num_blocks = 2 * (1 + 12)
        assert distiller.plan(1000).streams == 2  # of full length
        assert curator.account.tokens == 0


# --- what may go wrong --------------------------------------------------------------------------------------------


def test_a_rotated_key_reads_the_text_and_goes_on(each_store, make, open_curator):
    workspace = make()
    for num_tokens in (30, 60, 90):
        with open_curator(workspace) as curator:
            plan, text = distill(workspace, curator, num_tokens)
            assert (plan.kept, text.num_tokens) == (num_tokens - 30, num_tokens)
            assert usage_of(curator).tokens == num_tokens
        rotate_key(workspace)
    assert len(transcripts(workspace)) == 1


def test_a_ledger_moved_to_a_database_goes_on_with_the_text(make, open_curator, database, monkeypatch):
    from cli.commands import invoke

    workspace = make()
    with open_curator(workspace) as curator:
        distill(workspace, curator, 30)
    invoke("ledger", "move", workspace.path, "--to", database, "--yes")
    monkeypatch.setenv("PACLM_LEDGER", database)
    workspace = Workspace.open(workspace.path)
    with open_curator(workspace) as curator:
        assert distill(workspace, curator, 50)[0].kept == 30


def test_a_copy_of_the_workspace_with_the_same_ledger_lacks_only_what_came_later(
    make, open_curator, database, tmp_path
):
    """On a second host: text that the first one released since then is not there, and is charged again."""
    workspace = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACLM_LEDGER", database)
        patch.setenv("PACLM_KEY", "5a" * 32)
        with open_curator(workspace) as curator:
            distill(workspace, curator, 20)
        copy = Workspace.open(shutil.copytree(workspace.path, tmp_path / "host-2" / "clinic"))
        for place, num_tokens, charged in ((workspace, 50, 50), (copy, 50, 80), (workspace, 60, 90)):
            with open_curator(place) as curator:
                assert distill(place, curator, num_tokens)[1].num_tokens == num_tokens
                assert usage_of(curator).tokens == charged


def test_one_process_at_a_time_distills_or_serves(each_store, make, open_curator):
    workspace = make()
    with open_curator(workspace) as curator, distiller_of(workspace, curator), pytest.raises(LedgerBusy):
        open_curator(workspace, engine=ScriptedEngine())


@pytest.mark.parametrize("before", ["nothing", "another text", "a text that was deleted", "a key of that name"])
def test_text_that_the_ledger_has_not_charged_is_refused(make, open_curator, tmp_path, before):
    """Whatever else it has charged."""
    workspace = make()
    with open_curator(workspace) as curator:
        if before == "another text":
            distill(workspace, curator, 40, length=13)
        elif before == "a text that was deleted":
            distill(workspace, curator, 40)
            transcripts(workspace)[0].unlink()
        elif before == "a key of that name":
            curator.generate((5,), 40, tag=TAG)
        others = transcripts(workspace)
        distill(workspace, curator, 20)
    older = shutil.copytree(workspace.curator_path, tmp_path / "older")
    with open_curator(workspace) as curator:
        distill(workspace, curator, 30)
    (kept,) = set(transcripts(workspace)) - set(others)
    for file in older.iterdir():  # all of the folder is rolled back, but not the text
        if file.name != kept.name:
            shutil.copy2(file, workspace.curator_path / file.name)
    for leftover in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        (workspace.curator_path / leftover).unlink(missing_ok=True)
    with open_curator(workspace) as curator, pytest.raises(CuratorError):
        distill(workspace, curator, 30)
    kept.unlink()
    with open_curator(workspace) as curator:
        assert distill(workspace, curator, 30)[0].kept == 0


def test_the_text_of_another_ledger_over_the_same_worlds_is_not_taken(make, open_curator, monkeypatch):
    monkeypatch.setenv("PACLM_KEY", "5a" * 32)
    first, second = make("one"), make("two")
    with open_curator(first) as curator:
        distill(first, curator, 20)
    (theirs,) = transcripts(first)
    shutil.copy(theirs, second.curator_path)
    with open_curator(second) as curator:
        assert distill(second, curator, 20)[0].kept == 0
    (ours,) = [path for path in transcripts(second) if path.name != theirs.name]
    shutil.copy(theirs, ours)
    with open_curator(second) as curator, pytest.raises(CuratorError):
        distill(second, curator, 20)


def test_after_a_full_disk_the_same_command_goes_on(make, open_curator, monkeypatch):
    workspace, calls, write = make(), [], os.write

    def fail(descriptor, content):
        calls.append(content)
        return write(descriptor, content[: len(content) // 2] if len(calls) == 4 else content)

    with open_curator(workspace) as curator:
        monkeypatch.setattr(os, "write", fail)
        with pytest.raises(CuratorError):
            distill(workspace, curator, TOKENS)
        assert usage_of(curator).tokens == 3 * STREAMS
    with open_curator(workspace) as curator:
        plan, text = distill(workspace, curator, TOKENS)
        assert (plan.kept, text.num_tokens) == (2 * STREAMS, TOKENS)
        assert usage_of(curator).tokens == TOKENS + STREAMS


# --- kills --------------------------------------------------------------------------------------------------------


def check_kills(lives):
    """Of a driver's report: one entry a life, each with all that was released, charged and kept until its end."""
    texts = {}
    for life in lives:
        assert life["kept_tokens"] <= life["charged_tokens"] <= life["kept_tokens"] + life["num_kills"] * STREAMS
        assert life["kept_units"] <= life["charged_units"]
        for seed, tokens in life["kept"].items():
            assert tokens[: len(texts.get(seed, []))] == texts.get(seed, [])  # nothing kept is ever lost
            assert tokens == life["released"][seed][: len(tokens)]
        texts = life["kept"]
    assert lives[-1]["kept_tokens"] == TOKENS


def test_a_kill_at_any_moment_loses_one_step_at_most_and_the_same_command_goes_on(make):
    lives = run_driver("distill_driver.py", make(charge="dissent").path, TOKENS, "charged-first")
    assert sum(life["was_killed"] for life in lives) >= 15
    assert len({life["at"] for life in lives}) >= 5  # statements of SQLite, writes and syncs
    check_kills(lives)


def test_the_driver_finds_text_that_is_kept_before_it_is_charged(make):
    lives = run_driver("distill_driver.py", make().path, TOKENS, "kept-first")
    assert any(life["kept_tokens"] > life["charged_tokens"] for life in lives)
    with pytest.raises(AssertionError):
        check_kills(lives)


# --- the promise corpus -------------------------------------------------------------------------------------------


@pytest.fixture
def dp_workspace(make):
    return with_dp_adapter(make())


@pytest.fixture
def open_dp(small_tokenizer, own_state, tmp_path, monkeypatch):
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "notes"))

    def open_dp(workspace, **options):
        engine = ScriptedEngine(num_slots=STREAMS, dissent=0.0)
        engine.num_worlds = 0
        return DpDecoder.open(workspace, engine=engine, tokenizer=small_tokenizer, **options)

    return open_dp


def test_under_corpus_nothing_is_charged_and_the_figures_are_those_of_the_adapter(dp_workspace, open_dp):
    check_promised(dp_workspace)
    for num_tokens, kept in ((50, 0), (80, 50)):
        with open_dp(dp_workspace) as decoder:
            plan, text = distill(dp_workspace, decoder, num_tokens)
        assert (plan.kept, plan.most_nats, text.num_tokens) == (kept, 0.0, num_tokens)
        assert (text.charged_nats, text.most_nats, text.committed_nats) == (0.0, 0.0, None)
        assert (text.figures["epsilon"], text.figures["delta"]) == (GUARANTEE.epsilon, GUARANTEE.delta)
        assert (text.settings.promise, text.settings.release) == ("corpus", "dp")
    assert not dp_workspace.ledger_path.exists()


def test_under_corpus_two_decoders_may_run_but_one_distillation(dp_workspace, open_dp):
    with open_dp(dp_workspace) as one, open_dp(dp_workspace) as two, distiller_of(dp_workspace, one):
        second = distiller_of(dp_workspace, two)
        with pytest.raises(WorkspaceError):
            second.__enter__()


def test_a_new_dp_adapter_is_another_transcript(dp_workspace, open_dp):
    with open_dp(dp_workspace) as decoder:
        distill(dp_workspace, decoder, 20)
    another = with_dp_adapter(dp_workspace, seed=12)
    with open_dp(another) as decoder:
        assert distill(another, decoder, 20)[0].kept == 0


def test_where_promises_were_mixed_there_is_no_student(dp_workspace, open_dp):
    with open_dp(dp_workspace) as decoder, distiller_of(dp_workspace, decoder) as distiller:
        distiller.generate(20)
        DpLog(dp_log_path(dp_workspace.path)).append("mixed")  # by another process, meanwhile
        with pytest.raises(PromiseConflict):
            distiller.text(20)
    with pytest.raises(PromiseConflict):
        check_promised(dp_workspace)


def test_the_first_tokens_are_whole_texts_but_the_last():
    texts = [ReleasedText((0,), i, 1.0, [10 * i + j for j in range(3)]) for i in range(3)]
    assert [one.tokens for one in first_tokens(texts, 5)] == [[0, 1, 2], [10, 11]]
    assert [one.tokens for one in first_tokens(texts, 6)] == [[0, 1, 2], [10, 11, 12]]
    assert [one.tokens for one in texts] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
