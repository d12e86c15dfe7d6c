"""Block tables of several groups against a model of what sequences wrote where; sizes of blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from qinfer.cache.blocks import BlockPool, digest
from qinfer.cache.tables import RELEASED, BlockTables, Reach, SequenceBlocks, blocks_for
from qinfer.quant.kv import BLOCK_TOKENS, KV_BITS, KVFormat, KVSide, value_group
from tests.paged_fakes import FakeCache, visible

WINDOWS = (1, 2, 16, 31, 32, 33, 40, 63, 64, 65, 96)
SINKS = (0, 1, 4, 32, 33)
TEXTS = ([1] * 200, [i % 7 for i in range(200)], [1] * 64 + [2] * 136)
SLOTS = 8

reaches = st.just(Reach()) | st.builds(Reach, st.sampled_from(WINDOWS), st.sampled_from(SINKS))


def chain(tokens: list[int]) -> list[bytes]:
    """The digests of the full blocks of tokens."""
    names = [b""]
    for i in range(len(tokens) // BLOCK_TOKENS):
        names.append(digest(names[-1], tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]))
    return names[1:]


@dataclass(eq=False)
class Live:
    """A sequence on its way: what it has, and how much of it is in the cache."""

    tokens: list[int]
    blocks: SequenceBlocks
    slot: int
    computed: int = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class TablesMachine(RuleBasedStateMachine):
    """Runs sequences in the order of calls that the engine makes: grow, copy, write, publish, trim.

    A sequence that gives its blocks back stays in the bundle, but nothing is done with it any more.
    """

    sequences = Bundle("sequences")
    events: ClassVar[Counter[str]] = Counter()

    @initialize(
        groups=st.lists(reaches, min_size=1, max_size=3),
        capacity=st.integers(3, 16),
        step_tokens=st.sampled_from((1, 8, 32, 40, 70)),
        retained=st.sampled_from((None, None, 0, 3)),
        opens=st.booleans(),
    )
    def begin(self, groups, capacity, step_tokens, retained, opens):
        self.cache = FakeCache(
            groups, [capacity] * len(groups), slots=SLOTS, opens=opens, retained=retained
        )
        self.tables = self.cache.tables(step_tokens=step_tokens)
        self.step_tokens = step_tokens
        self.live: list[Live] = []
        self.slots = list(range(SLOTS))

    def path(self, live):
        return self.cache.prefixes.of(live.tokens)

    def groups_of(self, live):
        return zip(self.cache.reaches, live.blocks.tables, self.cache.pools, strict=True)

    def holders(self, group, block):
        return sum(live.blocks.tables[group].count(block) for live in self.live)

    def drop(self, live):
        self.tables.release(live.blocks)
        assert not any(live.blocks.tables)
        self.live.remove(live)
        self.slots.append(live.slot)

    @rule(
        target=sequences,
        text=st.sampled_from(TEXTS),
        common=st.sampled_from((0, 20, 31, 32, 33, 64, 65, 96, 100, 130)),
        own=st.lists(st.integers(0, 2), max_size=3),
        then=st.sampled_from(("wait", "prefill", "prefill", "end")),
    )
    def begin_sequence(self, text, common, own, then):
        tokens = [*text[:common], *own] or [0]
        if not self.slots:
            return multiple()
        live = Live(tokens, self.tables.new([]), self.slots.pop())
        expected = self.longest_prefix(tokens)
        live.computed = self.tables.reuse(live.blocks, tokens, len(tokens) - 1)
        assert live.computed == expected
        self.events["reused"] += live.computed > 0
        self.events["reused in part"] += any(RELEASED in table for table in live.blocks.tables)
        self.live.append(live)
        self.only_what_is_in_sight_is_held(live)
        for number, table in enumerate(live.blocks.tables):
            assert len(table) == live.computed // BLOCK_TOKENS, number
        if then != "wait":
            self.prefill(live)
        if then == "end" and live in self.live:
            self.drop(live)
        return live

    def longest_prefix(self, tokens):
        """By the definition: every key that the next query sees, in every group, can be found."""
        names = chain(tokens[:-1])
        for length in range(len(names) * BLOCK_TOKENS, 0, -BLOCK_TOKENS):
            if all(
                pool.knows(names[key // BLOCK_TOKENS])
                for reach, pool in zip(self.cache.reaches, self.cache.pools, strict=True)
                for key in visible(reach, length)[:-1]
            ):
                return length
        return 0

    @rule(
        chosen=st.lists(sequences, min_size=1, max_size=4, unique=True),
        counts=st.lists(st.integers(1, 70), min_size=4, max_size=4),
    )
    def step(self, chosen, counts):
        self.run_step([live for live in chosen if live in self.live and live.pending], counts)

    def run_step(self, chosen, counts):
        copies, running = [], []
        for live, count in zip(list(chosen), counts, strict=False):
            count = min(count, live.pending, self.step_tokens)
            while live in self.live:
                made = self.grow(live, count)
                if made is not None:
                    copies.append(made)
                    running.append((live, count))
                    break
                self.events["too few blocks"] += 1
                self.drop(chosen.pop())
        for made in copies:
            self.events["copied"] += len(made)
            self.cache.copy(made)
        for live, count in running:
            self.write(live, count)
        for live, count in running:
            self.look(live, count)
        for live, count in running:
            self.store(live, count)

    def grow(self, live, count):
        start, end = live.computed, live.computed + count
        before = [list(table) for table in live.blocks.tables]
        available = [pool.available for pool in self.cache.pools]
        needed = [
            max(0, blocks_for(end) - len(table))
            + sum(not pool.is_writable(block) for block in table[start // BLOCK_TOKENS :])
            for _, table, pool in self.groups_of(live)
        ]
        copies = self.tables.grow(live.blocks, start, end)
        if copies is None:
            assert any(n > there for n, there in zip(needed, available, strict=True))
            assert live.blocks.tables == before
            assert [pool.available for pool in self.cache.pools] == available
            return None
        for reach, table, pool in self.groups_of(live):
            assert len(table) == max(len(table), blocks_for(end))
            held = sum(block != RELEASED for block in table)
            assert held <= reach.most_blocks(end, self.step_tokens)
            assert pool.available >= 0
        for group, there in enumerate(available):
            assert self.cache.pools[group].available == there - needed[group]
        return copies

    def write(self, live, count):
        path = self.path(live)
        for position in range(live.computed, live.computed + count):
            for group, table in enumerate(live.blocks.tables):
                block = table[position // BLOCK_TOKENS]
                assert self.holders(group, block) == 1
                assert self.cache.pools[group].is_writable(block)
            self.cache.write(live.blocks.tables, live.slot, position, path[position])

    def look(self, live, count):
        """Below 16 bits only the last block of a sequence is open, so look from there."""
        path, end = self.path(live), live.computed + count
        first = max(live.computed, (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        for query in range(first if self.cache.opens else live.computed, end):
            self.cache.check(live.blocks.tables, live.slot, path, query)

    def store(self, live, count):
        live.computed += count
        self.tables.publish(live.blocks, live.tokens, live.computed)
        assert live.blocks.digests == chain(live.tokens)[: len(live.blocks.digests)]
        self.tables.trim(live.blocks, live.computed)
        self.only_what_is_in_sight_is_held(live)

    def only_what_is_in_sight_is_held(self, live):
        for reach, table, _ in self.groups_of(live):
            seen = {key // BLOCK_TOKENS for key in visible(reach, live.computed)}
            for i, block in enumerate(table):
                assert (block != RELEASED) == (i in seen), f"block {i} of {reach}"

    @rule(live=sequences, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def sample(self, live, tokens):
        if live in self.live and not live.pending and len(live.tokens) < 190:
            live.tokens.extend(tokens)

    def prefill(self, live):
        while live in self.live and live.pending:
            self.run_step([live], [self.step_tokens])

    @rule(
        target=sequences,
        live=sequences,
        first=st.lists(st.integers(0, 2), min_size=2, max_size=3),
        text=st.lists(st.integers(0, 2), max_size=40),
    )
    def fork(self, live, first, text):
        """Each samples a token at once, and goes on with the others."""
        if live not in self.live or live.pending or len(self.slots) < len(first):
            return multiple()
        choices = [live]
        for _ in first[1:]:
            twin = Live(list(live.tokens), self.tables.fork(live.blocks), self.slots.pop())
            twin.computed = live.computed
            self.cache.copy_open(live.slot, twin.slot)
            assert twin.blocks.tables == live.blocks.tables
            self.live.append(twin)
            choices.append(twin)
        twins = choices[1:]
        for choice, token in zip(choices, first, strict=True):
            choice.tokens.append(token)
        self.run_step(list(choices), [1] * len(choices))
        for token in text:
            choices = [choice for choice in choices if choice in self.live]
            for number, choice in enumerate(choices):
                choice.tokens.append((token + number) % 3)
            self.run_step(list(choices), [1] * len(choices))
        return multiple(*twins)

    @rule(live=sequences)
    def give_way_between_growing_and_writing(self, live):
        if live in self.live and live.pending:
            self.tables.grow(live.blocks, live.computed, live.computed + 1)
            self.drop(live)

    @rule(live=consumes(sequences))
    def end(self, live):
        if live in self.live:
            self.drop(live)

    @rule(live=sequences)
    def replay(self, live):
        """As the engine does to find where NaNs begin; nothing is published, and it ends."""
        if live not in self.live:
            return
        length = live.computed
        self.tables.release(live.blocks)
        live.blocks, live.computed = self.tables.new([]), 0
        while live.computed < length:
            count = min(self.step_tokens, length - live.computed)
            copies = self.grow(live, count)
            if copies is None:
                break
            assert not copies
            self.write(live, count)
            self.look(live, count)
            live.computed += count
            self.tables.trim(live.blocks, live.computed)
            self.only_what_is_in_sight_is_held(live)
        self.drop(live)

    @rule(live=sequences, length=st.integers(1, 190), spare=st.integers(0, 3))
    def ask_for_room(self, live, length, spare):
        if live not in self.live:
            return
        expected = all(
            reach.most_blocks(length, self.step_tokens) - sum(block != RELEASED for block in table)
            <= pool.available - spare
            for reach, table, pool in self.groups_of(live)
        )
        assert self.tables.fits(live.blocks, length, spare=spare) == expected

    @invariant()
    def blocks_are_in_use_exactly_while_they_are_held(self):
        if not hasattr(self, "live"):
            return
        used = []
        for group, pool in enumerate(self.cache.pools):
            held = {
                block
                for live in self.live
                for block in live.blocks.tables[group]
                if block != RELEASED
            }
            assert pool.in_use == len(held)
            used.append(len(held) / pool.capacity)
        assert self.tables.used == max(used)

    def teardown(self):
        if hasattr(self, "live"):
            for live in list(self.live):
                self.drop(live)
            assert all(pool.in_use == 0 for pool in self.cache.pools)


def test_sequences_of_several_groups_see_their_own_tokens_and_hold_no_more():
    TablesMachine.events.clear()
    run_state_machine_as_test(
        TablesMachine, settings=settings(max_examples=120, stateful_step_count=30, deadline=None)
    )
    least = {"reused": 10, "reused in part": 1, "copied": 10, "too few blocks": 10}
    for event, count in least.items():
        assert TablesMachine.events[event] >= count, TablesMachine.events


def make(*its_reaches, capacity=64, step_tokens=32, retained=None):
    """Tables and their pools."""
    pools = [BlockPool(capacity, retained=retained) for _ in its_reaches]
    return BlockTables(its_reaches, pools, step_tokens=step_tokens), pools


def run(tables, tokens, counts):
    """Blocks of a sequence whose tokens were computed in steps of these sizes."""
    blocks, start = tables.new([]), 0
    for count in counts:
        assert tables.grow(blocks, start, start + count) == []
        start += count
        tables.publish(blocks, tokens, start)
        tables.trim(blocks, start)
    return blocks


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("window", WINDOWS)
def test_exactly_what_the_next_query_sees_is_held_at_every_length(window, sinks):
    reach = Reach(window, sinks)
    tables, (pool,) = make(reach)
    blocks = tables.new([])
    for length in range(200):
        held = {i for i, block in enumerate(blocks.tables[0]) if block != RELEASED}
        seen = {key // BLOCK_TOKENS for key in visible(reach, length)}
        assert held == {i for i in seen if i < len(blocks.tables[0])}
        if length % BLOCK_TOKENS == 0:
            assert set(reach.needed(length)) == {
                key // BLOCK_TOKENS for key in visible(reach, length)[:-1]
            }
        tables.grow(blocks, length, length + 1)
        assert pool.in_use <= reach.most_blocks(length + 1, 1)
        tables.trim(blocks, length + 1)


@given(
    reach=reaches,
    step_tokens=st.integers(1, 100),
    counts=st.lists(st.integers(1, 100), min_size=1, max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_a_sequence_never_holds_more_than_most_blocks_says(reach, step_tokens, counts):
    tables, (pool,) = make(reach, capacity=100, step_tokens=step_tokens)
    blocks, length = tables.new([]), 0
    for count in counts:
        count = min(count, step_tokens)
        tables.grow(blocks, length, length + count)
        length += count
        assert pool.in_use <= reach.most_blocks(length, step_tokens)
        assert pool.in_use <= reach.most_blocks(10_000, step_tokens)
        tables.trim(blocks, length)


@given(reach=reaches, step_tokens=st.integers(1, 100), length=st.integers(1, 400))
@settings(max_examples=150, deadline=None)
def test_a_sequence_that_fits_alone_grows_to_its_length_alone(reach, step_tokens, length):
    capacity = reach.most_blocks(length, step_tokens)
    assert not make(reach, capacity=capacity - 1, step_tokens=step_tokens)[0].fits_alone(length)
    tables, _ = make(reach, capacity=capacity, step_tokens=step_tokens)
    blocks = tables.new([])
    assert tables.fits_alone(length)
    assert tables.fits(blocks, length)
    for start in range(0, length, step_tokens):
        end = min(start + step_tokens, length)
        assert tables.grow(blocks, start, end) == []
        tables.trim(blocks, end)


def test_the_longest_prefix_that_every_group_knows_is_reused():
    tokens = list(range(160))
    tables, _ = make(Reach(), Reach(40))
    tables.release(run(tables, tokens, [32, 32, 32, 32, 32]))
    blocks = tables.new([])
    assert tables.reuse(blocks, [*tokens, 7], 160) == 160
    assert [block == RELEASED for block in blocks.tables[1]] == [True, True, True, False, False]
    assert RELEASED not in blocks.tables[0]
    tables.release(blocks)
    assert tables.reuse(tables.new([]), [*tokens[:100], 7, *tokens[101:]], 159) == 96


def test_the_last_token_is_never_reused():
    tokens = list(range(64))
    tables, _ = make(Reach())
    tables.release(run(tables, tokens, [32, 32]))
    assert tables.reuse(tables.new([]), tokens, 63) == 32


def test_equal_tokens_at_another_place_are_not_reused():
    tables, (pool,) = make(Reach())
    blocks = run(tables, [5] * 64, [64])
    assert blocks.digests[0] != blocks.digests[1]
    assert tables.reuse(tables.new([]), [5] * 33, 32) == 32
    other = [6] * 32 + [5] * 33
    assert tables.reuse(tables.new([]), other, 64) == 0
    assert pool.in_use == 2


def test_every_full_block_of_a_step_of_many_tokens_is_published():
    tokens = list(range(200))
    tables, (pool,) = make(Reach())
    blocks = run(tables, tokens, [20, 150])
    assert [pool.knows(name) for name in blocks.name(tokens, 6)] == [True] * 5 + [False]


def test_what_leaves_the_window_within_one_step_is_published_before_it_is_released():
    tokens = list(range(160))
    tables, (pool,) = make(Reach(8, 4), step_tokens=160)
    blocks = run(tables, tokens, [160])
    assert all(pool.knows(name) for name in blocks.name(tokens, 5))
    assert pool.in_use == 2


def test_both_of_two_equal_sequences_go_on_when_the_first_ones_blocks_are_dropped():
    tokens = list(range(96))
    tables, (pool,) = make(Reach(), capacity=6, retained=0)
    first, second = run(tables, tokens, [96]), run(tables, tokens, [64])
    tables.release(first)
    assert tables.grow(second, 64, 96) == []
    tables.publish(second, tokens, 96)
    assert tables.reuse(tables.new([]), [*tokens, 1], 96) == 96
    assert pool.in_use == 3


@pytest.mark.parametrize(("length", "copied"), [(31, 1), (32, 0), (33, 1), (63, 1), (64, 0)])
def test_a_fork_copies_its_last_block_only_where_it_is_partly_filled(length, copied):
    tokens = list(range(length))
    tables, (pool,) = make(Reach(), step_tokens=length)
    leader = run(tables, tokens, [length])
    follower = tables.fork(leader)
    copies = tables.grow(follower, length, length + 1)
    assert len(copies) == copied
    assert [c.source for c in copies] == leader.tables[0][-1:] * copied
    assert [c.target for c in copies] == follower.tables[0][-1:] * copied
    assert tables.grow(leader, length, length + 1) == []
    assert leader.tables[0][-1] != follower.tables[0][-1]
    assert pool.in_use == blocks_for(length + 1) + 1


def test_of_three_that_share_a_block_the_last_one_keeps_it():
    tables, (pool,) = make(Reach(), capacity=3)
    first = run(tables, [1] * 10, [10])
    block = first.tables[0][0]
    second, third = tables.fork(first), tables.fork(first)
    assert len(tables.grow(first, 10, 11)) == 1
    assert len(tables.grow(second, 10, 11)) == 1
    assert tables.grow(third, 10, 11) == []
    assert third.tables == [[block]]
    assert pool.available == 0


def test_a_shared_block_is_not_written_where_there_is_none_to_copy_it_to():
    tables, (pool,) = make(Reach(), capacity=1)
    first = run(tables, [1] * 10, [10])
    second = tables.fork(first)
    assert tables.grow(second, 10, 11) is None
    assert second.tables == first.tables
    tables.release(first)
    assert tables.grow(second, 10, 11) == []
    assert pool.in_use == 1


def test_of_a_released_sequence_the_beginning_is_kept_longest():
    tokens = list(range(96))
    tables, (pool,) = make(Reach(), capacity=3)
    tables.release(run(tables, tokens, [96]))
    pool.allocate()
    assert [pool.knows(name) for name in chain(tokens)] == [True, True, False]


def test_forks_that_part_are_published_under_their_own_names():
    tables, (pool,) = make(Reach(), step_tokens=32)
    both = [1] * 20
    first = run(tables, both, [20])
    second = tables.fork(first)
    for blocks, token in ((first, 2), (second, 3)):
        tokens = both + [token] * 12
        tables.grow(blocks, 20, 32)
        tables.publish(blocks, tokens, 32)
        assert [pool.knows(name) for name in chain(tokens)] == [True]
    assert first.digests != second.digests


def test_growing_changes_nothing_where_one_group_has_too_few_blocks():
    reach = Reach(), Reach(32)
    pools = [BlockPool(4), BlockPool(1)]
    tables = BlockTables(reach, pools, step_tokens=64)
    blocks = tables.new([])
    assert tables.grow(blocks, 0, 33) is None
    assert blocks.tables == [[], []]
    assert [pool.in_use for pool in pools] == [0, 0]
    assert tables.grow(blocks, 0, 32) == []


class TestSizes:
    @pytest.mark.parametrize("head_dim", [2, 6, 24, 48, 64, 80, 96, 112, 128, 256])
    @pytest.mark.parametrize("v_bits", KV_BITS)
    @pytest.mark.parametrize("k_bits", KV_BITS)
    def test_block_bytes_are_those_of_the_tensors(self, k_bits, v_bits, head_dim):
        kv_format = KVFormat(k_bits, v_bits)
        sides = [
            KVSide.allocate(
                bits,
                is_keys=is_keys,
                heads=(3, head_dim),
                blocks=5,
                slots=2,
                half=torch.float16,
                device=torch.device("cpu"),
            )
            for bits, is_keys in ((k_bits, True), (v_bits, False))
        ]
        stored = sum(tensor.nbytes for side in sides for tensor in side.tensors())
        opened = sum(side.open.nbytes for side in sides if side.open is not None)
        assert stored == 5 * kv_format.block_bytes(3, head_dim)
        assert opened == 2 * kv_format.open_bytes(3, head_dim)
        assert sum(side.nbytes for side in sides) == stored + opened
        assert all(tensor.shape[0] == 5 for side in sides for tensor in side.tensors())

    @pytest.mark.parametrize("bits", [8, 4])
    def test_an_odd_head_dim_has_sizes_too_if_the_format_takes_it(self, bits):
        assert KVFormat(8, 8).block_bytes(1, 5) == 2 * (32 * 5 + 2 * 32)

    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
    @pytest.mark.parametrize("bits", [32, 16])
    def test_floats_take_two_times_layers_heads_channels_tokens_and_bytes(self, bits, head_dim):
        layers, kv_heads, blocks = 3, 2, 7
        expected = 2 * layers * kv_heads * head_dim * (blocks * 32) * bits // 8
        assert layers * blocks * KVFormat(bits, bits).block_bytes(kv_heads, head_dim) == expected

    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
    def test_8_bits_add_a_scale_per_token_and_head(self, head_dim):
        layers, kv_heads, blocks = 3, 2, 7
        elements = 2 * layers * kv_heads * head_dim * blocks * 32
        scales = 2 * layers * kv_heads * blocks * 32
        size = layers * blocks * KVFormat(8, 8).block_bytes(kv_heads, head_dim)
        assert size == elements + 2 * scales
        assert size < 0.56 * (2 * elements)

    @pytest.mark.parametrize(
        ("head_dim", "group", "share"),
        [(64, 32, 0.32), (80, 40, 0.32), (96, 32, 0.32), (128, 32, 0.32)],
    )
    def test_4_bits_add_scales_and_minimums_per_channel_and_group(self, head_dim, group, share):
        layers, kv_heads, blocks = 3, 2, 7
        heads = layers * kv_heads * blocks
        elements = 2 * heads * head_dim * 32
        of_keys, of_values = heads * head_dim, heads * 32 * head_dim // group
        size = layers * blocks * KVFormat(4, 4).block_bytes(kv_heads, head_dim)
        assert value_group(head_dim) == group
        assert size == elements // 2 + 2 * 2 * (of_keys + of_values)
        assert size < share * (2 * elements)
