"""nf4 tensors are those of bitsandbytes, and read back as it reads them."""

import json

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.quant import nf4

SHAPES = [(4, 64), (3, 96), (16, 128), (5, 40), (1, 64), (2, 33), (7, 2), (1, 1), (5, 13), (3, 65)]
FP32 = 1e-6  # of the largest magnitude: what rounding to fp32 may change


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes_of(packed, count):
    return torch.stack((packed.flatten() >> 4, packed.flatten() & 15), dim=-1).view(-1)[:count]


@pytest.mark.parametrize("shape", [*SHAPES, (512, 512)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantize_equals_bitsandbytes(shape, dtype):
    weight = normal(shape).to(dtype)
    packed, absmax = nf4.quantize(weight)
    theirs, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert packed.dtype == theirs.dtype
    assert packed.shape == theirs.shape
    assert torch.equal(absmax, state.absmax)
    assert torch.equal(packed, theirs)


def test_ties_are_broken_as_bitsandbytes_does():
    code = torch.tensor(nf4.CODE)
    weight = torch.zeros(1, 64)
    weight[0, :16] = torch.cat([(code[1:] + code[:-1]) / 2, torch.ones(1)])
    packed, _ = nf4.quantize(weight)
    assert codes_of(packed, 15).tolist() == list(range(15))  # down
    assert torch.equal(packed, bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")[0])


def test_every_weight_takes_the_nearest_code():
    weight = normal((64, 100), seed=6)
    packed, absmax = nf4.quantize(weight)
    flat = weight.flatten().double()
    scale = absmax.double().repeat_interleave(64)[: len(flat)]
    steps = ((flat / scale)[:, None] - torch.tensor(nf4.CODE, dtype=torch.float64)).abs()
    taken = steps.gather(1, codes_of(packed, len(flat)).long()[:, None])[:, 0]
    assert (taken <= steps.amin(1) + FP32).all()


def test_the_codes_are_those_of_bitsandbytes():
    assert torch.equal(torch.tensor(nf4.CODE), bnb.get_4bit_type("nf4", device="cpu"))


def test_literal_bytes():
    weight = torch.zeros(1, 64)
    weight[0, :6] = torch.tensor([-2.0, 2.0, 0.0, 1.0, -1.0, 0.2])
    packed, absmax = nf4.quantize(weight)
    assert absmax.tolist() == [2.0]
    # -1 → 0, 1 → 15, 0 → 7, 0.5 → 12 (0.44), -0.5 → 2 (-0.53), 0.1 → 8 (0.08); high nibble first
    assert bytes(packed[:4, 0].tolist()) == bytes.fromhex("0f7c2877")


@pytest.mark.parametrize("at", range(16))
def test_every_code_is_kept(at):
    weight = torch.zeros(1, 64)
    weight[0, 0], weight[0, 1] = -1.0, nf4.CODE[at]
    packed, absmax = nf4.quantize(weight)
    assert packed[0].item() == at
    found = nf4.dequantize(packed, absmax, torch.tensor(nf4.CODE), (1, 64), 64)
    assert torch.equal(found, weight)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantize_equals_bitsandbytes(shape):
    weight = normal(shape, seed=1)
    theirs, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    expected = bnb.dequantize_4bit(theirs, state)
    found = nf4.dequantize(theirs, state.absmax, state.code, shape, 64)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("block_size", [32, 128])
def test_other_block_sizes(block_size):
    weight = normal((6, 80), seed=2)
    packed, absmax = nf4.quantize(weight, block_size)
    theirs, state = bnb.quantize_4bit(weight, blocksize=block_size, quant_type="nf4")
    assert torch.equal(packed, theirs)
    assert torch.equal(absmax, state.absmax)
    found = nf4.dequantize(packed, absmax, state.code, (6, 80), block_size)
    assert torch.equal(found, bnb.dequantize_4bit(theirs, state))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 150), st.integers(0, 99), st.floats(-20, 20))
def test_error_is_at_most_half_the_widest_gap(rows, columns, seed, power):
    weight = normal((rows, columns), seed) * 10.0**power
    packed, absmax = nf4.quantize(weight)
    assert packed.shape == (-(-rows * columns // 2), 1)
    assert absmax.shape == (-(-rows * columns // 64),)
    found = nf4.dequantize(packed, absmax, torch.tensor(nf4.CODE), (rows, columns), 64)
    gaps = torch.tensor(nf4.CODE).diff()
    bound = absmax.repeat_interleave(64)[: rows * columns].view(rows, columns)
    assert ((weight - found).abs() <= bound * (gaps.max() / 2 + FP32)).all()
    largest = weight.abs().flatten().argmax()
    assert found.flatten()[largest] == weight.flatten()[largest]


def test_zeros_are_zeros():
    weight = torch.zeros(2, 64)
    weight[1, 3] = 5.0
    packed, absmax = nf4.quantize(weight)
    assert absmax.tolist() == [0.0, 5.0]
    assert torch.equal(nf4.dequantize(packed, absmax, torch.tensor(nf4.CODE), (2, 64), 64), weight)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 3e38])
def test_extreme_values_stay_finite(magnitude):
    weight = torch.tensor([[magnitude, -magnitude, 0.0, magnitude / 2]])
    packed, absmax = nf4.quantize(weight)
    found = nf4.dequantize(packed, absmax, torch.tensor(nf4.CODE), (1, 4), 64)
    assert found.isfinite().all()
    assert ((found - weight).abs() <= magnitude * 2).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_state_tensor_is_understood_by_bitsandbytes(dtype):
    weight = normal((6, 96), seed=4)
    packed, absmax = nf4.quantize(weight)
    tensors = {
        "weight.absmax": absmax,
        "weight.quant_map": torch.tensor(nf4.CODE),
        f"weight.{nf4.STATE_SUFFIX}": nf4.state_tensor((6, 96), dtype),
    }
    state = bnb.QuantState.from_dict(tensors, device=torch.device("cpu"))
    assert state.shape == (6, 96)
    assert state.dtype == getattr(torch, dtype)
    assert (state.blocksize, state.quant_type, state.nested) == (64, "nf4", False)
    state.dtype = torch.float32
    found = nf4.dequantize(packed, absmax, torch.tensor(nf4.CODE), (6, 96), 64)
    assert torch.equal(bnb.dequantize_4bit(packed, state), found)


def test_the_state_tensor_holds_what_bitsandbytes_writes():
    _, state = bnb.quantize_4bit(normal((6, 96)).bfloat16(), blocksize=64, quant_type="nf4")
    (theirs,) = (v for k, v in state.as_dict(packed=True).items() if "quant_state" in k)
    ours = nf4.state_tensor((6, 96), "bfloat16")
    assert ours.dtype == theirs.dtype
    assert json.loads(bytes(ours.tolist())) == json.loads(bytes(theirs.tolist()))
