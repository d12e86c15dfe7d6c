"""Blocks in one call to the kernels are the operations one by one, to the bit."""

import pytest
import torch

from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig, read_json
from qinfer.models.decoder import Decoder
from qinfer.ops.cpu import kernels
from qinfer.ops.cpu.block import NativeBlocks
from qinfer.ops.cpu.ops import CPUOps
from qinfer.ops.paged import Batch
from qinfer.quant.kv import KVFormat
from tests.tiny_models import SHAPES

CPU = torch.device("cpu")
# Positions that end within, at the end of and beyond a block; one and many tokens.
STEPS = [[(0, 40)], [(40, 1), (0, 9)], [(41, 23), (9, 1)], [(64, 2)]]


def run(directory, *, whole, threads, bits=16):
    """Hidden states of some steps, and what they leave in the cache."""
    config = ModelConfig.from_dict(read_json(directory / "config.json"))
    decoder = Decoder(Checkpoint(directory), config, CPUOps(threads=threads))
    assert isinstance(decoder.whole_blocks, NativeBlocks)
    if not whole:
        decoder.whole_blocks = None
    layout = CacheLayout.of(config, (KVFormat(bits, bits),) * config.num_hidden_layers)
    groups = len(layout.reaches)
    cache = PagedCache(layout, (6,) * groups, 2, half=torch.float16, device=CPU)
    stored = [
        tensor.zero_()
        for layer in cache.layers
        for side in (layer.keys, layer.values)
        for tensor in side.tensors()
    ]
    draw = torch.Generator().manual_seed(0)
    hidden = []
    for step in STEPS:
        parts = [
            (torch.randint(0, 256, (count,), generator=draw).tolist(), start)
            for start, count in step
        ]
        tables = [[0, 1, 2], [3, 4, 5]][: len(step)]
        batch = Batch.of(parts, [tables] * groups, list(range(len(step))), CPU)
        hidden.append(decoder.forward(batch, cache.layers).clone())
    return hidden, stored


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
