"""A model's decoding step in one call to the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qinfer.ops.block import StepTensors, WholeStep
from qinfer.ops.cpu import kernels
from qinfer.ops.cpu.block import NativeBlocks, out_of_memory
from qinfer.ops.cpu.weights import DENSE_KINDS, NativeWeight
from qinfer.quant.weights import Weight


class _NativeStep:
    """See `ReferenceOps.whole_step`."""

    def __init__(
        self, blocks: NativeBlocks, tables: Sequence[Tensor | None], head: NativeWeight
    ) -> None:
        self._blocks = blocks
        self._tables = tables  # the descriptions point into them
        self._head = head
        self._embedding, self._learned = map(_describe, tables)

    def __call__(self, tensors: StepTensors) -> Callable[[], None] | None:
        blocks, batch = self._blocks, tensors.batch
        caches = blocks.caches(tensors.layers)
        if caches is None:
            return None
        size, first = len(batch.ids), blocks.blocks[0]
        x = torch.empty(size, first.hidden)
        rotation = torch.empty(2, size, first.head_dim // 2)
        cos, sin = map(kernels.address, tensors.rotary or (None, None))
        decoding = kernels.Decoding(
            blocks=blocks.blocks,
            caches=caches,
            count=len(blocks.blocks),
            last=ctypes.pointer(blocks.norm),
            head=ctypes.pointer(self._head.description),
            embedding=self._embedding,
            learned=self._learned,
            cos=cos,
            sin=sin,
            ids=batch.ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            rotation=rotation.data_ptr(),
            logits=tensors.logits.data_ptr(),
            choice=kernels.Choice.of(
                tensors.logits, tensors.vocab_size, tensors.draws, tensors.results
            ),
        )
        step = blocks.step(x, batch)
        kept = tensors, x, rotation  # the descriptions point into these

        def run() -> None:
            step.workspace = blocks.workspace(size)
            if not blocks.library.qinfer_decode(decoding, step):
                raise out_of_memory(kept[0].batch)

        return run


def native_step(
    blocks: NativeBlocks, tables: Sequence[Tensor | None], head: Weight
) -> WholeStep | None:
    """Steps in one call, if the kernels take the head and the embeddings."""
    given = [table for table in tables if table is not None]
    takes = all(table.dtype in DENSE_KINDS and table.stride(1) == 1 for table in given)
    if not takes or not isinstance(head, NativeWeight):
        return None
    return _NativeStep(blocks, tables, head)


def _describe(table: Tensor | None) -> kernels.Table:
    if table is None:
        return kernels.Table()
    return kernels.Table(table.data_ptr(), DENSE_KINDS[table.dtype], table.stride(0))
