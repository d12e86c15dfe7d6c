"""Frequencies of the rotary position embedding and their scalings for long contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qinfer.config import RopeConfig

_PIECE = 1024  # positions


class RotaryTable:
    """Cosines and sines per position, computed when first needed.

    Always in pieces of the same size: how many positions are asked for does not change a value.
    """

    def __init__(self, inv_freq: Tensor, factor: float) -> None:
        self._inv_freq = inv_freq
        self._factor = factor
        self._tables = [inv_freq.new_empty(0, len(inv_freq)) for _ in range(2)]

    def rows(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 [tokens, head_dim / 2] each.

        Args:
            positions: int64 [tokens].
            last: The largest of them.
        """
        cos, sin = self.reserve(last + 1)
        return cos[positions], sin[positions]

    def reserve(self, positions: int) -> tuple[Tensor, Tensor]:
        """Have so many positions, or more; the tables, elsewhere in memory if they had to grow.

        Returns:
            Cosines and sines, fp32 [positions, head_dim / 2] each.
        """
        known = len(self._tables[0])
        if known < positions:
            size = -(-positions // _PIECE) * _PIECE
            grown = [table.new_empty(size, table.shape[1]) for table in self._tables]
            for old, new in zip(self._tables, grown, strict=True):
                new[:known] = old
            for first in range(known, size, _PIECE):  # little memory beside the tables
                at = torch.arange(first, first + _PIECE, device=self._inv_freq.device)
                angles = at.float().unsqueeze(1) * self._inv_freq
                for new, piece in zip(grown, (angles.cos(), angles.sin()), strict=True):
                    torch.mul(piece, self._factor, out=new[first : first + _PIECE])
            self._tables = grown
        cos, sin = self._tables
        return cos, sin


def frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Angles per position and the factor on their cosines and sines.

    Args:
        rope: The kind and its parameters.
        head_dim: Size of a head, even.
        max_positions: `max_position_embeddings`.

    Returns:
        fp32 [head_dim / 2], and the attention factor (1 but for YaRN).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / float(rope.parameters["factor"]), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq, max_positions), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim, max_positions)
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: Tensor, max_positions: int) -> Tensor:
    """Llama 3.1: divide low frequencies, keep high ones, interpolate smoothly between."""
    factor = float(rope.parameters["factor"])
    low = float(rope.parameters["low_freq_factor"])
    high = float(rope.parameters["high_freq_factor"])
    original = float(rope.parameters.get("original_max_position_embeddings") or max_positions)
    turns = original * inv_freq / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def _yarn(
    rope: RopeConfig, inv_freq: Tensor, head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """YaRN, arXiv 2309.00071: interpolate low frequencies, keep high ones, sharpen attention."""
    p = rope.parameters
    factor = float(p["factor"])
    original = float(p.get("original_max_position_embeddings") or max_positions)

    def dimension(rotations: float) -> float:
        """The dimension that turns this often over the original context."""
        return (
            head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low = dimension(float(p.get("beta_fast") or 32))
    high = dimension(float(p.get("beta_slow") or 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    return scaled, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = rope.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = rope.parameters.get("mscale"), rope.parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return magnitude(float(mscale)) / magnitude(float(mscale_all))
    return magnitude(1.0)
