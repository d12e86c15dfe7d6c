"""The scheduler under the real engine, over a decoder whose tokens depend on all before them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from qinfer.cache.blocks import BlockPool
from qinfer.cache.tables import BlockTables, Reach, blocks_for
from qinfer.engine.engine import Engine
from qinfer.engine.scheduler import Scheduler
from qinfer.engine.sequence import Sequence
from qinfer.sampling import SamplingParams
from tests.paged_fakes import VOCAB, FakeCache, FakeDecoder, FakeSampler, Prefixes

GREEDY = SamplingParams(temperature=0)
STOP = 0
GROUPS = (
    (Reach(),),
    (Reach(48),),
    (Reach(40, 4),),
    (Reach(), Reach(16)),
    (Reach(33), Reach(), Reach(64, 36)),
    (Reach(1), Reach(2)),
)


def alone(
    prompt: list[int], seed: int, max_tokens: int, prefixes: Prefixes, *, stop: int | None = None
) -> list[int]:
    """The sequence's tokens without scheduler, cache and others."""
    sampler, tokens = FakeSampler(seed), list(prompt)
    prefix = prefixes.of(tokens)[-1]
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(sampler.choose(prefixes.next(prefix)))
        prefix = prefixes.extend(prefix, tokens[-1])
        if tokens[-1] == stop:
            break
    return tokens


