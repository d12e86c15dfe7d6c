"""4-bit NormalFloat: the layout bitsandbytes and transformers use, byte for byte.

From "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314. A linear layer `NAME` of N
outputs and K inputs, flattened row by row and cut into blocks of 64, is stored as:

- `NAME.weight`, uint8 `[ceil(N · K / 2), 1]`: two codes a byte, the first in the high nibble. A
  nibble left over holds 7, the code of 0.
- `NAME.weight.absmax`, fp32 `[ceil(N · K / 64)]`: the largest magnitude of each block.
- `NAME.weight.quant_map`, fp32 `[16]`: the value of each code; `w ≈ quant_map[code] · absmax`.
- `NAME.weight.quant_state.bitsandbytes__nf4`, uint8: UTF-8 JSON with `quant_type`, `blocksize`,
  `dtype` (of the dense weight) and `shape` `[N, K]`.

With double quantization, which is read here but not written, `absmax` is uint8 and
`absmax_i = nested_quant_map[absmax[i]] · nested_absmax[i // nested_blocksize] + nested_offset`.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

# Quantiles of a normal distribution scaled to [-1, 1], zero among them (QLoRA, appendix E).
CODE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
STATE_SUFFIX = "quant_state.bitsandbytes__nf4"


def quantize(weight: Tensor, block_size: int = 64) -> tuple[Tensor, Tensor]:
    """Round each weight to the nearest code of its block.

    Args:
        weight: Any shape; flattened row by row.
        block_size: Weights a block. The last block may be short.

    Returns:
        Packed codes, uint8 [ceil(n / 2), 1], and absolute maxima, fp32 [ceil(n / block_size)].
    """
    flat = weight.float().reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block_size)).view(-1, block_size)
    absmax = padded.abs().amax(-1)
    inverse = 1 / torch.where(absmax == 0, torch.ones_like(absmax), absmax)
    normalized = (padded * inverse.unsqueeze(-1)).view(-1)[: len(flat)]
    code = torch.tensor(CODE)
    codes = torch.bucketize(normalized, (code[1:] + code[:-1]) / 2).to(torch.uint8)
    if len(codes) % 2:
        codes = torch.nn.functional.pad(codes, (0, 1), value=CODE.index(0.0))
    return (codes[0::2] << 4 | codes[1::2]).unsqueeze(-1), absmax


def dequantize(
    packed: Tensor, absmax: Tensor, code: Tensor, shape: tuple[int, int], block_size: int
) -> Tensor:
    """The weights that packed codes stand for.

    Args:
        packed: uint8 [ceil(n / 2), 1].
        absmax: fp32 [ceil(n / block_size)].
        code: fp32 [16].
        shape: (N, K) with N · K = n.
        block_size: Weights a block.

    Returns:
        fp32 [N, K].
    """
    count = shape[0] * shape[1]
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).view(-1)[:count]
    values = code[codes.int()]
    full = count // block_size
    values[: full * block_size].view(full, block_size).mul_(absmax[:full].unsqueeze(-1))
    values[full * block_size :] *= absmax[-1]
    return values.view(shape)


def state_tensor(shape: tuple[int, int], dtype: str, block_size: int = 64) -> Tensor:
    """The `quant_state` tensor for a weight of this shape; uint8 [n]."""
    state = {
        "quant_type": "nf4",
        "blocksize": block_size,
        "dtype": dtype,
        "shape": list(shape),
    }
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
