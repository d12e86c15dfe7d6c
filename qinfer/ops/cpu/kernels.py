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

from qinfer.ops.draws import Draws, columns_that_count
from qinfer.ops.paged import Batch, KVLayer
from qinfer.quant.kv import KVSide, value_group

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3}
_MAX_HEAD_DIM, _MAX_GROUP_HEADS = 256, 48  # MAX_HEAD_DIM and MAX_ROWS in attention.c

_int32, _int64, _float, _pointer = (
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_void_p,
)


class Weight(ctypes.Structure):
    """`weight` in weight.h."""

    _fields_ = (
        ("kind", _int32),
        ("scale_is_fp16", _int32),
        ("has_zeros", _int64),
        ("rows", _int64),
        ("columns", _int64),
        ("group", _int64),
        ("row_bytes", _int64),
        ("data", _pointer),
        ("absmax", _pointer),
        ("code", _pointer),
    )


class Product(ctypes.Structure):
    """`product` in weight.h."""

    _fields_ = (
        ("weight", ctypes.POINTER(Weight)),
        ("bias", _pointer),
        ("out", _pointer),
        ("stride", _int64),
        ("adds", _int64),
    )


class Norm(ctypes.Structure):
    """`norm` in rows.h."""

    _fields_ = (("weight", _pointer), ("bias", _pointer), ("eps", ctypes.c_double))


class Projection(ctypes.Structure):
    """`projection` in block.c."""

    _fields_ = (("weight", ctypes.POINTER(Weight)), ("bias", _pointer))


class Block(ctypes.Structure):
    """`block` in block.c."""

    _fields_ = (
        ("hidden", _int64),
        ("intermediate", _int64),
        ("heads", _int64),
        ("kv_heads", _int64),
        ("head_dim", _int64),
        ("scale", _float),
        ("softcap", _float),
        ("activation", _int64),
        ("attention_norm", Norm),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("mlp_norm", Norm),
        ("qkv", Projection * 3),
        ("output", Projection),
        ("gate", Projection),
        ("up", Projection),
        ("down", Projection),
    )


class _Side(ctypes.Structure):
    """`side` in attention.h."""

    _fields_ = (
        ("bits", _int32),
        ("is_keys", _int32),
        ("head_dim", _int64),
        ("group", _int64),
        ("data", _pointer),
        ("scale", _pointer),
        ("minimum", _pointer),
        ("open", _pointer),
    )


class Cache(ctypes.Structure):
    """`cache` in attention.h."""

    _fields_ = (
        ("keys", _Side),
        ("values", _Side),
        ("group", _int64),
        ("window", _int64),
        ("sinks", _int64),
    )

    @classmethod
    def of(cls, layer: KVLayer) -> Cache:
        """The cache of a layer; the layer must outlive it."""
        return cls(
            keys=_side(layer.keys),
            values=_side(layer.values),
            group=layer.group,
            window=layer.window or 0,
            sinks=layer.sinks,
        )


class Segments(ctypes.Structure):
    """`segments` in attention.h."""

    _fields_ = (
        ("count", _int64),
        ("starts", _pointer),
        ("offsets", _pointer),
        ("slots", _pointer),
        ("tables", ctypes.POINTER(_pointer)),
        ("widths", ctypes.POINTER(_int64)),
    )

    @classmethod
    def of(cls, batch: Batch) -> Segments:
        """The segments of a batch, which must outlive them."""
        groups = len(batch.tables)
        return cls(
            count=len(batch.starts),
            starts=batch.starts.data_ptr(),
            offsets=batch.offsets.data_ptr(),
            slots=batch.slots.data_ptr(),
            tables=(_pointer * groups)(*(table.data_ptr() for table in batch.tables)),
            widths=(_int64 * groups)(*(table.shape[1] for table in batch.tables)),
        )


class Step(ctypes.Structure):
    """`step` in block.c."""

    _fields_ = (
        ("tokens", _int64),
        ("threads", _int64),
        ("x", _pointer),
        ("cos", _pointer),
        ("sin", _pointer),
        ("segments", ctypes.POINTER(Segments)),
        ("workspace", _pointer),
    )


class Table(ctypes.Structure):
    """`table` in decode.c."""

    _fields_ = (("data", _pointer), ("kind", _int64), ("stride", _int64))


