"""Kernels whose programs take rows: norms and activations.

All arithmetic is fp32, and a row's result does not depend on which rows are computed with it. A
call launches the same programs whenever its arguments have the same shapes, and never waits for the
device, so that all of it can be captured in a CUDA graph. Products, attention and the choice of
tokens are elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.ops.block import Norm
from qinfer.ops.cuda.compilation import Compilation

LARGEST_ROW = 2**14
"""A norm holds its row in registers: this many elements are 32 in each of 512 threads."""

_ELEMENTS_PER_WARP = 256  # 8 in each thread: two loads of 128 bits in fp32, one in 16 bits
_MAX_WARPS = 16
_ACTIVATION_BLOCK = 1024


def add_norm(x: Tensor, delta: Tensor | None, norm: Norm, *, dtype: torch.dtype) -> Tensor:
    """In place: add to the residual stream; returns the norm of the sum, which is not rounded.

    Args:
        x: fp32 [tokens, hidden], elements of a row side by side; becomes `x + delta`.
        delta: [tokens, hidden] of 16 or 32 bits, or None to add nothing.
        norm: Of size `hidden`, at most `LARGEST_ROW`.
        dtype: Of the result.

    Returns:
        [tokens, hidden].

    Raises:
        ValueError: The row is too large, or `x` or `delta` is not as described.
    """
    if x.dtype != torch.float32 or x.dim() != 2 or not _lies_in_rows(x):
        raise ValueError(f"x must be fp32 [tokens, hidden] in rows, got {x.dtype} {list(x.shape)}")
    if delta is not None and delta.shape != x.shape:
        raise ValueError(f"delta is {list(delta.shape)}, x is {list(x.shape)}")
    if delta is not None and not _lies_in_rows(delta):
        delta = delta.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch_norm(x.unsqueeze(1), delta, norm, y)
    return y


def norm(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm ("RMSNorm", arXiv 1910.07467) or, with a bias, LayerNorm over the last axis.

    Args:
        x: [..., size] of 16 or 32 bits; a view such as some heads of all is read where it is.
        norm: Of size `size`, at most `LARGEST_ROW`.

    Returns:
        Like `x`, contiguous.

    Raises:
        ValueError: The row is too large.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(_in_three_axes(x), None, norm, y)
    return y


def activation(x: Tensor, kind: str) -> Tensor:
    """The MLP's nonlinearity.

    Args:
        x: [..., size].
        kind: One of `qinfer.config.ACTIVATIONS`.

    Returns:
        Like `x`, contiguous.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_activation(_in_two_axes(x), None, kind, y)
    return y


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """`activation(gate) · up` ("GLU variants", arXiv 2002.05202), rounded once.

    Args:
        gate: [..., intermediate].
        up: Like `gate`. Both may be halves of one tensor.
        kind: One of `qinfer.config.ACTIVATIONS`.

    Returns:
        Like `gate`, contiguous.

    Raises:
        ValueError: Their shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate is {list(gate.shape)}, up is {list(up.shape)}")
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch_activation(_in_two_axes(gate), _in_two_axes(up), kind, y)
    return y


def _launch_norm(x: Tensor, delta: Tensor | None, norm: Norm, y: Tensor) -> None:
    """Into `y`, of [outer, inner, size]; with a delta [outer, size], which needs inner = 1."""
    outer, inner, size = x.shape
    if size > LARGEST_ROW:
        raise ValueError(f"a row has {size} elements, a norm takes {LARGEST_ROW}")
    rows, columns, warps = _norm_tile(size)
    _norm_kernel[(triton.cdiv(outer * inner, rows),)](
        x,
        delta,
        norm.weight,
        norm.bias,
        y,
        outer * inner,
        inner,
        x.stride(0),
        x.stride(1),
        0 if delta is None else delta.stride(0),
        size,
        norm.eps,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
    )


def _launch_activation(gate: Tensor, up: Tensor | None, kind: str, y: Tensor) -> None:
    """Into `y`, of [rows, size]."""
    rows, size = gate.shape
    _activation_kernel[(rows, triton.cdiv(size, _ACTIVATION_BLOCK))](
        gate,
        up,
        y,
        gate.stride(0),
        0 if up is None else up.stride(0),
        size,
        KIND=kind,
        BLOCK=_ACTIVATION_BLOCK,
        num_warps=_warps(_ACTIVATION_BLOCK),
    )


def _lies_in_rows(x: Tensor) -> bool:
    """Whether the elements along the last axis are side by side."""
    return x.stride(-1) == 1 or x.shape[-1] == 1 or x.numel() == 0


def _in_three_axes(x: Tensor) -> Tensor:
    """[..., size] as [outer, inner, size], copied only if no view has a row's elements adjacent."""
    x = x if _lies_in_rows(x) else x.contiguous()
    if x.dim() == 3:
        return x
    return x.reshape(-1, 1, x.shape[-1]) if x.dim() < 3 else x.flatten(0, -3)


