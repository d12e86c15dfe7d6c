# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Kernels that write keys and values to the paged cache, and rotate them before.

The formats are those of `qinfer.quant.kv`: codes, scales and minimums are equal to the bit to what
`KVSide.seal` stores. The programs of a grid are (segment, key-value head, block of the segment).
"""

import triton
import triton.language as tl

from qinfer.ops.cuda.block_functions import BLOCK, put_tokens
from qinfer.ops.cuda.seal_functions import seal_int4_keys, seal_int4_values, seal_int8


@triton.jit
def rotate_kernel(
    q,
    k,
    q_norm,
    k_norm,
    cos,
    sin,
    q_stride,
    k_stride,
    q_eps,
    k_eps,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """In place: normalize and rotate the heads of a group.

    A program per token and key-value head.

    Args:
        q: [tokens, heads, head_dim], `q_stride` from token to token.
        k: [tokens, kv_heads, head_dim], `k_stride` from token to token.
        q_norm: fp32 [head_dim], or None.
        k_norm: Like `q_norm`.
        cos: fp32 [tokens, head_dim / 2], or None.
        sin: Like `cos`.
        q_stride: Elements.
        k_stride: Elements.
        q_eps: Added to the mean square.
        k_eps: Added to the mean square.
        HEAD_DIM: Even.
        PAIRS: HEAD_DIM / 2 up to a power of two.
        GROUP: Query heads per key-value head.
        ROWS: GROUP up to a power of two.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if cos is not None:
        cos += row * (HEAD_DIM // 2)
        sin += row * (HEAD_DIM // 2)
    q += row * q_stride + head * (GROUP * HEAD_DIM)
    k += row * k_stride + head * HEAD_DIM
    _rotate(q, q_norm, cos, sin, q_eps, HEAD_DIM, PAIRS, GROUP, ROWS)
    _rotate(k, k_norm, cos, sin, k_eps, HEAD_DIM, PAIRS, 1, 1)


@triton.jit
def _rotate(
    x,
    norm,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """In place: heads [HEADS, HEAD_DIM] of one token, rounded after the norm and after rotation."""
    half: tl.constexpr = HEAD_DIM // 2
    head = tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    is_pair = pair < half
    mask = (head < HEADS) & is_pair
    at = x + head * HEAD_DIM + pair
    first = tl.load(at, mask, 0.0).to(tl.float32)
    second = tl.load(at + half, mask, 0.0).to(tl.float32)
    if norm is not None:
        square = tl.sum(first * first + second * second, 1) / HEAD_DIM
        root = tl.rsqrt(square + eps)[:, None]
        first = first * root * tl.load(norm + pair, is_pair, 0.0)
        second = second * root * tl.load(norm + half + pair, is_pair, 0.0)
        first = first.to(x.dtype.element_ty).to(tl.float32)
        second = second.to(x.dtype.element_ty).to(tl.float32)
    if cos is not None:
        cosine = tl.load(cos + pair, is_pair, 0.0)
        sine = tl.load(sin + pair, is_pair, 0.0)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
    tl.store(at, first.to(x.dtype.element_ty), mask)
    tl.store(at + half, second.to(x.dtype.element_ty), mask)


@triton.jit
def store_kernel(
    q,
    k,
    v,
    q_norm,
    k_norm,
    cos,
    sin,
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
    q_eps,
    k_eps,
    ROTATES: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Before attention: store a block's new tokens, rotated before if that is asked for.

    In 16 and 32 bits they are written where they belong. Below, a block that they fill is
    quantized; of a segment of one token that is also written to the open block, and the tokens of
    longer ones that fill no block are left to `keep_kernel`.

    A program per segment, key-value head and block that the segment's new tokens touch.

    Args:
        q: See `rotate_kernel`; with ROTATES only.
        k: [tokens, kv_heads, head_dim].
        v: Like `k`.
        q_norm: See `rotate_kernel`.
        k_norm: See `rotate_kernel`.
        cos: See `rotate_kernel`.
        sin: See `rotate_kernel`.
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
        q_stride: From token to token, in elements.
        k_stride: From token to token.
        v_stride: From token to token.
        table_stride: From segment to segment.
        q_eps: See `rotate_kernel`.
        k_eps: See `rotate_kernel`.
        ROTATES: Whether to, in place; every segment has one token then.
        K_BITS: Of the keys.
        V_BITS: Of the values.
        VALUE_GROUP: Channels that share a scale in 4-bit values.
        HEAD_DIM: Even.
        PADDED: HEAD_DIM up to a power of two, 16 at least.
        PAIRS: See `rotate_kernel`.
        GROUP: See `rotate_kernel`.
        ROWS: See `rotate_kernel`.
        TOKENS: 1 if no segment has more, else 32.
    """
    segment, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + segment).to(tl.int32)
    row = tl.load(offsets + segment)
    count = (tl.load(offsets + segment + 1) - row).to(tl.int32)
    own = start // BLOCK + tl.program_id(2)
    if own * BLOCK >= start + count:
        return
    place = tl.load(table + segment.to(tl.int64) * table_stride + own).to(tl.int64)
    place = place * tl.num_programs(1) + head
    slot = tl.load(slots + segment).to(tl.int64) * tl.num_programs(1) + head
    at = tl.maximum(start - own * BLOCK, 0)
    stop = tl.minimum(start + count - own * BLOCK, BLOCK)
    row += tl.maximum(own * BLOCK - start, 0)
    k += row * k_stride + head * HEAD_DIM
    v += row * v_stride + head * HEAD_DIM
    if ROTATES:
        if cos is not None:
            cos += row * (HEAD_DIM // 2)
            sin += row * (HEAD_DIM // 2)
        q += row * q_stride + head * (GROUP * HEAD_DIM)
        _rotate(q, q_norm, cos, sin, q_eps, HEAD_DIM, PAIRS, GROUP, ROWS)
        _rotate(k, k_norm, cos, sin, k_eps, HEAD_DIM, PAIRS, 1, 1)
        tl.debug_barrier()  # other threads read what these wrote
    _store_side(
        *(k_data, k_scale, k_minimum, k_open, place, slot, k, k_stride, at, stop, count == 1),
        *(True, K_BITS, VALUE_GROUP, HEAD_DIM, PADDED, TOKENS),
    )
    _store_side(
        *(v_data, v_scale, v_minimum, v_open, place, slot, v, v_stride, at, stop, count == 1),
        *(False, V_BITS, VALUE_GROUP, HEAD_DIM, PADDED, TOKENS),
    )


@triton.jit
def _store_side(
    data,
    scale,
    minimum,
    opened,
    place,
    slot,
    new,
    stride,
    at,
    stop,
    is_alone,
    IS_KEYS: tl.constexpr,
    BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Store the tokens from `at` to `stop` of a block, of which `new` is the first."""
    if BITS >= 16:
        data += place * (HEAD_DIM * BLOCK)
        put_tokens(data, new, stride, at, stop, IS_KEYS, HEAD_DIM, PADDED, TOKENS)
    else:
        opened += slot * (HEAD_DIM * BLOCK)
        if is_alone:
            put_tokens(opened, new, stride, at, stop, IS_KEYS, HEAD_DIM, PADDED, TOKENS)
        if stop == BLOCK:
            if BITS == 8:
                seal_int8(data, scale, place, opened, new, stride, at, IS_KEYS, HEAD_DIM, PADDED)
            elif IS_KEYS:
                seal_int4_keys(
                    data, scale, minimum, place, opened, new, stride, at, HEAD_DIM, PADDED
                )
            else:
                seal_int4_values(
                    data, scale, minimum, place, opened, new, stride, at, HEAD_DIM, VALUE_GROUP
                )


@triton.jit
def keep_kernel(
    k,
    v,
    k_open,
    v_open,
    starts,
    offsets,
    slots,
    k_stride,
    v_stride,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """After attention: write the tokens that fill no block to the open one.

    Not before: the segment's first new tokens see what it holds until then. A program per segment
    and key-value head; segments of one token are done.

    Args:
        k: See `store_kernel`, as the others.
        v: Of the values.
        k_open: None from 16 bits up.
        v_open: None from 16 bits up.
        starts: `Batch.starts`.
        offsets: `Batch.offsets`.
        slots: `Batch.slots`.
        k_stride: From token to token.
        v_stride: From token to token.
        HEAD_DIM: Even.
        PADDED: HEAD_DIM up to a power of two.
    """
    segment, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + segment).to(tl.int32)
    row = tl.load(offsets + segment)
    count = (tl.load(offsets + segment + 1) - row).to(tl.int32)
    first = (start + count) // BLOCK * BLOCK
    if (count < 2) | (first == start + count):
        return
    slot = tl.load(slots + segment).to(tl.int64) * tl.num_programs(1) + head
    at = tl.maximum(start - first, 0)
    stop = start + count - first
    row += tl.maximum(first - start, 0)
    if k_open is not None:
        k += row * k_stride + head * HEAD_DIM
        k_open += slot * (HEAD_DIM * BLOCK)
        put_tokens(k_open, k, k_stride, at, stop, True, HEAD_DIM, PADDED, BLOCK)
    if v_open is not None:
        v += row * v_stride + head * HEAD_DIM
        v_open += slot * (HEAD_DIM * BLOCK)
        put_tokens(v_open, v, v_stride, at, stop, False, HEAD_DIM, PADDED, BLOCK)
