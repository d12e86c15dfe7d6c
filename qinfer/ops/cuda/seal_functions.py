# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: PLR0913
"""Parts of kernels: quantizing a full block.

Codes, scales and minimums are equal to the bit to what `KVSide.seal` stores.
"""

import triton
import triton.language as tl

from qinfer.ops.cuda.block_functions import BLOCK, axes, own_block, place_in_block

ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23, see `_codes`


@triton.jit
def seal_int8(
    data,
    scale,
    place,
    opened,
    new,
    stride,
    at,
    IS_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store a full block as `quantize_int8` does."""
    token, channel = axes(BLOCK, PADDED, IS_KEYS)
    mask = channel < HEAD_DIM
    x = own_block(opened, new, stride, at, BLOCK, token, channel, mask, IS_KEYS, HEAD_DIM)
    axis: tl.constexpr = 0 if IS_KEYS else 1
    is_bad = tl.max((x != x).to(tl.int32), axis) > 0
    x = tl.where(x == x, x, 0.0)
    most = tl.div_rn(tl.max(tl.abs(x), axis), 127.0)
    half = tl.where(is_bad, float("nan"), most).to(tl.float16)
    wide = tl.expand_dims(half.to(tl.float32), axis)
    codes = _codes(x, wide, -127.0, 127.0).to(tl.int8)
    where = data + place * (HEAD_DIM * BLOCK) + place_in_block(token, channel, IS_KEYS, HEAD_DIM)
    tl.store(where, codes, mask)
    tl.store(scale + place * BLOCK + tl.arange(0, BLOCK), half)


@triton.jit
def seal_int4_keys(
    data,
    scale,
    minimum,
    place,
    opened,
    new,
    stride,
    at,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store a full block of keys as `quantize_int4` does: a scale per channel."""
    channel = tl.arange(0, PADDED)
    byte = tl.arange(0, BLOCK // 2)[None, :]
    mask = channel[:, None] < HEAD_DIM
    low = own_block(opened, new, stride, at, BLOCK, byte, channel[:, None], mask, True, HEAD_DIM)
    high = own_block(
        opened, new, stride, at, BLOCK, byte + BLOCK // 2, channel[:, None], mask, True, HEAD_DIM
    )
    packed, factor, least = _quantize_int4(low, high, mask)
    tl.store(data + place * (HEAD_DIM * BLOCK // 2) + channel[:, None] * 16 + byte, packed, mask)
    tl.store(scale + place * HEAD_DIM + channel, factor, channel < HEAD_DIM)
    tl.store(minimum + place * HEAD_DIM + channel, least, channel < HEAD_DIM)


@triton.jit
def seal_int4_values(
    data,
    scale,
    minimum,
    place,
    opened,
    new,
    stride,
    at,
    HEAD_DIM: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
):
    """Store a full block of values as `quantize_int4` does: a scale per token and run of channels.

    The tile has a row per token and run, and a column per byte.
    """
    half: tl.constexpr = VALUE_GROUP // 2
    runs: tl.constexpr = HEAD_DIM // VALUE_GROUP
    padded_runs: tl.constexpr = triton.next_power_of_2(runs)
    row = tl.arange(0, BLOCK * padded_runs)
    token, run = row // padded_runs, row % padded_runs
    byte = tl.arange(0, triton.next_power_of_2(half))[None, :]
    is_run = run < runs
    mask = is_run[:, None] & (byte < half)
    channel = run[:, None] * VALUE_GROUP + byte
    low = own_block(opened, new, stride, at, BLOCK, token[:, None], channel, mask, False, HEAD_DIM)
    high = own_block(
        opened, new, stride, at, BLOCK, token[:, None], channel + half, mask, False, HEAD_DIM
    )
    packed, factor, least = _quantize_int4(low, high, mask)
    index = place * (BLOCK * runs) + token * runs + run
    tl.store(data + index[:, None] * half + byte, packed, mask)
    tl.store(scale + index, factor, is_run)
    tl.store(minimum + index, least, is_run)


@triton.jit
def _quantize_int4(low, high, mask):
    """Rows of codes from 0 to 15, each with a scale and a minimum, both NaN if a number is.

    Args:
        low: fp32 [rows, bytes], for the low nibbles; 0 where there is no number.
        high: Like `low`, for the high ones.
        mask: [rows, bytes]: where there are numbers.

    Returns:
        uint8 [rows, bytes], and fp16 scales and minimums [rows].
    """
    is_bad = tl.max(((low != low) | (high != high)).to(tl.int32), 1) > 0
    low, high = tl.where(low == low, low, 0.0), tl.where(high == high, high, 0.0)
    least = tl.min(tl.where(mask, tl.minimum(low, high), float("inf")), 1)
    most = tl.max(tl.where(mask, tl.maximum(low, high), float("-inf")), 1)
    least = tl.where(is_bad, float("nan"), least)
    scale = tl.div_rn(most - least, 15.0).to(tl.float16)
    minimum = least.to(tl.float16)
    wide = scale.to(tl.float32)[:, None]
    base = minimum.to(tl.float32)[:, None]
    first = _codes(low - base, wide, 0.0, 15.0).to(tl.int32)
    second = _codes(high - base, wide, 0.0, 15.0).to(tl.int32)
    return (first | (second << 4)).to(tl.uint8), scale, minimum


@triton.jit
def _codes(x, scale, least, most):
    """`x / scale`, rounded half to even and limited; 0 where the scale is not positive."""
    is_scaled = scale > 0.0
    codes = tl.div_rn(x, tl.where(is_scaled, scale, 1.0))
    codes = (codes + ROUNDER) - ROUNDER
    return tl.where(is_scaled, tl.minimum(tl.maximum(codes, least), most), 0.0)
