"""A model's decoder blocks in one call to the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from qinfer.ops.block import BlockParameters, Norm, Projection, Rotation
from qinfer.ops.cpu import kernels
from qinfer.ops.cpu.weights import NativeWeight
from qinfer.ops.paged import Batch, KVLayer


class NativeBlocks:
    """Blocks whose weights the kernels take; see `ReferenceOps.whole_blocks`.

    Attributes:
        library: The kernels.
        blocks: Their descriptions.
        norm: That of the norm behind the last.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        parameters: Sequence[BlockParameters],
        norm: Norm,
        workspace: kernels.Workspace,
        threads: int,
    ) -> None:
        self.library = library
        self._parameters = parameters, norm  # the descriptions point into them
        self.norm = _norm(norm)
        self.blocks = (kernels.Block * len(parameters))(*map(_describe, parameters))
        self._largest = max(self.blocks, key=lambda block: library.qinfer_block_bytes(block, 1))
        self._workspace = workspace
        self._threads = threads
        self._layers: Sequence[KVLayer] | None = None
        self._caches: ctypes.Array[kernels.Cache] | None = None

    def __call__(
        self, x: Tensor, rotation: Rotation, layers: Sequence[KVLayer], batch: Batch
    ) -> Tensor | None:
        """Run tokens through the blocks and the norm, in place.

        Raises:
            MemoryError: There is none for the attention.
        """
        caches = self.caches(layers)
        if caches is None:
            return None
        x = x.contiguous()
        step = self.step(x, batch)
        step.cos, step.sin = map(kernels.address, rotation or (None, None))
        count = len(self.blocks)
        if not self.library.qinfer_blocks(self.blocks, caches, count, self.norm, step):
            raise out_of_memory(batch)
        return x

    def step(self, x: Tensor, batch: Batch) -> kernels.Step:
        """The description of a step, without its rotation; good until the next one is asked for."""
        return kernels.Step(
            tokens=len(x),
            threads=self._threads,
            x=x.data_ptr(),
            segments=ctypes.pointer(kernels.Segments.of(batch)),
            workspace=self.workspace(len(x)),
        )

    def workspace(self, tokens: int) -> int:
        """Where a step of so many tokens finds its memory, until the next one asks."""
        need = self.library.qinfer_block_bytes(self._largest, tokens)
        return self._workspace.at_least(need).data_ptr()

    def caches(self, layers: Sequence[KVLayer]) -> ctypes.Array[kernels.Cache] | None:
        """The descriptions of the layers' caches, if the kernels take all of them."""
        if layers is not self._layers:
            self._layers, self._caches = layers, self._describe_caches(layers)
        return self._caches

    def _describe_caches(self, layers: Sequence[KVLayer]) -> ctypes.Array[kernels.Cache] | None:
        for p, layer in zip(self._parameters[0], layers, strict=True):
            if not kernels.takes_attention((p.heads, p.kv_heads), p.head_dim, layer):
                return None
        return (kernels.Cache * len(layers))(*map(kernels.Cache.of, layers))


def out_of_memory(batch: Batch) -> MemoryError:
    """What to raise where the kernels found no memory."""
    return MemoryError(f"no memory for attention over {len(batch.starts)} sequences")


def native_blocks(
    library: ctypes.CDLL,
    parameters: Sequence[BlockParameters],
    norm: Norm,
    workspace: kernels.Workspace,
    threads: int,
) -> NativeBlocks | None:
    """Blocks in one call, if the kernels take all of their weights."""
    for p in parameters:
        parts = [*p.qkv, p.output, *p.gate_up, p.down]
        if not all(isinstance(q.weight, NativeWeight) for q in parts):
            return None
    return NativeBlocks(library, parameters, norm, workspace, threads)


def _describe(p: BlockParameters) -> kernels.Block:
    return kernels.Block(
        hidden=p.output.weight.shape[0],
        intermediate=p.down.weight.shape[1],
        heads=p.heads,
        kv_heads=p.kv_heads,
        head_dim=p.head_dim,
        scale=p.scale,
        softcap=p.softcap or 0,
        activation=kernels.ACTIVATIONS[p.activation],
        attention_norm=_norm(p.attention_norm),
        q_norm=_norm(p.q_norm),
        k_norm=_norm(p.k_norm),
        mlp_norm=_norm(p.mlp_norm),
        qkv=tuple(_projection(q) for q in p.qkv),
        output=_projection(p.output),
        gate=_projection(p.gate_up[0] if p.is_gated else None),
        up=_projection(p.gate_up[-1]),
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
