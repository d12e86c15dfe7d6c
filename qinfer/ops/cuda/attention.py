"""Attention over the paged cache on NVIDIA GPUs.

Segments may pad a batch, with a position of 0, and a block and a slot that are nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qinfer.ops.block import Norm
from qinfer.ops.cuda.attention_launches import Call, Preparation, rotation_launch
from qinfer.ops.cuda.compilation import Compilation
from qinfer.ops.cuda.launches import Launch
from qinfer.ops.paged import Batch, KVLayer
from qinfer.quant.kv import KVSide


def rotate(q: Tensor, k: Tensor, preparation: Preparation) -> None:
    """In place: normalize and rotate heads, as `rms_norm` and `rotary` of `ReferenceOps` do.

    Args:
        q: [tokens, heads, head_dim], a token's heads side by side.
        k: [tokens, kv_heads, head_dim], likewise.
        preparation: What to do.
    """
    rotation_launch(q, k, preparation).run()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: KVLayer,
    batch: Batch,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Write new keys and values to the cache, in place, and attend to it.

    See `ReferenceOps.attention`. A segment of one token is computed in the same way, to the bit,
    whatever else is in the batch.

    Args:
        q: [tokens, heads, head_dim], a token's heads side by side.
        k: [tokens, kv_heads, head_dim], likewise.
        v: Like `k`.
        layer: The cache.
        batch: Its tensors are where `q` is, but for `ids` and `positions`, which are not read.
        scale: Multiplies the scores.
        softcap: `softcap · tanh(score / softcap)` limits them.

    Returns:
        [tokens, heads, head_dim].
    """
    call = Call(q, k, v, layer, batch, scale, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for launch in call.launches(out):
        launch.run()
    return out


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: KVLayer,
    batch: Batch,
    *,
    preparation: Preparation,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`rotate`, in place, and `attention` for a batch with one token per segment."""
    call = Call(q, k, v, layer, batch, scale, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for launch in call.launches(out, preparation):
        launch.run()
    return out


def compilations() -> list[Compilation]:
    """All kernels in configurations that models usually have, for a compiler's check."""
    found: dict[tuple[str, ...], Compilation] = {}
    usual = [(torch.bfloat16, 128, bits, False) for bits in (16, 8, 4)]
    for dtype, head_dim, bits, limited in (*usual, (torch.float16, 64, 8, True)):
        kind = f"{str(dtype).removeprefix('torch.')}, {head_dim} channels, {bits} bits"
        for tokens in (1, 64):
            for launch in _example(dtype, head_dim, bits, tokens, limited=limited):
                which = f"{tokens} tokens{', window and soft cap' if limited else ''}"
                one = launch.compilation(f"{launch.kernel.__name__}: {kind}, {which}")
                key = map(str, (launch.kernel.__name__, one.signature, one.constants))
                found.setdefault(tuple(key), one)
    return list(found.values())


def _example(
    dtype: torch.dtype, head_dim: int, bits: int, tokens: int, *, limited: bool
) -> Iterator[Launch]:
    """What a step of so many tokens launches, over tensors that have no memory."""
    heads, kv_heads, meta = 32, 8, torch.device("meta")
    joint = torch.empty(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=meta)
    sizes = [n * head_dim for n in (heads, kv_heads, kv_heads)]
    q, k, v = (part.view(tokens, -1, head_dim) for part in torch.split_with_sizes(joint, sizes, 1))

    def side(*, is_keys: bool) -> KVSide:
        return KVSide.allocate(
            bits,
            is_keys=is_keys,
            heads=(kv_heads, head_dim),
            blocks=64,
            slots=1,
            half=dtype,
            device=meta,
        )

    layer = KVLayer(side(is_keys=True), side(is_keys=False))
    if limited:
        layer.window, layer.sinks = 4096, 4
    batch = Batch.of([([0] * tokens, 0)], [[[0] * 64]], [0], meta)
    pairs, channels = (torch.empty(tokens, n, device=meta) for n in (head_dim // 2, head_dim))
    norm = Norm(channels[0], None, 1e-6)
    preparation = Preparation((pairs, pairs), norm, norm)
    call = Call(q, k, v, layer, batch, head_dim**-0.5, 50.0 if limited else None)
    out = torch.empty(q.shape, dtype=dtype, device=meta)
    if tokens > 1:
        yield rotation_launch(q, k, preparation)
        yield from call.launches(out)
    else:
        yield from call.launches(out, preparation)
