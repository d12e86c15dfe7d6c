# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: PLR0913
"""Parts of kernels: a softmax that blocks are taken into one by one, and their dequantizing.

See "Online normalizer calculation for softmax" (arXiv 1805.02867). Scores are exponents of two in
fp32.
"""

import triton
import triton.language as tl

from qinfer.ops.cuda.block_functions import BLOCK, axes

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def nothing(ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Softmax over no token: largest scores, sums of weights, and mixed values."""
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    return most, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, PADDED), tl.float32)


@triton.jit
def hidden_blocks(first, last, position, window, sinks):
    """Which of the blocks from `first` to `last` the query and later ones do not see.

    Returns:
        The first of them, and how many there are.
    """
    if window is None:
        return last, 0
    else:
        skip = tl.minimum(tl.maximum((sinks + BLOCK - 1) // BLOCK, first), last)
        oldest = tl.maximum(position - window + 1, 0) // BLOCK
        return skip, tl.minimum(tl.maximum(oldest, skip), last) - skip


@triton.jit
def scores_of_block(
    queries,
    data,
    scale,
    minimum,
    place,
    DOT: tl.constexpr,
    BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Queries times the keys of a stored block: fp32 [rows, 32]."""
    token, channel = axes(BLOCK, PADDED, True)
    mask = channel < HEAD_DIM
    if BITS == 4:
        at = data + place * (HEAD_DIM * BLOCK // 2) + channel * (BLOCK // 2)
        codes = tl.load(at + token % (BLOCK // 2), mask, 0).to(tl.int32)
        codes = (codes >> (token // (BLOCK // 2) * 4)) & 15
        factor = _halves(scale, place * (HEAD_DIM // 2), channel, mask)
        least = _halves(minimum, place * (HEAD_DIM // 2), channel, mask)
        keys = codes.to(tl.float32) * factor + least
        scores = tl.dot(queries, keys.to(DOT), input_precision="ieee")
    else:
        keys = tl.load(data + place * (HEAD_DIM * BLOCK) + channel * BLOCK + token, mask, 0)
        scores = tl.dot(queries, keys.to(DOT), input_precision="ieee")
        if BITS == 8:
            scores *= tl.load(scale + place * BLOCK + token).to(tl.float32)
    return scores


@triton.jit
def scaled_scores(scores, scale, softcap):
    """Scores as exponents of two: scaled, and brought within the limits if there are any."""
    if softcap is None:
        return scores * (scale * LOG2_E)
    else:
        x = scores * (scale / softcap)
        shrunk = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
        tanh = (1.0 - shrunk) / (1.0 + shrunk)
        return tl.where(x < 0.0, -tanh, tanh) * (softcap * LOG2_E)


@triton.jit
def hide(scores, first, position, window, sinks):
    """Scores [rows, 32] of a block's tokens, minus infinity where the queries do not see them."""
    at = first + tl.arange(0, BLOCK)[None, :]
    is_seen = at <= position
    if window is not None:
        is_seen = is_seen & ((at > position - window) | (at < sinks))
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def weigh(scores, most, total):
    """Take more scores into a softmax.

    Returns:
        Their weights, what to multiply earlier ones with, and the largest score and the sum of
        weights with them.
    """
    new = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # nothing is seen so far
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    return weights, shrink, new, total * shrink + tl.sum(weights, 1)


@triton.jit
def mix_of_block(
    weights,
    data,
    scale,
    minimum,
    place,
    DOT: tl.constexpr,
    BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Weights times the values of a stored block: fp32 [rows, PADDED]."""
    token, channel = axes(BLOCK, PADDED, False)
    mask = channel < HEAD_DIM
    if BITS == 4:
        half: tl.constexpr = VALUE_GROUP // 2
        byte = channel // VALUE_GROUP * half + channel % half
        at = data + place * (BLOCK * HEAD_DIM // 2) + token * (HEAD_DIM // 2)
        codes = tl.load(at + byte, mask, 0).to(tl.int32)
        codes = (codes >> (channel % VALUE_GROUP // half * 4)) & 15
        factor = _by_channel(scale, place, VALUE_GROUP, HEAD_DIM, PADDED)
        least = _by_channel(minimum, place, VALUE_GROUP, HEAD_DIM, PADDED)
        values = codes.to(tl.float32) * factor + least
        return tl.dot(weights.to(DOT), values.to(DOT), input_precision="ieee")
    else:
        values = tl.load(data + place * (BLOCK * HEAD_DIM) + token * HEAD_DIM + channel, mask, 0)
        if BITS == 8:
            by_token = tl.load(scale + place * BLOCK + tl.arange(0, BLOCK)[None, :]).to(tl.float32)
            largest = tl.max(by_token, 1)[:, None]  # fp16 is too narrow for weights times scales
            largest = tl.where(largest > 0.0, largest, 1.0)
            scaled = weights * (by_token * (1.0 / largest))
            return tl.dot(scaled.to(DOT), values.to(DOT), input_precision="ieee") * largest
        else:
            return tl.dot(weights.to(DOT), values.to(DOT), input_precision="ieee")


@triton.jit
def _by_channel(x, place, VALUE_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Scales or minimums of a block of 4-bit values, each for all of its channels."""
    runs: tl.constexpr = HEAD_DIM // VALUE_GROUP
    if VALUE_GROUP & (VALUE_GROUP - 1) == 0 and PADDED >= VALUE_GROUP:
        padded_runs: tl.constexpr = PADDED // VALUE_GROUP
        token, run = axes(BLOCK, padded_runs, False)
        few = _halves(x, place * (BLOCK // 2 * runs), token * runs + run, run < runs)
        wide = tl.broadcast_to(few[:, :, None], (BLOCK, padded_runs, VALUE_GROUP))
        return tl.reshape(wide, (BLOCK, PADDED))
    else:
        token, channel = axes(BLOCK, PADDED, False)
        at = token * runs + channel // VALUE_GROUP
        return _halves(x, place * (BLOCK // 2 * runs), at, channel < HEAD_DIM)


@triton.jit
def _halves(x, first, index, mask):
    """Numbers in fp16 as fp32, 0 without mask; read in the pairs that a pipeline can fetch ahead.

    Args:
        x: fp16.
        first: In pairs.
        index: From there, in numbers.
        mask: Like `index`.
    """
    pairs = tl.load(x.to(tl.pointer_type(tl.int32)) + first + index // 2, mask, 0)
    bits = (pairs >> (index % 2 * 16)) & 0xFFFF
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
