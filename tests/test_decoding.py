"""Decoding over fixed buffers gives what steps of any shape give.

On a CPU it is one call, on a GPU it is captured.
"""

import gc
import itertools
import weakref

import pytest
import torch

from qinfer.engine.decoding import Decoding, _FixedStep
from qinfer.models import rope
from qinfer.models.decoder import Decoder
from qinfer.ops.cpu.ops import CPUOps
from qinfer.sampling import SamplingParams
from tests.engines import engine_of

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
PENALIZED = SamplingParams(temperature=0, repetition_penalty=1.3)
NAMES = ["llama", "gpt2", "mistral"]


class FixedOps(CPUOps):
    """The CPU's operations in decoding steps as a GPU has them."""

    def __init__(self):
        super().__init__()
        self.fixed_steps = True

    def whole_step(self, blocks, tables, head):
        return None


EITHER = pytest.mark.parametrize("kind", [FixedOps, CPUOps])


def flexible(directory, **options):
    """An engine whose steps have any shape."""
    engine = engine_of(directory, CPUOps(), **options)
    engine.decode_with(None)
    return engine


def run(engine, jobs):
    """(prompt, params, max_tokens) → the tokens of each."""
    sequences = [engine.add(prompt, params, count) for prompt, params, count in jobs]
    while engine.stats.running or engine.stats.waiting:
        engine.step()
    assert all(sequence.error is None for sequence in sequences)
    return [sequence.token_ids for sequence in sequences]


def prompt(length, seed):
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


JOBS = [
    (prompt(5, 0), GREEDY, 70),
    (prompt(31, 1), GREEDY, 3),
    (prompt(40, 2), GREEDY, 33),
    (prompt(1, 3), GREEDY, 64),
    (prompt(64, 4), GREEDY, 20),
]


@pytest.fixture
def counted(monkeypatch):
    """How many steps were launched, and how many of them ahead."""
    counts = {"launch": 0, "launch_ahead": 0}

    def count(name):
        function = getattr(Decoding, name)

        def counting(self, argument):
            flight = function(self, argument)
            counts[name] += flight is not None
            return flight

        monkeypatch.setattr(Decoding, name, counting)

    for name in counts:
        count(name)
    return counts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_tokens_are_the_same(tiny_model, counted, name, bits):
    directory = tiny_model(name)
    expected = run(flexible(directory, bits=bits), JOBS)
    assert counted["launch"] == 0
    assert run(engine_of(directory, FixedOps(), bits=bits), JOBS) == expected
    assert counted["launch_ahead"] > counted["launch"] > 0
    counted.update(launch=0, launch_ahead=0)
    assert run(engine_of(directory, CPUOps(), bits=bits), JOBS) == expected
    assert counted["launch"] > counted["launch_ahead"] == 0


@EITHER
@pytest.mark.parametrize("params", [SEEDED, PENALIZED])
def test_what_the_host_samples_is_not_launched_ahead(tiny_model, counted, params, kind):
    directory = tiny_model("llama")
    jobs = [(JOBS[0][0], params, 20), (JOBS[1][0], GREEDY, 20)]
    expected = run(flexible(directory), jobs)
    assert run(engine_of(directory, kind()), jobs) == expected
    if kind is FixedOps and params is SEEDED:
        assert counted["launch_ahead"] > counted["launch"] > 0
    else:
        assert counted["launch"] > counted["launch_ahead"] == 0


@EITHER
@pytest.mark.parametrize("embeds_on_device", [True, False])
def test_sequences_that_are_drawn_differently_do_not_mix(
    tiny_model, monkeypatch, kind, embeds_on_device
):
    """Some on the device and some on the host, over blocks, ends and arrivals."""
    monkeypatch.setattr(Decoder, "embeds_on_device", embeds_on_device)
    directory = tiny_model("llama")
    ways = [
        {"temperature": 1.0, "top_p": None},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 0.7, "repetition_penalty": 1.2},
        {"temperature": 0},
        {"temperature": 1.3, "min_p": 0.05},
        {},
    ]
    jobs = [
        (prompt(3 + 7 * i, i), SamplingParams(**way, seed=i), 35 + 9 * i)
        for i, way in enumerate(ways)
    ]
    alone = [run(flexible(directory), [job])[0] for job in jobs]
    assert run(engine_of(directory, kind(), max_sequences=3), jobs) == alone


def test_with_embeddings_on_the_host_nothing_is_launched_ahead(tiny_model, counted, monkeypatch):
    directory = tiny_model("gpt2")
    expected = run(flexible(directory), JOBS)
    monkeypatch.setattr(Decoder, "embeds_on_device", False)
    assert run(engine_of(directory, FixedOps()), JOBS) == expected
    assert counted["launch"] > counted["launch_ahead"] == 0


