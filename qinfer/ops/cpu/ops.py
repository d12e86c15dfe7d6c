"""The operations on a CPU: compiled kernels, and the reference operations where there are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from qinfer.ops.block import BlockParameters, Norm, WholeBlocks, WholeStep
from qinfer.ops.cpu import kernels
from qinfer.ops.cpu.block import NativeBlocks, native_blocks
from qinfer.ops.cpu.decode import native_step
from qinfer.ops.cpu.weights import Arena, NativeWeight, native
from qinfer.ops.draws import Draws
from qinfer.ops.paged import Batch, KVLayer
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.weights import Weight

_FEW_TOKENS = 4
"""Up to here what torch does is not worth more than one thread."""


class CPUOps(ReferenceOps):
    """Activations in fp32 as in the reference, rounded to 16 bits before 4- and 8-bit weights.

    In the kernels the order of sums is the same for one token as for many: a token's result does
    not depend on which others are computed with it, nor on the number of threads. What they do not
    cover is computed token by token, so that this stays true.
    """

    def __init__(self, *, deterministic: bool = False, threads: int | None = None) -> None:
        self._kernels = kernels.library()
        self._threads = threads or torch.get_num_threads()
        self._arena = Arena()
        self._workspace = kernels.Workspace()
        super().__init__(
            torch.device("cpu"),
            torch.float32,
            deterministic=deterministic or self._kernels is not None,
        )

    @contextmanager
    def forward_pass(self, tokens: int) -> Iterator[None]:
        """Keep torch to one thread where the kernels do the heavy part.

        Between two of torch's parallel regions its threads spin for work, on the cores that the
        kernels' own threads need: decoding would be two to three times slower.
        """
        if tokens > _FEW_TOKENS and self._kernels is None:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def prepare(self, weight: Weight) -> Weight:
        """Repack a weight if the kernels take it; any other stays mapped."""
        return native(weight, self._arena, threads=self._threads)

    def whole_blocks(self, parameters: Sequence[BlockParameters], norm: Norm) -> WholeBlocks | None:
        """See `ReferenceOps.whole_blocks`."""
        if self._kernels is None:
            return None
        return native_blocks(self._kernels, parameters, norm, self._workspace, self._threads)

    def whole_step(
        self, blocks: WholeBlocks | None, tables: Sequence[Tensor | None], head: Weight
    ) -> WholeStep | None:
        """See `ReferenceOps.whole_step`."""
        if not isinstance(blocks, NativeBlocks):
            return None
        return native_step(blocks, tables, head)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `ReferenceOps.rms_norm`."""
        if self._kernels is None:
            return super().rms_norm(x, weight, eps)
        return kernels.norm(self._kernels, x, weight, None, eps, threads=self._threads)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """See `ReferenceOps.layer_norm`."""
        if self._kernels is None:
            return super().layer_norm(x, weight, bias, eps)
        return kernels.norm(self._kernels, x, weight, bias, eps, threads=self._threads)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """See `ReferenceOps.linear`."""
        if self._kernels is None or not isinstance(weight, NativeWeight):
            return super().linear(x, weight, bias)
        return kernels.linear(
            self._kernels, x, weight.description, bias, self._workspace, threads=self._threads
        )

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `ReferenceOps.rotary`."""
        if self._kernels is None:
            return super().rotary(x, cos, sin)
        return kernels.rotary(self._kernels, x, cos, sin)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: KVLayer,
        batch: Batch,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """See `ReferenceOps.attention`."""
        heads = q.shape[1], k.shape[1]
        if self._kernels is None or not kernels.takes_attention(heads, q.shape[2], layer):
            return super().attention(q, k, v, layer, batch, scale=scale, softcap=softcap)
        return kernels.attention(
            *(self._kernels, (q, k, v), layer, batch),
            scale=scale,
            softcap=softcap,
            threads=self._threads,
        )

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """See `ReferenceOps.activation`."""
        if self._kernels is None:
            return super().activation(x, kind)
        return kernels.activate(self._kernels, x, None, kind, threads=self._threads)

    def gated_activation(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        """See `ReferenceOps.gated_activation`."""
        if self._kernels is None:
            return super().gated_activation(gate, up, kind)
        return kernels.activate(self._kernels, gate, up, kind, threads=self._threads)

    def greedy(self, logits: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """See `ReferenceOps.greedy`."""
        if self._kernels is None:
            return super().greedy(logits, vocab_size)
        return kernels.choose(self._kernels, logits, vocab_size, None, threads=self._threads)

    def draw(self, logits: Tensor, vocab_size: int, draws: Draws) -> tuple[Tensor, Tensor]:
        """See `ReferenceOps.draw`."""
        if self._kernels is None:
            return super().draw(logits, vocab_size, draws)
        return kernels.choose(self._kernels, logits, vocab_size, draws, threads=self._threads)
