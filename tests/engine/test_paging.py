"""Votes do not depend on how sequences lie in the cache, on what they share, or on when their prompts are read."""

import numpy as np
import pytest
import torch

from paclm.engine.decode_step import PromptChunk
from paclm.engine.engine import LEAST_PART, Engine
from paclm.engine.stacked import StackedModel
from paclm.engine.weights import take_apart
from paclm.errors import EngineError

WORLDS, SUPPORT, PAGE = 4, 12, 4


def text(length, seed=5):
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


@pytest.fixture
def make(family, build_model, make_stack):
    """Engines over one model with pages of 4 tokens, and how many prompt tokens each pass read."""

    def engine(chunk=7, num_blocks=40, max_sequences=6, page=PAGE):
        model = build_model(family)
        worlds = StackedModel(take_apart(model, make_stack(model, WORLDS), 48), num_blocks + 1, page)
        passes = []
        prefill = worlds.prefill

        def counted(chunk: PromptChunk):
            passes.append(chunk.lengths.tolist())
            return prefill(chunk)

        worlds.prefill = counted
        made = Engine(worlds, SUPPORT, chunk, max_sequences=max_sequences)
        made.passes = passes
        return made

    return engine


def read_all(engine, handles):
    while not all(engine.is_ready(handle) for handle in handles):
        engine.prefill()


