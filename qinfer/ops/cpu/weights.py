"""The weights that the kernels compute with, and which ones they take.

They are repacked once, when the model is loaded, into memory that comes in huge pages.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from qinfer.ops.cpu import kernels
from qinfer.quant.weights import AffineWeight, DenseWeight, NF4Weight, Weight

_RUN = 32  # RUN in weight.h
_NF4, _INT4, _INT8 = 0, 4, 5
DENSE_KINDS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
_ARENA_BYTES = 32 << 20  # many huge pages; the unused rest of the last one is not touched
_ALIGNMENT = 64


class Arena:
    """Hands out memory, in huge pages if there are any; it lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], aligned to a cache line and not initialized."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._rest):
            self._rest = torch.frombuffer(_map(max(size, _ARENA_BYTES)), dtype=torch.uint8)
        taken, self._rest = self._rest[:nbytes], self._rest[size:]
        return taken


def _map(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    # Not shared, as is the default: shared memory is not given in huge pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class NativeWeight:
    """A weight in the layout of packed.c or dense.c.

    Activations are rounded to 16 bits for 4- and 8-bit weights.

    Attributes:
        weight: As it lies in the mapped file; kept, since the description may point into it.
        description: For the kernels.
        shape: (N, K).
    """

    def __init__(
        self, library: ctypes.CDLL, source: _Source, weight: Weight, arena: Arena, *, threads: int
    ) -> None:
        """Repack a weight of which `source` is the description."""
        self.weight = weight
        self.description = source.description
        self.shape = weight.shape
        self._data = arena.take(library.qinfer_weight_bytes(self.description))
        self.description.data = self._data.data_ptr()
        library.qinfer_repack(
            *(self.description, source.data.data_ptr()),
            *(kernels.address(source.scale), kernels.address(source.zero), threads),
        )

    def rows(self, start: int, stop: int) -> Tensor:
        """Output rows `start:stop` in fp32, [stop - start, K]."""
        return self.weight.rows(start, stop)

    def to(self, device: torch.device) -> Weight:
        """The weight without kernels on another device."""
        return self.weight.to(device)


@dataclass(slots=True)
class _Source:
    """What a weight is repacked from."""

    description: kernels.Weight
    data: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None


def native(weight: Weight, arena: Arena, *, threads: int) -> Weight:
    """A weight as the kernels take it; one that they do not take as it is.

    Args:
        weight: Any.
        arena: Where the repacked weight goes.
        threads: How many repack.
    """
    library = kernels.library()
    source = None if library is None else _source(weight)
    if library is None or source is None:
        return weight
    return NativeWeight(library, source, weight, arena, threads=threads)


def _source(weight: Weight) -> _Source | None:
    if isinstance(weight, AffineWeight):
        return _affine(weight)
    if isinstance(weight, NF4Weight):
        return _nf4(weight)
    if isinstance(weight, DenseWeight):
        return _dense(weight.data)
    return None


def _affine(weight: AffineWeight) -> _Source | None:
    group, odd = divmod(weight.columns, weight.scale.shape[1])
    if odd or (group % _RUN and weight.scale.shape[1] > 1):
        return None  # groups are neither of whole runs nor of whole rows
    tensors = (weight.packed, weight.scale)
    if weight.scale.dtype == torch.float32 or not all(t.is_contiguous() for t in tensors):
        return None
    if weight.zero is not None and not weight.zero.is_contiguous():
        return None
    description = kernels.Weight(
        # Less its zero point, a value of 4 bits fits in 8.
        kind=_INT4 if weight.bits == 4 and weight.zero is None else _INT8,
        scale_is_fp16=weight.scale.dtype == torch.float16,
        has_zeros=weight.bits == 8 and weight.zero is not None,
        rows=weight.shape[0],
        columns=weight.columns,
        group=group,
        row_bytes=4 * weight.packed.shape[1],
    )
    return _Source(description, *tensors, weight.zero)


def _dense(data: Tensor) -> _Source | None:
    kind = DENSE_KINDS.get(data.dtype)
    if kind is None:
        return None
    data = data if data.stride(1) == 1 else data.contiguous()
    rows, columns = data.shape
    description = kernels.Weight(
        kind=kind,
        rows=rows,
        columns=columns,
        group=columns,
        row_bytes=data.itemsize * data.stride(0),
    )
    return _Source(description, data)


def _nf4(weight: NF4Weight) -> _Source | None:
    rows, columns = weight.shape
    if columns % weight.block_size or weight.block_size % 32 or weight.block_size.bit_count() != 1:
        return None  # blocks span rows, or are of a size that no library writes
    if weight.code.shape != (16,) or weight.code.dtype != torch.float32:
        return None
    if not all(t.is_contiguous() for t in (weight.packed, weight.absmax, weight.code)):
        return None
    description = kernels.Weight(
        kind=_NF4,
        rows=rows,
        columns=columns,
        group=weight.block_size,
        row_bytes=columns // 2,
        absmax=weight.absmax.data_ptr(),
        code=weight.code.data_ptr(),
    )
    return _Source(description, weight.packed)
