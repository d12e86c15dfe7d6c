"""Calling the compiled kernels: their arguments, and which shapes they take.

The C beside this file is built with the package as an extension of plain C. Where no compiler was
there at install time it is missing, and the reference operations do the work.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

import torch
from torch import Tensor

from qinfer.ops.paged import Batch, KVLayer
from qinfer.quant.kv import KVSide, value_group

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3}
_MAX_HEAD_DIM, _MAX_GROUP_HEADS = 256, 48  # MAX_HEAD_DIM and MAX_ROWS in attention.c


class Unpacked(ctypes.Structure):
    """`weight` in linear.c."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("absmax", ctypes.c_void_p),
        ("code", ctypes.c_void_p),
    )


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


class _Side(ctypes.Structure):
    """`side` in attention.c."""

    _fields_ = (
        ("bits", ctypes.c_int32),
        ("is_keys", ctypes.c_int32),
        ("head_dim", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("minimum", ctypes.c_void_p),
        ("open", ctypes.c_void_p),
    )


class _Attention(ctypes.Structure):
    """`call` in attention.c."""

    _fields_ = (
        ("keys", _Side),
        ("values", _Side),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("segments", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built."""
    spec = importlib.util.find_spec("qinfer.ops.cpu._kernels")
    if spec is None or spec.origin is None:
        return None
    return load(spec.origin)


def load(path: str) -> ctypes.CDLL:
    """Load a build of the kernels and declare their functions."""
    kernels = ctypes.CDLL(path)
    pointer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    weight, packed = ctypes.POINTER(Unpacked), ctypes.POINTER(Packed)
    real = ctypes.c_float
    kernels.qinfer_linear.argtypes = [weight, pointer, size, pointer, count]
    kernels.qinfer_linear.restype = count
    kernels.qinfer_packed_linear.argtypes = [packed, pointer, size, pointer, count]
    kernels.qinfer_packed_linear.restype = count
    kernels.qinfer_packed_bytes.argtypes = [packed]
    kernels.qinfer_packed_bytes.restype = size
    kernels.qinfer_repack.argtypes = [packed, pointer, pointer, size, count]
    kernels.qinfer_attention.argtypes = [ctypes.POINTER(_Attention)]
    kernels.qinfer_attention.restype = count
    kernels.qinfer_rms_norm.argtypes = [pointer, pointer, real, size, size, pointer, count]
    kernels.qinfer_layer_norm.argtypes = [
        *(pointer, pointer, pointer, real),
        *(size, size, pointer, count),
    ]
    kernels.qinfer_activate.argtypes = [pointer, pointer, count, size, size, pointer, count]
    kernels.qinfer_rotary.argtypes = [pointer, pointer, pointer, size, size, size]
    for name in ("repack", "rms_norm", "layer_norm", "activate", "rotary"):
        getattr(kernels, f"qinfer_{name}").restype = None
    return kernels


def takes_attention(q: Tensor, k: Tensor, layer: KVLayer) -> bool:
    """Whether the attention kernel covers these shapes and this cache."""
    fits = q.shape[2] <= _MAX_HEAD_DIM and q.shape[1] // k.shape[1] <= _MAX_GROUP_HEADS
    return fits and all(
        t.dtype == torch.float16
        for side in (layer.keys, layer.values)
        for t in (side.open if side.bits < 16 else side.data if side.bits == 16 else None,)
        if t is not None
    )


def attention(
    kernels: ctypes.CDLL,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: KVLayer,
    batch: Batch,
    *,
    scale: float,
    threads: int,
) -> Tensor:
    """See `ReferenceOps.attention`; the result does not depend on `threads`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    table = batch.tables[layer.group]
    call = _Attention(
        keys=_side(layer.keys),
        values=_side(layer.values),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        window=layer.window or 0,
        sinks=layer.sinks,
        scale=scale,
        threads=threads,
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        segments=len(batch.starts),
        starts=batch.starts.data_ptr(),
        offsets=batch.offsets.data_ptr(),
        tables=table.data_ptr(),
        table_width=table.shape[1],
        slots=batch.slots.data_ptr(),
    )
    if not kernels.qinfer_attention(ctypes.byref(call)):
        raise MemoryError(f"no memory for attention over {len(batch.starts)} sequences")
    return out


def _side(side: KVSide) -> _Side:
    def pointer(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return _Side(
        bits=side.bits,
        is_keys=side.is_keys,
        head_dim=side.head_dim,
        group=value_group(side.head_dim),
        data=side.data.data_ptr(),
        scale=pointer(side.scale),
        minimum=pointer(side.minimum),
        open=pointer(side.open),
    )


def rms_norm(
    kernels: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float, *, threads: int
) -> Tensor:
    """See `ReferenceOps.rms_norm`."""
    x, y = x.contiguous(), torch.empty(x.shape)
    size = x.shape[-1]
    kernels.qinfer_rms_norm(
        x.data_ptr(), weight.data_ptr(), eps, x.numel() // size, size, y.data_ptr(), threads
    )
    return y


def layer_norm(
    kernels: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, threads: int
) -> Tensor:
    """See `ReferenceOps.layer_norm`."""
    x, y = x.contiguous(), torch.empty(x.shape)
    size = x.shape[-1]
    kernels.qinfer_layer_norm(
        *(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), eps),
        *(x.numel() // size, size, y.data_ptr(), threads),
    )
    return y


def activate(
    kernels: ctypes.CDLL, x: Tensor, up: Tensor | None, kind: str, *, threads: int
) -> Tensor:
    """The activation of `x`, times `up` if there is one."""
    x, y = x.contiguous(), torch.empty(x.shape)
    size = x.shape[-1]
    up = None if up is None else up.contiguous()
    kernels.qinfer_activate(
        *(x.data_ptr(), None if up is None else up.data_ptr(), _ACTIVATIONS[kind]),
        *(x.numel() // size, size, y.data_ptr(), threads),
    )
    return y


def rotary(kernels: ctypes.CDLL, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `ReferenceOps.rotary`; in place where `x` is contiguous."""
    x = x.contiguous()
    tokens, heads, head_dim = x.shape
    kernels.qinfer_rotary(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, heads, head_dim // 2
    )
    return x