class Choice(ctypes.Structure):
    """`choice` in choice.h."""

    _fields_ = (
        ("logits", _pointer),
        ("rows", _int64),
        ("stride", _int64),
        ("vocab_size", _int64),
        ("draws", _pointer),
        ("positions", _pointer),
        ("chosen", _pointer),
        ("broken", _pointer),
    )

    @classmethod
    def of(
        cls, logits: Tensor, vocab_size: int | None, draws: Draws | None, results: Tensor
    ) -> Choice:
        """A choice from these tensors, which must outlive it.

        Args:
            logits: fp32 [rows, vocab], a row's side by side.
            vocab_size: Ids from here on are never chosen; None is all.
            draws: None takes the likeliest.
            results: int64 [2, rows], contiguous: tokens, and whether there is none.

        Raises:
            ValueError: An argument is not as described.
        """
        if draws is not None:
            draws.check(len(logits))
        chosen, broken = results
        return cls(
            logits=logits.data_ptr(),
            rows=len(logits),
            stride=logits.stride(0),
            vocab_size=columns_that_count(logits, vocab_size),
            draws=None if draws is None else draws.table.data_ptr(),
            positions=None if draws is None else draws.positions.data_ptr(),
            chosen=chosen.data_ptr(),
            broken=broken.data_ptr(),
        )


class Decoding(ctypes.Structure):
    """`decoding` in decode.c."""

    _fields_ = (
        ("blocks", ctypes.POINTER(Block)),
        ("caches", ctypes.POINTER(Cache)),
        ("count", _int64),
        ("last", ctypes.POINTER(Norm)),
        ("head", ctypes.POINTER(Weight)),
        ("embedding", Table),
        ("learned", Table),
        ("cos", _pointer),
        ("sin", _pointer),
        ("ids", _pointer),
        ("positions", _pointer),
        ("rotation", _pointer),
        ("logits", _pointer),
        ("choice", Choice),
    )


