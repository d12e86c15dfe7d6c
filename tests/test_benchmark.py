"""Benchmarks run what they say and count it exactly; no test asserts a time."""

import itertools
import shutil
from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file

from qinfer import benchmark
from qinfer.benchmark import Benchmark, Case, Spread, cases_of, require_memory
from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.config import ModelConfig
from qinfer.engine import memory
from qinfer.errors import NumericsError, QInferError
from qinfer.generation import LanguageModel
from qinfer.ops import bandwidth
from qinfer.quant.kv import KVFormat
from tests.test_eval import damage

LINEAR = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96  # weights of a block of the tiny Llama
CPU = torch.device("cpu")


def open_model(directory):
    return LanguageModel(directory, device="cpu", context_tokens=1, max_sequences=1)


def plan(model, *bits, **lists):
    lists = {"prompts": [0], "new_tokens": [0], "depths": [0], "batches": [1]} | lists
    return cases_of(model.config, [KVFormat(n, n) for n in bits or (16,)], **lists)


@pytest.fixture(scope="module")
def llama(tiny_model):
    return open_model(tiny_model("llama"))


@pytest.fixture
def passes(monkeypatch):
    """`passes(model)`: each pass to come, as (tokens in the cache, new ones) per sequence."""

    def spy(model):
        found, decoder = [], model.engine.decoder

        def run(batch, cache, **options):
            counts = batch.offsets.diff().tolist()
            found.append(list(zip(batch.starts.tolist(), counts, strict=True)))
            return type(decoder).forward(decoder, batch, cache, **options)

        monkeypatch.setattr(decoder, "forward", run)
        monkeypatch.setattr(decoder, "whole_step", None)
        return found

    return spy


class TestCases:
    def test_all_combinations_with_formats_outermost(self, llama):
        found = plan(llama, 16, 8, prompts=[8, 0], new_tokens=[4], depths=[0, 32], batches=[1, 2])
        assert len(found) == 2 * 2 * 2 * 2
        half, eight = KVFormat(16, 16), KVFormat(8, 8)
        assert found[:3] == [
            Case("prefill", 8, 0, 1, half),
            Case("decode", 4, 0, 1, half),
            Case("prefill", 8, 0, 2, half),
        ]
        assert found[-1] == Case("decode", 4, 32, 2, eight)

    def test_depths_are_whole_blocks(self, llama):
        found = plan(llama, new_tokens=[1], depths=[0, 1, 31, 32, 33])
        assert [case.depth for case in found] == [0, 32, 64]

    @pytest.mark.parametrize(("depth", "tokens"), [(0, 255), (100, 127), (224, 31)])
    def test_a_prompt_is_as_long_as_the_model_allows(self, llama, depth, tokens):
        (case,) = plan(llama, prompts=None, depths=[0, depth])[-1:]
        assert (case.tokens, case.context_tokens) == (tokens, case.depth + tokens + 1)

    @pytest.mark.parametrize("lists", [{"prompts": [224]}, {"new_tokens": [223]}], ids=str)
    def test_the_context_is_the_limit(self, llama, lists):
        (name, (tokens,)) = next(iter(lists.items()))
        assert plan(llama, depths=[32], **{name: [tokens - 1]})
        with pytest.raises(QInferError, match=r"takes a context of 257 .* 256") as error:
            plan(llama, depths=[32], **lists)
        assert error.value.hint.endswith("by 1.")

    def test_memory_is_the_limit(self, llama, monkeypatch):
        cases = plan(llama, new_tokens=[8], depths=[64], batches=[1, 8])
        monkeypatch.setattr(benchmark, "default_budget", lambda device: 1 << 40)
        require_memory(llama.directory, llama.config, cases, device="cpu")
        monkeypatch.setattr(benchmark, "default_budget", lambda device: 1 << 20)
        with pytest.raises(QInferError, match=r"8 sequences of 74 tokens take 0\.00 GB") as error:
            require_memory(llama.directory, llama.config, cases, device="cpu")
        assert "--batch" in error.value.hint


