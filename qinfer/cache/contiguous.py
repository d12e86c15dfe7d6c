"""The key-value cache of one sequence, in one piece."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qinfer.config import ModelConfig


class KVCache:
    """Keys and values of one sequence, allocated once for all the tokens it may come to.

    Pages of memory that no token has reached are never touched. The layout is fixed: a head's
    tokens lie side by side, so attention reads memory in order.

    Attributes:
        keys: [layers, kv_heads, capacity, head_dim].
        values: Like `keys`.
        length: Tokens stored; the caller advances it.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = self._shape(config, capacity)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    @staticmethod
    def _shape(config: ModelConfig, capacity: int) -> tuple[int, int, int, int]:
        return config.num_hidden_layers, config.num_key_value_heads, capacity, config.head_dim

    @staticmethod
    def nbytes_for(config: ModelConfig, capacity: int, dtype: torch.dtype) -> int:
        """Bytes that a cache of this capacity takes."""
        return 2 * math.prod(KVCache._shape(config, capacity)) * dtype.itemsize

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens behind those that are there; does not advance `length`.

        Args:
            layer: Index of the block.
            k: [tokens, kv_heads, head_dim].
            v: Like `k`.

        Returns:
            Views of all the layer's keys and values, [kv_heads, length + tokens, head_dim].
        """
        end = self.length + k.shape[0]
        self.keys[layer, :, self.length : end] = k.transpose(0, 1)
        self.values[layer, :, self.length : end] = v.transpose(0, 1)
        return self.keys[layer, :, :end], self.values[layer, :, :end]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes
