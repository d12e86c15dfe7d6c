"""The weights that the kernels compute with, and which ones they take.

Dense and NF4 weights are read where they lie in the mapped file; 4- and 8-bit ones are repacked
once, when the model is loaded.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from qinfer.ops.cpu import kernels
from qinfer.quant.weights import AffineWeight, DenseWeight, NF4Weight, Weight

_RUN = 32  # RUN in weight.h
_NF4, _INT4, _INT8 = 0, 4, 5
_DENSE = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
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
    """A weight that a kernel computes with.

    Attributes:
        weight: As it lies in the mapped file; kept, since the description may point into it.
        description: For the kernels.
        shape: (N, K).
    """

    def __init__(self, description: kernels.Weight, weight: Weight) -> None:
        self.weight = weight
        self.description = description
        self.shape = weight.shape

    def rows(self, start: int, stop: int) -> Tensor:
        """Output rows `start:stop` in fp32, [stop - start, K]."""
        return self.weight.rows(start, stop)

    def to(self, device: torch.device) -> Weight:
        """The weight without kernels on another device."""
        return self.weight.to(device)


class PackedWeight(NativeWeight):
    """A 4- or 8-bit weight in the layout of packed.c; activations are rounded to 16 bits for it."""

    def __init__(
        self, library: ctypes.CDLL, weight: AffineWeight, arena: Arena, *, threads: int
    ) -> None:
        """Repack a weight of a kind that `_is_packable`."""
        description = kernels.Weight(
            kind=_INT4 if weight.bits == 4 else _INT8,
            scale_is_fp16=weight.scale.dtype == torch.float16,
            rows=weight.shape[0],
            columns=weight.columns,
            group=weight.columns // weight.scale.shape[1],
            row_bytes=4 * weight.packed.shape[1],
        )
        self._data = arena.take(library.qinfer_packed_bytes(description))
        description.data = self._data.data_ptr()
        library.qinfer_repack(
            description, weight.packed.data_ptr(), weight.scale.data_ptr(), threads
        )
        super().__init__(description, weight)


def native(weight: Weight, arena: Arena, *, threads: int) -> Weight:
    """A weight as the kernels take it; one that they do not take as it is.

    Args:
        weight: Any.
        arena: Where a repacked weight goes.
        threads: How many repack.
    """
    library = kernels.library()
    if library is None:
        return weight
    if isinstance(weight, AffineWeight):
        packable = _is_packable(weight)
        return PackedWeight(library, weight, arena, threads=threads) if packable else weight
    description = _describe(weight)
    if description is None:
        return weight
    return NativeWeight(description, weight)


def _describe(weight: Weight) -> kernels.Weight | None:
    if isinstance(weight, NF4Weight):
        return _describe_nf4(weight)
    if isinstance(weight, DenseWeight):
        return _describe_dense(weight.data)
    return None


def _describe_dense(data: Tensor) -> kernels.Weight | None:
    kind = _DENSE.get(data.dtype)
    if kind is None or data.stride(1) != 1:
        return None
    rows, columns = data.shape
    return kernels.Weight(
        kind=kind,
        rows=rows,
        columns=columns,
        group=columns,
        row_bytes=data.itemsize * data.stride(0),
        data=data.data_ptr(),
    )


def _describe_nf4(weight: NF4Weight) -> kernels.Weight | None:
    rows, columns = weight.shape
    if columns % weight.block_size or weight.block_size % 32 or weight.block_size.bit_count() != 1:
        return None  # blocks span rows, or are of a size that no library writes
    if weight.code.shape != (16,) or weight.code.dtype != torch.float32:
        return None
    if not all(t.is_contiguous() for t in (weight.packed, weight.absmax, weight.code)):
        return None
    return kernels.Weight(
        kind=_NF4,
        rows=rows,
        columns=columns,
        group=weight.block_size,
        row_bytes=columns // 2,
        data=weight.packed.data_ptr(),
        absmax=weight.absmax.data_ptr(),
        code=weight.code.data_ptr(),
    )


def _is_packable(weight: AffineWeight) -> bool:
    """Whether groups are of whole runs, or of whole rows, and scales have 16 bits."""
    group, odd = divmod(weight.columns, weight.scale.shape[1])
    whole = not odd and (group % _RUN == 0 or weight.scale.shape[1] == 1)
    tensors = (weight.packed, weight.scale)
    return whole and weight.scale.dtype != torch.float32 and all(t.is_contiguous() for t in tensors)
