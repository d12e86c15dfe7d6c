"""The device runs out of memory in the middle: less runs at once, and nobody's tokens change."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from qinfer.cache.tables import Reach
from tests.test_scheduler import add, alone, finish, make_engine, words

ERRORS = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
)


def full(at):
    """Out of memory in these steps, of each kind in turn."""
    return dict(zip(at, itertools.cycle(ERRORS), strict=False))


def warned(engine):
    """Collects what the engine says."""
    said: list[str] = []
    engine.warn = said.append
    return said


def run(engine):
    """Run to the end; whatever was returned, in order."""
    returned = []
    for _ in range(5000):
        if not engine.scheduler.order_of_unfinished():
            return returned
        returned += engine.step()
    raise AssertionError("no end in sight")


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("reaches", [(Reach(),), (Reach(), Reach(40, 4))])
@pytest.mark.parametrize("at", [[1], [2], [3, 4], [5, 9, 30], [1, 2, 3, 40]])
def test_every_sequence_gets_the_tokens_it_gets_without(at, reaches, opens):
    engine = make_engine(
        reaches, opens=opens, fails=full(at), max_sequences=32, step_tokens=256, blocks=64
    )
    said = warned(engine)
    sequences = [add(engine, words(40, first=i // 2), 30, seed=i) for i in range(12)]
    finish(engine, *sequences)
    assert [s.finish_reason for s in sequences] == ["length"] * 12
    assert engine.scheduler.max_sequences == 32 >> len(at)
    assert engine.scheduler.step_tokens == max(256 >> len(at), 32)
    assert len(said) == len(at)


@pytest.mark.parametrize("error", ERRORS, ids=["python", "torch", "torch on a CPU"])
def test_concurrency_and_step_are_halved_and_a_sentence_says_so(error):
    engine = make_engine(fails={3: error}, max_sequences=8, step_tokens=100)
    said = warned(engine)
    sequences = [add(engine, words(10, first=i), 20, seed=i) for i in range(8)]
    finish(engine, *sequences)
    assert (engine.scheduler.max_sequences, engine.scheduler.step_tokens) == (4, 50)
    assert said == ["out of memory; going on with 4 sequences and 50 tokens at once"]


def test_the_step_that_failed_returns_nothing_and_leaves_nobody_in_the_cache():
    engine = make_engine(fails=full([2]), max_sequences=4)
    sequences = [add(engine, words(10, first=i), 20, seed=i) for i in range(3)]
    assert len(engine.step()) == 3
    assert engine.step() == []
    assert engine.scheduler.running == []
    assert list(engine.scheduler.waiting) == sequences
    assert engine.stats.kv_used == 0
    finish(engine, *sequences)


def test_a_step_that_is_small_already_stays_as_it_is():
    engine = make_engine(fails=full([2]), max_sequences=4, step_tokens=8)
    sequences = [add(engine, words(10, first=i), 20, seed=i) for i in range(4)]
    finish(engine, *sequences)
    assert (engine.scheduler.max_sequences, engine.scheduler.step_tokens) == (2, 8)


def test_at_one_sequence_and_the_smallest_step_it_ends_with_error_and_others_go_on():
    engine = make_engine(fails=full([5]), max_sequences=1, step_tokens=32)
    said = warned(engine)
    first, second, third = (add(engine, words(10, first=i), 20, seed=i) for i in range(3))
    returned = run(engine)
    assert first.finish_reason == "error"
    assert "out of memory" in str(first.error)
    assert "--ctx-size" in first.error.hint
    assert first.new_tokens == 4
    assert first in returned
    assert first.last_token_s is not None
    assert said == []
    for seed, sequence in ((1, second), (2, third)):
        expected = alone(words(10, first=seed), seed, 20, engine.cache.prefixes)
        assert sequence.token_ids == expected
        assert sequence.finish_reason == "length"


def test_memory_that_never_suffices_ends_all_with_errors():
    engine = make_engine(fails=full(range(1, 1000)), max_sequences=8, step_tokens=256)
    said = warned(engine)
    sequences = [add(engine, words(10, first=i // 2), 20, seed=i) for i in range(6)]
    returned = run(engine)
    assert returned == sequences
    assert all(s.finish_reason == "error" and s.error is not None for s in sequences)
    assert all((s.blocks, s.slot) == (None, None) for s in sequences)
    assert [tuple(map(int, re.findall(r"\d+", text))) for text in said] == [
        (4, 128),
        (2, 64),
        (1, 32),
    ]
    assert all(pool.in_use == 0 for pool in engine.cache.pools)


def test_a_long_prompt_goes_on_in_smaller_chunks():
    engine = make_engine(fails=full([2, 3]), max_sequences=1, step_tokens=128, context_tokens=400)
    sequence = add(engine, words(300), 5)
    finish(engine, sequence)
    assert sequence.finish_reason == "length"
    assert engine.scheduler.step_tokens == 32


def test_choices_of_a_prompt_that_failed_are_still_choices_of_it():
    engine = make_engine(fails=full([1]), max_sequences=8)
    sequences = [add(engine, words(40), 20, seed=i) for i in range(3)]
    finish(engine, *sequences)
    assert engine.scheduler.events["forks"] == 2


def test_choices_go_on_where_the_first_one_ended_with_error():
    engine = make_engine(fails=full([2]), max_sequences=1, step_tokens=32)
    sequences = [add(engine, words(40), 20, seed=i) for i in range(3)]
    run(engine)
    assert [s.finish_reason for s in sequences] == ["error", "length", "length"]
    for seed in (1, 2):
        expected = alone(words(40), seed, 20, engine.cache.prefixes)
        assert sequences[seed].token_ids == expected


def test_who_waits_when_memory_runs_out_does_not_overtake():
    engine = make_engine(fails=full([4]), max_sequences=4, step_tokens=8)
    sequences = [add(engine, words(30, first=i), 10, seed=i) for i in range(4)]
    finish(engine, *sequences)
    ends = [s.last_token_s for s in sequences]
    assert ends == sorted(ends)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("out of memory"),
    ],
)
def test_other_errors_pass_through(error):
    engine = make_engine(fails={2: error})
    said = warned(engine)
    add(engine, words(10), 20)
    engine.step()
    with pytest.raises(type(error), match=re.escape(str(error))):
        engine.step()
    assert said == []
    assert engine.scheduler.max_sequences == 4
