# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Kernels that attend to the paged cache, read where it lies and dequantized in registers.

Segments of one token are decoded: `split_kernel` attends to pieces of the past side by side and
`merge_kernel` puts them together ("Flash-Decoding", 2023; "Online normalizer calculation for
softmax", arXiv 1805.02867). The pieces are of a fixed size: a token's result does not depend on its
company. `tile_kernel` takes the tokens of longer segments, a block of 32 at a time, which see the
same past. Scores are to base 2 and in fp32.
"""

import triton
import triton.language as tl

from qinfer.ops.cuda.attend_functions import (
    hidden_blocks,
    hide,
    mix_of_block,
    nothing,
    scaled_scores,
    scores_of_block,
    weigh,
)
from qinfer.ops.cuda.block_functions import BLOCK, floats, floats_of_step


@triton.jit
def split_kernel(
    q,
    out,
    partial,
    sums,
    k_data,
    k_scale,
    k_minimum,
    k_open,
    v_data,
    v_scale,
    v_minimum,
    v_open,
    table,
    starts,
    offsets,
    slots,
    q_stride,
    table_stride,
    scale,
    softcap,
    window,
    sinks,
    DOT: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend to SPLIT blocks, for segments of one token, which the cache holds already.

    A program per segment, key-value head and split of the table's width.

    Args:
        q: [tokens, heads, head_dim], `q_stride` from token to token.
        out: [tokens, heads, head_dim]; written if there is but one split.
        partial: fp32 [segments, heads, splits, head_dim]: a split's weighted sum of values; written
            if there are more.
        sums: fp32 [segments, heads, splits, 2]: its largest score and the sum of its weights.
        k_data: `KVSide.data` of the keys.
        k_scale: `KVSide.scale`.
        k_minimum: `KVSide.minimum`.
        k_open: `KVSide.open`.
        v_data: Of the values.
        v_scale: Of the values.
        v_minimum: Of the values.
        v_open: Of the values.
        table: `Batch.tables[group]`.
        starts: `Batch.starts`.
        offsets: `Batch.offsets`.
        slots: `Batch.slots`.
        q_stride: In elements.
        table_stride: From segment to segment.
        scale: Multiplies the scores.
        softcap: Limits them, or None.
        window: Tokens a query sees, or None.
        sinks: First tokens that it sees beside the window.
        DOT: Type of the numbers that are multiplied.
        K_BITS: Of the keys.
        V_BITS: Of the values.
        VALUE_GROUP: Channels that share a scale in 4-bit values.
        HEAD_DIM: Even.
        PADDED: HEAD_DIM up to a power of two, 16 at least.
        GROUP: Query heads per key-value head.
        ROWS: GROUP up to a power of two, 16 at least.
        SPLIT: Blocks.
    """
    segment, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(starts + segment).to(tl.int32)
    row = tl.load(offsets + segment)
    own, first = position // BLOCK, split * SPLIT
    if (tl.load(offsets + segment + 1) - row != 1) | (first > own):
        return
    table += segment.to(tl.int64) * table_stride
    at = tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, PADDED)[None, :]
    mask = (at < GROUP) & (channel < HEAD_DIM)
    of_head = (head * GROUP + at) * HEAD_DIM + channel
    queries = tl.load(q + row * q_stride + of_head, mask, 0.0).to(DOT)
    most, total, mixed = nothing(ROWS, PADDED)
    last = tl.minimum(first + SPLIT, own)
    skip, jump = hidden_blocks(first, last, position, window, sinks)
    for i in range(first, last - jump):
        block = tl.where(i >= skip, i + jump, i)
        place = tl.load(table + block).to(tl.int64) * tl.num_programs(1) + head
        scores = scores_of_block(
            queries, k_data, k_scale, k_minimum, place, DOT, K_BITS, HEAD_DIM, PADDED
        )
        scores = scaled_scores(scores, scale, softcap)
        if window is not None:
            scores = hide(scores, block * BLOCK, position, window, sinks)
        weights, shrink, most, total = weigh(scores, most, total)
        more = mix_of_block(
            weights, v_data, v_scale, v_minimum, place, DOT, V_BITS, VALUE_GROUP, HEAD_DIM, PADDED
        )
        mixed = mixed * shrink[:, None] + more
    if own < first + SPLIT:
        place = tl.load(table + own).to(tl.int64) * tl.num_programs(1) + head
        slot = tl.load(slots + segment).to(tl.int64) * tl.num_programs(1) + head
        k_block = (
            k_data + place * (HEAD_DIM * BLOCK)
            if K_BITS >= 16
            else (k_open + slot * (HEAD_DIM * BLOCK))
        )
        v_block = (
            v_data + place * (HEAD_DIM * BLOCK)
            if V_BITS >= 16
            else (v_open + slot * (HEAD_DIM * BLOCK))
        )
        length = position % BLOCK + 1
        keys = floats(k_block, length, True, HEAD_DIM, PADDED).to(DOT)
        scores = scaled_scores(tl.dot(queries, keys, input_precision="ieee"), scale, softcap)
        scores = hide(scores, own * BLOCK, position, window, sinks)
        weights, shrink, most, total = weigh(scores, most, total)
        values = floats(v_block, length, False, HEAD_DIM, PADDED).to(DOT)
        more = tl.dot(weights.to(DOT), values, input_precision="ieee")
        mixed = mixed * shrink[:, None] + more
    if tl.num_programs(2) == 1:
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        heads = tl.num_programs(1) * GROUP
        tl.store(out + row * (heads * HEAD_DIM) + of_head, result, mask)
    else:
        index = (segment.to(tl.int64) * tl.num_programs(1) + head) * GROUP + tl.arange(0, ROWS)
        index = index * tl.num_programs(2) + split
        tl.store(partial + index[:, None] * HEAD_DIM + channel, mixed, mask)
        tl.store(sums + index * 2, most, tl.arange(0, ROWS) < GROUP)
        tl.store(sums + index * 2 + 1, total, tl.arange(0, ROWS) < GROUP)


