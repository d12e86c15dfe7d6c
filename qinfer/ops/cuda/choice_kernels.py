# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Kernels that choose tokens from logits: the likeliest of each row, or one that is drawn.

`qinfer.ops.draws` defines what is drawn. Nothing is sorted. What the filters can keep lies within
some reach of the peak; `weigh_blocks` counts and sums what lies within each of a few, `list_few`
writes the ids down of the nearest that suffices, mostly some dozens, and `draw_kernel` looks for
the filters' limits among them by bisection, over the bits of the numbers themselves.

Masses are integers, see there; those of a row are 0 from 28 below the peak on. A block is BLOCK
columns of a row; a row that is not drawn, or not sound, is passed over.
"""

import triton
import triton.language as tl

from qinfer.ops import draws

LEVELS = tl.constexpr(4)  # of reach: 4, 8, 16, all
_UNIT = tl.constexpr(2.0**draws.UNIT_BITS)
_COLUMNS = tl.constexpr(draws.COLUMNS)
_UNIFORMS = tl.constexpr(draws.UNIFORMS)
_LARGEST = tl.constexpr(0x7FFFFFFF)
_LOWEST = tl.constexpr(-0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)  # the bits of fp32


@triton.jit
def find_peaks(logits, peaks, firsts, stride, size, BLOCK: tl.constexpr):
    """Program (i, j): maximum of block j of row i, +inf if any is NaN, and where it is first.

    Args:
        logits: fp32 [sequences, columns].
        peaks: fp32 [sequences, blocks].
        firsts: int32 [sequences, blocks].
        stride: Of `logits`.
        size: Columns that count.
        BLOCK: Columns a program.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + column, mask=column < size, other=float("-inf"))
    values = tl.where(values != values, float("inf"), values)
    peak = tl.max(values, 0)
    first = tl.min(tl.where(values == peak, column, _LARGEST), 0)
    place = row * tl.num_programs(1) + block
    tl.store(peaks + place, peak)
    tl.store(firsts + place, first)


