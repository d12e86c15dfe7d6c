"""The product of an integer weight with few rows of x, for `qinfer.ops.cuda.linear`.

It reads words as `linear_kernels` does, and turns a value into a float with less: its bits are
masked where they are. As fp32 those of bit `p` and up of the mantissa alone are `code * 2^(p-149)`,
which is exact, and its factor of x comes that much larger. The offset of codes is taken from the
sum, once for all outputs. Arguments are named as there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qinfer.ops.cuda.linear_kernels import pieces_of

STAGES = tl.constexpr(3)  # the weights of so many steps, less one, are on their way
_UP = tl.constexpr(77)  # sums of products are so many powers of two too small until they are done


@triton.jit
def _code(words: tl.tensor, J: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Value J of each word plus `2^(bits - 1)`, times `2^(place - 149)`, as fp32 and exactly."""
    SHIFT: tl.constexpr = 0 if (J + 1) * BITS <= 23 else (12 if BITS == 4 else 16)
    MASK: tl.constexpr = ((1 << BITS) - 1) << (J * BITS - SHIFT)
    return ((words >> SHIFT) & MASK).to(tl.float32, bitcast=True)


@triton.jit
def _large(x: tl.tensor, J: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """What `_code` is to be multiplied with."""
    SHIFT: tl.constexpr = 0 if (J + 1) * BITS <= 23 else (12 if BITS == 4 else 16)
    return x * 2.0 ** (149 - _UP - (J * BITS - SHIFT))


@triton.jit
def _piece(
    x: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    inside: tl.tensor,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Eight columns of x from each k on, of row m each: [ROWS, len(k) / ROWS, 8].

    There always are rows; but a load in a branch is no part of a loop's pipeline. x, which all
    programs share, comes from the L1 cache.
    """
    column = k[:, None] + tl.arange(0, 8)
    mask = ((m < rows) & inside)[:, None]
    if not ALIGNED:
        mask = mask & (column < columns)
    values = tl.zeros((k.shape[0], 8), x.dtype.element_ty)
    if rows > 0:
        values = tl.load(x + m[:, None] * columns + column, mask=mask, other=0)
    return values.reshape(ROWS, k.shape[0] // ROWS, 8)


@triton.jit
def _chunk_of_x(
    x: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    start: tl.tensor,
    last: tl.tensor,
    PER_CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """The columns of x of each chunk from `start` on, as a tuple of pieces of eight."""
    i = tl.arange(0, ROWS * CHUNKS)
    m = i // CHUNKS
    chunk = start + i % CHUNKS
    inside = chunk < last
    k = chunk * PER_CHUNK
    x0 = _piece(x, rows, columns, m, k, inside, ROWS, ALIGNED)
    x1 = _piece(x, rows, columns, m, k + 8, inside, ROWS, ALIGNED)
    if PER_CHUNK == 16:
        return x0, x1
    else:
        x2 = _piece(x, rows, columns, m, k + 16, inside, ROWS, ALIGNED)
        x3 = _piece(x, rows, columns, m, k + 24, inside, ROWS, ALIGNED)
        return x0, x1, x2, x3


@triton.jit
def _by_chunk(
    table: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    start: tl.tensor,
    last: tl.tensor,
    PER_CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """What a table [N, groups] holds for each chunk from `start` on: [BLOCK_N · CHUNKS], flat."""
    SIZE: tl.constexpr = row.shape[0] * CHUNKS
    chunk = start + tl.arange(0, CHUNKS)
    at = row * (columns // GROUP) + (chunk * PER_CHUNK // GROUP)[None]
    mask = (chunk < last)[None].broadcast_to(row.shape[0], CHUNKS)
    return tl.load(table + at.reshape(SIZE), mask=mask.reshape(SIZE), other=0)


@triton.jit
def _product(
    words: tl.tensor,
    pieces: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    PIECES: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Add four words of each row, [BLOCK_N, CHUNKS] each, times x to `total`, and x to `sums`.

    A word holds values plus `2^(bits - 1)`; `total` is of these, and `2^-_UP` times too small.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    for i in tl.static_range(PIECES):
        values = pieces_of(pieces[i].to(tl.float32))
        for j in tl.static_range(8):
            code = _code(words[(i * 8 + j) // PER_WORD], j % PER_WORD, BITS)
            total += code[:, None, :] * _large(values[j], j % PER_WORD, BITS)[None]
            sums += values[j]
    return total, sums


@triton.jit(do_not_specialize=["rows", "per_split"])
def gemv(  # noqa: C901 - its branches are on constants
    x: tl.tensor,
    packed: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    columns: tl.tensor,
    per_split: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """`y = x · Wᵀ + bias` for few rows of x, in fp32 without tensor cores.

    A thread takes whole chunks of 16 bytes of BLOCK_N rows of the weight, CHUNKS of them side by
    side in a program of as many threads, and the 16 or 32 values of x that belong to them. Sums
    are combined over threads once, at the end. The order of addition does not depend on ROWS.

    Weights are fetched two steps ahead, past the registers: else the assembler orders loads to
    save those, and few are on their way at a time.

    What is loaded is laid out flat, and shaped afterwards: of tensors with more axes, versions of
    Triton before 3.7 give a thread other elements than it needs, and then move all of them through
    shared memory.

    Args:
        x: bf16, fp16 or fp32 [rows, K].
        packed: int32 [N, ceil(K · BITS / 32)].
        scale: [N, groups].
        zero: int8 [N, groups].
        bias: [N].
        y: [splits, rows, N], a sum over the part of K of each split.
        rows: At most ROWS.
        outputs: N.
        columns: K.
        per_split: Chunks of a split.
        BITS: 4 or 8.
        GROUP: A multiple of 32, or 0.
        ROWS: A power of 2.
        BLOCK_N: Rows of the weight a program.
        CHUNKS: Threads a program.
        ALIGNED: K is a multiple of a chunk.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    PER_CHUNK: tl.constexpr = 4 * PER_WORD
    PIECES: tl.constexpr = PER_CHUNK // 8
    words = tl.cdiv(columns, PER_WORD)
    if ALIGNED:
        words = columns // PER_CHUNK * 4
        columns = columns // PER_CHUNK * PER_CHUNK
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    row = tl.minimum(n, outputs - 1)[:, None]
    m = tl.arange(0, ROWS)
    first = split * per_split
    last = tl.minimum(first + per_split, tl.cdiv(columns, PER_CHUNK))
    total = tl.zeros((BLOCK_N, ROWS, CHUNKS), tl.float32)
    sums = tl.zeros((ROWS, CHUNKS), tl.float32)
    offset = 2.0 ** (BITS - 1)
    if (zero is not None) and (GROUP == 0):
        offset += tl.load(zero + row).to(tl.float32)[:, None]
    if not GROUP:  # ahead of what takes long
        factor = tl.load(scale + row).to(tl.float32)
    if GROUP:  # too small for asynchronous loads: they are fetched a step ahead here
        s = _by_chunk(scale, row, columns, first, last, PER_CHUNK, CHUNKS, GROUP)
        if zero is not None:
            z = _by_chunk(zero, row, columns, first, last, PER_CHUNK, CHUNKS, GROUP)
    for start in tl.range(first, last, CHUNKS, num_stages=STAGES):
        word = start * 4 + tl.arange(0, 4 * CHUNKS)
        there = word < last * 4
        if not ALIGNED:
            there = there & (word < words)
        w = tl.load(packed + row * words + word[None], mask=there[None], other=0)
        w = pieces_of(w.reshape(BLOCK_N, CHUNKS, 4))
        pieces = _chunk_of_x(x, rows, columns, start, last, PER_CHUNK, CHUNKS, ROWS, ALIGNED)
        if GROUP:
            its, ahead = offset, start + CHUNKS
            by_chunk = s.to(tl.float32).reshape(BLOCK_N, 1, CHUNKS)
            s = _by_chunk(scale, row, columns, ahead, last, PER_CHUNK, CHUNKS, GROUP)
            if zero is not None:
                its += z.to(tl.float32).reshape(BLOCK_N, 1, CHUNKS)
                z = _by_chunk(zero, row, columns, ahead, last, PER_CHUNK, CHUNKS, GROUP)
            part = tl.zeros((BLOCK_N, ROWS, CHUNKS), tl.float32)
            sums = tl.zeros((ROWS, CHUNKS), tl.float32)
            part, sums = _product(w, pieces, part, sums, PIECES, BITS)
            total += (part * 2.0**_UP - its * sums[None]) * by_chunk
        else:
            total, sums = _product(w, pieces, total, sums, PIECES, BITS)
    if not GROUP:
        total = total * 2.0**_UP - offset * sums[None]
    result = tl.sum(total, 2)
    if not GROUP:
        result = result * factor
    if bias is not None:
        result += tl.load(bias + row).to(tl.float32)
    where = y + (split * rows + m)[None] * outputs + n[:, None]
    tl.store(where, result, mask=(n < outputs)[:, None] & (m < rows)[None])