class Watched(Scheduler):
    """Checks each schedule against what was there before it.

    Attributes:
        order: Sequences in the order of their arrival.
        events: How often what happened.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.order: dict[Sequence, int] = {}
        self.events: Counter[str] = Counter()
        self.slots = self.max_sequences

    def add(self, sequence):
        self.order[sequence] = len(self.order)
        super().add(sequence)

    def schedule(self):
        decoding = [s for s in self.running if s.pending_tokens == 1]
        prefilling = [s for s in self.running if s.pending_tokens > 1]
        there = set(self.running)
        chunks = super().schedule()
        ran = [chunk.sequence for chunk in chunks]
        self._check_chunks(chunks)
        self._check_order()
        assert all(s in ran or s.blocks is None for s in decoding)
        assert all(s in ran or s.blocks is None for s in prefilling[:1])
        if self.order_of_unfinished():
            assert ran[0] is min(self.order_of_unfinished(), key=self.order.__getitem__)
        else:
            assert not chunks
        for s in set(ran) - there:
            self.events["reused"] += s.computed_tokens > 0
            self.events["resumed"] += s.new_tokens > 0
        self.events["copies"] += sum(len(chunk.copies) for chunk in chunks)
        self.events["mixed"] += len({chunk.tokens > 1 for chunk in chunks}) == 2
        return chunks

    def order_of_unfinished(self):
        return [*self.running, *self.waiting]

    def _check_chunks(self, chunks):
        ran = [chunk.sequence for chunk in chunks]
        assert len(set(ran)) == len(ran)
        assert set(ran) <= set(self.running)
        assert all(s.finish_reason is None for s in ran)
        assert sum(chunk.tokens for chunk in chunks) <= self.step_tokens
        assert all(1 <= chunk.tokens <= chunk.sequence.pending_tokens for chunk in chunks)

    def _check_order(self):
        assert len(self.running) <= self.max_sequences
        slots = [s.slot for s in self.running]
        assert len(set(slots)) == len(slots)
        assert all(slot in range(self.slots) for slot in slots)
        arrivals = [self.order[s] for s in (*self.running, *self.waiting)]
        assert arrivals == sorted(arrivals), "a sequence overtook one that came before"
        assert len(arrivals) == len(set(arrivals))
        for s in self.waiting:
            assert (s.blocks, s.slot, s.computed_tokens) == (None, None, 0)

    def fork(self, leader, follower):
        assert leader.token_ids == follower.token_ids
        assert leader.computed_tokens == len(leader.token_ids)
        forked = super().fork(leader, follower)
        self.events["forks"] += forked
        self.events["refused forks"] += not forked
        self._check_order()
        return forked


def make_engine(reaches=GROUPS[0], *, blocks=64, opens=False, retained=None, fails=None, **options):
    """An engine over fakes with a watched scheduler."""
    defaults = {"context_tokens": 200, "max_sequences": 4, "step_tokens": 32, "stop_ids": ()}
    options = defaults | options
    capacities = [blocks] * len(reaches) if isinstance(blocks, int) else blocks
    slots = options["max_sequences"]
    cache = FakeCache(reaches, capacities, slots=slots, opens=opens, retained=retained)
    engine = Engine(FakeDecoder(cache.prefixes, fails), cache, vocab_size=VOCAB, **options)
    step_tokens = engine.scheduler.step_tokens
    engine.scheduler = Watched(
        engine.scheduler.tables, max_sequences=slots, step_tokens=step_tokens
    )
    return engine


@dataclass
class Load:
    """Random prompts that arrive while others run, and what each gets alone."""

    engine: Engine
    random: random.Random
    context: int
    arrivals: int
    expected: dict[Sequence, list[int]] = field(default_factory=dict)
    cancelled: set[Sequence] = field(default_factory=set)
    steps: int = 0

    def prompt(self) -> list[int]:
        common = [1 + i % 5 for i in range(self.random.choice((0, 0, 0, 20, 32, 64, 70)))]
        own = [
            self.random.randrange(1, VOCAB) for _ in range(self.random.choice((1, 1, 3, 12, 40)))
        ]
        return (common + own)[: self.context - 5]

    def arrive(self) -> None:
        prompt = self.prompt()
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            seed = self.random.randrange(1000)
            limit = min(self.random.choice((1, 2, 10, 60, 120)), self.context - len(prompt))
            sequence = self.engine.add(prompt, GREEDY, limit)
            sequence.sampler = FakeSampler(seed)
            prefixes = self.engine.cache.prefixes
            self.expected[sequence] = alone(prompt, seed, limit, prefixes, stop=STOP)
            if self.random.random() < 0.2:
                self.step()

    def step(self) -> None:
        self.steps += 1
        before = {s: len(s.token_ids) for s in self.expected}
        advanced = self.engine.step()
        assert len(set(advanced)) == len(advanced)
        for sequence, length in before.items():
            grown = len(sequence.token_ids) - length
            assert grown == (sequence in advanced)
            wanted = self.expected[sequence]
            assert sequence.token_ids == wanted[: len(sequence.token_ids)]
        scheduler = self.engine.scheduler
        for sequence in advanced:
            ended = sequence.token_ids == self.expected[sequence]
            assert (sequence.finish_reason is not None) == ended
            assert (sequence in scheduler.running) != ended
            if ended:
                assert (sequence.blocks, sequence.slot) == (None, None)

    def disturb(self) -> None:
        scheduler, draw = self.engine.scheduler, self.random.random()
        unfinished = [s for s in self.expected if s.finish_reason is None]
        if draw < 0.02 and unfinished:
            victim = self.random.choice(unfinished)
            self.engine.cancel(victim)
            self.cancelled.add(victim)
            assert victim not in scheduler.order_of_unfinished()
        elif draw < 0.028 and scheduler.max_sequences > 1:
            scheduler.max_sequences -= 1
        elif draw < 0.04 and scheduler.running:
            for sequence in reversed(list(scheduler.running)):
                scheduler.preempt(sequence)

    def run(self, *, disturbed: bool) -> None:
        added = 0
        while added < self.arrivals or self.engine.scheduler.order_of_unfinished():
            if added < self.arrivals and self.random.random() < 0.5:
                self.arrive()
                added += 1
            if disturbed:
                self.disturb()
            self.step()
            assert self.steps < 100 * len(self.expected) + 1000, "no end in sight"
        assert self.engine.step() == []
        for sequence, tokens in self.expected.items():
            if sequence not in self.cancelled:
                assert sequence.token_ids == tokens
                assert sequence.finish_reason == ("stop" if tokens[-1] == STOP else "length")
        assert all(pool.in_use == 0 for pool in self.engine.cache.pools)


def random_load(seed: int) -> Load:
    """A random engine, small enough that its cache overflows, and its load."""
    chance = random.Random(seed)
    reaches = GROUPS[seed % len(GROUPS)]
    context, step = chance.choice((80, 150, 200)), chance.choice((4, 16, 32, 40, 100))
    most = chance.choice((1, 2, 4, 6))
    step = max(step, most)
    tight = chance.choice((0, 0, 1, 2, 6))
    engine = make_engine(
        reaches,
        blocks=[reach.most_blocks(context, step) + tight for reach in reaches],
        opens=chance.random() < 0.5,
        retained=chance.choice((None, 0, 2)),
        context_tokens=context,
        max_sequences=most,
        step_tokens=step,
        stop_ids={STOP},
    )
    return Load(engine, chance, context, arrivals=10)


LEAST_EVENTS = {
    False: {"preemptions": 10, "forks": 50, "refused forks": 50, "copies": 50, "reused": 100},
    True: {"preemptions": 100, "forks": 50, "resumed": 100, "cancelled": 50, "lowered": 5},
}


@pytest.mark.parametrize("disturbed", [False, True])
def test_under_random_load_every_sequence_gets_the_tokens_it_gets_alone(disturbed):
    events: Counter[str] = Counter()
    for seed in range(70):
        load = random_load(seed)
        most = load.engine.scheduler.max_sequences
        try:
            load.run(disturbed=disturbed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        events += load.engine.scheduler.events
        events["preemptions"] += load.engine.scheduler.preemptions
        events["cancelled"] += len(load.cancelled)
        events["lowered"] += load.engine.scheduler.max_sequences < most
    for event, least in LEAST_EVENTS[disturbed].items():
        assert events[event] >= least, f"too few {event} to test anything: {events}"


def add(engine, prompt, max_tokens=5, *, seed=0):
    sequence = engine.add(prompt, GREEDY, max_tokens)
    sequence.sampler = FakeSampler(seed)
    return sequence


def step_until(engine, condition):
    """Step until something is so, which it must be before all have ended."""
    while not condition():
        assert engine.scheduler.order_of_unfinished()
        engine.step()


def finish(engine, *sequences, seed=0):
    """Run to the end; what has ended got what it gets alone."""
    for _ in range(5000):
        if not engine.scheduler.order_of_unfinished():
            break
        engine.step()
    for number, sequence in enumerate(sequences):
        prompt = sequence.token_ids[: sequence.prompt_tokens]
        expected = alone(prompt, seed + number, sequence.max_tokens, engine.cache.prefixes)
        assert sequence.token_ids == expected, number
    assert all(pool.in_use == 0 for pool in engine.cache.pools)


def words(count, *, first=1):
    """Tokens that are not periodic in the length of a block."""
    return [1 + (first + i) % 11 for i in range(count)]


class TestChoices:
    """Several sequences of one prompt."""

    @pytest.mark.parametrize("opens", [False, True])
    @pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65])
    @pytest.mark.parametrize("reaches", GROUPS[:5])
    def test_a_prompt_is_computed_once_for_all_its_choices(self, length, reaches, opens):
        engine = make_engine(reaches, opens=opens)
        choices = [add(engine, words(length), 40, seed=i) for i in range(4)]
        step_until(engine, lambda: choices[0].new_tokens)
        assert engine.decoder.tokens == length
        assert [c.new_tokens for c in choices] == [1, 1, 1, 1]
        assert [c.reused_tokens for c in choices] == [0, length, length, length]
        assert engine.stats.reused_tokens == 3 * length
        finish(engine, *choices)
        assert engine.scheduler.events["forks"] == 3
        assert (engine.cache.copied > 0) == (length % 32 > 0)

    def test_one_that_comes_late_does_not_join_a_leader_that_has_gone_on(self):
        """It would take over the leader's own tokens; it waits for the one before it instead."""
        engine = make_engine(max_sequences=2)
        other = add(engine, words(3, first=5), 3, seed=0)
        first, second = (add(engine, words(40), 60, seed=i) for i in (1, 2))
        step_until(engine, lambda: first.new_tokens)
        assert second in engine.scheduler.waiting
        third = add(engine, words(40), 60, seed=3)
        finish(engine, other, first, second, third)

    def test_one_that_comes_late_joins_the_one_before_it(self):
        engine = make_engine(max_sequences=3)
        others = [add(engine, words(3, first=5), 4, seed=0)]
        others += [add(engine, words(3, first=6), 4, seed=1)]
        first, second = (add(engine, words(40), 9, seed=i) for i in (2, 3))
        step_until(engine, lambda: first.new_tokens)
        third = add(engine, words(40), 9, seed=4)
        assert third.leader is second
        finish(engine, *others, first, second, third)
        assert engine.scheduler.events["forks"] == 1
        assert third.reused_tokens == 40

    @pytest.mark.parametrize("when", ["waiting", "halfway", "decoding"])
    def test_the_others_go_on_without_a_leader_that_is_cancelled(self, when):
        engine = make_engine()
        choices = [add(engine, words(70), 20, seed=i) for i in range(3)]
        for _ in range({"waiting": 0, "halfway": 1, "decoding": 4}[when]):
            engine.step()
        engine.cancel(choices[0])
        finish(engine, *choices[1:], seed=1)
        assert choices[0].finish_reason is None

    def test_the_others_go_on_without_a_follower_that_is_cancelled(self):
        engine = make_engine()
        choices = [add(engine, words(70), 20, seed=i) for i in range(3)]
        engine.step()
        engine.cancel(choices[1])
        finish(engine, choices[0])
        assert choices[2].token_ids == alone(words(70), 2, 20, engine.cache.prefixes)
        assert engine.scheduler.events["forks"] == 1

    def test_a_leader_that_is_preempted_halfway_leads_when_it_is_back(self):
        engine = make_engine()
        choices = [add(engine, words(70), 20, seed=i) for i in range(3)]
        engine.step()
        engine.scheduler.preempt(choices[0])
        assert list(engine.scheduler.waiting) == choices
        finish(engine, *choices)
        assert engine.scheduler.events["forks"] == 2

    def test_where_there_is_no_room_to_fork_the_prompt_is_found_later(self):
        engine = make_engine(max_sequences=1)
        choices = [add(engine, words(70), 20, seed=i) for i in range(3)]
        finish(engine, *choices)
        assert engine.scheduler.events["refused forks"] == 2
        assert [c.reused_tokens for c in choices] == [0, 64, 64]

    def test_a_prompt_that_equals_another_and_its_output_is_no_choice_of_it(self):
        engine = make_engine()
        first = add(engine, words(40), 20)
        step_until(engine, lambda: first.new_tokens)
        second = add(engine, list(first.token_ids), 20, seed=1)
        assert second.leader is None
        finish(engine, first, second)

    def test_an_old_prompt_that_comes_again_is_no_choice_of_it(self):
        engine = make_engine()
        first = add(engine, words(40), 5)
        finish(engine, first)
        second = add(engine, words(40), 5, seed=1)
        assert second.leader is None
        finish(engine, second, seed=1)
        assert second.reused_tokens == 32