class _Attention(ctypes.Structure):
    """`attention` in attention.h."""

    _fields_ = (
        ("cache", ctypes.POINTER(Cache)),
        ("segments", ctypes.POINTER(Segments)),
        ("heads", _int64),
        ("kv_heads", _int64),
        ("head_dim", _int64),
        ("scale", _float),
        ("softcap", _float),
        ("q", _pointer),
        ("k", _pointer),
        ("v", _pointer),
        ("q_stride", _int64),
        ("kv_stride", _int64),
        ("out", _pointer),
        ("threads", _int64),
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
    count, to = ctypes.c_int, ctypes.POINTER
    signatures = {
        "linear": (None, [to(Product), _pointer, _int64, _pointer, count]),
        "input_bytes": (_int64, [_int64, _int64]),
        "weight_bytes": (_int64, [to(Weight)]),
        "repack": (None, [to(Weight), _pointer, _pointer, _pointer, count]),
        "attention": (count, [to(_Attention)]),
        "blocks": (count, [to(Block), to(Cache), _int64, to(Norm), to(Step)]),
        "block_bytes": (_int64, [to(Block), _int64]),
        "choose": (count, [to(Choice), count]),
        "decode": (count, [to(Decoding), to(Step)]),
        "norm": (None, [to(Norm), _pointer, _int64, _int64, _pointer, count]),
        "activate": (None, [_pointer, _pointer, count, _int64, _int64, _pointer, count]),
        "rotary": (None, [_pointer, _pointer, _pointer, _int64, _int64, _int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(kernels, f"qinfer_{name}")
        function.restype, function.argtypes = result, arguments
    return kernels


def variant(kernels: ctypes.CDLL) -> str | None:
    """Which vector code runs on this processor, such as `avx2`, or `plain` C.

    None if the library is older than the question.
    """
    function = getattr(kernels, "qinfer_variant", None)
    if function is None:
        return None
    function.argtypes, function.restype = [], ctypes.c_char_p
    return str(function().decode())


class Workspace:
    """Memory that calls use one after another, as large as the largest needed.

    Attributes:
        memory: uint8; another tensor when it had to grow.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, nbytes: int) -> Tensor:
        """The memory, of so many bytes or more."""
        if nbytes > len(self.memory):
            self.memory = torch.empty(0, dtype=torch.uint8)  # lets go of what is there first
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        return self.memory


def linear(
    kernels: ctypes.CDLL,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    workspace: Workspace,
    *,
    threads: int,
) -> Tensor:
    """See `ReferenceOps.linear`; the result does not depend on `threads`."""
    x = x.contiguous()
    tokens, columns = x.shape
    y = torch.empty(tokens, weight.rows)
    memory = workspace.at_least(kernels.qinfer_input_bytes(tokens, columns))
    product = Product(
        weight=ctypes.pointer(weight),
        bias=address(bias),
        out=y.data_ptr(),
        stride=weight.rows,
    )
    kernels.qinfer_linear(product, x.data_ptr(), tokens, memory.data_ptr(), threads)
    return y


def takes_attention(heads: tuple[int, int], head_dim: int, layer: KVLayer) -> bool:
    """Whether the attention kernel covers these heads, of queries and of keys, and this cache."""
    fits = head_dim <= _MAX_HEAD_DIM and heads[0] // heads[1] <= _MAX_GROUP_HEADS
    return fits and all(
        t.dtype == torch.float16
        for side in (layer.keys, layer.values)
        for t in (side.open if side.bits < 16 else side.data if side.bits == 16 else None,)
        if t is not None
    )


def attention(
    kernels: ctypes.CDLL,
    heads: tuple[Tensor, Tensor, Tensor],
    layer: KVLayer,
    batch: Batch,
    *,
    scale: float,
    softcap: float | None,
    threads: int,
) -> Tensor:
    """See `ReferenceOps.attention`; the result does not depend on `threads`.

    `heads` are q, k and v.
    """
    q, k, v = (x.contiguous() for x in heads)
    out = torch.empty_like(q)
    call = _Attention(
        cache=ctypes.pointer(Cache.of(layer)),
        segments=ctypes.pointer(Segments.of(batch)),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        scale=scale,
        softcap=softcap or 0,
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        q_stride=q.stride(0),
        kv_stride=k.stride(0),
        out=out.data_ptr(),
        threads=threads,
    )
    if not kernels.qinfer_attention(call):
        raise MemoryError(f"no memory for attention over {len(batch.starts)} sequences")
    return out


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's data is; None if there is none."""
    return None if tensor is None else tensor.data_ptr()


def _side(side: KVSide) -> _Side:
    return _Side(
        bits=side.bits,
        is_keys=side.is_keys,
        head_dim=side.head_dim,
        group=value_group(side.head_dim),
        data=side.data.data_ptr(),
        scale=address(side.scale),
        minimum=address(side.minimum),
        open=address(side.open),
    )


def norm(
    kernels: ctypes.CDLL,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    threads: int,
) -> Tensor:
    """See `ReferenceOps.layer_norm`; without a bias `ReferenceOps.rms_norm`."""
    x, y = x.contiguous(), torch.empty(x.shape)
    size = x.shape[-1]
    described = Norm(weight=weight.data_ptr(), bias=address(bias), eps=eps)
    kernels.qinfer_norm(described, x.data_ptr(), x.numel() // size, size, y.data_ptr(), threads)
    return y


def activate(
    kernels: ctypes.CDLL, x: Tensor, up: Tensor | None, kind: str, *, threads: int
) -> Tensor:
    """The activation of `x`, times `up` if there is one."""
    x, y = x.contiguous(), torch.empty(x.shape)
    size = x.shape[-1]
    up = None if up is None else up.contiguous()
    kernels.qinfer_activate(
        *(x.data_ptr(), address(up), ACTIVATIONS[kind]),
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


def choose(
    kernels: ctypes.CDLL,
    logits: Tensor,
    vocab_size: int | None,
    draws: Draws | None,
    *,
    threads: int,
) -> tuple[Tensor, Tensor]:
    """See `ReferenceOps.draw`, or without draws `greedy`.

    Raises:
        ValueError: An argument is not as described.
        MemoryError: There is none to list what may be drawn.
    """
    results = torch.empty(2, len(logits), dtype=torch.int64)
    if not kernels.qinfer_choose(Choice.of(logits, vocab_size, draws, results), threads):
        raise MemoryError(f"no memory for a choice from {logits.shape[1]:,} tokens")
    return results[0], results[1].bool()
