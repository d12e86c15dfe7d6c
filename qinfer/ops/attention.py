"""Attention over the paged cache in plain torch: the definition that kernels are tested against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qinfer.ops.paged import Batch, KVLayer
from qinfer.quant.kv import BLOCK_TOKENS, KVSide


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: KVLayer,
    batch: Batch,
    *,
    scale: float,
    softcap: float | None = None,
    one_by_one: bool = False,
) -> Tensor:
    """See `ReferenceOps.attention`; `one_by_one` computes each query by itself."""
    out = torch.empty_like(q)
    offsets, slots = batch.offsets.tolist(), batch.slots.tolist()
    for s, start in enumerate(batch.starts.tolist()):
        table = batch.tables[layer.group][s].tolist()
        for first, end in _pieces(start, start + offsets[s + 1] - offsets[s], one_by_one):
            rows = slice(offsets[s] + first - start, offsets[s] + end - start)
            own = first // BLOCK_TOKENS
            past = [i for i in range(own) if _sees_block(layer, first, i)]
            numbers = torch.tensor([table[i] for i in past], dtype=torch.int64, device=q.device)
            keys, values = (
                torch.cat(
                    (
                        _by_token(side, side.blocks(numbers)),
                        _append(side, table[own], slots[s], first % BLOCK_TOKENS, new[rows]),
                    )
                )
                for side, new in ((layer.keys, k), (layer.values, v))
            )
            positions = [BLOCK_TOKENS * i + j for i in (*past, own) for j in range(BLOCK_TOKENS)]
            at = torch.tensor(positions[: len(keys)], device=q.device)
            visible = _visible(layer, first, end, at)
            out[rows] = _attend(q[rows], keys, values, visible, scale, softcap)
    return out


def _pieces(start: int, end: int, one_by_one: bool) -> Iterator[tuple[int, int]]:
    """Cut a run of positions so that each piece lies in one block."""
    while start < end:
        stop = start + 1 if one_by_one else (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        yield start, min(stop, end)
        start = stop


def _sees_block(layer: KVLayer, position: int, block: int) -> bool:
    first = block * BLOCK_TOKENS
    oldest = 0 if layer.window is None else position - layer.window + 1
    return first + BLOCK_TOKENS > oldest or first < layer.sinks


def _visible(layer: KVLayer, first: int, end: int, at: Tensor) -> Tensor:
    """Which of the keys at these positions each query sees: bool [queries, keys]."""
    queries = torch.arange(first, end, device=at.device).unsqueeze(1)
    visible = at <= queries
    if layer.window is not None:
        visible &= (at > queries - layer.window) | (at < layer.sinks)
    return visible


def _by_token(side: KVSide, blocks: Tensor) -> Tensor:
    """Blocks [n, kv_heads, …] as [tokens, kv_heads, head_dim]."""
    order = (0, 3, 1, 2) if side.is_keys else (0, 2, 1, 3)
    return blocks.permute(order).flatten(0, 1)


def _append(side: KVSide, block: int, slot: int, at: int, new: Tensor) -> Tensor:
    """Write tokens from place `at` of a block on, and store the block if they fill it.

    Args:
        side: Keys or values; in place.
        block: The block's number.
        slot: Of the sequence's open block.
        at: Tokens that are there before.
        new: [tokens, kv_heads, head_dim], not beyond the block.

    Returns:
        fp32 [at + tokens, kv_heads, head_dim]: all of the block so far, not quantized.
    """
    whole = side.data[block] if side.open is None else side.open[slot]
    by_token = whole.permute((2, 0, 1) if side.is_keys else (1, 0, 2))
    end = at + len(new)
    by_token[at:end] = new.to(whole.dtype)
    if end == BLOCK_TOKENS and side.open is not None:
        side.seal(block, whole)
    return by_token[:end].float()


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Softmax attention in fp32.

    Args:
        q: [queries, heads, head_dim].
        keys: fp32 [length, kv_heads, head_dim].
        values: Like `keys`.
        visible: bool [queries, length].
        scale: Multiplies the scores.
        softcap: Bounds them, if it is given.

    Returns:
        Like `q`.
    """
    queries, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.float().view(queries, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).reshape(q.shape).to(q.dtype)