def _in_two_axes(x: Tensor) -> Tensor:
    """[..., size] as [rows, size], copied only if no view has a row's elements adjacent."""
    x = x if _lies_in_rows(x) else x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _warps(elements: int) -> int:
    """Of a program with this many elements, a power of two."""
    return max(1, min(_MAX_WARPS, elements // _ELEMENTS_PER_WARP))


def _norm_tile(size: int) -> tuple[int, int, int]:
    """Rows and columns, powers of two, of a program for rows of this size; and its warps."""
    columns = triton.next_power_of_2(size)
    rows = max(1, _ELEMENTS_PER_WARP // columns)
    return rows, columns, _warps(rows * columns)


@triton.jit(do_not_specialize=["rows"])  # nor compile again for another number of tokens
def _norm_kernel(  # noqa: PLR0913
    x,  # [outer, inner, size]
    delta,  # [outer, size] and inner = 1, or None
    weight,  # fp32 [size]
    bias,  # fp32 [size], or None
    y,  # [outer, inner, size], contiguous
    rows,  # outer · inner
    inner,
    x_outer_stride,
    x_inner_stride,
    delta_stride,
    size,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program i takes the rows from i · ROWS."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    within = column < size
    mask = (row < rows) & within
    factor = tl.load(weight + column, mask=within, other=0.0)  # first: in no cache, as a rule
    if bias is not None:
        addend = tl.load(bias + column, mask=within, other=0.0)
    outer = (row // inner).to(tl.int64)  # before products, which may pass 2**31
    place = x + outer * x_outer_stride + row % inner * x_inner_stride + column
    row = row.to(tl.int64)
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if delta is not None:
        values += tl.load(delta + row * delta_stride + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, values, mask=mask)
    if bias is not None:
        mean = tl.sum(values, 1)[:, None] / size
        values = tl.where(mask, values - mean, 0.0)
    mean_square = tl.sum(values * values, 1)[:, None] / size
    values = values * tl.rsqrt(mean_square + eps) * factor
    if bias is not None:
        values += addend
    tl.store(y + row * size + column, values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _activation_kernel(
    gate,  # [rows, size]
    up,  # [rows, size], or None
    y,  # [rows, size], contiguous
    gate_stride,
    up_stride,
    size,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, j) takes block j of row i."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    values = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    values = _activate(values, KIND)
    if up is not None:
        values *= tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * size + column, values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """NaN stays NaN, so that numbers that went wrong are seen in the logits."""
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # (1 + tanh u) / 2 = 1 / (1 + exp(-2u)); the factor is 2 · sqrt(2 / pi)
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return y


def compilations() -> list[Compilation]:
    """The cases of a decoding step, and those that need the most registers."""
    return [
        _norm_compilation("add_norm, 4096, bf16", 4096, delta="*bf16", y="*bf16"),
        _norm_compilation("add_norm, 16384 with bias", 16384, delta="*fp32", bias="*fp32"),
        _norm_compilation("norm, heads of 128, bf16", 128, x="*bf16", y="*bf16", inner="i32"),
        _activation_compilation("activation, gated silu, bf16", "silu", "*bf16", gated=True),
        _activation_compilation("activation, gelu, fp16", "gelu", "*fp16", gated=False),
    ]


def _norm_compilation(name: str, size: int, **types: str) -> Compilation:
    """Of rows of this size; types of arguments where they are not fp32, None or 1."""
    rows, columns, warps = _norm_tile(size)
    signature = {
        "x": "*fp32",
        "delta": "constexpr",
        "weight": "*fp32",
        "bias": "constexpr",
        "y": "*fp32",
        "rows": "i32",
        "inner": "constexpr",
        "x_outer_stride": "i32",
        "x_inner_stride": "i32",
        "delta_stride": "i32",
        "size": "i32",
        "eps": "fp32",
        "ROWS": "constexpr",
        "COLUMNS": "constexpr",
    } | types
    values = {"delta": None, "bias": None, "inner": 1, "ROWS": rows, "COLUMNS": columns}
    of_any_value = ("rows", "inner", "eps")
    return Compilation(
        name=name,
        kernel=_norm_kernel,
        signature=signature,
        constants={k: v for k, v in values.items() if signature[k] == "constexpr"},
        aligned=tuple(
            k for k, kind in signature.items() if kind != "constexpr" and k not in of_any_value
        ),
        num_warps=warps,
        num_stages=3,
    )


def _activation_compilation(name: str, kind: str, pointer: str, *, gated: bool) -> Compilation:
    aligned = ("gate", "y", "gate_stride", "up_stride", "size")
    constants = {"KIND": kind, "BLOCK": _ACTIVATION_BLOCK}
    return Compilation(
        name=name,
        kernel=_activation_kernel,
        signature={
            "gate": pointer,
            "up": pointer if gated else "constexpr",
            "y": pointer,
            "gate_stride": "i32",
            "up_stride": "i32",
            "size": "i32",
            "KIND": "constexpr",
            "BLOCK": "constexpr",
        },
        constants=constants if gated else constants | {"up": None},
        aligned=(*aligned, "up") if gated else aligned,
        num_warps=_warps(_ACTIVATION_BLOCK),
        num_stages=3,
    )
