"""Symmetric int4 and int8: the layout byte for byte, and how far rounding may go."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.quant import affine

BITS = pytest.mark.parametrize("bits", [4, 8])
SCALE_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def integers(bits, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    limit = 2 ** (bits - 1)
    shape = (rows, columns)
    return torch.randint(-limit, limit, shape, dtype=torch.int8, generator=generator)


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@BITS
@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 99))
def test_pack_round_trip_and_compressed_tensors_agree(bits, rows, columns, seed):
    q = integers(bits, rows, columns, seed)
    packed = affine.pack(q, bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(affine.unpack(packed, bits, columns), q)
    assert torch.equal(unpack_from_int32(packed, bits, q.shape), q)
    assert torch.equal(affine.unpack(pack_to_int32(q, bits), bits, columns), q)
    padding = -columns % (32 // bits)  # of which the format says nothing
    full = torch.nn.functional.pad(q, (0, padding))
    assert torch.equal(affine.pack(full, bits), pack_to_int32(full, bits))


def test_int4_layout_is_low_nibble_first_plus_eight():
    q = torch.tensor([[-8, 7, 0, 1, -1, 2, 3, -7], [0] * 8], dtype=torch.int8)
    packed = affine.pack(q, 4)
    assert bytes(packed.view(torch.uint8).flatten().tolist()) == bytes.fromhex("f098a71b88888888")
    assert packed[0, 0].item() == 0x1BA798F0


def test_int8_layout_is_a_byte_each_with_the_sign_bit_flipped():
    q = torch.tensor([[-128, 127, 0, -1, 5]], dtype=torch.int8)
    packed = affine.pack(q, 8).view(torch.uint8)
    assert bytes(packed.flatten().tolist()) == bytes.fromhex("00ff807f85000000")
    assert bytes((packed[0, :5] ^ 0x80).view(torch.int8).tolist()[2:3]) == b"\0"


def test_odd_int4_columns_leave_the_tail_zero():
    packed = affine.pack(torch.tensor([[7, -8, 3]], dtype=torch.int8), 4)
    assert packed.view(torch.uint8).tolist() == [[0x0F, 0x0B, 0, 0]]
    assert affine.unpack(packed, 4, 3).tolist() == [[7, -8, 3]]


@BITS
def test_every_integer_survives(bits):
    limit = 2 ** (bits - 1)
    q = torch.arange(-limit, limit, dtype=torch.int16).to(torch.int8)[None]
    assert torch.equal(affine.unpack(affine.pack(q, bits), bits, q.shape[1]), q)


def test_dequantize_multiplies_each_group_by_its_scale():
    q = torch.tensor([[1, -2, 3, -4], [5, 6, 7, -8]], dtype=torch.int8)
    scale = torch.tensor([[0.5, -2.0], [1.0, 0.25]], dtype=torch.bfloat16)
    for bits in (4, 8):
        weight = affine.dequantize(affine.pack(q, bits), scale, bits, 4)
        assert weight.dtype == torch.float32
        assert weight.tolist() == [[0.5, -1.0, -6.0, 8.0], [5.0, 6.0, 1.75, -2.0]]


def quantized(weight, bits, group, dtype):
    q, scale = affine.quantize(weight, bits, group, dtype)
    rows, columns = weight.shape
    groups = columns // (group or columns)
    assert q.dtype == torch.int8
    assert q.shape == weight.shape
    assert scale.dtype == dtype
    assert scale.shape == (rows, groups)
    assert int(q.min()) >= -(2 ** (bits - 1))
    assert int(q.max()) < 2 ** (bits - 1)
    packed = affine.pack(q, bits)
    dequantized = affine.dequantize(packed, scale, bits, columns)
    wide = scale.float().repeat_interleave(group or columns, dim=1)
    return q, wide, dequantized


@SCALE_DTYPES
@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([8, 32, 64, None]),
    st.integers(0, 999),
    st.floats(-3, 3),
    st.sampled_from([0.0, 3.0, -3.0]),
)
def test_int4_error_is_half_a_step_or_a_clamped_whole_one(dtype, rows, group, seed, power, shift):
    weight = (normal(rows, 128, seed=seed) + shift) * 10.0**power
    q, scale, found = quantized(weight, 4, group, dtype)
    error, step = (weight - found).abs(), scale.abs()
    exact = weight / scale
    # The largest magnitude is -8 steps, so its opposite is +8 and there is only +7: from 7.5 steps
    # on the error grows to one step, more by what the stored scale is rounded (at most 2^-8).
    clamped = exact > 7.5
    assert (error[~clamped] <= step[~clamped] * 0.5001).all()
    assert (error[clamped] <= step[clamped] * (1 + 8 * 2**-8)).all()
    assert (q[clamped] == 7).all()


@SCALE_DTYPES
@settings(deadline=None)
@given(st.integers(1, 4), st.sampled_from([8, 32, None]), st.integers(0, 999), st.floats(-3, 3))
def test_int8_error_is_half_a_step(dtype, rows, group, seed, power):
    weight = normal(rows, 128, seed=seed) * 10.0**power
    q, scale, found = quantized(weight, 8, group, dtype)
    assert int(q.abs().max()) >= 126  # all levels serve
    # 127 is the largest magnitude; with a scale rounded down by 2^-9 it may be 127.25: no clamp.
    # With one rounded down further, q = 128 is cut to 127 (the one value -128 is kept).
    assert ((weight - found).abs() <= scale * 0.5001).all()


@SCALE_DTYPES
@pytest.mark.parametrize("sign", [1, -1])
def test_int4_maps_the_largest_magnitude_to_minus_eight_exactly(dtype, sign):
    weight = normal(50, 64, seed=1).clamp(-2, 2)
    at = torch.arange(50) % 32
    groups = weight.view(50, 2, 32)
    groups[torch.arange(50), 0, at] = 2.5 * sign
    groups[torch.arange(50), 1, at] = 3.1 * sign
    q, scale = affine.quantize(weight, 4, 32, dtype)
    q = q.view(50, 2, 32)
    for group in range(2):
        assert (q[torch.arange(50), group, at] == -8).all()
        assert int(q[:, group].max()) <= 7
    assert ((scale < 0) == (sign > 0)).all()
    assert torch.equal(scale, (torch.tensor([2.5, 3.1]) * sign / -8).to(dtype).expand(50, 2))
    exact = affine.quantize(weight[:, :32], 4, 32, dtype)[1].float() * -8
    assert torch.equal(exact, torch.full((50, 1), 2.5 * sign))


def test_int4_uses_all_sixteen_levels():
    weight = torch.arange(-8.0, 8.0)[None]
    q, scale = affine.quantize(weight, 4, None, torch.float16)
    assert q.tolist() == [list(range(-8, 8))]
    assert scale.item() == 1
    mirrored = affine.quantize(-weight, 4, None, torch.float16)
    assert mirrored[0].tolist() == [list(range(-8, 8))]
    assert mirrored[1].item() == -1


def test_int4_opposite_of_the_largest_magnitude_is_clamped():
    q, scale = affine.quantize(torch.tensor([[-8.0, 8.0, 7.5, 7.4]]), 4, None, torch.float16)
    assert scale.item() == 1
    assert q.tolist() == [[-8, 7, 7, 7]]


def test_int8_maps_the_largest_magnitude_to_127():
    weight = torch.tensor([[-127.0, 3, 127], [-12.7, 0.05, 12.6]])
    q, scale = affine.quantize(weight, 8, None, torch.float16)
    assert q.tolist() == [[-127, 3, 127], [-127, 1, 126]]
    assert scale[0].item() == 1


def test_rounding_is_to_nearest_by_the_stored_scale():
    weight = normal(8, 64, seed=3)
    for bits, dtype in ((4, torch.bfloat16), (8, torch.float16)):
        q, scale = affine.quantize(weight, bits, 32, dtype)
        steps = weight.double().view(8, 2, 32) / scale.double()[..., None]
        limit = 2 ** (bits - 1)
        levels = torch.arange(-limit, limit, dtype=torch.float64)
        nearest = (steps[..., None] - levels).abs().argmin(-1) - limit
        assert torch.equal(q.view(8, 2, 32).long(), nearest)


@BITS
@SCALE_DTYPES
def test_an_all_zero_group_is_zero_with_a_scale_that_divides(bits, dtype):
    weight = normal(2, 64)
    weight[0, :32] = 0
    weight[1, 32:] = -0.0
    q, scale, found = quantized(weight, bits, 32, dtype)
    assert not q[0, :32].any()
    assert not q[1, 32:].any()
    assert (scale != 0).all()
    assert torch.equal(found[0, :32], torch.zeros(32))
    assert found.isfinite().all()


@BITS
@SCALE_DTYPES
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-30, 6e-8, 1e-7, 1e-6, 1e-5])
def test_tiny_values_stay_finite_and_as_near_as_their_scale_can_say(bits, dtype, magnitude):
    weight = normal(4, 64, scale=magnitude / 3).clamp(-magnitude, magnitude)
    _, _, found = quantized(weight, bits, 32, dtype)
    assert found.isfinite().all()
    # A scale below the smallest normal is off by up to half the spacing there, times 2^(bits-1).
    spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    step = weight.abs().amax() / (8 if bits == 4 else 127)
    bound = step * (1.04 if bits == 4 else 0.51) + 2 ** (bits - 1) * spacing
    assert ((weight - found).abs() <= bound).all()


@BITS
def test_huge_values_fit_bf16_scales(bits):
    weight = torch.tensor([[3.3e38, -3.3e38, 1e38, 0.0]])
    q, scale, found = quantized(weight, bits, None, torch.bfloat16)
    assert scale.isfinite().all()
    # clamped int4 included; a step is 2^-3 or 2^-7 of the largest
    assert ((weight - found).abs() <= 3.3e38 * (0.13 if bits == 4 else 0.004)).all()
    assert q[0, 3] == 0


@BITS
def test_half_precision_weights_need_no_wider_scales(bits):
    weight = torch.tensor([[65504.0, -65504.0, 1.0, 2.0]], dtype=torch.float16)
    assert quantized(weight.float(), bits, None, torch.float16)[2].isfinite().all()


@BITS
def test_strided_weights_quantize_like_contiguous_ones(bits):
    weight = normal(64, 48, seed=5).t()
    assert not weight.is_contiguous()
    q, scale = affine.quantize(weight, bits, 32, torch.bfloat16)
    again, same = affine.quantize(weight.contiguous(), bits, 32, torch.bfloat16)
    assert torch.equal(q, again)
    assert torch.equal(scale, same)
    assert torch.equal(affine.pack(q, bits), affine.pack(again, bits))
