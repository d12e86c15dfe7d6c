"""Integers of 4 and 8 bits: the compressed-tensors "pack-quantized" layout, byte for byte.

A linear layer `NAME` of N outputs and K inputs is stored as three tensors:

- `NAME.weight_packed`, int32 `[N, ceil(K · bits / 32)]`: `32 / bits` values a word, value k of a
  row in bits `bits · (k mod (32 / bits))` and up of word `k // (32 / bits)`, as `q + 2^(bits-1)`.
  Read as little-endian bytes: for 4 bits, even k in the low nibble and odd k in the high one, both
  plus 8; for 8 bits, byte k is `q XOR 0x80`. A row's unused tail holds the code of q = 0 or 0.
- `NAME.weight_scale`, bf16 or fp16 `[N, K / group_size]`, or `[N, 1]` for one per channel.
- `NAME.weight_shape`, int64 `[2]`: N and K.
- `NAME.weight_zero_point`, int32 `[ceil(N · bits / 32), groups]`, in asymmetric ones only: a z for
  each scale, packed like the values but along N.

`w ≈ (q - z) · s` with q and z in -2^(bits-1) … 2^(bits-1) - 1, computed in fp32. The scale may be
negative. What is quantized here is symmetric: z is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def quantize(
    weight: Tensor, bits: int, group_size: int | None, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Round to nearest, with scales rounded to their stored dtype first.

    For 4 bits the value of largest magnitude in a group maps to -8 exactly, whatever its sign, so
    that all sixteen levels serve; for 8 bits the largest magnitude maps to 127.

    Args:
        weight: [N, K].
        bits: 4 or 8.
        group_size: Divides K; None is a scale per row.
        scale_dtype: bf16 or fp16.

    Returns:
        Integers, int8 [N, K], and scales, `scale_dtype` [N, K / group_size or 1].
    """
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, group_size or columns)
    if bits == 4:
        low, high = groups.amin(-1), groups.amax(-1)
        scale = torch.where(-low >= high, low, high) / -8
    else:
        scale = groups.abs().amax(-1) / 127
    scale = scale.to(scale_dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # an all-zero group
    limit = 2 ** (bits - 1)
    q = (groups / scale.float().unsqueeze(-1)).round_().clamp_(-limit, limit - 1)
    return q.to(torch.int8).view(rows, columns), scale


def pack(q: Tensor, bits: int) -> Tensor:
    """Pack integers along the input axis.

    Args:
        q: int8 [N, K].
        bits: 4 or 8.

    Returns:
        int32 [N, ceil(K · bits / 32)].
    """
    codes = (q.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    codes = F.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    if bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes.contiguous().view(torch.int32)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `pack`.

    Args:
        packed: int32 [N, ceil(columns · bits / 32)].
        bits: 4 or 8.
        columns: K.

    Returns:
        int8 [N, columns].
    """
    codes = packed.view(torch.uint8)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).view(len(packed), -1)
    q: Tensor = codes[:, :columns] - 2 ** (bits - 1)  # wraps, which gives two's complement
    return q.view(torch.int8)


def dequantize(
    packed: Tensor, scale: Tensor, bits: int, columns: int, zero: Tensor | None = None
) -> Tensor:
    """The weights that packed integers stand for.

    Args:
        packed: int32 [N, ceil(columns · bits / 32)].
        scale: bf16 or fp16 [N, groups]; groups divides columns.
        bits: 4 or 8.
        columns: K.
        zero: int8 [N, groups]; None is 0.

    Returns:
        fp32 [N, columns].
    """
    q = unpack(packed, bits, columns).view(len(packed), scale.shape[1], -1).float()
    if zero is not None:
        q.sub_(zero.unsqueeze(-1))
    return q.mul_(scale.float().unsqueeze(-1)).view(len(packed), columns)
