"""Calling the compiled kernels: which weights they take, and their arguments.

`kernels.c` is built with the package as an extension of plain C. Where no compiler was there at
install time it is missing, and the reference operations do the work.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

import torch
from torch import Tensor

from qinfer.quant.weights import AffineWeight, DenseWeight, NF4Weight, Weight

_INT4, _INT8, _NF4 = range(3)
_DENSE = {torch.bfloat16: 3, torch.float16: 4, torch.float32: 5}


class _Weight(ctypes.Structure):
    """`weight` in kernels.c."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("scale_is_fp16", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("absmax", ctypes.c_void_p),
        ("code", ctypes.c_void_p),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built."""
    spec = importlib.util.find_spec("qinfer.ops.cpu._kernels")
    if spec is None or spec.origin is None:
        return None
    return load(spec.origin)


def load(path: str) -> ctypes.CDLL:
    """Load a build of `kernels.c` and declare its functions."""
    kernels = ctypes.CDLL(path)
    pointer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    weight = ctypes.POINTER(_Weight)
    kernels.qinfer_linear.argtypes = [weight, pointer, size, pointer, count]
    kernels.qinfer_linear.restype = count
    return kernels


class NativeWeight:
    """A weight that the kernels can compute with, as it lies in the mapped file.

    Attributes:
        weight: The weight; keeps its memory alive.
        shape: (N, K).
    """

    def __init__(self, kernels: ctypes.CDLL, weight: Weight, description: _Weight) -> None:
        self.weight = weight
        self.shape = weight.shape
        self._kernels = kernels
        self._description = ctypes.byref(description)

    def linear(self, x: Tensor, threads: int) -> Tensor:
        """`x · Wᵀ`.

        Args:
            x: fp32 [tokens, K].
            threads: How many compute, this one included; the result does not depend on it.

        Returns:
            fp32 [tokens, N].
        """
        x = x.contiguous()
        tokens = x.shape[0]
        y = torch.empty(tokens, self.shape[0])
        if not self._kernels.qinfer_linear(
            self._description, x.data_ptr(), tokens, y.data_ptr(), threads
        ):
            raise MemoryError(f"no memory for activations of shape {list(x.shape)}")
        return y

    def rows(self, start: int, stop: int) -> Tensor:
        """Output rows `start:stop` in fp32, [stop - start, K]."""
        return self.weight.rows(start, stop)

    def to(self, device: torch.device) -> Weight:
        """The weight without kernels on another device."""
        return self.weight.to(device)


def native(weight: Weight) -> Weight:
    """Wrap a weight that the kernels take; return any other as it is."""
    kernels, description = library(), _describe(weight)
    if kernels is None or description is None:
        return weight
    return NativeWeight(kernels, weight, description)


def _describe(weight: Weight) -> _Weight | None:
    if isinstance(weight, AffineWeight):
        return _describe_affine(weight)
    if isinstance(weight, NF4Weight):
        return _describe_nf4(weight)
    if isinstance(weight, DenseWeight):
        return _describe_dense(weight.data)
    return None


def _describe_dense(data: Tensor) -> _Weight | None:
    kind = _DENSE.get(data.dtype)
    if kind is None or data.stride(1) != 1:
        return None
    rows, columns = data.shape
    return _Weight(
        kind=kind,
        rows=rows,
        columns=columns,
        group=columns,
        row_bytes=data.itemsize * data.stride(0),
        data=data.data_ptr(),
    )


def _describe_affine(weight: AffineWeight) -> _Weight | None:
    group, odd = divmod(weight.columns, weight.scale.shape[1])
    whole = weight.bits == 8 or group % 32 == 0
    tensors = (weight.packed, weight.scale)
    if odd or not whole or weight.scale.dtype == torch.float32:
        return None
    if not all(t.is_contiguous() for t in tensors):
        return None
    return _Weight(
        kind=_INT4 if weight.bits == 4 else _INT8,
        scale_is_fp16=weight.scale.dtype == torch.float16,
        rows=weight.shape[0],
        columns=weight.columns,
        group=group,
        row_bytes=4 * weight.packed.shape[1],
        data=weight.packed.data_ptr(),
        scale=weight.scale.data_ptr(),
    )


def _describe_nf4(weight: NF4Weight) -> _Weight | None:
    rows, columns = weight.shape
    if columns % weight.block_size or weight.block_size % 32:
        return None  # blocks span rows
    if weight.code.shape != (16,) or weight.code.dtype != torch.float32:
        return None
    if not all(t.is_contiguous() for t in (weight.packed, weight.absmax, weight.code)):
        return None
    return _Weight(
        kind=_NF4,
        rows=rows,
        columns=columns,
        group=weight.block_size,
        row_bytes=columns // 2,
        data=weight.packed.data_ptr(),
        absmax=weight.absmax.data_ptr(),
        code=weight.code.data_ptr(),
    )