@EITHER
def test_a_stop_token_that_was_not_foreseen_ends_a_sequence(tiny_model, kind):
    directory = tiny_model("llama")
    whole = run(flexible(directory), JOBS)
    stop = whole[0][len(JOBS[0][0]) + 10]
    expected = run(flexible(directory, stop_ids={stop}), JOBS)
    assert expected != whole
    assert run(engine_of(directory, kind(), stop_ids={stop}), JOBS) == expected


@EITHER
def test_sequences_that_are_cancelled_or_come_later_change_nothing(tiny_model, kind):
    directory = tiny_model("llama")
    (expected,) = run(flexible(directory), JOBS[:1])
    engine = engine_of(directory, kind())
    first, second = (engine.add(*job) for job in JOBS[:3:2])
    for _ in range(9):
        engine.step()
    engine.cancel(second)
    for _ in range(3):
        engine.step()
    engine.add(*JOBS[4])
    while engine.stats.running or engine.stats.waiting:
        engine.step()
    assert first.token_ids == expected


@EITHER
def test_choices_of_one_prompt_part_where_they_are_sampled(tiny_model, kind):
    directory = tiny_model("llama")
    jobs = [(JOBS[0][0], SamplingParams(temperature=1.0, seed=i), 20) for i in range(3)]
    jobs.append((JOBS[0][0], GREEDY, 40))
    expected = run(flexible(directory), jobs)
    assert run(engine_of(directory, kind()), jobs) == expected


@EITHER
def test_a_context_that_slides_outgrows_what_was_reserved(tiny_model, kind):
    directory = tiny_model("llama")
    options = {"context_tokens": 64, "context_policy": "sinks", "bits": 8}
    jobs = [(prompt(20, 5), GREEDY, 300)]
    expected = run(flexible(directory, **options), jobs)
    assert run(engine_of(directory, kind(), **options), jobs) == expected


@EITHER
def test_blocks_that_run_out_are_given_up_and_computed_again(tiny_model, kind):
    directory = tiny_model("llama")
    few = {"memory_bytes": None}
    engine = engine_of(directory, kind(), **few)
    for pool in (group[1] for group in engine.scheduler.tables._groups):
        del pool._free[: len(pool._free) - 4]
    expected = run(flexible(directory), JOBS)
    assert run(engine, JOBS) == expected
    assert engine.stats.preemptions > 0


@EITHER
def test_rotary_tables_that_have_moved_are_not_read_where_they_were(tiny_model, monkeypatch, kind):
    monkeypatch.setattr(rope, "_PIECE", 16)
    directory = tiny_model("llama")
    options = {"context_tokens": 32, "context_policy": "slide", "max_sequences": 2}
    jobs = [(prompt(9, 6), GREEDY, 150), (prompt(5, 7), GREEDY, 4), (prompt(31, 8), GREEDY, 90)]
    expected = run(flexible(directory, **options), jobs)
    assert run(engine_of(directory, kind(), **options), jobs) == expected


def test_models_that_the_kernels_do_not_take_run_in_steps_of_any_shape(tiny_model, monkeypatch):
    directory = tiny_model("llama")
    expected = run(flexible(directory), JOBS)
    monkeypatch.setattr(CPUOps, "whole_blocks", lambda self, parameters, norm: None)
    engine = engine_of(directory, CPUOps())
    assert engine.decoding is None
    assert run(engine, JOBS) == expected


@EITHER
def test_nan_is_noticed_and_blamed(tiny_model, kind):
    engine = engine_of(tiny_model("llama"), kind())
    sequences = [engine.add(*JOBS[0]), engine.add(*JOBS[2])]
    for _ in range(5):
        engine.step()
    engine.decoder.blocks[1].parameters.attention_norm.weight.fill_(float("nan"))
    while engine.stats.running or engine.stats.waiting:
        engine.step()
    for sequence in sequences:
        assert sequence.finish_reason == "error"
        assert "layer 1" in str(sequence.error)


@EITHER
def test_choices_of_several_prompts_do_not_swap_their_logits(tiny_model, kind):
    directory = tiny_model("llama")
    jobs = [
        (prompt(5 + i, i), SamplingParams(temperature=1.0, seed=10 * i + j), 12)
        for i in range(2)
        for j in range(3)
    ]
    alone = [run(flexible(directory), [job])[0] for job in jobs]
    assert run(engine_of(directory, kind()), jobs) == alone


