# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: PLR0913
"""Parts of kernels: where a block of the cache has its numbers, and those before it is stored."""

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(32)  # qinfer.quant.kv.BLOCK_TOKENS


@triton.jit
def axes(TOKENS: tl.constexpr, CHANNELS: tl.constexpr, IS_KEYS: tl.constexpr):
    """Tokens and channels of a tile, in the order of keys or of values."""
    token = tl.arange(0, TOKENS)
    channel = tl.arange(0, CHANNELS)
    if IS_KEYS:
        return token[None, :], channel[:, None]
    else:
        return token[:, None], channel[None, :]


@triton.jit
def place_in_block(token, channel, IS_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where a block of floats, or of 8-bit codes, holds a number."""
    if IS_KEYS:
        return channel * BLOCK + token
    else:
        return token * HEAD_DIM + channel


@triton.jit
def put_tokens(
    block,
    new,
    stride,
    at,
    stop,
    IS_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the tokens from `at` to `stop`, of which `new` is the first, to a block of floats."""
    if TOKENS == 1:
        channel = tl.arange(0, PADDED)
        value = tl.load(new + channel, channel < HEAD_DIM, 0.0)
        where = block + place_in_block(at, channel, IS_KEYS, HEAD_DIM)
        tl.store(where, value.to(block.dtype.element_ty), channel < HEAD_DIM)
    else:
        token, channel = axes(TOKENS, PADDED, IS_KEYS)
        mask = (channel < HEAD_DIM) & (token >= at) & (token < stop)
        value = tl.load(new + (token - at) * stride.to(tl.int64) + channel, mask, 0.0)
        where = block + place_in_block(token, channel, IS_KEYS, HEAD_DIM)
        tl.store(where, value.to(block.dtype.element_ty), mask)


@triton.jit
def own_block(
    opened,
    new,
    stride,
    at,
    stop,
    token,
    channel,
    mask,
    IS_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """A block before it is stored, fp32 of numbers in 16 bits; 0 where it has none.

    Args:
        opened: Holds the tokens before `at`.
        new: The token `at`, those up to `stop` behind it.
        stride: From new token to new token.
        at: Of 32.
        stop: Of 32.
        token: Of the numbers wanted.
        channel: Of the numbers wanted.
        mask: Which of them are any.
        IS_KEYS: Keys or values.
        HEAD_DIM: Even.
    """
    where = opened + place_in_block(token, channel, IS_KEYS, HEAD_DIM)
    old = tl.load(where, mask, 0.0)  # of all tokens: so it takes wide loads
    is_new = mask & (token >= at) & (token < stop)
    fresh = tl.load(new + (token - at) * stride.to(tl.int64) + channel, is_new, 0.0)
    return tl.where(token < at, old, fresh.to(opened.dtype.element_ty)).to(tl.float32)


@triton.jit
def floats(block, length, IS_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """The first tokens of a block of floats; 0 behind them."""
    token, channel = axes(BLOCK, PADDED, IS_KEYS)
    where = block + place_in_block(token, channel, IS_KEYS, HEAD_DIM)
    x = tl.load(where, channel < HEAD_DIM, 0.0)
    return tl.where(token < length, x, 0.0)


@triton.jit
def floats_of_step(
    opened,
    new,
    stride,
    at,
    stop,
    IS_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A block that the step has written tokens of; 0 behind them. See `own_block`."""
    token, channel = axes(BLOCK, PADDED, IS_KEYS)
    mask = (channel < HEAD_DIM) & (token < stop)
    return own_block(opened, new, stride, at, stop, token, channel, mask, IS_KEYS, HEAD_DIM)