@triton.jit
def merge_kernel(
    out,
    partial,
    sums,
    starts,
    offsets,
    splits,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Put the splits of a token together, CHUNK at a time.

    A program per segment and head.

    Args:
        out: See `split_kernel`, as the others.
        partial: What that has written.
        sums: Like `partial`.
        starts: `Batch.starts`.
        offsets: `Batch.offsets`.
        splits: Of the table's width.
        HEAD_DIM: Even.
        PADDED: HEAD_DIM up to a power of two.
        SPLIT: Blocks.
        CHUNK: Splits.
    """
    segment, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(offsets + segment)
    if tl.load(offsets + segment + 1) - row != 1:
        return
    count = tl.load(starts + segment).to(tl.int32) // BLOCK // SPLIT + 1
    channel = tl.arange(0, PADDED)
    index = (segment.to(tl.int64) * tl.num_programs(1) + head) * splits
    most, total, mixed = nothing(1, PADDED)
    for first in range(0, count, CHUNK):
        split = first + tl.arange(0, CHUNK)
        scores = tl.load(sums + (index + split) * 2, split < count, float("-inf"))
        totals = tl.load(sums + (index + split) * 2 + 1, split < count, 0.0)
        mask = (split < count)[:, None] & (channel < HEAD_DIM)[None, :]
        at = partial + (index + split)[:, None] * HEAD_DIM + channel[None, :]
        parts = tl.load(at, mask, 0.0)
        weights, shrink, most, _ignored = weigh(scores[None, :], most, total)
        total = total * shrink + tl.sum(weights * totals[None, :], 1)
        mixed = mixed * shrink[:, None] + tl.sum(tl.trans(weights) * parts, 0)[None, :]
    where = out + (row * tl.num_programs(1) + head) * HEAD_DIM + channel[None, :]
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(where, result, (channel < HEAD_DIM)[None, :])


@triton.jit
def tile_kernel(
    q,
    k,
    v,
    out,
    k_data,
    k_scale,
    k_minimum,
    k_open,
    v_data,
    v_scale,
    v_minimum,
    v_open,
    table,
    starts,
    offsets,
    slots,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    scale,
    softcap,
    window,
    sinks,
    DOT: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Attend, for some tokens of a block and the query heads of a key-value head.

    A program per segment, key-value head and (block that the segment's tokens touch, tile); row r
    of a block's 32 * GROUP rows is head r % GROUP of token r / GROUP. Segments of one token are
    left to `split_kernel`. Blocks below 16 bits that the step fills are stored already, the open
    one is as it was before.

    Args:
        q: See `split_kernel`, as the others.
        k: [tokens, kv_heads, head_dim], the new ones, `k_stride` from token to token.
        v: Like `k`.
        out: [tokens, heads, head_dim].
        k_data: `KVSide.data` of the keys.
        k_scale: `KVSide.scale`.
        k_minimum: `KVSide.minimum`.
        k_open: `KVSide.open`.
        v_data: Of the values.
        v_scale: Of the values.
        v_minimum: Of the values.
        v_open: Of the values.
        table: `Batch.tables[group]`.
        starts: `Batch.starts`.
        offsets: `Batch.offsets`.
        slots: `Batch.slots`.
        q_stride: In elements.
        k_stride: From token to token.
        v_stride: From token to token.
        table_stride: From segment to segment.
        scale: Multiplies the scores.
        softcap: Limits them, or None.
        window: Tokens a query sees, or None.
        sinks: First tokens that it sees beside the window.
        DOT: Type of the numbers that are multiplied.
        K_BITS: Of the keys.
        V_BITS: Of the values.
        VALUE_GROUP: Channels that share a scale in 4-bit values.
        HEAD_DIM: Even.
        PADDED: HEAD_DIM up to a power of two, 16 at least.
        GROUP: Query heads per key-value head.
        ROWS: Of a tile.
        TILES: Of a block.
    """
    segment, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + segment).to(tl.int32)
    row = tl.load(offsets + segment)
    count = (tl.load(offsets + segment + 1) - row).to(tl.int32)
    own = start // BLOCK + tl.program_id(2) // TILES
    first = own * BLOCK
    begin = tl.maximum(start, first)
    stop = tl.minimum(start + count, first + BLOCK)
    at = tl.program_id(2) % TILES * ROWS + tl.arange(0, ROWS)
    earliest = first + tl.program_id(2) % TILES * ROWS // GROUP
    latest = first + (tl.program_id(2) % TILES * ROWS + ROWS - 1) // GROUP
    if (count < 2) | (tl.maximum(begin, earliest) >= tl.minimum(stop, latest + 1)):
        return
    position = first + at // GROUP
    is_query = (position >= begin) & (position < stop)
    position = tl.minimum(tl.maximum(position, begin), stop - 1)  # a row without one repeats one
    table += segment.to(tl.int64) * table_stride
    channel = tl.arange(0, PADDED)[None, :]
    mask = is_query[:, None] & (channel < HEAD_DIM)
    token = row + (position - start)[:, None]
    of_head = (head * GROUP + at % GROUP)[:, None] * HEAD_DIM + channel
    queries = tl.load(q + token * q_stride + of_head, mask, 0.0).to(DOT)
    most, total, mixed = nothing(ROWS, PADDED)
    skip, jump = hidden_blocks(0, own, tl.maximum(begin, earliest), window, sinks)
    for i in range(0, own - jump):
        block = tl.where(i >= skip, i + jump, i)
        place = tl.load(table + block).to(tl.int64) * tl.num_programs(1) + head
        scores = scores_of_block(
            queries, k_data, k_scale, k_minimum, place, DOT, K_BITS, HEAD_DIM, PADDED
        )
        scores = scaled_scores(scores, scale, softcap)
        if window is not None:
            scores = hide(scores, block * BLOCK, position[:, None], window, sinks)
        weights, shrink, most, total = weigh(scores, most, total)
        more = mix_of_block(
            weights, v_data, v_scale, v_minimum, place, DOT, V_BITS, VALUE_GROUP, HEAD_DIM, PADDED
        )
        mixed = mixed * shrink[:, None] + more
    place = tl.load(table + own).to(tl.int64) * tl.num_programs(1) + head
    slot = tl.load(slots + segment).to(tl.int64) * tl.num_programs(1) + head
    row += begin - start
    if K_BITS >= 16:
        keys = floats(k_data + place * (HEAD_DIM * BLOCK), stop - first, True, HEAD_DIM, PADDED)
    else:
        k += row * k_stride + head * HEAD_DIM
        k_open += slot * (HEAD_DIM * BLOCK)
        keys = floats_of_step(
            k_open, k, k_stride, begin - first, stop - first, True, HEAD_DIM, PADDED
        )
    if V_BITS >= 16:
        values = floats(v_data + place * (HEAD_DIM * BLOCK), stop - first, False, HEAD_DIM, PADDED)
    else:
        v += row * v_stride + head * HEAD_DIM
        v_open += slot * (HEAD_DIM * BLOCK)
        values = floats_of_step(
            v_open, v, v_stride, begin - first, stop - first, False, HEAD_DIM, PADDED
        )
    scores = scaled_scores(tl.dot(queries, keys.to(DOT), input_precision="ieee"), scale, softcap)
    scores = hide(scores, first, position[:, None], window, sinks)
    weights, shrink, most, total = weigh(scores, most, total)
    more = tl.dot(weights.to(DOT), values.to(DOT), input_precision="ieee")
    mixed = mixed * shrink[:, None] + more
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + token * (tl.num_programs(1) * GROUP * HEAD_DIM) + of_head, result, mask)