@triton.jit
def take_likeliest(peaks, firsts, ids, flags, blocks, BLOCKS: tl.constexpr):
    """Program i: the first maximum of row i, and whether that is infinite.

    Args:
        peaks: fp32 [sequences, blocks].
        firsts: int32 [sequences, blocks].
        ids: int64 [sequences].
        flags: int8 [sequences].
        blocks: Of a row.
        BLOCKS: A power of 2, not less.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    place = row * blocks + block
    values = tl.load(peaks + place, mask=block < blocks, other=float("-inf"))
    # a block that does not exist comes after those that do, also if all are -inf
    first = tl.load(firsts + place, mask=block < blocks, other=_LARGEST)
    peak = tl.max(values, 0)
    best = tl.min(tl.where(values == peak, first, _LARGEST), 0)
    infinite = (peak == float("inf")) | (peak == float("-inf"))
    tl.store(ids + row, best.to(tl.int64))
    tl.store(flags + row, infinite.to(tl.int8))


@triton.jit
def weigh_blocks(
    logits,
    peaks,
    table,
    masses,
    counts,
    stride,
    size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (i, j): what of block j of row i lies within each reach.

    Args:
        logits: fp32 [sequences, columns].
        peaks: fp32 [sequences, blocks].
        table: See `Draws`.
        masses: int64 [sequences, LEVELS, blocks].
        counts: int32 [sequences, LEVELS, blocks].
        stride: Of `logits`.
        size: Columns that count.
        BLOCK: Columns a program.
        BLOCKS: A power of 2, not less than the blocks of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    temperature = _settings(table, row)[0]
    peak = _peak(peaks, row, blocks, BLOCKS)
    if _is_drawn(temperature, peak):
        column = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < size, other=float("-inf"))
        depth, mass = _weigh(x, peak, temperature)
        for level in tl.static_range(LEVELS):
            within = (depth <= _reach(level)) & (column < size)
            place = (row * LEVELS + level) * blocks + block
            tl.store(masses + place, tl.sum(tl.where(within, mass, 0), 0))
            tl.store(counts + place, tl.sum(within.to(tl.int32), 0))


@triton.jit
def list_few(
    logits,
    peaks,
    table,
    masses,
    counts,
    listed,
    stride,
    size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (i, j): write down the ids in block j that row i may draw, behind those before it.

    Args:
        logits: fp32 [sequences, columns].
        peaks: fp32 [sequences, blocks].
        table: See `Draws`.
        masses: int64 [sequences, LEVELS, blocks].
        counts: int32 [sequences, LEVELS, blocks].
        listed: int32 [sequences, size]: ascending; rows without filters stay empty.
        stride: Of `logits`.
        size: Columns that count.
        BLOCK: Columns a program.
        BLOCKS: A power of 2, not less than the blocks of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p, floor = _settings(table, row)
    peak = _peak(peaks, row, blocks, BLOCKS)
    if _is_drawn(temperature, peak) & _is_filtered(top_k, top_p, floor):
        level = _nearest(masses, counts, row, blocks, top_k, top_p, floor, BLOCKS)[0]
        others = tl.arange(0, BLOCKS)
        place = (row * LEVELS + level) * blocks
        before = tl.load(counts + place + others, mask=others < block, other=0)
        if tl.load(counts + place + block) > 0:
            column = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + column, mask=column < size, other=float("-inf"))
            depth = _weigh(x, peak, temperature)[0]
            within = (depth <= _reach(level)) & (column < size)
            at = tl.sum(before, 0) + tl.cumsum(within.to(tl.int32), 0) - 1
            tl.store(listed + row * size + at, column, mask=within)


@triton.jit
def draw_kernel(
    logits,
    peaks,
    table,
    masses,
    counts,
    listed,
    positions,
    ids,
    stride,
    size,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program i: what row i draws.

    Args:
        logits: fp32 [sequences, columns].
        peaks: fp32 [sequences, blocks].
        table: See `Draws`.
        masses: int64 [sequences, LEVELS, blocks].
        counts: int32 [sequences, LEVELS, blocks].
        listed: int32 [sequences, size].
        positions: int64 [sequences].
        ids: int64 [sequences]; rows that are not drawn keep theirs.
        stride: Of `logits`.
        size: Columns that count.
        blocks: Of a row.
        BLOCK: Columns of one, and listed ids at a time.
        BLOCKS: A power of 2, not less.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, floor = _settings(table, row)
    peak = _peak(peaks, row, blocks, BLOCKS)
    if _is_drawn(temperature, peak):
        logits += row * stride
        listed += row * size
        level, total = _nearest(masses, counts, row, blocks, top_k, top_p, floor, BLOCKS)
        is_listed = _is_filtered(top_k, top_p, floor)
        others = tl.arange(0, BLOCKS)
        place = (row * LEVELS + level) * blocks + others
        stop = tl.sum(tl.load(counts + place, mask=others < blocks, other=0), 0)
        least = tl.full((), _LOWEST, tl.int64)
        limit = tl.full((), _INFINITY, tl.int64)
        ties = tl.full((), _LARGEST, tl.int64)
        if is_listed:
            if top_k > 0:
                least = _search(logits, listed, stop, peak, temperature, least, top_k, False, BLOCK)
                total = _sums(logits, listed, stop, peak, temperature, least, limit + 1, BLOCK)[0]
            needed = _share(top_p, total)
            if top_p < 1.0:
                limit = _search(logits, listed, stop, peak, temperature, least, needed, True, BLOCK)
            lowest = (0.0 - floor).to(tl.int32, bitcast=True).to(tl.int64)
            is_cut = (top_p < 1.0) & (limit <= lowest)
            limit = tl.minimum(limit, lowest)
            total, ties = _sums(logits, listed, stop, peak, temperature, least, limit, BLOCK)
            mass = _mass(limit.to(tl.int32).to(tl.float32, bitcast=True))
            if is_cut:
                first_ones = (needed - total + mass - 1) // tl.maximum(mass, 1)
                ties = tl.minimum(tl.maximum(first_ones, 1), ties)
            total += ties * mass
        target = (_uniform(table, positions, row) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        start = tl.full((), 0, tl.int32)
        reached = tl.full((), 0, tl.int64)
        if not is_listed:
            its = tl.load(masses + place, mask=others < blocks, other=0)
            block = tl.sum((tl.cumsum(its, 0) <= target).to(tl.int32), 0)
            reached = tl.sum(tl.where(others < block, its, 0), 0)
            start = block * BLOCK
            stop = tl.minimum(start + BLOCK, size)
        tied = tl.full((), 0, tl.int64)
        token = tl.full((), _LARGEST, tl.int32)
        while (token == _LARGEST) & (start < stop):
            at = start + tl.arange(0, BLOCK)
            column = at
            if is_listed:
                column = tl.load(listed + at, mask=at < stop, other=0)
            depth, mass, order = _look(logits, column, at < stop, peak, temperature)
            keep = (at < stop) & (order >= least)
            is_tie = keep & (depth == limit)
            rank = tied + tl.cumsum(is_tie.to(tl.int64), 0)
            keep = keep & ((depth < limit) | (is_tie & (rank <= ties)))
            mass = tl.where(keep, mass, 0)
            passed = (reached + tl.cumsum(mass, 0) > target) & (at < stop)
            token = tl.min(tl.where(passed, column, _LARGEST), 0)
            reached += tl.sum(mass, 0)
            tied += tl.sum(is_tie.to(tl.int64), 0)
            start += BLOCK
        if token < size:
            tl.store(ids + row, token.to(tl.int64))


@triton.jit
def _settings(table, row):
    """Temperature and log(min_p) as fp32, top_k as int32, top_p as fp64."""
    at = table + row * _COLUMNS
    temperature = tl.load(at).to(tl.float32)
    floor = tl.load(at + 3).to(tl.float32)
    return temperature, tl.load(at + 1).to(tl.int32), tl.load(at + 2), floor


@triton.jit
def _uniform(table, positions, row):
    place = tl.load(positions + row) % _UNIFORMS
    return tl.load(table + row * _COLUMNS + (_COLUMNS - _UNIFORMS) + place)


@triton.jit
def _is_drawn(temperature, peak):
    return (temperature > 0.0) & (tl.abs(peak) < float("inf"))


@triton.jit
def _is_filtered(top_k, top_p, floor):
    return (top_k > 0) | (top_p < 1.0) | (floor > float("-inf"))


@triton.jit
def _peak(peaks, row, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    mask = block < blocks
    return tl.max(tl.load(peaks + row * blocks + block, mask=mask, other=float("-inf")), 0)


@triton.jit
def _reach(level):
    """How far below the peak a level goes."""
    far = tl.where(level == 2, 16.0, float("inf"))
    return tl.where(level == 0, 4.0, tl.where(level == 1, 8.0, far))


@triton.jit
def _weigh(x, peak, temperature):
    """Logits as distances below the peak, at least 0, and as masses."""
    depth = tl.abs(tl.div_rn(x - peak, temperature))
    return depth, _mass(depth)


@triton.jit
def _mass(depth):
    return (tl.exp(-depth) * _UNIT).to(tl.int64)


@triton.jit
def _look(logits, column, is_there, peak, temperature):
    """Depths, as the integers that order like them; masses; and the order of the logits."""
    x = tl.load(logits + column, mask=is_there, other=float("-inf"))
    depth, mass = _weigh(x, peak, temperature)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & _LARGEST)
    return depth.to(tl.int32, bitcast=True).to(tl.int64), mass, order.to(tl.int64)


@triton.jit
def _nearest(masses, counts, row, blocks, top_k, top_p, floor, BLOCKS: tl.constexpr):
    """The nearest reach that has all that the filters keep; and the mass of the row."""
    block = tl.arange(0, BLOCKS)
    mask = block < blocks
    place = row * LEVELS * blocks + block
    total = tl.sum(tl.load(masses + place + (LEVELS - 1) * blocks, mask=mask, other=0), 0)
    needed = _share(top_p, total)
    nearest = tl.full((), LEVELS - 1, tl.int32)
    for level in tl.static_range(LEVELS - 1):
        mass = tl.sum(tl.load(masses + place + level * blocks, mask=mask, other=0), 0)
        count = tl.sum(tl.load(counts + place + level * blocks, mask=mask, other=0), 0)
        suffices = tl.where(top_p < 1.0, mass >= needed, -floor <= _reach(level))
        suffices = tl.where(top_k > 0, count >= top_k, suffices)
        nearest = tl.minimum(nearest, tl.where(suffices, level, LEVELS - 1))
    return nearest, total


@triton.jit
def _share(p, total):
    """The mass that `top_p` needs; not nothing, as it always keeps the likeliest."""
    return tl.maximum(tl.ceil(p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _sums(logits, listed, count, peak, temperature, least, limit, BLOCK: tl.constexpr):
    """Of the listed ids from an order on: the mass above a depth, and how many are at it."""
    mass_above = tl.full((), 0, tl.int64)
    count_at = tl.full((), 0, tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        column = tl.load(listed + at, mask=at < count, other=0)
        depth, mass, order = _look(logits, column, at < count, peak, temperature)
        keep = (at < count) & (order >= least)
        mass_above += tl.sum(tl.where(keep & (depth < limit), mass, 0), 0)
        count_at += tl.sum((keep & (depth == limit)).to(tl.int64), 0)
    return mass_above, count_at


@triton.jit
def _search(
    logits,
    listed,
    count,
    peak,
    temperature,
    least,
    needed,
    BY_DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The depth down to which the listed ids have a mass; or the order down to which there are k.

    By bisection between numbers that there are, so that it takes few passes where those are few.

    Args:
        logits: fp32 [columns].
        listed: int32 [count].
        count: Of them.
        peak: Of the logits.
        temperature: They are divided by.
        least: Order of the smallest that counts.
        needed: The mass, or k. If there is not as much, the result is beyond all.
        BY_DEPTH: Which of both.
        BLOCK: Listed ids at a time.
    """
    low = tl.full((), _LOWEST, tl.int64)
    high = tl.full((), _LARGEST, tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        sum_to = tl.full((), 0, tl.int64)
        last_to = tl.full((), _LOWEST, tl.int64)
        first_beyond = tl.full((), _LARGEST, tl.int64)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            column = tl.load(listed + at, mask=at < count, other=0)
            depth, mass, order = _look(logits, column, at < count, peak, temperature)
            place = depth if BY_DEPTH else -order
            amount = mass if BY_DEPTH else tl.full((BLOCK,), 1, tl.int64)
            keep = (at < count) & (order >= least)
            is_to = place <= middle
            sum_to += tl.sum(tl.where(keep & is_to, amount, 0), 0)
            last_to = tl.maximum(last_to, tl.max(tl.where(keep & is_to, place, _LOWEST), 0))
            beyond = tl.where(keep & (place > middle), place, _LARGEST)
            first_beyond = tl.minimum(first_beyond, tl.min(beyond, 0))
        high = tl.where(sum_to >= needed, last_to, high)
        low = tl.where(sum_to >= needed, low, first_beyond)
    return low if BY_DEPTH else -low