@EITHER
@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALIZED])
def test_padding_of_the_vocabulary_is_never_chosen(tiny_model, kind, params):
    directory, known = tiny_model("llama"), 40

    def tokens(engine):
        engine.vocab_size = known
        if engine.decoding is not None:
            engine.decoding.vocab_size = known
        return run(engine, [(prompt(5, i), params, 20) for i in range(3)])

    expected = tokens(flexible(directory))
    assert all(max(ids[5:]) < known for ids in expected)
    assert expected != run(flexible(directory), [(prompt(5, i), params, 20) for i in range(3)])
    assert tokens(engine_of(directory, kind())) == expected


@EITHER
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_nan_in_a_prompt_is_noticed(tiny_model, kind, params):
    engine = engine_of(tiny_model("llama"), kind())
    engine.decoder.blocks[1].parameters.attention_norm.weight.fill_(float("nan"))
    sequence = engine.add(JOBS[0][0], params, 5)
    assert engine.step() == [sequence]
    assert (sequence.new_tokens, sequence.finish_reason) == (0, "error")
    assert "layer 1" in str(sequence.error)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_memory_that_runs_out_while_tokens_are_drawn_changes_none(tiny_model, monkeypatch, at):
    directory = tiny_model("llama")
    jobs = [(prompt(5, 0), SamplingParams(temperature=1.0, seed=i), 6) for i in range(3)]
    expected = run(flexible(directory), jobs)
    engine = engine_of(directory, FixedOps(), max_sequences=4)
    draw, calls, warnings = engine.decoder.ops.draw, itertools.count(1), []
    engine.warn = warnings.append

    def failing(*arguments):
        if next(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return draw(*arguments)

    monkeypatch.setattr(engine.decoder.ops, "draw", failing)
    sequences = [engine.add(*job) for job in jobs]
    for _ in range(50):
        engine.step()
    assert [sequence.token_ids for sequence in sequences] == expected
    assert len(warnings) == 1


def test_who_ends_in_a_step_that_then_runs_out_of_memory_is_returned(tiny_model, monkeypatch):
    engine = engine_of(tiny_model("llama"), FixedOps(), max_sequences=4)
    first, second = (engine.add(prompt(5, i), SEEDED, 3 + 6 * i) for i in range(2))
    for _ in range(2):
        engine.step()
    draw = engine.decoder.ops.draw

    def broken(*arguments):
        tokens, _ = draw(*arguments)
        return tokens, torch.tensor([False, True])

    def replay(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    engine._ahead = None
    monkeypatch.setattr(engine.decoder.ops, "draw", broken)
    monkeypatch.setattr(engine, "_replay", replay)
    assert engine.step() == [first]
    assert first.finish_reason == "length"
    monkeypatch.undo()
    while engine.stats.waiting or engine.stats.running:
        engine.step()
    assert second.finish_reason == "length"


def test_where_capturing_fails_a_warning_says_so_and_it_goes_on(tiny_model, monkeypatch):
    directory = tiny_model("llama")
    calls = []
    for name in ("current_stream", "Stream", "set_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *its, name=name: calls.append(name) or name)

    def capture(self, stream, pool):
        assert (stream, pool) == ("Stream", None)
        raise RuntimeError("operation not permitted\nwhen a stream is capturing")

    monkeypatch.setattr(_FixedStep, "capture", capture)
    engine = engine_of(directory, FixedOps())
    engine.decoding.graphs = True
    warnings = []
    engine.warn = warnings.append
    assert run(engine, JOBS) == run(flexible(directory), JOBS)
    (warning,) = warnings
    assert warning.endswith("CUDA graph (operation not permitted); going on without")
    assert calls == ["current_stream", "Stream", "set_stream", "synchronize"]


@EITHER
def test_an_engine_that_is_dropped_is_gone_at_once(tiny_model, kind):
    """Its cache may be most of the memory, and the next one is about to be made."""
    engine = engine_of(tiny_model("llama"), kind())
    run(engine, JOBS[:2])
    cache = weakref.ref(engine.cache)
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_captured_step_gives_what_single_launches_give(tiny_model, name, bits):
    from qinfer.ops.cuda.ops import CUDAOps

    def tokens(*, graphs):
        ops = CUDAOps(torch.device("cuda", 0), torch.float32, half=torch.float16)
        engine = engine_of(tiny_model(name), ops, bits=bits, graphs=graphs)
        warnings = []
        engine.warn = warnings.append
        found = run(engine, [*JOBS, *((prompt, SEEDED, count) for prompt, _, count in JOBS)])
        assert not warnings
        assert engine.decoding.graphs == graphs
        return found

    assert tokens(graphs=True) == tokens(graphs=False)
