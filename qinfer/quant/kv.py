"""Formats of the key-value cache: blocks of 32 tokens at 32, 16, 8 or 4 bits.

A block holds, per key-value head of `d` channels, its keys with the channels before the tokens, so
that one channel's 32 tokens lie side by side, and its values with the tokens before the channels:

    bits    keys                                  values
    32, 16  float [d, 32]                         float [32, d]
    8       int8 [d, 32]; scale fp16 [32]         int8 [32, d]; scale fp16 [32]
    4       uint8 [d, 16]; scale and minimum      uint8 [32, d / 2]; scale and minimum
            fp16 [d]                              fp16 [32, d / g]

At 8 bits a scale is a token's (`x ≈ scale · code`, codes from -127 to 127). At 4 bits keys share a
scale per channel and values per group of g channels of a token (`x ≈ scale · code + minimum`, codes
from 0 to 15; "KIVI", arXiv 2402.02750; g is the largest even number up to 40 that divides d: 32 for
the usual 64, 96 and 128, and 40 for 80). Of n values that share a scale, byte i holds value i in
its low nibble and value `n / 2 + i` in its high one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qinfer.checkpoint.record import RECORD_NAME, read_record
from qinfer.errors import CheckpointError, QInferError

BLOCK_TOKENS = 32
KV_BITS = (4, 8, 16, 32)

_SCALE_BYTES = 2
_LARGEST_GROUP = 40


def value_group(head_dim: int) -> int:
    """Channels that share a scale in 4-bit values."""
    sizes = (n for n in range(_LARGEST_GROUP, 0, -2) if head_dim % n == 0)
    return next(sizes, 1)  # 1: an odd head_dim, which 4 bits refuse


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Bits of keys and of values: 32 (for parity tests), 16, 8 or 4 each."""

    k_bits: int = 16
    v_bits: int = 16

    def __post_init__(self) -> None:
        for bits in (self.k_bits, self.v_bits):
            if bits not in KV_BITS:
                raise ValueError(f"KV bits must be one of {KV_BITS}, got {bits}")

    def __str__(self) -> str:
        return f"k{self.k_bits}v{self.v_bits}"

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are stored in less than 16 bits."""
        return min(self.k_bits, self.v_bits) < 16

    @classmethod
    def stored(cls, directory: Path) -> KVFormat:
        """What a model directory was converted for; 16 bits if it does not say.

        Raises:
            CheckpointError: Its record is damaged.
        """
        found = (read_record(directory) or {}).get("kv_cache", {})
        try:
            return cls(**found)
        except (TypeError, ValueError):
            raise CheckpointError(
                f"{directory / RECORD_NAME}: kv_cache must be k_bits and v_bits, "
                f"found {str(found)[:80]}",
                hint="The file is damaged; convert the model again.",
            ) from None

    def check(self, head_dim: int) -> None:
        """Refuse a model that the format does not fit.

        Raises:
            QInferError: 4 bits and an odd number of channels.
        """
        if min(self.k_bits, self.v_bits) == 4 and head_dim % 2:
            raise QInferError(
                f"a 4-bit KV cache needs an even head_dim, this model's is {head_dim}",
                hint="Use --kv-bits 8.",
            )

    def block_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one layer's keys and values of a block of 32 tokens, scales included."""
        elements = BLOCK_TOKENS * head_dim
        scales = {
            (8, "k"): BLOCK_TOKENS,
            (8, "v"): BLOCK_TOKENS,
            (4, "k"): 2 * head_dim,
            (4, "v"): 2 * BLOCK_TOKENS * (head_dim // value_group(head_dim)),
        }
        return kv_heads * sum(
            elements * bits // 8 + _SCALE_BYTES * scales.get((bits, side), 0)
            for side, bits in (("k", self.k_bits), ("v", self.v_bits))
        )

    def open_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one layer's last block of a sequence, kept in 16 bits beside quantized ones."""
        sides = sum(bits < 16 for bits in (self.k_bits, self.v_bits))
        return sides * kv_heads * BLOCK_TOKENS * head_dim * 2


@dataclass(slots=True)
class KVSide:
    """The keys or the values of one layer.

    Attributes:
        bits: 32, 16, 8 or 4.
        is_keys: Whether channels come before tokens.
        head_dim: Channels.
        data: [blocks, kv_heads, …] as the module says.
        scale: fp16 [blocks, kv_heads, …], None from 16 bits up.
        minimum: Like `scale`; at 4 bits only.
        open: 16-bit [slots, kv_heads, …]: the last block of each running sequence, below 16 bits.
    """

    bits: int
    is_keys: bool
    head_dim: int
    data: Tensor
    scale: Tensor | None = None
    minimum: Tensor | None = None
    open: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        bits: int,
        *,
        is_keys: bool,
        heads: tuple[int, int],
        blocks: int,
        slots: int,
        half: torch.dtype,
        device: torch.device,
    ) -> KVSide:
        """Reserve memory, which is not touched yet.

        Args:
            bits: 32, 16, 8 or 4.
            is_keys: Keys or values.
            heads: (kv_heads, head_dim).
            blocks: Number of blocks.
            slots: Number of open blocks.
            half: The 16-bit float type.
            device: Where.
        """
        kv_heads, d = heads
        whole = (d, BLOCK_TOKENS) if is_keys else (BLOCK_TOKENS, d)

        def empty(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty((count, kv_heads, *shape), dtype=dtype, device=device)

        if bits >= 16:
            dtype = torch.float32 if bits == 32 else half
            return cls(bits, is_keys, d, empty(blocks, whole, dtype))
        opened = empty(slots, whole, half)
        if bits == 8:
            data, scale = (
                empty(blocks, whole, torch.int8),
                empty(blocks, (BLOCK_TOKENS,), torch.float16),
            )
            return cls(bits, is_keys, d, data, scale, open=opened)
        scales = (d,) if is_keys else (BLOCK_TOKENS, d // value_group(d))
        data = empty(blocks, (whole[0], whole[1] // 2), torch.uint8)
        scale, minimum = (empty(blocks, scales, torch.float16) for _ in range(2))
        return cls(bits, is_keys, d, data, scale, minimum, opened)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors whose first axis is the block."""
        for tensor in (self.data, self.scale, self.minimum):
            if tensor is not None:
                yield tensor

    @property
    def nbytes(self) -> int:
        """Bytes reserved, open blocks included."""
        opened = 0 if self.open is None else self.open.nbytes
        return opened + sum(tensor.nbytes for tensor in self.tensors())

    def seal(self, block: int, x: Tensor) -> None:
        """In place: store a whole block.

        Args:
            block: Its number.
            x: [kv_heads, head_dim, 32] keys or [kv_heads, 32, head_dim] values in 16 bits.
        """
        if self.bits >= 16:
            self.data[block] = x
        elif self.scale is not None and self.minimum is None:
            axis = -1 if self.is_keys else -2
            self.data[block], self.scale[block] = quantize_int8(x, token_axis=axis)
        elif self.scale is not None and self.minimum is not None:
            size = BLOCK_TOKENS if self.is_keys else value_group(self.head_dim)
            codes, scale, minimum = quantize_int4(x, size)
            self.data[block] = codes
            self.scale[block] = scale.view(self.scale.shape[1:])
            self.minimum[block] = minimum.view(self.minimum.shape[1:])

    def blocks(self, numbers: Tensor) -> Tensor:
        """Blocks as numbers to compute with.

        Args:
            numbers: int64 [n].

        Returns:
            fp32 [n, kv_heads, head_dim, 32] keys or [n, kv_heads, 32, head_dim] values.
        """
        data = self.data[numbers]
        if self.scale is None:
            return data.float()
        scale = self.scale[numbers].float()
        if self.minimum is None:
            return data.float() * scale.unsqueeze(-2 if self.is_keys else -1)
        minimum = self.minimum[numbers].float()
        size = BLOCK_TOKENS if self.is_keys else value_group(self.head_dim)
        runs = 2 * data.shape[-1] // size
        codes = data.view(*data.shape[:-1], runs, size // 2)
        codes = torch.cat((codes & 15, codes >> 4), -1).float()
        shape = (*codes.shape[:-1], 1)
        return (codes * scale.view(shape) + minimum.view(shape)).flatten(-2)


def quantize_int8(x: Tensor, *, token_axis: int) -> tuple[Tensor, Tensor]:
    """Quantize symmetrically with a scale per token.

    Args:
        x: [kv_heads, …], two axes behind the heads.
        token_axis: -1 or -2; the other one is reduced.

    Returns:
        int8 codes like `x`, and fp16 scales [kv_heads, tokens].
    """
    x = x.float()
    channels = -2 if token_axis == -1 else -1
    scale = (x.abs().amax(channels, keepdim=True) / 127).half()
    wide = scale.float()
    codes = torch.where(wide > 0, (x / wide).round().clamp(-127, 127), 0)
    return codes.to(torch.int8), scale.squeeze(channels)


def quantize_int4(x: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize asymmetrically runs of `size` values of the last axis.

    Args:
        x: [..., n], n a multiple of `size`, which is even.
        size: Values that share a scale.

    Returns:
        uint8 codes [..., n / 2], fp16 scales and fp16 minimums [..., n / size].
    """
    runs = x.float().reshape(*x.shape[:-1], -1, size)
    low, high = runs.amin(-1, keepdim=True), runs.amax(-1, keepdim=True)
    scale, minimum = ((high - low) / 15).half(), low.half()
    wide = scale.float()
    codes = torch.where(wide > 0, ((runs - minimum.float()) / wide).round().clamp(0, 15), 0)
    first, second = codes.to(torch.uint8).chunk(2, -1)
    packed = (first | second << 4).flatten(-2)
    return packed, scale.squeeze(-1), minimum.squeeze(-1)
