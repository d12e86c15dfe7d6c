"""The operations on a CUDA device: Triton kernels, bitsandbytes for its own formats, and cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qinfer.ops.block import BlockParameters, Norm, Projection, WholeBlocks
from qinfer.ops.cuda import attention, bnb, choice, linear, rows
from qinfer.ops.cuda.blocks import FusedBlocks
from qinfer.ops.draws import Draws
from qinfer.ops.paged import Batch, KVLayer
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.weights import AffineWeight, DenseWeight, Weight


class CUDAOps(ReferenceOps):
    """Activations in 16 bits, sums in fp32; weights stay packed and are unpacked in registers.

    Between blocks activations are fp32, so that a model made for bf16 does not overflow in fp16.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        half: torch.dtype | None = None,
        embeddings_on_host: bool = False,
        int8_by_bitsandbytes: bool = False,
    ) -> None:
        """Run on a device.

        Args:
            device: With CUDA; a CPU where Triton interprets its kernels.
            dtype: Of activations; fp32 for parity tests.
            half: The 16-bit type of the key-value cache; None is `dtype`, if that has 16 bits.
            embeddings_on_host: Leave embeddings mapped in host memory.
            int8_by_bitsandbytes: Multiply int8 weights with a scale per row as LLM.int8 does.
        """
        if half is None:
            half = torch.float16 if dtype == torch.float32 else dtype
        super().__init__(device, dtype, half=half)
        self.maps_tables = embeddings_on_host
        self.fixed_steps = True
        self._int8_by_bitsandbytes = int8_by_bitsandbytes

    def table(self, data: Tensor) -> Tensor:
        """See `ReferenceOps.table`."""
        return data if self.maps_tables else data.to(self.device)

    def prepare(self, weight: Weight) -> Weight:
        """To the device as it is packed; what has more than 16 bits, in the type of activations."""
        if isinstance(weight, DenseWeight):
            return DenseWeight(weight.data.to(self.device, self.dtype))
        on_device = weight.to(self.device)
        if self.device.type != "cuda":
            return on_device
        if self._int8_by_bitsandbytes:
            return bnb.prepare_nf4(on_device) or bnb.prepare_int8(on_device) or on_device
        return bnb.prepare_nf4(on_device) or on_device

    def join(self, projections: Sequence[Projection]) -> Sequence[Projection]:
        """One weight for all, if they are of one kind: a launch instead of several."""
        weights = [p.weight for p in projections]
        biases = [p.bias for p in projections if p.bias is not None]
        if len(biases) not in (0, len(projections)):
            return projections
        joined: Weight | None = None
        if all(isinstance(w, DenseWeight) for w in weights):
            joined = DenseWeight(torch.cat([w.data for w in weights if isinstance(w, DenseWeight)]))
        affine = [w for w in weights if isinstance(w, AffineWeight)]
        if len(affine) == len(weights):
            joined = linear.join(affine)
        if joined is None:
            return projections
        return [Projection(joined, torch.cat(biases) if biases else None)]

    def whole_blocks(self, parameters: Sequence[BlockParameters], norm: Norm) -> WholeBlocks | None:
        """See `ReferenceOps.whole_blocks`; equal but for rounding, as sums stay in fp32."""
        return FusedBlocks(parameters, norm, self.dtype, self.linear)

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """See `ReferenceOps.embedding`."""
        return F.embedding(ids.to(table.device), table).to(self.device, self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `ReferenceOps.rms_norm`."""
        return rows.norm(x, Norm(weight, None, eps))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """See `ReferenceOps.layer_norm`."""
        return rows.norm(x, Norm(weight, bias, eps))

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `ReferenceOps.linear`; with `out_dtype` the result is of that type."""
        if isinstance(weight, AffineWeight) and linear.supports(weight):
            return linear.linear(x, weight, bias, out_dtype=out_dtype)
        if isinstance(weight, DenseWeight):
            y = F.linear(x, weight.data, bias)
        elif isinstance(weight, bnb.BitsandbytesNF4):
            y = bnb.linear_nf4(x, weight, bias)
        elif isinstance(weight, bnb.BitsandbytesInt8):
            y = bnb.linear_int8(x, weight, bias)
        else:
            y = super().linear(x, weight, bias)
        return y if out_dtype is None else y.to(out_dtype)

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
        return attention.attention(q, k, v, layer, batch, scale=scale, softcap=softcap)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """See `ReferenceOps.activation`."""
        return rows.activation(x, kind)

    def gated_activation(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        """See `ReferenceOps.gated_activation`."""
        return rows.gated_activation(gate, up, kind)

    def logits(self, x: Tensor, head: Weight) -> Tensor:
        """See `ReferenceOps.logits`; sums that are in fp32 stay so."""
        return self.linear(x, head, None, out_dtype=torch.float32)

    def greedy(self, logits: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """See `ReferenceOps.greedy`."""
        return choice.argmax_or_nan(logits, vocab_size)

    def draw(self, logits: Tensor, vocab_size: int, draws: Draws) -> tuple[Tensor, Tensor]:
        """See `ReferenceOps.draw`."""
        return choice.draw_or_nan(logits, draws, vocab_size)