class TestReuse:
    def test_a_prompt_that_comes_again_is_computed_from_its_last_block_on(self):
        engine = make_engine()
        finish(engine, add(engine, words(100), 1))
        before = engine.decoder.tokens
        finish(engine, add(engine, words(100), 1))
        assert before == 100
        assert engine.decoder.tokens - before == 4
        assert engine.stats.reused_tokens == 96

    def test_of_a_prompt_of_whole_blocks_the_last_one_is_computed(self):
        engine = make_engine()
        finish(engine, add(engine, words(96), 1), add(engine, words(96), 1, seed=1))
        again = add(engine, words(96), 1)
        finish(engine, again)
        assert again.reused_tokens == 64

    def test_a_common_beginning_that_is_being_computed_is_waited_for(self):
        engine = make_engine(step_tokens=40)
        first = add(engine, [*words(96), 5, 5, 5], 10)
        second = add(engine, [*words(96), 6, 6], 10, seed=1)
        finish(engine, first, second)
        assert second.reused_tokens == 96

    def test_what_is_waited_for_may_be_given_up(self):
        engine = make_engine(step_tokens=40)
        first = add(engine, [*words(96), 5, 5, 5], 10)
        second = add(engine, [*words(96), 6, 6], 10, seed=1)
        engine.step()
        assert second in engine.scheduler.waiting
        engine.cancel(first)
        finish(engine, second, seed=1)
        assert second.reused_tokens == 32

    def test_a_preempted_sequence_finds_its_own_blocks_again(self):
        engine = make_engine()
        sequence = add(engine, words(100), 50)
        step_until(engine, lambda: sequence.new_tokens == 30)
        before, length = engine.decoder.tokens, len(sequence.token_ids)
        engine.scheduler.preempt(sequence)
        engine.step()
        assert engine.decoder.tokens - before == length - 128
        finish(engine, sequence)

    def test_its_own_blocks_do_not_count_as_reused(self):
        engine = make_engine()
        sequence = add(engine, words(100), 5)
        engine.step()
        engine.step()
        engine.scheduler.preempt(sequence)
        engine.step()
        assert sequence.computed_tokens > 64
        assert sequence.reused_tokens == engine.stats.reused_tokens == 0
        finish(engine, sequence)


