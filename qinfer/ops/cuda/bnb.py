"""Linear layers through bitsandbytes: nf4, and int8 weights times int8 activations (LLM.int8).

The operations are those that bitsandbytes registers with torch, `torch.ops.bitsandbytes.*`, whose
schemas are the same from 0.48 to 0.50; what only newer ones have is looked for. All of them run
without asking the host, so they can be captured in a CUDA graph. Importing bitsandbytes takes
seconds and is left to the first weight that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from qinfer.quant import affine, nf4
from qinfer.quant.weights import AffineWeight, NF4Weight, Weight

_NF4_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)  # 32 is new in 0.49
_LIMIT = 65280.0  # the largest bf16 that fp16 holds


@dataclass(frozen=True, slots=True)
class BitsandbytesNF4:
    """An nf4 weight that bitsandbytes computes with; nothing is copied.

    Attributes:
        source: As it is in the checkpoint, on a device.
    """

    source: NF4Weight

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.source.shape

    def rows(self, start: int, stop: int) -> Tensor:
        """Output rows in fp32, [stop - start, K]."""
        return self.source.rows(start, stop)

    def to(self, device: torch.device) -> NF4Weight:
        """The weight without bitsandbytes, on `device`."""
        return self.source.to(device)


@dataclass(frozen=True, slots=True)
class BitsandbytesInt8:
    """An int8 weight that is multiplied with activations rounded to int8.

    Attributes:
        data: int8 [N, K].
        scale: fp32 [N].
        absmax: fp32 [N], 127 times the scale: what bitsandbytes calls SCB.
    """

    data: Tensor
    scale: Tensor
    absmax: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.data.shape[0], self.data.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Output rows in fp32, [stop - start, K]."""
        return self.data[start:stop].float().mul_(self.scale[start:stop, None])

    def to(self, device: torch.device) -> BitsandbytesInt8:
        """The same weight on `device`."""
        return BitsandbytesInt8(self.data.to(device), self.scale.to(device), self.absmax.to(device))


def prepare_nf4(weight: Weight) -> BitsandbytesNF4 | None:
    """An nf4 weight for `linear_nf4`, on its device; None if bitsandbytes does not take it.

    It has the codes built in and wants blocks of 64 · 2^n, flattened over rows.
    """
    if not isinstance(weight, NF4Weight) or weight.block_size not in _NF4_BLOCKS:
        return None
    codes = torch.tensor(nf4.CODE, device=weight.code.device)
    if weight.code.dtype != torch.float32 or not torch.equal(weight.code, codes):
        return None
    if weight.absmax.dtype != torch.float32:
        return None
    return BitsandbytesNF4(
        NF4Weight(
            weight.packed.contiguous(),
            weight.absmax.contiguous(),
            weight.code.contiguous(),
            weight.shape,
            weight.block_size,
        )
    )


def linear_nf4(x: Tensor, weight: BitsandbytesNF4, bias: Tensor | None) -> Tensor:
    """`x · Wᵀ + b`.

    Which kernel a number of rows gets is decided by bitsandbytes where it has `gemm_4bit`. Older
    ones have a kernel for one row; for more, the weight is dequantized to the dtype of `x`.

    Args:
        x: bf16, fp16 or fp32 [tokens, K].
        weight: (N, K).
        bias: [N] in the dtype of `x`, or None.

    Returns:
        [tokens, N], like `x`.
    """
    ops, source = _operations(), weight.source
    x = x.contiguous()
    shape, block = list(source.shape), source.block_size
    whole = source.shape[1] % block == 0  # no block spans two rows
    if whole and hasattr(ops, "gemm_4bit"):
        y: Tensor = ops.gemm_4bit(x, source.packed, shape, source.absmax, block, "nf4", bias=bias)
        return y
    if whole and len(x) == 1:
        y = ops.gemv_4bit(x, source.packed, shape, source.absmax, source.code, block)
        return y if bias is None else y.add_(bias)
    dense = ops.dequantize_4bit(source.packed, source.absmax, block, "nf4", shape, x.dtype)
    return torch.nn.functional.linear(x, dense, bias)


def prepare_int8(weight: Weight) -> BitsandbytesInt8 | None:
    """An int8 weight for `linear_int8`, on its device; None if bitsandbytes does not take it.

    It wants a scale per row, no zero points, and N and K that are multiples of 4, as cuBLAS does.
    """
    if not isinstance(weight, AffineWeight) or weight.bits != 8:
        return None
    if weight.scale.shape[1] != 1 or weight.zero is not None:
        return None
    if any(size % 4 for size in weight.shape):
        return None
    data = affine.unpack(weight.packed, 8, weight.columns).contiguous()
    scale = weight.scale.float().view(-1)
    return BitsandbytesInt8(data, scale, scale * 127)


def linear_int8(x: Tensor, weight: BitsandbytesInt8, bias: Tensor | None) -> Tensor:
    """`x · Wᵀ + b` in integers, rows of x rounded to int8 of their largest magnitude.

    "LLM.int8()", arXiv 2208.07339, without its decomposition of outliers, which asks the host how
    many there are. Activations and results pass through fp16, the only type that it takes: larger
    activations are cut to what it holds.

    Args:
        x: bf16, fp16 or fp32 [tokens, K].
        weight: (N, K).
        bias: [N] in the dtype of `x`, or None.

    Returns:
        [tokens, N], like `x`.
    """
    ops = _operations()
    half = x if x.dtype == torch.float16 else x.clamp(-_LIMIT, _LIMIT).half()
    q, absmax, _ = ops.int8_vectorwise_quant(half.contiguous())
    sums = ops.int8_linear_matmul(q, weight.data)
    y: Tensor = ops.int8_mm_dequant(sums, absmax, weight.absmax).to(x.dtype)
    return y if bias is None else y.add_(bias)


def _operations() -> Any:
    import_module("bitsandbytes")
    return torch.ops.bitsandbytes