class TestCounts:
    @pytest.mark.parametrize("window", [None, 1, 5, 100])
    def test_tokens_seen(self, window):
        for first, count in [(0, 1), (0, 9), (3, 4), (40, 7)]:
            positions = range(first, first + count)
            expected = sum(
                len([k for k in range(p + 1) if window is None or p - k < window])
                for p in positions
            )
            assert benchmark.seen_tokens(first, count, window) == expected

    def test_operations_of_a_prompt(self, llama):
        linear, head = 2 * 10 * 3 * LINEAR, 2 * 320 * 64
        attention = 3 * 4 * (4 * 16) * 55  # layers, 2 · 2, heads and channels, 1 + … + 10
        assert benchmark.prefill_operations(llama.config, 0, 10) == linear + head + attention
        deeper = attention + 3 * 4 * 64 * 10 * 32
        assert benchmark.prefill_operations(llama.config, 32, 10) == linear + head + deeper

    def test_operations_end_at_a_window(self, tiny_model):
        config = ModelConfig.read(tiny_model("mistral"))
        linear = 2 * 4 * 3 * (2 * 64 * 96 + 2 * 64 * 48 + 3 * 64 * 96)
        attention = 3 * 4 * (4 * 24) * 4 * 16
        expected = linear + 2 * 320 * 64 + attention
        assert benchmark.prefill_operations(config, 32, 4) == expected

    def test_bytes_of_a_token(self, llama):
        tensors = load_file(llama.directory / "model.safetensors").values()
        weights = sum(t.nbytes for t in tensors)  # fp32, the embedding being the head as well
        assert weights == 4 * (3 * LINEAR + 320 * 64 + 7 * 64)
        assert Benchmark(llama).weights_bytes == weights
        cases = plan(llama, 16, 8, new_tokens=[4], depths=[32], batches=[1, 8])
        seen = Fraction(34 + 35 + 36 + 37, 4)
        of_16 = 2 * 3 * 2 * 16 * 2 * seen  # sides, layers, heads, channels, bytes
        of_8 = 2 * 3 * 2 * (16 + 2) * seen  # … and a scale per token and head
        expected = [weights + of_16, weights / 8 + of_16, weights + of_8, weights / 8 + of_8]
        found = [benchmark.bytes_per_token(llama.config, case, weights) for case in cases]
        assert found == [float(n) for n in expected]

    def test_bytes_end_at_a_window(self, tiny_model):
        config = ModelConfig.read(tiny_model("qwen2-window"))  # of 16, in 2 of 3 layers
        case = Case("decode", 1, 64, 1, KVFormat(16, 16))
        found = benchmark.bytes_per_token(config, case, 0)
        assert found == 2 * 2 * 16 * 2 * (66 + 16 + 16)

    def test_an_embedding_that_is_no_head_is_not_read(self, tiny_model):
        model = open_model(tiny_model("qwen3"))
        tensors = load_file(model.directory / "model.safetensors")
        read = sum(t.nbytes for name, t in tensors.items() if "embed_tokens" not in name)
        assert Benchmark(model).weights_bytes == read

    def test_a_spread(self):
        assert Spread.of([3.0, 1.0, 2.0, 9.0]) == Spread(2.5, 1.0, 9.0)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-window", "gpt2"])
class TestRuns:
    def test_decoding_is_behind_what_was_computed_once(self, tiny_model, passes, name, bits):
        model = open_model(tiny_model(name))
        found = passes(model)
        cases = plan(model, bits, new_tokens=[5], depths=[64], batches=[1, 3])
        list(Benchmark(model).run(cases, repetitions=2))
        run_of_1 = [[(64 + i, 1)] for i in range(6)]
        assert found[:19] == [[(0, 64)], *3 * run_of_1]
        rest = found[19:]
        assert rest[0] == [(32, 32), (0, 64), (0, 64)]  # a token at least runs always
        assert rest[1:] == 3 * [[(64 + i, 1)] * 3 for i in range(6)]

    def test_prompts_are_new_each_time(self, tiny_model, passes, name, bits):
        model = open_model(tiny_model(name))
        found = passes(model)
        cases = plan(model, bits, prompts=[100], depths=[0, 96], batches=[4])
        results = list(Benchmark(model).run(cases, repetitions=2))
        assert [result.case for result in results] == cases
        run = [[(0, 100), (0, 100), (0, 56)], [(56, 44), (0, 100)]]  # a step has 256 tokens
        fill = [[(0, 96), (0, 96), (0, 64)], [(64, 32), (0, 96)]]
        behind = [[(start + 96, count) for start, count in its] for its in run]
        assert found == [*3 * run, *fill, *3 * behind]


