"""The block pool against a plain model of who uses what."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from qinfer.cache.blocks import BlockPool, digest

NAMES = [bytes([i]) for i in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Users are counted per block; `cached` lists blocks without users, oldest first."""

    @initialize(capacity=st.integers(0, 5), retained=st.none() | st.integers(0, 5))
    def begin(self, capacity, retained):
        self.pool = BlockPool(capacity, retained=retained)
        self.capacity = capacity
        self.retained = capacity if retained is None else retained
        self.users: dict[int, int] = {}
        self.names: dict[int, bytes] = {}
        self.cached: list[int] = []

    def used_block(self, data):
        return data.draw(st.sampled_from(sorted(self.users)))

    def forget_oldest(self):
        block = self.cached.pop(0)
        del self.names[block]
        return block

    @rule()
    def allocate(self):
        block = self.pool.allocate()
        if len(self.users) == self.capacity:
            assert block is None
            return
        assert block in range(self.capacity)
        assert block not in self.users
        if len(self.users) + len(self.cached) == self.capacity:
            assert block == self.forget_oldest()
        assert block not in self.cached
        self.users[block] = 1

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def share(self, data):
        block = self.used_block(data)
        self.pool.share(block)
        self.users[block] += 1

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data):
        block = self.used_block(data)
        self.pool.release(block)
        self.users[block] -= 1
        if self.users[block]:
            return
        del self.users[block]
        if block in self.names:
            self.cached.append(block)
            if len(self.cached) > self.retained:
                self.forget_oldest()

    @precondition(lambda self: self.users)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def publish(self, data, name):
        block = self.used_block(data)
        self.pool.publish(block, name)
        if name not in self.names.values():
            self.names.setdefault(block, name)

    @rule(name=st.sampled_from(NAMES))
    def find(self, name):
        found = [block for block, its in self.names.items() if its == name]
        assert self.pool.find(name) == (found[0] if found else None)
        for block in found:
            self.users[block] = self.users.get(block, 0) + 1
            if block in self.cached:
                self.cached.remove(block)

    @precondition(lambda self: len(self.users) < self.capacity)
    @rule(data=st.data())
    def refuse_a_block_without_users(self, data):
        unused = [block for block in range(self.capacity) if block not in self.users]
        block = data.draw(st.sampled_from(unused))
        for operation in (
            self.pool.share,
            self.pool.release,
            lambda block: self.pool.publish(block, b"new"),
        ):
            with pytest.raises(ValueError, match=f"block {block} is not in use"):
                operation(block)
        assert not self.pool.knows(b"new")

    @invariant()
    def the_counts_are_right(self):
        assert self.pool.in_use == len(self.users)
        assert self.pool.available == self.capacity - len(self.users)
        assert len(self.cached) <= self.retained

    @invariant()
    def exactly_the_named_blocks_are_known(self):
        for name in NAMES:
            assert self.pool.knows(name) == (name in self.names.values())

    @invariant()
    def only_a_block_of_one_user_without_a_name_is_writable(self):
        for block in range(self.capacity):
            expected = self.users.get(block) == 1 and block not in self.names
            assert self.pool.is_writable(block) == expected

    def teardown(self):
        for block, users in list(self.users.items()):
            for _ in range(users):
                self.pool.release(block)
        assert (self.pool.in_use, self.pool.available) == (0, self.capacity)
        taken = [self.pool.allocate() for _ in range(self.capacity)]
        assert sorted(taken) == list(range(self.capacity))
        assert self.pool.allocate() is None


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def cached(pool: BlockPool, *names: bytes) -> list[int]:
    """Blocks published under these names and released, in this order."""
    blocks = []
    for name in names:
        block = pool.allocate()
        pool.publish(block, name)
        blocks.append(block)
    for block in blocks:
        pool.release(block)
    return blocks


def test_the_least_recently_used_content_goes_first():
    pool = BlockPool(3)
    cached(pool, b"a", b"b", b"c")
    pool.release(pool.find(b"a"))
    pool.allocate()
    assert [pool.knows(name) for name in (b"a", b"b", b"c")] == [True, False, True]


def test_free_blocks_are_taken_before_content_is_dropped():
    pool = BlockPool(3)
    cached(pool, b"a", b"b")
    pool.allocate()
    assert pool.knows(b"a")
    assert pool.knows(b"b")


def test_no_more_blocks_stay_cached_than_retained():
    pool = BlockPool(5, retained=2)
    cached(pool, b"a", b"b", b"c", b"d")
    assert [pool.knows(name) for name in (b"a", b"b", b"c", b"d")] == [False, False, True, True]
    assert pool.available == 5


def test_a_bound_of_none_retained_makes_every_released_block_free():
    pool = BlockPool(2, retained=0)
    cached(pool, b"a", b"b")
    assert not pool.knows(b"a")
    assert not pool.knows(b"b")
    assert sorted([pool.allocate(), pool.allocate()]) == [0, 1]


def test_content_in_use_is_never_dropped():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, b"a")
    pool.allocate()
    assert pool.allocate() is None
    assert pool.find(b"a") == block


def test_the_first_block_of_a_content_stays_the_one_found():
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find(b"a") == first
    assert pool.is_writable(second)


def test_a_released_block_without_a_name_is_not_found_under_its_old_one():
    pool = BlockPool(1)
    (block,) = cached(pool, b"a")
    assert pool.allocate() == block
    pool.release(block)
    assert pool.find(b"a") is None


def test_a_digest_depends_on_the_tokens_their_order_and_all_before_them():
    tokens = list(range(32))
    names = {
        digest(b"", tokens),
        digest(b"", tokens[::-1]),
        digest(b"", tokens[:-1]),
        digest(b"", [*tokens[:-1], 2**40]),
        digest(digest(b"", tokens), tokens),
        digest(digest(b"", tokens[::-1]), tokens),
    }
    assert len(names) == 6
    assert digest(b"", tokens) == digest(b"", tuple(tokens))
