"""Decoder blocks with what lies between the matrix products fused, and sums of blocks in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qinfer.ops.block import BlockParameters, Norm, Projection, Rotation
from qinfer.ops.cuda import attention, rows
from qinfer.ops.cuda.attention_launches import Preparation
from qinfer.ops.paged import Batch, KVLayer
from qinfer.quant.weights import DenseWeight


class FusedBlocks:
    """All blocks; see `ReferenceOps.whole_blocks`."""

    def __init__(
        self,
        parameters: Sequence[BlockParameters],
        norm: Norm,
        dtype: torch.dtype,
        linear: Callable[..., Tensor],
    ) -> None:
        """`linear` is `CUDAOps.linear`."""
        self._parameters = parameters
        self._norm = norm
        self._dtype = dtype
        self._linear = linear

    def __call__(
        self, x: Tensor, rotation: Rotation, layers: Sequence[KVLayer], batch: Batch
    ) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        x = x.float()
        addend: Tensor | None = None
        for p, layer in zip(self._parameters, layers, strict=True):
            normed = rows.add_norm(x, addend, p.attention_norm, dtype=self._dtype)
            mixed = self._attend(normed, p, rotation, layer, batch)
            addend = self._project(mixed, p.output, out_dtype=torch.float32)
            normed = rows.add_norm(x, addend, p.mlp_norm, dtype=self._dtype)
            addend = self._project(self._inner(normed, p), p.down, out_dtype=torch.float32)
        return rows.add_norm(x, addend, self._norm, dtype=self._dtype)

    def _attend(
        self, x: Tensor, p: BlockParameters, rotation: Rotation, layer: KVLayer, batch: Batch
    ) -> Tensor:
        heads = (p.heads, p.kv_heads, p.kv_heads)
        parts: Sequence[Tensor] = [self._project(x, part) for part in p.qkv]
        if len(parts) == 1:
            parts = torch.split_with_sizes(parts[0], [n * p.head_dim for n in heads], -1)
        q, k, v = (part.view(len(x), n, p.head_dim) for part, n in zip(parts, heads, strict=True))
        preparation = Preparation(rotation, p.q_norm, p.k_norm)
        if batch.longest == 1:
            mixed = attention.decode_attention(
                *(q, k, v, layer, batch),
                preparation=preparation,
                scale=p.scale,
                softcap=p.softcap,
            )
        else:
            attention.rotate(q, k, preparation)
            mixed = attention.attention(q, k, v, layer, batch, scale=p.scale, softcap=p.softcap)
        return mixed.flatten(1)

    def _inner(self, x: Tensor, p: BlockParameters) -> Tensor:
        """The MLP up to its last projection."""
        parts = [self._project(x, part) for part in p.gate_up]
        if not p.is_gated:
            return rows.activation(parts[0], p.activation)
        gate, up = parts if len(parts) > 1 else parts[0].chunk(2, dim=-1)
        return rows.gated_activation(gate, up, p.activation)

    def _project(
        self, x: Tensor, projection: Projection, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if isinstance(projection.weight, DenseWeight):
            out_dtype = None  # the library has rounded its sums; to widen them is a launch more
        return self._linear(x, projection.weight, projection.bias, out_dtype=out_dtype)