class TestResults:
    def test_what_is_given(self, llama):
        cases = plan(llama, prompts=[40], new_tokens=[3], batches=[2])
        seen, runs = [], []
        prefill, decode = Benchmark(llama).run(
            cases, repetitions=3, on_case=seen.append, on_run=lambda: runs.append(0)
        )
        assert seen == cases
        assert len(runs) == 2 * (1 + 3)
        for result in (prefill, decode):
            rate, latency = result.tokens_per_s, result.latency_s
            assert 0 < rate.low <= rate.median <= rate.high
            assert 0 < latency.low <= latency.median <= latency.high
            assert result.peak_memory_bytes > 1 << 20
        assert prefill.flops_per_s > 0
        assert (prefill.bytes_per_token, prefill.read_bytes_per_s) == (None, None)
        assert decode.flops_per_s is None
        assert decode.read_bytes_per_s == decode.bytes_per_token * decode.tokens_per_s.median

    def test_the_run_to_warm_up_does_not_count(self, llama, monkeypatch):
        runs = iter([benchmark.Run(1, 100.0, 100.0), *(benchmark.Run(6, 2.0, 0.5),) * 2])
        monkeypatch.setattr(Benchmark, "_decode", lambda *_: next(runs))
        (result,) = Benchmark(llama).run(plan(llama, new_tokens=[1]), repetitions=2)
        assert result.tokens_per_s == Spread(3, 3, 3)
        assert result.latency_s == Spread(0.5, 0.5, 0.5)

    def test_sequences_decode_together_also_where_a_token_is_drawn_twice(self, llama, monkeypatch):
        drawn = itertools.cycle([5, 5, 6])
        monkeypatch.setattr(Benchmark, "_ids", lambda self, draw, count: [next(drawn)] * count)
        (result,) = Benchmark(llama).run(plan(llama, new_tokens=[4], batches=[3]), repetitions=1)
        assert result.tokens_per_s.low > 0

    def test_values_that_are_not_finite_are_an_error(self, tiny_model, tmp_path):
        shutil.copytree(tiny_model("llama"), tmp_path / "m")
        damage(tmp_path / "m", "layers.1.mlp.up_proj.weight", lambda x: x.fill_(float("nan")))
        model = open_model(tmp_path / "m")
        with pytest.raises(NumericsError, match="layer 1"):
            list(Benchmark(model).run(plan(model, new_tokens=[4]), repetitions=1))

    def test_running_out_of_memory_is_an_error(self, tiny_model, monkeypatch):
        model = open_model(tiny_model("llama"))

        def fail(*_, **__):
            raise MemoryError

        monkeypatch.setattr(model.engine.decoder, "forward", fail)
        monkeypatch.setattr(model.engine.decoder, "whole_step", None)
        with pytest.raises(QInferError, match="out of memory") as error:
            list(Benchmark(model).run(plan(model, new_tokens=[4], batches=[2]), repetitions=1))
        assert "--batch" in error.value.hint


class TestMachine:
    def test_bandwidth_is_bytes_by_the_median_time(self, monkeypatch):
        times = iter([0.5, 4.0, 2.0] * 5)
        monkeypatch.setattr(bandwidth, "_seconds", lambda run, device: next(times))
        monkeypatch.setitem(bandwidth._BUFFER_BYTES, "cpu", 1 << 20)
        monkeypatch.setattr(bandwidth, "_LEAST_BYTES", 1 << 16)
        assert bandwidth.read_bandwidth(CPU, free_bytes=1 << 30) == (1 << 20) / 2.0
        times = iter([1.0] * 15)
        assert bandwidth.read_bandwidth(CPU, free_bytes=1 << 19) == 1 << 17

    def test_bandwidth_is_measured(self, monkeypatch):
        monkeypatch.setitem(bandwidth._BUFFER_BYTES, "cpu", 1 << 24)
        monkeypatch.setattr(bandwidth, "_LEAST_BYTES", 1 << 24)
        assert bandwidth.read_bandwidth(CPU, free_bytes=1 << 30) > 0

    def test_a_peak_can_be_forgotten(self):
        memory.forget_peak()
        before = memory.peak_bytes()
        held = torch.ones(64 << 20, dtype=torch.uint8)
        assert memory.peak_bytes() >= before + (60 << 20)
        del held
        if memory._CLEAR_REFS.exists():
            memory.forget_peak()
            assert memory.peak_bytes() < before + (60 << 20)

    def test_a_processor_has_a_name(self):
        assert benchmark.device_name(CPU)


@pytest.mark.parametrize(("retained", "covered"), [(32, 32), (64, 64), (1 << 20, 96)])
def test_a_cache_keeps_as_much_as_it_is_told(llama, retained, covered):
    layout = CacheLayout.of(llama.config, (KVFormat(),) * 3)
    cache = PagedCache(layout, [8], 1, half=torch.float16, device=CPU, retained_tokens=retained)
    tables, tokens = cache.tables(step_tokens=96), list(range(97))
    blocks = tables.new([])
    tables.grow(blocks, 0, 97)
    tables.publish(blocks, tokens, 97)
    tables.release(blocks)
    assert tables.reuse(tables.new([]), tokens, 96) == covered
