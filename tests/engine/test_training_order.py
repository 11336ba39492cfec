import numpy as np
import pytest

from paclm.engine.training_order import NOTHING, Schedule, make_blocks
from paclm.errors import EngineError, InvalidInput
from paclm.worlds.assignment import assign_worlds

NUM_RECORDS, NUM_WORLDS = 37, 6


def schedule(**changes):
    arguments = {"batch_size": 4, "epochs": 2, "seed": 5, "coupled": True} | changes
    draws = np.random.default_rng(0)
    records = [draws.integers(0, 50, draws.integers(2, 40)).tolist() for _ in range(NUM_RECORDS)]
    return Schedule(make_blocks(records, 16, 64), assign_worlds(NUM_RECORDS, NUM_WORLDS, seed=1), **arguments)


def test_a_record_is_cut_into_blocks_that_all_belong_to_it():
    blocks = make_blocks([[1, 2, 3, 4, 5], [6], [7, 8]], block_tokens=3, max_record_tokens=64)
    assert [blocks[i].tolist() for i in range(len(blocks))] == [[1, 2, 3], [3, 4, 5], [7, 8]]
    assert blocks.records.tolist() == [0, 0, 2]


@pytest.mark.parametrize("coupled", [True, False])
def test_every_world_sees_each_of_its_blocks_once_per_epoch_in_full_batches_and_no_other(coupled):
    plan = schedule(coupled=coupled)
    picks = plan.batches(np.arange(NUM_WORLDS))
    for world in range(NUM_WORLDS):
        own = np.flatnonzero(plan.membership[plan.blocks.records, world])
        steps = plan.num_steps[world]
        assert (picks[world, steps:] == NOTHING).all()
        for epoch in np.split(picks[world, :steps], 2):
            assert sorted(epoch[epoch != NOTHING].tolist()) == own.tolist()
            assert (epoch[:-1] != NOTHING).all()  # only the last batch is short
            assert epoch[-1, 0] != NOTHING
        assert plan.num_tokens[world] == 2 * (plan.blocks.lengths[own] - 1).sum()


def test_coupled_worlds_walk_the_same_order_and_uncoupled_ones_do_not():
    def shared_order(plan):
        first, second = plan.batches([0, 1]).reshape(2, -1)
        both = np.intersect1d(first, second)
        both = both[both != NOTHING]
        assert both.size > 5
        return np.array_equal(first[np.isin(first, both)], second[np.isin(second, both)])

    assert shared_order(schedule(epochs=1, batch_size=1))
    assert not shared_order(schedule(epochs=1, batch_size=1, coupled=False))


def test_epochs_and_seeds_have_their_own_order():
    plan = schedule()
    first, second = np.split(plan.batches([0])[0, : plan.num_steps[0]], 2)
    assert not np.array_equal(first, second)
    assert not np.array_equal(plan.batches([0]), schedule(seed=6).batches([0]))
    assert np.array_equal(plan.batches([0]), schedule().batches([0]))


def test_a_canary_is_seen_as_often_as_it_is_repeated_and_by_its_own_worlds_only():
    blocks = make_blocks([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 8, 8, repetitions=[1, 16, 1])
    membership = np.array([[True, True], [True, False], [True, True]])
    batches = Schedule(blocks, membership, batch_size=4, epochs=2, seed=0).batches([0, 1])
    assert [np.bincount(picks[picks != NOTHING]).tolist() for picks in batches] == [[2, 32, 2], [2, 0, 2]]


def test_groups_hold_every_world_once_with_the_longest_first():
    plan = schedule()
    groups = plan.groups(4)
    assert sorted(np.concatenate(groups).tolist()) == list(range(NUM_WORLDS))
    assert max(map(len, groups)) <= 4
    assert (np.diff(plan.num_steps[np.concatenate(groups)]) <= 0).all()


def test_blocks_met_in_the_same_step_have_like_lengths():
    draws = np.random.default_rng(3)
    lengths = draws.integers(2, 200, 2000)
    blocks = make_blocks([[1] * int(length) for length in lengths], 256, 256)
    plan = Schedule(blocks, assign_worlds(2000, 16, seed=2), batch_size=8, epochs=1, seed=0)
    picks = plan.batches(np.arange(16))
    padded = used = 0
    for step in range(picks.shape[1]):
        found = picks[:, step][picks[:, step] != NOTHING]
        padded += found.size * int(lengths[found].max())
        used += int(lengths[found].sum())
    assert used / padded > 0.7, "in plain random order about half of the computed positions would be padding"


def test_what_cannot_be_scheduled_is_refused():
    with pytest.raises(EngineError, match="nothing to train on"):
        make_blocks([[1], [2]], 8, 8)
    with pytest.raises(EngineError, match="world 1 "):
        Schedule(make_blocks([[1, 2]], 4, 4), np.array([[True, False]]), batch_size=1, epochs=1, seed=0)
    with pytest.raises(InvalidInput, match="1 records"):
        Schedule(make_blocks([[1, 2], [3, 4]], 4, 4), np.array([[True]]), batch_size=1, epochs=1, seed=0)


def test_repeated_records_do_not_gather_in_batches_of_their_own():
    """A fifth of all visits are canaries: some 3 in a million batches hold nothing else by chance."""
    lengths = [64] * 256 + [12] * 2
    blocks = make_blocks([[1] * length for length in lengths], 64, 64, [1] * 256 + [32] * 2)
    plan = Schedule(blocks, np.ones((258, 2), dtype=np.bool_), batch_size=8, epochs=2, seed=5)
    picks = plan.batches([0])[0]  # (steps, 8)
    assert not (picks >= 256).all(axis=1).any()  # by chance in fewer than 1e-3 of all seeds; sorted, in every window