@pytest.mark.parametrize(("page", "chunk"), [(1, 5), (3, 7), (4, 1), (4, 4), (16, 40), (64, 6)])
def test_logits_equal_peft_for_any_page_and_chunk(make, family, build_model, make_stack, peft_logits, page, chunk):
    tokens = text(23)
    expected = peft_logits(family, make_stack(build_model(family), WORLDS), torch.tensor([tokens]))[:, 0]  # (m, T, V)
    engine = make(chunk, 200 // page, page=page)
    other = engine.add(text(9, 1), 3)
    for length in (1, 2, 4, 5, 16, 17, 23):
        handle = engine.add(tokens[:length], 1)
        support, logits = engine.scores([other, handle])
        reference = expected[:, length - 1, support[1]]
        assert (logits[1, :-1] - reference).abs().max() < 1e-4
        engine.remove(handle)


def test_a_shared_prompt_is_read_once_and_votes_as_one_that_is_not(make):
    engine, common = make(), text(13)
    prompts = [[*common, *text(n, n)] for n in (1, 2, 5)] + [common[:9], common[:12], common]
    alone = [engine.ballot(prompt) for prompt in prompts]
    engine.passes.clear()
    handles = [engine.add(prompt, 2, owner="a") for prompt in prompts]
    read_all(engine, handles)
    assert sum(map(sum, engine.passes)) == 13 + 2 + 5 + 0 + 3 + 0  # past the 12 tokens of three full blocks
    ballot = engine.step(handles)
    for i, expected in enumerate(alone):
        assert ballot.support[i].tolist() == expected.support[0].tolist()
        assert ballot.votes[i].tolist() == expected.votes[0].tolist()
    for handle in handles:
        engine.append(handle, 3)
    found = engine.step(handles).votes.tolist()
    engine.clear()
    assert found == [engine.votes([*prompt, 3]).tolist() for prompt in prompts]


def test_a_prompt_is_found_again_after_its_sequence_ended_and_only_by_its_owner(make):
    engine, prompt = make(chunk=40), text(14)
    expected = engine.votes(prompt).tolist()
    engine.passes.clear()
    read = []
    for owner in ("a", "a", "b", None, None, "a"):
        handle = engine.add(prompt, 3, owner=owner)
        assert engine.step([handle]).votes[0].tolist() == expected
        engine.remove(handle)
        read.append(sum(map(sum, engine.passes)))
        engine.passes.clear()
    assert read == [13, 1, 13, 13, 13, 1]


def test_prompts_that_are_wholly_shared_are_ready_at_once(make):
    engine, prompt = make(), text(9)
    engine.step([engine.add(prompt, owner="a")])
    assert engine.is_ready(engine.add(prompt, 1, owner="a"))
    assert engine.is_ready(engine.add([5], 1))
    assert not engine.is_ready(engine.add(prompt, 1, owner="b"))


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_prompt_removed_before_it_is_read_is_read_by_the_next_that_shares_it(make, passes):
    engine, prompt = make(chunk=6), text(18)
    engine.votes(text(40, 1))  # blocks hold something else
    first, second, third = (engine.add(prompt, 1, owner="a") for _ in range(3))
    for _ in range(passes):
        engine.prefill()
    engine.remove(first)
    assert not engine.is_ready(first)
    ballot = engine.step([third, second])
    assert ballot.votes.tolist() == [engine.votes(prompt).tolist()] * 2
    engine.clear()
    assert engine.num_free == 6


def test_a_pass_that_fails_is_read_again_by_all_that_share_it(make):
    engine, prompt = make(chunk=40), text(18)
    engine.votes(text(40, 1))  # blocks hold something else
    handles = [engine.add(prompt, 1, owner="a") for _ in range(2)]
    prefill = engine._step.prefill

    def interrupted(chunk):
        raise KeyboardInterrupt

    engine._step.prefill = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.prefill()
    assert not any(engine.is_ready(handle) for handle in handles)
    engine._step.prefill = prefill
    assert engine.step(handles).votes.tolist() == [engine.votes(prompt).tolist()] * 2


def test_prompts_are_read_in_the_order_of_their_arrival_several_in_one_pass(make):
    engine = make(chunk=24)
    handles = [engine.add(text(n, n), 1) for n in (9, 11, 17, 20, 1)]
    assert [engine.is_ready(handle) for handle in handles] == [False] * 4 + [True]
    engine.prefill()
    assert [engine.is_ready(handle) for handle in handles] == [True, True, False, False, True]
    engine.prefill()
    assert [engine.is_ready(handle) for handle in handles] == [True, True, True, False, True]
    engine.prefill()
    assert engine.passes == [[8, 10, 6], [10, 14], [5]]
    assert engine.is_ready(handles[3])
    engine.prefill()
    assert len(engine.passes) == 3


def test_short_parts_count_for_more_tokens_than_they_have(make):
    """So that a chunk is one pass on a GPU, which has room for one part in every LEAST_PART tokens."""
    engine = make(chunk=3 * LEAST_PART)
    for n in range(5):
        engine.add(text(3, n), 1)
    engine.prefill()
    engine.prefill()
    assert engine.passes == [[2, 2, 2], [2, 2]]


def test_prompts_read_between_steps_and_halves_of_steps_change_no_vote(make):
    engine = make(chunk=5)
    prompts = [text(n, n) for n in (6, 21, 3, 17)]
    coins = np.random.default_rng(0).gumbel(size=(4, 6, SUPPORT))

    def alone(prompt, rows):
        tokens = list(prompt)
        for row in rows:
            tokens.append(int(engine.ballot(tokens, row).votes[0, 1]))
        return tokens

    expected = [alone(prompt, rows) for prompt, rows in zip(prompts, coins, strict=True)]
    handles, done = [], [0] * 4
    while min(done) < 6:
        if len(handles) < 4:
            handles.append(engine.add(prompts[len(handles)], 6))
        ready = [i for i, handle in enumerate(handles) if engine.is_ready(handle) and done[i] < 6]
        if ready:
            engine.launch([handles[i] for i in ready], np.stack([coins[i, done[i]] for i in ready]), [1.0] * len(ready))
        engine.prefill()
        if ready:
            for i, votes in zip(ready, engine.collect().votes, strict=True):
                engine.append(handles[i], int(votes[1]))
                done[i] += 1
    assert [engine.tokens(handle) for handle in handles] == expected


def test_a_sequence_removed_during_a_step_has_its_row_and_spoils_no_other(make):
    engine = make(num_blocks=9)
    first, second = engine.add(text(15, 1), 1), engine.add(text(14, 2), 1)
    expected = engine.step([first, second]).votes.tolist()
    engine.launch([first, second])
    engine.remove(first)
    third = engine.add(text(16, 3), 1)  # in the blocks of the first, with one more
    read_all(engine, [third])
    assert engine.collect().votes.tolist() == expected
    engine.remove(second)
    assert engine.step([third]).votes[0].tolist() == engine.votes(text(16, 3)).tolist()


def test_halves_of_a_step_are_refused_in_any_other_order(make):
    engine = make()
    handle, unread = engine.add([5]), engine.add(text(20))
    with pytest.raises(EngineError, match="in flight"):
        engine.collect()
    with pytest.raises(EngineError, match="not read"):
        engine.launch([handle, unread])
    engine.launch([handle])
    with pytest.raises(EngineError, match="in flight"):
        engine.launch([handle])
    engine.collect()


def test_room_is_reserved_for_the_worst_case_so_that_no_running_sequence_runs_out(make):
    engine = make(num_blocks=10, max_sequences=5)
    assert (engine.context, engine.num_together(9), engine.num_together(20)) == (40, 3, 2)
    prompt = text(9)
    handles = []
    while engine.has_room(9 + 4):
        handles.append(engine.add(prompt, 4, owner="a"))
    assert len(handles) == 3
    with pytest.raises(EngineError, match="blocks"):
        engine.add(prompt, 24)
    for _ in range(4):
        engine.step()
        for handle in handles:
            engine.append(handle, 7)
    found = engine.step().votes.tolist()
    engine.clear()
    assert found == [engine.votes([*prompt, 7, 7, 7, 7]).tolist()] * 3
    assert engine.has_room(40)
    assert not engine.has_room(41)
    for _ in range(5):
        engine.add([1], 1)
    assert not engine.has_room(2)


def test_any_order_of_calls_votes_as_each_context_does_alone(make):
    rng = np.random.default_rng(11)
    engine = make(chunk=6, num_blocks=30, max_sequences=5)
    known, running = {}, []

    def expected(tokens):
        if tuple(tokens) not in known:
            known[tuple(tokens)] = fresh.votes(tokens).tolist()
        return known[tuple(tokens)]

    fresh = make(chunk=40)
    for _ in range(120):
        action = rng.integers(0, 5)
        length = int(rng.integers(1, 14))
        if action <= 1 and engine.has_room(length + 5):
            owner = [None, "a", "b"][rng.integers(0, 3)]
            running.append(engine.add(text(length, int(rng.integers(0, 2))), 5, owner=owner))
        elif action == 2:
            engine.prefill()
        elif action == 3 and running:
            engine.remove(running.pop(int(rng.integers(0, len(running)))))
        else:
            ready = [handle for handle in running if engine.is_ready(handle)]
            if not ready:
                continue
            for handle, votes in zip(ready, engine.step(ready).votes, strict=True):
                assert votes.tolist() == expected(engine.tokens(handle))
                if len(engine.tokens(handle)) < engine._running[handle].limit:
                    engine.append(handle, int(votes[0]))
    assert len(known) > 30
    engine.clear()
    assert engine._pool.num_free == 30
