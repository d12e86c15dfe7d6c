"""Affine weights in the layout of packed.c: repacked once, when the model is loaded."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from qinfer.quant.weights import AffineWeight, Weight

RUN = 32
_ARENA_BYTES = 32 << 20  # many huge pages; the unused rest of the last one is not touched
_ALIGNMENT = 64


class Packed(ctypes.Structure):
    """`packed` in packed.h."""

    _fields_ = (
        ("bits", ctypes.c_int32),
        ("scale_is_fp16", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("runs", ctypes.c_int64),
        ("runs_a_group", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )


class Arena:
    """Hands out memory, in huge pages if there are any; it lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], aligned to a cache line and not initialized."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._rest):
            memory = mmap.mmap(-1, max(size, _ARENA_BYTES))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._rest = torch.frombuffer(memory, dtype=torch.uint8)
        taken, self._rest = self._rest[:nbytes], self._rest[size:]
        return taken


class PackedWeight:
    """A 4- or 8-bit weight that the kernels compute with.

    Attributes:
        weight: As it lies in the mapped file.
        shape: (N, K).
        description: For the kernels.
    """

    def __init__(
        self, kernels: ctypes.CDLL, weight: AffineWeight, arena: Arena, *, threads: int
    ) -> None:
        """Repack a weight of a kind that `is_packable`."""
        runs = -(-weight.columns // RUN)
        self.weight = weight
        self.shape = weight.shape
        self.description = Packed(
            bits=weight.bits,
            scale_is_fp16=weight.scale.dtype == torch.float16,
            rows=weight.shape[0],
            columns=weight.columns,
            runs=runs,
            runs_a_group=runs // weight.scale.shape[1],
        )
        self._kernels = kernels
        self._data = arena.take(kernels.qinfer_packed_bytes(self.description))
        self.description.data = self._data.data_ptr()
        kernels.qinfer_repack(
            *(self.description, weight.packed.data_ptr(), weight.scale.data_ptr()),
            *(4 * weight.packed.shape[1], threads),
        )

    def linear(self, x: Tensor, threads: int) -> Tensor:
        """`x · Wᵀ`, the activations rounded to 16 bits.

        Args:
            x: fp32 [tokens, K].
            threads: How many compute, this one included; the result does not depend on it.

        Returns:
            fp32 [tokens, N].
        """
        x = x.contiguous()
        y = torch.empty(x.shape[0], self.shape[0])
        if not self._kernels.qinfer_packed_linear(
            self.description, x.data_ptr(), x.shape[0], y.data_ptr(), threads
        ):
            raise MemoryError(f"no memory for activations of shape {list(x.shape)}")
        return y

    def rows(self, start: int, stop: int) -> Tensor:
        """Output rows `start:stop` in fp32, [stop - start, K]."""
        return self.weight.rows(start, stop)

    def to(self, device: torch.device) -> Weight:
        """The weight without kernels on another device."""
        return self.weight.to(device)


def is_packable(weight: AffineWeight) -> bool:
    """Whether groups are of whole runs, or of whole rows, and scales have 16 bits."""
    group, odd = divmod(weight.columns, weight.scale.shape[1])
    whole = not odd and (group % RUN == 0 or weight.scale.shape[1] == 1)
    tensors = (weight.packed, weight.scale)
    return whole and weight.scale.dtype != torch.float32 and all(t.is_contiguous() for t in tensors)


def declare(kernels: ctypes.CDLL) -> None:
    """Declare the functions of packed.c."""
    pointer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    packed = ctypes.POINTER(Packed)
    signatures: dict[str, tuple[Callable[..., object] | None, list[object]]] = {
        "qinfer_packed_bytes": (size, [packed]),
        "qinfer_repack": (None, [packed, pointer, pointer, size, count]),
        "qinfer_packed_linear": (count, [packed, pointer, size, pointer, count]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