class TestOrder:
    def test_decoding_goes_on_at_every_step_of_a_long_prompt(self):
        engine = make_engine(step_tokens=8, max_sequences=3)
        decoding = [add(engine, words(3, first=i), 40, seed=i) for i in range(2)]
        step_until(engine, lambda: all(s.new_tokens for s in decoding))
        long = add(engine, words(120), 5, seed=2)
        steps = 0
        while not long.new_tokens:
            before = [s.new_tokens for s in decoding]
            engine.step()
            steps += 1
            assert [s.new_tokens for s in decoding] == [n + 1 for n in before]
        assert steps == 120 // 6
        finish(engine, *decoding, long)

    def test_a_prompt_too_large_for_now_is_not_overtaken(self):
        engine = make_engine(blocks=7)
        first = add(engine, words(100, first=3), 30)
        for _ in range(4):
            engine.step()
        large = add(engine, words(150), 5, seed=1)
        small = add(engine, words(3), 5, seed=2)
        engine.step()
        assert list(engine.scheduler.waiting) == [large, small]
        finish(engine, first, large, small)
        assert first.last_token_s < large.first_token_s < small.first_token_s

    def test_the_one_that_came_last_gives_way(self):
        engine = make_engine(blocks=7)
        sequences = [add(engine, words(10, first=i), 150, seed=i) for i in range(3)]
        step_until(engine, lambda: engine.scheduler.preemptions)
        assert engine.scheduler.running == sequences[:2]
        assert list(engine.scheduler.waiting) == sequences[2:]
        finish(engine, *sequences)

    def test_lowering_the_most_sequences_preempts_the_last_ones(self):
        engine = make_engine(max_sequences=4)
        sequences = [add(engine, words(10, first=i), 40, seed=i) for i in range(4)]
        for _ in range(5):
            engine.step()
        engine.scheduler.max_sequences = 2
        engine.step()
        assert engine.scheduler.running == sequences[:2]
        assert list(engine.scheduler.waiting) == sequences[2:]
        engine.scheduler.max_sequences = 1
        finish(engine, *sequences)

    def test_the_steps_of_many_are_bounded_by_their_tokens(self):
        engine = make_engine(blocks=7, max_sequences=4)
        sequences = [add(engine, words(40, first=i), 30, seed=i) for i in range(10)]
        steps = 0
        while engine.scheduler.order_of_unfinished():
            engine.step()
            steps += 1
        assert steps <= 10 * (30 + 40 // 32 + 1)
        finish(engine, *sequences)


class TestPlainScheduler:
    """Without an engine."""

    def make(self, *, blocks=8, max_sequences=2, step_tokens=32):
        tables = BlockTables([Reach()], [BlockPool(blocks)], step_tokens=step_tokens)
        return Scheduler(tables, max_sequences=max_sequences, step_tokens=step_tokens)

    def test_nothing_is_scheduled_where_nothing_waits_or_runs(self):
        assert self.make().schedule() == []

    def test_a_step_has_a_token_for_every_sequence_at_least(self):
        assert self.make(max_sequences=50, step_tokens=8).step_tokens == 50

    def test_removing_twice_or_a_stranger_does_nothing(self):
        scheduler, sequence = self.make(), Sequence([1], 1, FakeSampler(0))
        scheduler.remove(sequence)
        scheduler.add(sequence)
        (chunk,) = scheduler.schedule()
        assert chunk == (sequence, 1, [])
        scheduler.remove(sequence)
        scheduler.remove(sequence)
        assert scheduler.schedule() == []

    def test_a_prompt_is_cut_into_chunks_of_the_budget(self):
        scheduler, sequence = self.make(), Sequence(words(70), 1, FakeSampler(0))
        scheduler.add(sequence)
        counts = []
        while sequence.pending_tokens:
            (chunk,) = scheduler.schedule()
            counts.append(chunk.tokens)
            sequence.computed_tokens += chunk.tokens
            assert len(sequence.blocks.tables[0]) == blocks_for(sequence.computed_tokens)
        assert counts == [32, 32, 6]

    def test_a_sequence_that_does_not_run_is_not_forked(self):
        scheduler = self.make()
        leader, follower = (Sequence([1, 2], 5, FakeSampler(i)) for i in range(2))
        scheduler.add(leader)
        scheduler.add(follower)
        assert not scheduler.fork(leader, follower)
        assert list(scheduler.waiting) == [leader, follower]
