"""A decoder block in one call to the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qinfer.ops.block import BlockParameters, Norm, Projection, Rotation
from qinfer.ops.cpu import kernels
from qinfer.ops.cpu.weights import NativeWeight
from qinfer.ops.paged import Batch, KVLayer


@dataclass(slots=True)
class _Pass:
    """A description of a forward pass, and what it points to."""

    x: Tensor
    rotation: Rotation
    batch: Batch
    memory: Tensor
    step: kernels.Step


class Passes:
    """Describes a forward pass once for all of its blocks."""

    def __init__(self, workspace: kernels.Workspace, threads: int) -> None:
        self._workspace = workspace
        self._threads = threads
        self._last: _Pass | None = None

    def describe(
        self,
        x: Tensor,
        rotation: Rotation,
        batch: Batch,
        workspace_bytes: Callable[[int], int],
    ) -> kernels.Step:
        """The description of a pass, whose arguments are kept until the next one."""
        last, memory = self._last, self._workspace.memory
        if (
            last is not None
            and (last.x is x and last.rotation is rotation)
            and (last.batch is batch and last.memory is memory)
        ):
            return last.step
        cos, sin = rotation or (None, None)
        memory = self._workspace.at_least(workspace_bytes(len(x)))
        step = kernels.Step(
            tokens=x.shape[0],
            threads=self._threads,
            x=x.data_ptr(),
            cos=kernels.address(cos),
            sin=kernels.address(sin),
            segments=ctypes.pointer(kernels.Segments.of(batch)),
            workspace=memory.data_ptr(),
        )
        self._last = _Pass(x, rotation, batch, memory, step)
        return step


class NativeBlock:
    """A block whose weights the kernels take; see `ReferenceOps.whole_block`."""

    def __init__(self, library: ctypes.CDLL, parameters: BlockParameters, passes: Passes) -> None:
        self._library = library
        self._passes = passes
        self._parameters = parameters  # the description points into it
        self._description = _describe(parameters)
        self._layer: KVLayer | None = None
        self._cache: kernels.Cache | None = None

    def __call__(
        self, x: Tensor, rotation: Rotation, layer: KVLayer, batch: Batch
    ) -> Tensor | None:
        """Run tokens through the block, in place.

        Raises:
            MemoryError: There is none for the attention.
        """
        if layer is not self._layer:
            p = self._parameters
            fits = kernels.takes_attention((p.heads, p.kv_heads), p.head_dim, layer)
            self._layer, self._cache = layer, kernels.Cache.of(layer) if fits else None
        if self._cache is None or not x.is_contiguous():
            return None
        step = self._passes.describe(x, rotation, batch, self._workspace_bytes)
        if not self._library.qinfer_block(self._description, self._cache, step):
            raise MemoryError(f"no memory for attention over {len(batch.starts)} sequences")
        return x

    def _workspace_bytes(self, tokens: int) -> int:
        return int(self._library.qinfer_block_bytes(self._description, tokens))


def native_block(
    library: ctypes.CDLL, parameters: BlockParameters, passes: Passes
) -> NativeBlock | None:
    """A block in one call, if the kernels take all of its weights."""
    p = parameters
    parts = [*p.qkv, p.output, p.gate, p.up, p.down]
    if not all(isinstance(q.weight, NativeWeight) for q in parts if q is not None):
        return None
    return NativeBlock(library, parameters, passes)


def _describe(p: BlockParameters) -> kernels.Block:
    return kernels.Block(
        hidden=p.output.weight.shape[0],
        intermediate=p.down.weight.shape[1],
        heads=p.heads,
        kv_heads=p.kv_heads,
        head_dim=p.head_dim,
        scale=p.scale,
        activation=kernels.ACTIVATIONS[p.activation],
        attention_norm=_norm(p.attention_norm),
        q_norm=_norm(p.q_norm),
        k_norm=_norm(p.k_norm),
        mlp_norm=_norm(p.mlp_norm),
        qkv=tuple(_projection(q) for q in p.qkv),
        output=_projection(p.output),
        gate=_projection(p.gate),
        up=_projection(p.up),
        down=_projection(p.down),
    )


def _norm(norm: Norm | None) -> kernels.Norm:
    if norm is None:
        return kernels.Norm()
    return kernels.Norm(norm.weight.data_ptr(), kernels.address(norm.bias), norm.eps)


def _projection(projection: Projection | None) -> kernels.Projection:
    if projection is None or not isinstance(projection.weight, NativeWeight):
        return kernels.Projection()
    weight = ctypes.pointer(projection.weight.description)
    return kernels.Projection(weight, kernels.address(projection.bias))
