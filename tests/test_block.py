"""Blocks and decoding steps in one call are the operations one by one, to the bit."""

import ctypes

import pytest
import torch

from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig, read_json
from qinfer.models.decoder import Decoder
from qinfer.ops.block import StepTensors
from qinfer.ops.cpu import kernels
from qinfer.ops.cpu.block import NativeBlocks
from qinfer.ops.cpu.ops import CPUOps
from qinfer.ops.paged import Batch
from qinfer.quant.kv import KVFormat
from tests.tiny_models import SHAPES

CPU = torch.device("cpu")
# Positions that end within, at the end of and beyond a block; one and many tokens.
STEPS = [[(0, 40)], [(40, 1), (0, 9)], [(41, 23), (9, 1)], [(64, 2)]]


class Model:
    """A decoder, and a cache with room for two sequences."""

    def __init__(self, directory, *, whole, threads, bits=16):
        config = ModelConfig.from_dict(read_json(directory / "config.json"))
        self.decoder = Decoder(Checkpoint(directory), config, CPUOps(threads=threads))
        assert isinstance(self.decoder.whole_blocks, NativeBlocks)
        if not whole:
            self.decoder.whole_blocks = None
        layout = CacheLayout.of(config, (KVFormat(bits, bits),) * config.num_hidden_layers)
        self.groups = len(layout.reaches)
        self.cache = PagedCache(layout, (6,) * self.groups, 2, half=torch.float16, device=CPU)
        self.stored = [
            tensor.zero_()
            for layer in self.cache.layers
            for side in (layer.keys, layer.values)
            for tensor in side.tensors()
        ]
        self.draw = torch.Generator().manual_seed(0)

    def batch(self, step):
        parts = [
            (torch.randint(0, 256, (count,), generator=self.draw).tolist(), start)
            for start, count in step
        ]
        tables = [[0, 1, 2], [3, 4, 5]][: len(step)]
        return Batch.of(parts, [tables] * self.groups, list(range(len(step))), CPU)

    def forward(self, batch):
        return self.decoder.forward(batch, self.cache.layers).clone()


def run(directory, **options):
    """Hidden states of some steps, and what they leave in the cache."""
    model = Model(directory, **options)
    return [model.forward(model.batch(step)) for step in STEPS], model.stored


def decode(directory, *, whole, **options):
    """Logits and choices of some decoding steps, and what they leave in the cache."""
    model = Model(directory, whole=whole, **options)
    decoder, vocab = model.decoder, model.decoder.config.vocab_size
    found = [model.forward(model.batch([(0, 30), (0, 9)]))]
    for count in (1, 2, 2, 1):
        batch = model.batch([(30 + len(found), 1), (8 + len(found), 1)][:count])
        if whole:
            logits, results = torch.empty(count, vocab), torch.empty(2, count, dtype=torch.int64)
            rotary = decoder.rotary and decoder.rotary.reserve(64)
            tensors = StepTensors(batch, rotary, model.cache.layers, logits, results, vocab - 5)
            decoder.whole_step(tensors)()
        else:
            logits = decoder.logits(model.forward(batch))
            results = torch.stack([x.long() for x in decoder.ops.greedy(logits, vocab - 5)])
        found += [logits, results]
    return found, model.stored


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("name", "scheme"), [("llama", "int4"), ("llama", "int8"), ("llama", "bf16"), ("gpt2", "nf4")]
)
def test_every_kind_of_weight(build, converted, name, scheme):
    directory = converted(name, scheme)
    assert_same(run(directory, whole=True, threads=3), run(directory, whole=False, threads=1))


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_model(build, converted, name):
    directory = converted(name, "int8")
    assert_same(run(directory, whole=True, threads=2), run(directory, whole=False, threads=1))
    assert_same(decode(directory, whole=True, threads=2), decode(directory, whole=False, threads=1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_kind_of_embedding(build, tiny_model, dtype):
    for name in ("llama", "gpt2"):
        found = decode(tiny_model(name, dtype), whole=True, threads=2)
        assert_same(found, decode(tiny_model(name, dtype), whole=False, threads=1))


@pytest.mark.parametrize("count", [1, 7, 8, 1025, 3000])
def test_the_likeliest_is_the_lowest_of_equals(build, count):
    build.likeliest.restype = ctypes.c_int64
    build.likeliest.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_float)

    def likeliest():
        peak = ctypes.c_float()
        return build.likeliest(x.data_ptr(), count, peak), peak.value

    draw = torch.Generator().manual_seed(count)
    for _ in range(20):
        x = torch.randint(-9, 9, (count,), generator=draw).float()
        peak, first = x.max(-1)
        assert likeliest() == (int(first), float(peak))
        x[int(torch.randint(0, count, (), generator=draw))] = float("inf")
        assert likeliest()[1] == float("inf")
        x[int(torch.randint(0, count, (), generator=draw))] = float("nan")
        assert likeliest()[1] != likeliest()[1]
    x.fill_(float("-inf"))
    assert likeliest() == (0, float("-inf"))


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_every_kind_of_cache(build, converted, bits):
    directory = converted("llama", "int4")
    found = run(directory, whole=True, threads=2, bits=bits)
    assert_same(found, run(directory, whole=False, threads=1, bits=bits))


def test_a_cache_that_the_kernels_do_not_read_goes_to_the_operations(build, converted, monkeypatch):
    directory = converted("llama", "int4")
    expected = run(directory, whole=False, threads=1)
    monkeypatch.setattr(kernels, "_MAX_GROUP_HEADS", 0)
    found = run(directory, whole=True, threads=1)
    for a, b in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_weights_of_which_one_has_no_kernel_are_run_one_by_one(build, converted):
    directory = converted("llama", "int4")
    config = ModelConfig.from_dict(read_json(directory / "config.json"))

    class Partly(CPUOps):
        def prepare(self, weight):
            odd = weight.shape == (config.hidden_size, config.intermediate_size)
            return weight if odd else super().prepare(weight)

    decoder = Decoder(Checkpoint(directory), config, Partly())
    assert decoder.whole_blocks is None
