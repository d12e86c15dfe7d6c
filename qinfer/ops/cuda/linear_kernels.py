"""Triton kernels of `qinfer.ops.cuda.linear`; which runs when, and with what tiles, is there.

They read integers in the layout of the checkpoint, see `qinfer.quant.affine`: N rows of int32
words, `32 / bits` values each. A value becomes a float without a conversion instruction, which
would run at a quarter of the speed of the others: its bits are masked where they are and an
exponent is put above them. As fp32, bits `p` and up of the mantissa of `2^(23-p)` are worth 1 and
up, so the result is `2^(23-p) + code`, and subtracting `2^(23-p) + 2^(bits-1)` gives q exactly.

To `gemv` the exponent comes as an argument: with two constants at hand, the assembler takes two
steps for what a processor does in one, masking and setting bits. In `gemm`, an argument would keep
the compiler from dequantizing where the tensor cores want the result.

In all kernels N is `outputs` and K is `columns`; GROUP is the group size, or 0 if there is a scale
per row; `zero` and `bias` may be None; ALIGNED promises that rows are whole 16-byte pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl

EXPONENT = tl.constexpr(150 << 23)  # of 2^23 in fp32


@triton.jit
def _pieces(x: tl.tensor) -> tl.tensor:
    """Split [..., ..., 4 or 8] into the tuple of its [..., ...], in registers."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    if x.shape[2] == 4:
        even, odd = x.reshape(A, B, 2, 2).split()
        x0, x2 = even.split()
        x1, x3 = odd.split()
        return x0, x1, x2, x3
    else:
        even, odd = x.reshape(A, B, 2, 2, 2).split()
        even_low, even_high = even.split()
        odd_low, odd_high = odd.split()
        x0, x4 = even_low.split()
        x2, x6 = even_high.split()
        x1, x5 = odd_low.split()
        x3, x7 = odd_high.split()
        return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _value(
    words: tl.tensor, zero: tl.tensor, exponent: tl.tensor, J: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """Value J of each word, less `zero`, as fp32 and exactly."""
    SHIFT: tl.constexpr = (12 if BITS == 4 else 16) if J * BITS >= 16 else 0
    PLACE: tl.constexpr = J * BITS - SHIFT
    MASK: tl.constexpr = ((1 << BITS) - 1) << PLACE
    OFFSET: tl.constexpr = (1 << (23 - PLACE)) + (1 << (BITS - 1))
    bits = ((words >> SHIFT) & MASK) | (exponent - (PLACE << 23))
    return bits.to(tl.float32, bitcast=True) - (zero + OFFSET)


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
    """Eight columns of x from each k on, of row m each: [ROWS, len(k) / ROWS, 8]."""
    column = k[:, None] + tl.arange(0, 8)
    mask = ((m < rows) & inside)[:, None]
    if not ALIGNED:
        mask = mask & (column < columns)
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
    at: tl.tensor,
    inside: tl.tensor,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """What a table holds at [BLOCK_N, CHUNKS] places: fp32, 0 where a chunk is not inside."""
    at = at.reshape(BLOCK_N * CHUNKS)
    mask = inside[None].broadcast_to(BLOCK_N, CHUNKS).reshape(BLOCK_N * CHUNKS)
    values = tl.load(table + at, mask=mask, other=0)
    return values.reshape(BLOCK_N, CHUNKS).to(tl.float32)


@triton.jit
def _product(
    words: tl.tensor,
    pieces: tl.tensor,
    zero: tl.tensor,
    exponent: tl.tensor,
    total: tl.tensor,
    PIECES: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Add the products of four words of each row, [BLOCK_N, CHUNKS] each, with x to `total`."""
    PER_WORD: tl.constexpr = 32 // BITS
    for i in tl.static_range(PIECES):
        values = _pieces(pieces[i].to(tl.float32))
        for j in tl.static_range(8):
            word = words[(i * 8 + j) // PER_WORD]
            q = _value(word, zero, exponent, j % PER_WORD, BITS)
            total += q[:, None, :] * values[j][None]
    return total


@triton.jit(do_not_specialize=["rows", "per_split"])
def gemv(
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
    exponent: tl.tensor,
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
        exponent: EXPONENT.
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
    for start in range(first, last, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        inside = chunk < last
        word = start * 4 + tl.arange(0, 4 * CHUNKS)
        there = word < last * 4
        if not ALIGNED:
            there = there & (word < words)
        w = tl.load(packed + row * words + word[None], mask=there[None], other=0)
        w = _pieces(w.reshape(BLOCK_N, CHUNKS, 4))
        pieces = _chunk_of_x(x, rows, columns, start, last, PER_CHUNK, CHUNKS, ROWS, ALIGNED)
        at = row + (chunk * 0)[None]
        if GROUP:
            at = row * (columns // GROUP) + (chunk * PER_CHUNK // GROUP)[None]
        offset = 0.0
        if zero is not None:
            offset = _by_chunk(zero, at, inside, BLOCK_N, CHUNKS)
        if GROUP:
            s = _by_chunk(scale, at, inside, BLOCK_N, CHUNKS)
        part = tl.zeros((BLOCK_N, ROWS, CHUNKS), tl.float32)
        part = _product(w, pieces, offset, exponent, part, PIECES, BITS)
        if GROUP:
            part = part * s[:, None, :]
        total += part
    result = tl.sum(total, 2)
    if not GROUP:
        result = result * tl.load(scale + row).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + row).to(tl.float32)
    where = y + (split * rows + m)[None] * outputs + n[:, None]
    tl.store(where, result, mask=(n < outputs)[:, None] & (m < rows)[None])


@triton.jit
def _by_word(
    table: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    start: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PER_WORD: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """What a table [N, groups] holds for each word of a tile: fp32 [BLOCK_N, BLOCK_K / PER_WORD].

    A tile of whole groups reads each once, side by side: only loads of 4 bytes and more are made
    asynchronous, and only with those can words be dequantized where the tensor cores want them.
    """
    BLOCK_W: tl.constexpr = BLOCK_K // PER_WORD
    BLOCK_G: tl.constexpr = BLOCK_K // GROUP if GROUP else 0
    if BLOCK_G * GROUP == BLOCK_K:
        group = start // GROUP + tl.arange(0, BLOCK_G)[None]
        at = table + row * (columns // GROUP) + group
        values = tl.load(at, mask=group * GROUP < columns, other=0).to(tl.float32)
        shape: tl.constexpr = (BLOCK_N, BLOCK_G, BLOCK_W // BLOCK_G)
        return values.expand_dims(2).broadcast_to(shape).reshape(BLOCK_N, BLOCK_W)
    else:
        k = start + tl.arange(0, BLOCK_W)[None] * PER_WORD
        at = table + (row * (columns // GROUP) + k // GROUP if GROUP else row + k * 0)
        return tl.load(at, mask=k < columns, other=0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "per_split"])
def gemm(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MULTIPLE: tl.constexpr,
) -> None:
    """`y = x · Wᵀ + bias` with tensor cores, the weight dequantized in registers.

    The order of K within a product is free, and is chosen so that no integer moves between
    threads: value j of every word of a tile times the matching columns of x is one product. With
    groups the weight is rounded to the dtype of x, as the reference does; with a scale per row it
    is multiplied with the sums instead.

    Args:
        x: bf16 or fp16 [rows, K].
        packed: int32 [N, ceil(K · BITS / 32)].
        scale: [N, groups].
        zero: int8 [N, groups].
        bias: [N].
        y: [splits, rows, N], a sum over the part of K of each split.
        rows: Of x.
        outputs: N.
        columns: K.
        per_split: Tiles of a split.
        BITS: 4 or 8.
        GROUP: A multiple of 8, or 0.
        BLOCK_M: Rows of x a program.
        BLOCK_N: Rows of the weight a program.
        BLOCK_K: Columns at a time, at least 16 words.
        MULTIPLE: Divides K: BLOCK_K, 32 or 1.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    BLOCK_W: tl.constexpr = BLOCK_K // PER_WORD
    columns = columns // MULTIPLE * MULTIPLE
    words = tl.cdiv(columns, PER_WORD) if MULTIPLE == 1 else columns // 32 * BITS
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row = tl.minimum(n, outputs - 1)[:, None]
    first = split * per_split
    last = tl.minimum(first + per_split, tl.cdiv(columns, BLOCK_K))
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(first, last):
        word = tile * BLOCK_W + tl.arange(0, BLOCK_W)[None]
        k = tile * BLOCK_K + tl.arange(0, BLOCK_K)[None]
        at_x = x + m[:, None] * columns + k
        if MULTIPLE == BLOCK_K:
            w = tl.load(packed + row * words + word)
            values = tl.load(at_x, mask=(m < rows)[:, None], other=0)
        else:
            w = tl.load(packed + row * words + word, mask=word < words, other=0)
            values = tl.load(at_x, mask=(m < rows)[:, None] & (k < columns), other=0)
        start = tile * BLOCK_K
        offset = 0.0
        if zero is not None:
            offset = _by_word(zero, row, columns, start, BLOCK_N, BLOCK_K, PER_WORD, GROUP)
        if GROUP:
            s = _by_word(scale, row, columns, start, BLOCK_N, BLOCK_K, PER_WORD, GROUP)
        values = _pieces(values.reshape(BLOCK_M, BLOCK_W, PER_WORD))
        for j in tl.static_range(PER_WORD):
            q = _value(w, offset, EXPONENT, j, BITS)
            if GROUP:
                q = q * s
            q = q.to(values[j].dtype)
            total = tl.dot(q, values[j].trans(), total)
    if not GROUP:
        total = total * tl.load(scale + row).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)
    where = y + (split * rows + m)[None] * outputs + n[:, None]
    tl.store(where, total, mask=(n < outputs)[:, None] & (m < rows)[None])


@triton.jit
def dequantize(
    packed: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    y: tl.tensor,
    columns: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Rows of the weight as floats; a program takes BLOCK_W words of one row.

    Args:
        packed: int32 [N, ceil(K · BITS / 32)].
        scale: [N, groups].
        zero: int8 [N, groups].
        y: bf16, fp16 or fp32 [N, K].
        columns: K.
        BITS: 4 or 8.
        GROUP: A multiple of 8, or 0.
        BLOCK_W: Words at a time.
        ALIGNED: K is a multiple of 32.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    words = tl.cdiv(columns, PER_WORD)
    if ALIGNED:
        words = columns // 32 * BITS
        columns = columns // 32 * 32
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = word < words
    w = tl.load(packed + row * words + word, mask=inside, other=0)
    at = row + word * 0
    if GROUP:
        at = row * (columns // GROUP) + word * PER_WORD // GROUP
    s = tl.load(scale + at, mask=inside, other=0).to(tl.float32)
    offset = 0.0
    if zero is not None:
        offset = tl.load(zero + at, mask=inside, other=0).to(tl.float32)
    # Value j = 4a + 2b + c of a word goes to [word, a, b, c].
    if PER_WORD == 8:
        e0 = tl.join(_value(w, offset, EXPONENT, 0, BITS), _value(w, offset, EXPONENT, 4, BITS))
        e1 = tl.join(_value(w, offset, EXPONENT, 2, BITS), _value(w, offset, EXPONENT, 6, BITS))
        o0 = tl.join(_value(w, offset, EXPONENT, 1, BITS), _value(w, offset, EXPONENT, 5, BITS))
        o1 = tl.join(_value(w, offset, EXPONENT, 3, BITS), _value(w, offset, EXPONENT, 7, BITS))
        q = tl.join(tl.join(e0, e1), tl.join(o0, o1)).reshape(BLOCK_W, PER_WORD)
    else:
        even = tl.join(_value(w, offset, EXPONENT, 0, BITS), _value(w, offset, EXPONENT, 2, BITS))
        odd = tl.join(_value(w, offset, EXPONENT, 1, BITS), _value(w, offset, EXPONENT, 3, BITS))
        q = tl.join(even, odd).reshape(BLOCK_W, PER_WORD)
    k = word[:, None] * PER_WORD + tl.arange(0, PER_WORD)
    there = inside[:, None] if ALIGNED else k < columns
    tl.store(y + row * columns + k, q * s[:, None], mask=there)


@triton.jit(do_not_specialize=["splits"])
def combine(
    partial: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    total: tl.tensor,
    outputs: tl.tensor,
    splits: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Add the sums of all splits, in order, and the bias.

    Args:
        partial: fp32 [splits, rows, N].
        bias: [N].
        y: [rows, N].
        total: rows · N.
        outputs: N.
        splits: How many.
        BLOCK: Elements a program.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    result = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        result += tl.load(partial + split * total + at, mask=inside, other=0)
    if bias is not None:
        result += tl.load(bias + at % outputs, mask=inside, other=0).to(tl.float32)
    tl.store(y + at, result, mask=inside)
