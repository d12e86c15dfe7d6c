"""The operations on a CPU: the reference ones, with compiled kernels under the linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.ops.cpu.kernels import NativeWeight, native
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.weights import Weight

_FEW_TOKENS = 4
"""Up to here a product reads each weight once a token; above, weights are dequantized first."""


class CPUOps(ReferenceOps):
    """Activations in fp32 as in the reference; sums differ in their order only."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)

    def prepare(self, weight: Weight) -> Weight:
        """Describe a weight to the kernels; it stays mapped."""
        return native(weight)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """See `ReferenceOps.linear`."""
        if len(x) > _FEW_TOKENS or not isinstance(weight, NativeWeight):
            return super().linear(x, weight, bias)
        y = weight.linear(x)
        return y if bias is None else y.add_(bias)
