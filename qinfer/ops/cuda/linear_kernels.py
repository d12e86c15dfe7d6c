"""Triton kernels of `qinfer.ops.cuda.linear`; which runs when, and with what tiles, is there.

They read integers in the layout of the checkpoint, see `qinfer.quant.affine`: N rows of int32
words, `32 / bits` values each. A value becomes a float without a conversion instruction, which
would run at a quarter of the speed of the others: an exponent is put above its bits where they are.
Bits `p` and up of the mantissa of `2^(23-p)` are worth 1 and up, so the result is
`2^(23-p) + code`, and subtracting `2^(23-p) + 2^(bits-1)` gives q exactly. The product with few
rows of x is in `gemv_kernels`.

In all kernels N is `outputs` and K is `columns`; GROUP is the group size, or 0 if there is a scale
per row; `zero` and `bias` may be None; ALIGNED promises that rows are whole 16-byte pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl

EXPONENT = tl.constexpr(150 << 23)  # of 2^23 in fp32


@triton.jit
def pieces_of(x: tl.tensor) -> tl.tensor:
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
def _value(words: tl.tensor, zero: tl.tensor, J: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Value J of each word, less `zero`, as fp32 and exactly."""
    SHIFT: tl.constexpr = (12 if BITS == 4 else 16) if J * BITS >= 16 else 0
    PLACE: tl.constexpr = J * BITS - SHIFT
    MASK: tl.constexpr = ((1 << BITS) - 1) << PLACE
    OFFSET: tl.constexpr = (1 << (23 - PLACE)) + (1 << (BITS - 1))
    bits = ((words >> SHIFT) & MASK) | (EXPONENT - (PLACE << 23))
    return bits.to(tl.float32, bitcast=True) - (zero + OFFSET)


@triton.jit
def _of_tile(
    table: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    tile: tl.tensor,
    BLOCK_K: tl.constexpr,
    PER_WORD: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """What a table [N, groups] holds for a tile: of each group if it has whole ones, or word."""
    BLOCK_G: tl.constexpr = BLOCK_K // GROUP if GROUP else 0
    if BLOCK_G * GROUP == BLOCK_K:
        group = tile * BLOCK_G + tl.arange(0, BLOCK_G)[None]
        return tl.load(table + row * (columns // GROUP) + group, group * GROUP < columns, 0)
    else:
        k = tile * BLOCK_K + tl.arange(0, BLOCK_K // PER_WORD)[None] * PER_WORD
        at = table + (row * (columns // GROUP) + k // GROUP if GROUP else row + k * 0)
        return tl.load(at, mask=k < columns, other=0)


@triton.jit
def _by_word(values: tl.tensor, BLOCK_W: tl.constexpr) -> tl.tensor:
    """What `_of_tile` gave, as fp32 and for each word: [BLOCK_N, BLOCK_W]."""
    N: tl.constexpr = values.shape[0]
    G: tl.constexpr = values.shape[1]
    values = values.to(tl.float32)
    return values.expand_dims(2).broadcast_to(N, G, BLOCK_W // G).reshape(N, BLOCK_W)


@triton.jit
def _pair(
    words: tl.tensor,
    less: tl.tensor,
    s: tl.tensor,
    J: tl.constexpr,
    HALF: tl.constexpr,
    SCALE: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Values J and J + 4 of each word, dequantized: [N, W, 2]. See `_add_pairs`."""
    pair = ((words >> (4 * J)) & 0x000F000F) | EXPONENTS
    low = (pair & 0xFFFF).to(tl.int16).to(HALF, bitcast=True) - less
    high = (pair >> 16).to(tl.int16).to(HALF, bitcast=True) - less
    if GROUP and SCALE == HALF:
        low, high = low * s.to(HALF), high * s.to(HALF)
    elif GROUP:
        low, high = (low.to(tl.float32) * s).to(HALF), (high.to(tl.float32) * s).to(HALF)
    return tl.join(low, high)


@triton.jit
def _add_pairs(
    total: tl.tensor,
    words: tl.tensor,
    x: tl.tensor,
    s: tl.tensor,
    zero: tl.tensor,
    HAS_ZERO: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """`total` plus the product of a tile's words of eight values with x, [BLOCK_M, BLOCK_K].

    Values j and j + 4 of a word make a register of two numbers of 16 bits as they lie: an exponent
    is put above both at once, 7 or 10 bits of mantissa hold them, and processors subtract and
    multiply both at once.
    """
    HALF: tl.constexpr = x.dtype
    IS_BF16: tl.constexpr = x.dtype == tl.bfloat16
    EXPONENTS: tl.constexpr = 0x43004300 if IS_BF16 else 0x64006400  # of 2^7 and of 2^10
    ONE: tl.constexpr = 128.0 if IS_BF16 else 1024.0
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    M: tl.constexpr = x.shape[0]
    x = x.reshape(M, W, 2, 2, 2)  # token, word, j / 4, j / 2 % 2, j % 2
    less = tl.full((1, 1), ONE + 8.0, tl.float32).to(HALF)
    if HAS_ZERO:
        less = (zero + (ONE + 8.0)).to(HALF)
    q0 = _pair(words, less, s, 0, HALF, SCALE, EXPONENTS, GROUP)
    q1 = _pair(words, less, s, 1, HALF, SCALE, EXPONENTS, GROUP)
    q2 = _pair(words, less, s, 2, HALF, SCALE, EXPONENTS, GROUP)
    q3 = _pair(words, less, s, 3, HALF, SCALE, EXPONENTS, GROUP)
    if M == 16:  # in two products, for whose operands larger tiles have too few registers
        even, odd = x.split()
        q = tl.join(q0, q2).permute(0, 3, 1, 2).reshape(N, 4 * W)
        total = tl.dot(q, even.permute(0, 3, 1, 2).reshape(M, 4 * W).trans(), total)
        q = tl.join(q1, q3).permute(0, 3, 1, 2).reshape(N, 4 * W)
        total = tl.dot(q, odd.permute(0, 3, 1, 2).reshape(M, 4 * W).trans(), total)
    else:
        even, odd = x.split()
        x0, x2 = even.split()
        x1, x3 = odd.split()
        total = tl.dot(q0.reshape(N, 2 * W), x0.reshape(M, 2 * W).trans(), total)
        total = tl.dot(q1.reshape(N, 2 * W), x1.reshape(M, 2 * W).trans(), total)
        total = tl.dot(q2.reshape(N, 2 * W), x2.reshape(M, 2 * W).trans(), total)
        total = tl.dot(q3.reshape(N, 2 * W), x3.reshape(M, 2 * W).trans(), total)
    return total


@triton.jit(do_not_specialize=["rows", "per_split"])
def gemm(  # noqa: C901 - its branches are on constants
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
    PAIRS: tl.constexpr,
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
        PAIRS: Dequantize two values of 4 bits at once, as processors from 8.0 on can.
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
    # What is too small for asynchronous loads is fetched a tile ahead where registers suffice.
    AHEAD: tl.constexpr = BLOCK_M == 16
    if AHEAD and zero is not None:
        its_zero = _of_tile(zero, row, columns, first, BLOCK_K, PER_WORD, GROUP)
    if AHEAD and GROUP:
        its_scale = _of_tile(scale, row, columns, first, BLOCK_K, PER_WORD, GROUP)
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
        offset, s = 0.0, 1.0
        if zero is not None:
            if not AHEAD:
                its_zero = _of_tile(zero, row, columns, tile, BLOCK_K, PER_WORD, GROUP)
            offset = _by_word(its_zero, BLOCK_W)
            if AHEAD:
                its_zero = _of_tile(zero, row, columns, tile + 1, BLOCK_K, PER_WORD, GROUP)
        if GROUP:
            if not AHEAD:
                its_scale = _of_tile(scale, row, columns, tile, BLOCK_K, PER_WORD, GROUP)
            s = _by_word(its_scale, BLOCK_W)
            if AHEAD:
                its_scale = _of_tile(scale, row, columns, tile + 1, BLOCK_K, PER_WORD, GROUP)
        if PAIRS:
            SCALE: tl.constexpr = scale.dtype.element_ty
            total = _add_pairs(total, w, values, s, offset, zero is not None, SCALE, GROUP)
        else:
            values = pieces_of(values.reshape(BLOCK_M, BLOCK_W, PER_WORD))
            for j in tl.static_range(PER_WORD):
                q = _value(w, offset, j, BITS)
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
        e0 = tl.join(_value(w, offset, 0, BITS), _value(w, offset, 4, BITS))
        e1 = tl.join(_value(w, offset, 2, BITS), _value(w, offset, 6, BITS))
        o0 = tl.join(_value(w, offset, 1, BITS), _value(w, offset, 5, BITS))
        o1 = tl.join(_value(w, offset, 3, BITS), _value(w, offset, 7, BITS))
        q = tl.join(tl.join(e0, e1), tl.join(o0, o1)).reshape(BLOCK_W, PER_WORD)
    else:
        even = tl.join(_value(w, offset, 0, BITS), _value(w, offset, 2, BITS))
        odd = tl.join(_value(w, offset, 1, BITS), _value(w, offset, 3, BITS))
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
