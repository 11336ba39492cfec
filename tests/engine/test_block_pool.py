import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paclm.engine.block_pool import BlockPool
from paclm.errors import EngineError

PAGE, BLOCKS = 4, 12
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
OWNERS = st.sampled_from([None, "a", "b"])


def fill(pool, blocks, prompt):
    for block in blocks[: len(prompt) // PAGE]:
        pool.fill(block)


class PoolMachine(RuleBasedStateMachine):
    """Any order of acquiring, filling and releasing, against what each block must hold."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS + 1, PAGE)
        self.running = []  # (owner, prompt, blocks)
        self.content = {}  # by block: owner and all tokens up to the block's end, of those filled

    @rule(prompt=PROMPTS, more=st.integers(0, 9), owner=OWNERS)
    def acquire(self, prompt, more, owner):
        needed = self.pool.needed(len(prompt) + more)
        if needed > self.pool.num_free:
            with pytest.raises(EngineError):
                self.pool.acquire(len(prompt) + more, prompt, owner)
            return
        blocks = self.pool.acquire(len(prompt) + more, prompt, owner)
        assert len(blocks) == len(set(blocks)) == needed
        for i, block in enumerate(blocks):
            if self.pool.is_filled(block):
                assert owner is not None
                assert self.content[block] == (owner, prompt[: (i + 1) * PAGE])
        self.running.append((owner, prompt, blocks))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def read(self, data):
        owner, prompt, blocks = data.draw(st.sampled_from(self.running))
        fill(self.pool, blocks, prompt)
        for i in range(len(prompt) // PAGE):
            self.content[blocks[i]] = (owner, prompt[: (i + 1) * PAGE])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.pool.release(sequence[2])

    @invariant()
    def blocks_are_shared_by_equal_prompts_of_one_owner_only(self):
        users = {}
        for owner, prompt, blocks in self.running:
            for i, block in enumerate(blocks):
                assert 1 <= block <= BLOCKS
                users.setdefault(block, []).append((owner, i, prompt[: (i + 1) * PAGE]))
        for (owner, i, tokens), *others in users.values():
            if others:
                assert owner is not None
                assert len(tokens) == (i + 1) * PAGE
                assert all(other == (owner, i, tokens) for other in others)
        assert self.pool.num_free == BLOCKS - len(users)

    def teardown(self):
        for _, _, blocks in self.running:
            self.pool.release(blocks)
        assert self.pool.num_free == BLOCKS
        assert len(self.pool.acquire(BLOCKS * PAGE)) == BLOCKS


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@given(OWNERS, OWNERS, st.booleans())
def test_blocks_are_found_again_by_the_same_owner_only(first, second, is_filled):
    pool, prompt = BlockPool(BLOCKS + 1, PAGE), [5, 6, 7, 8, 9, 1, 2, 3, 4]
    blocks = pool.acquire(12, prompt, first)
    if is_filled:
        fill(pool, blocks, prompt)
    pool.release(blocks)
    again = pool.acquire(12, [*prompt[:8], 0], second)
    found = [block for block in again if pool.is_filled(block)]
    assert found == (blocks[:2] if is_filled and first == second is not None else [])


def test_a_block_is_found_by_all_tokens_before_it_too():
    pool = BlockPool(BLOCKS + 1, PAGE)
    blocks = pool.acquire(8, [1, 1, 1, 1, 2, 2, 2, 2], "a")
    fill(pool, blocks, range(8))
    other = pool.acquire(8, [3, 3, 3, 3, 2, 2, 2, 2], "a")
    assert not set(blocks) & set(other)
    assert not pool.is_filled(other[1])


def test_what_was_used_last_is_given_up_last_and_what_holds_nothing_first():
    pool = BlockPool(4 + 1, PAGE)
    kept = [pool.acquire(PAGE, [number] * PAGE, "a") for number in range(3)]
    unread = pool.acquire(PAGE, [3] * PAGE, "a")
    for blocks in kept:
        fill(pool, blocks, range(PAGE))
        pool.release(blocks)
    pool.release(unread)
    pool.release(pool.acquire(PAGE, [0] * PAGE, "a"))  # used again
    assert pool.num_free == 4
    assert [pool.acquire(PAGE)[0] for _ in range(3)] == [unread[0], kept[1][0], kept[2][0]]
    assert pool.is_filled(pool.acquire(PAGE, [0] * PAGE, "a")[0])


def test_the_end_of_a_prompt_is_given_up_before_its_beginning():
    pool, prompt = BlockPool(3 + 1, PAGE), [1, 1, 1, 1, 2, 2, 2, 2]
    blocks = pool.acquire(8, prompt, "a")
    fill(pool, blocks, prompt)
    pool.release(blocks)
    pool.release(pool.acquire(8))
    assert [pool.is_filled(block) for block in pool.acquire(8, prompt, "a")] == [True, False]


def test_a_child_is_not_found_under_a_parent_that_was_given_up():
    pool = BlockPool(3 + 1, PAGE)
    prompt = [1, 1, 1, 1, 2, 2, 2, 2]
    blocks = pool.acquire(8, prompt, "a")
    fill(pool, blocks, prompt)
    pool.release(blocks)
    pool.release(pool.acquire(4, prompt[:4], "a"))
    other = pool.acquire(12)  # takes all three
    pool.release(other)
    again = pool.acquire(8, prompt, "a")
    assert not any(pool.is_filled(block) for block in again)


def test_the_memory_that_was_freed_last_is_used_first():
    pool = BlockPool(1000, PAGE)
    used = set()
    for _ in range(20):
        first, second = pool.acquire(9), pool.acquire(5)
        used |= {*first, *second}
        pool.release(first)
        pool.release(second)
    assert len(used) == 5


def test_tokens_show_in_no_repr():
    pool = BlockPool(3, PAGE)
    pool.acquire(4, [31415] * 4, "a")
    assert "31415" not in repr(pool._blocks)
