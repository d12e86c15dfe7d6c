"""The operations on a CPU: the reference ones, with compiled kernels under the linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from qinfer.ops.cpu.kernels import NativeWeight, native
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.weights import Weight

_FEW_TOKENS = 4
"""Up to here nothing but the linear layers is worth more than one thread."""


class CPUOps(ReferenceOps):
    """Activations in fp32 as in the reference; sums differ in their order only.

    That order is the same for one token as for many: a token's result does not depend on which
    others are computed with it.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)
        self._threads = torch.get_num_threads()

    @contextmanager
    def forward_pass(self, tokens: int) -> Iterator[None]:
        """Keep torch to one thread where the kernels do the heavy part.

        Between two of torch's parallel regions its threads spin for work, on the cores that the
        kernels' own threads need: decoding would be two to three times slower.
        """
        if tokens > _FEW_TOKENS:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)

    def prepare(self, weight: Weight) -> Weight:
        """Describe a weight to the kernels; it stays mapped."""
        return native(weight)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """See `ReferenceOps.linear`."""
        if not isinstance(weight, NativeWeight):
            return super().linear(x, weight, bias)
        y = weight.linear(x, self._threads)
        return y if bias is None else y.add_(bias)
