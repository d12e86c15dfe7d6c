"""Linear layers of integer weights on an NVIDIA GPU: which kernel runs when, and with what tiles.

Nothing is tuned at run time and no value is read back from the device, so that a call with given
shapes always launches the same kernels and can be captured in a CUDA graph. The first call compiles
what it needs, which takes seconds and belongs before the capture.

For one row of x a product takes as long as reading the weight does. For many, as long as the
tensor cores need. Three ways cover the range:

- up to `GEMV_ROWS` rows: `gemv`, which reads the weight once and multiplies in fp32;
- up to `FUSED_ROWS` rows of 16 bits: `gemm`, which dequantizes in registers for tensor cores;
- otherwise: `dequantize` to the dtype of x, slab by slab, and the library's product.

A row's result does not depend on the rows beside it among calls of 1 to `GEMV_ROWS` rows, nor
among calls of more than that and up to 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qinfer.ops.cuda import gemv_kernels, linear_kernels
from qinfer.ops.cuda.compilation import Compilation
from qinfer.quant.weights import AffineWeight, Weight

# `gemv` takes 1.5 instructions a weight to dequantize and one more for each row; a program of 4
# rows of the weight spends 1 to 2 on the values of x. `gemm` takes 3.5 for up to 16 rows, or 6.2
# of 8 bits.
GEMV_ROWS = 2
# Per weight, on an H200 by calculation: dequantizing to memory and back is 4.5 bytes, 0.9 ps; the
# library's product is 2 flop a row, 0.0025 ps; `gemm` dequantizes anew for every 64 rows with 7.5
# instructions a weight, 0.25 to 0.5 ps. Between 256 and 512 rows it loses its lead.
FUSED_ROWS = 256
SLAB_BYTES = 64 * 2**20  # of a weight dequantized at a time
_SLAB_ROWS = 256  # a slab is a multiple of this many
_SCALES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Tile:
    """How `gemm` cuts its work: see there.

    Attributes:
        rows: Of x; up to this many rows of x in all, this tile is taken, and beyond, the last.
        outputs: Rows of the weight.
        columns: Of both, at a time.
        num_warps: Of a program.
        num_stages: How many tiles loads run ahead.
    """

    rows: int
    outputs: int
    columns: int
    num_warps: int
    num_stages: int


TILES = (
    Tile(16, 64, 256, 4, 3),
    Tile(32, 64, 256, 4, 3),
    Tile(64, 128, 128, 8, 3),
)


def supports(weight: Weight) -> bool:
    """Whether `linear` takes this weight: its groups are of 32 · n or whole rows."""
    if not isinstance(weight, AffineWeight) or weight.bits not in (4, 8):
        return False
    group_size, rest = divmod(weight.columns, weight.scale.shape[1])
    tensors = [weight.packed, weight.scale]
    if weight.zero is not None:
        tensors.append(weight.zero)
    return (
        rest == 0
        and (group_size == weight.columns or group_size % 32 == 0)
        and weight.scale.dtype in _SCALES
        and weight.packed.numel() < 2**31
        and all(tensor.is_contiguous() for tensor in tensors)
    )


def join(weights: Sequence[AffineWeight]) -> AffineWeight | None:
    """Weights of the same inputs as one, their outputs one after the other.

    Args:
        weights: (N_i, K) each.

    Returns:
        (ΣN_i, K), a copy; None if they differ in anything but N_i.
    """
    kinds = {
        (w.bits, w.columns, w.scale.shape[1], w.scale.dtype, w.zero is None, w.packed.device)
        for w in weights
    }
    if len(kinds) != 1:
        return None
    zeros = [w.zero for w in weights if w.zero is not None]
    return AffineWeight(
        torch.cat([w.packed for w in weights]),
        torch.cat([w.scale for w in weights]),
        weights[0].bits,
        weights[0].columns,
        torch.cat(zeros) if zeros else None,
    )


def linear(
    x: Tensor, weight: AffineWeight, bias: Tensor | None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`x · Wᵀ + b`.

    Args:
        x: bf16, fp16 or fp32 [tokens, K].
        weight: (N, K), one that `supports` accepts.
        bias: [N], or None.
        out_dtype: Of the result, that of `x` if None. Sums are in fp32 and rounded once; beyond
            `FUSED_ROWS` rows they are rounded to the dtype of `x` on the way.

    Returns:
        [tokens, N].
    """
    x = x.contiguous()
    rows, outputs = x.shape[0], weight.shape[0]
    y = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return y
    if rows <= GEMV_ROWS:
        return _gemv(x, weight, bias, y)
    if rows <= FUSED_ROWS and x.dtype != torch.float32:
        return _gemm(x, weight, bias, y)
    return _by_slabs(x, weight, bias, y)


def _gemv(x: Tensor, weight: AffineWeight, bias: Tensor | None, y: Tensor) -> Tensor:
    rows, (outputs, columns) = x.shape[0], weight.shape
    per_chunk = 4 * (32 // weight.bits)
    chunks = -(-columns // per_chunk)
    block_n = 8 if outputs >= 8 * 3 * _processors(x.device) else 4
    blocks = -(-outputs // block_n)
    warps = _gemv_warps(chunks, blocks, x.device)
    steps = -(-chunks // (32 * warps))
    splits, steps_each = _split(blocks, steps, 2 * _processors(x.device))
    target, last_bias = _target(y, bias, splits)
    gemv_kernels.gemv[(blocks, splits)](
        x,
        weight.packed,
        weight.scale,
        weight.zero,
        last_bias,
        target,
        rows,
        outputs,
        columns,
        steps_each * 32 * warps,
        BITS=weight.bits,
        GROUP=_group(weight),
        ROWS=1 << (rows - 1).bit_length(),
        BLOCK_N=block_n,
        CHUNKS=32 * warps,
        ALIGNED=columns % per_chunk == 0,
        num_warps=warps,
    )
    return _combine(target, bias, y, splits)


def _gemv_warps(chunks: int, blocks: int, device: torch.device) -> int:
    """Threads side by side on a row: two warps if few of them are without work then, or one.

    Of many programs one is enough: none waits for another where sums are combined.
    """
    padded = -(-chunks // 64) * 64
    return 1 if blocks >= 16 * _processors(device) or padded > 1.1 * (-(-chunks // 32) * 32) else 2


def _gemm(x: Tensor, weight: AffineWeight, bias: Tensor | None, y: Tensor) -> Tensor:
    rows, (outputs, columns) = x.shape[0], weight.shape
    tile = next((tile for tile in TILES if rows <= tile.rows), TILES[-1])
    m_blocks, n_blocks = -(-rows // tile.rows), -(-outputs // tile.outputs)
    wanted = 4 * _processors(x.device) if rows <= 16 else _processors(x.device)
    splits, steps_each = _split(m_blocks * n_blocks, -(-columns // tile.columns), wanted)
    target, last_bias = _target(y, bias, splits)
    linear_kernels.gemm[(m_blocks, n_blocks, splits)](
        x,
        weight.packed,
        weight.scale,
        weight.zero,
        last_bias,
        target,
        rows,
        outputs,
        columns,
        steps_each,
        BITS=weight.bits,
        GROUP=_group(weight),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.columns,
        MULTIPLE=next(size for size in (tile.columns, 32, 1) if columns % size == 0),
        PAIRS=weight.bits == 4 and _has_tensor_cores_of_8(x.device),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return _combine(target, bias, y, splits)


def _by_slabs(x: Tensor, weight: AffineWeight, bias: Tensor | None, y: Tensor) -> Tensor:
    outputs, columns = weight.shape
    step = SLAB_BYTES // (columns * x.itemsize * _SLAB_ROWS) * _SLAB_ROWS or _SLAB_ROWS
    dense = torch.empty(min(step, outputs), columns, dtype=x.dtype, device=x.device)
    product = y if y.dtype == x.dtype else torch.empty_like(y, dtype=x.dtype)
    for start in range(0, outputs, step):
        stop = min(start + step, outputs)
        _dequantize(weight, start, stop, dense)
        torch.mm(x, dense[: stop - start].t(), out=product[:, start:stop])
    if product is not y:
        y.copy_(product)
    return y if bias is None else y.add_(bias)


def _dequantize(weight: AffineWeight, start: int, stop: int, dense: Tensor) -> None:
    """Fill `dense`, [at least stop - start, K], with rows of the weight, in place."""
    columns = weight.columns
    block_w = 512
    grid = (stop - start, -(-columns * weight.bits // (32 * block_w)))
    linear_kernels.dequantize[grid](
        weight.packed[start:stop],
        weight.scale[start:stop],
        None if weight.zero is None else weight.zero[start:stop],
        dense,
        columns,
        BITS=weight.bits,
        GROUP=_group(weight),
        BLOCK_W=block_w,
        ALIGNED=columns % 32 == 0,
        num_warps=4,
    )


def _group(weight: AffineWeight) -> int:
    groups = weight.scale.shape[1]
    return 0 if groups == 1 else weight.columns // groups


def _split(blocks: int, steps: int, wanted: int) -> tuple[int, int]:
    """How many parts to cut K into so that there are about `wanted` programs, and steps of each."""
    steps_each = -(-steps // max(1, min(steps, wanted // blocks)))
    return -(-steps // steps_each), steps_each


def _target(y: Tensor, bias: Tensor | None, splits: int) -> tuple[Tensor, Tensor | None]:
    """Where a kernel writes, and the bias it adds: a workspace and none if there are splits."""
    if splits == 1:
        return y, bias
    return torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device), None


def _combine(target: Tensor, bias: Tensor | None, y: Tensor, splits: int) -> Tensor:
    if splits > 1:
        total, block = y.numel(), 512
        grid = (-(-total // block),)
        linear_kernels.combine[grid](
            target, bias, y, total, y.shape[1], splits, BLOCK=block, num_warps=4
        )
    return y


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _has_tensor_cores_of_8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def compilations() -> list[Compilation]:
    """Every kernel in the configurations that models use most."""
    return [
        *(_gemv_compilation(*kind) for kind in _GEMV_KINDS),
        *(_gemm_compilation(*kind, tile) for kind in _GEMM_KINDS for tile in TILES),
        *(_gemm_compilation("bf16", 4, 128, False, tile, whole_tiles=False) for tile in TILES),
        *(_dequantize_compilation(*kind) for kind in _GEMM_KINDS),
        _compilation(
            "combine",
            linear_kernels.combine,
            {"partial": "*fp32", "y": "*bf16"},
            {"bias": None, "BLOCK": 512},
            ("partial", "y", "total", "outputs"),
        ),
    ]


_GEMV_KINDS = (  # dtype of x, bits, group size, zero points, rows, BLOCK_N, warps
    ("bf16", 4, 32, False, 1, 8, 2),
    ("bf16", 4, 64, False, 1, 8, 1),
    ("bf16", 4, 128, False, 1, 8, 2),
    ("bf16", 4, 128, False, 1, 4, 2),
    ("bf16", 4, 128, False, 1, 4, 1),
    ("bf16", 4, 128, True, 1, 8, 2),
    ("fp16", 4, 64, False, 1, 8, 2),
    ("bf16", 4, 128, False, 2, 8, 2),
    ("bf16", 4, 128, False, 2, 4, 2),
    ("bf16", 8, 0, False, 1, 8, 1),
    ("bf16", 8, 0, False, 1, 8, 2),
    ("bf16", 8, 0, False, 1, 4, 2),
    ("bf16", 8, 0, False, 2, 8, 2),
    ("bf16", 8, 128, False, 1, 8, 2),
)
_GEMM_KINDS = (  # dtype of x, bits, group size, zero points
    ("bf16", 4, 32, False),
    ("bf16", 4, 128, False),
    ("bf16", 4, 128, True),
    ("fp16", 4, 128, False),
    ("bf16", 8, 0, False),
)
_ALIGNED = ("x", "packed", "scale", "zero", "y", "outputs", "columns")


def _gemv_compilation(
    dtype: str, bits: int, group: int, with_zero: bool, rows: int, block_n: int, warps: int
) -> Compilation:
    kind = f"{dtype}-int{bits}-g{group}{'-zero' if with_zero else ''}"
    constants = {"BITS": bits, "GROUP": group, "ROWS": rows, "BLOCK_N": block_n}
    constants["CHUNKS"] = 32 * warps
    return _compilation(
        f"gemv-{rows}x{block_n}-{kind}-w{warps}",
        gemv_kernels.gemv,
        _pointers(dtype, with_zero),
        constants | {"bias": None, "ALIGNED": True} | ({} if with_zero else {"zero": None}),
        _ALIGNED,
        num_warps=warps,
    )


def _gemm_compilation(
    dtype: str, bits: int, group: int, with_zero: bool, tile: Tile, *, whole_tiles: bool = True
) -> Compilation:
    kind = f"{dtype}-int{bits}-g{group}{'-zero' if with_zero else ''}"
    constants = {
        "bias": None,
        "BITS": bits,
        "GROUP": group,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.columns,
        "MULTIPLE": tile.columns if whole_tiles else 32,
        "PAIRS": bits == 4,
    }
    return _compilation(
        f"gemm-{tile.rows}-{kind}{'' if whole_tiles else '-masked'}",
        linear_kernels.gemm,
        _pointers(dtype, with_zero),
        constants | ({} if with_zero else {"zero": None}),
        _ALIGNED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _dequantize_compilation(dtype: str, bits: int, group: int, with_zero: bool) -> Compilation:
    name = f"dequantize-{dtype}-int{bits}-g{group}{'-zero' if with_zero else ''}"
    pointers = _pointers(dtype, with_zero)
    del pointers["x"]
    constants = {"BITS": bits, "GROUP": group, "BLOCK_W": 512, "ALIGNED": True}
    return _compilation(
        name,
        linear_kernels.dequantize,
        pointers,
        constants | ({} if with_zero else {"zero": None}),
        _ALIGNED,
    )


def _pointers(dtype: str, with_zero: bool) -> dict[str, str]:
    pointers = {"x": f"*{dtype}", "packed": "*i32", "scale": f"*{dtype}", "y": f"*{dtype}"}
    return pointers | ({"zero": "*i8"} if with_zero else {})


def _compilation(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    aligned: Sequence[str],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Compilation:
    signature = {
        argument: "constexpr" if argument in constants else pointers.get(argument, "i32")
        for argument in kernel.arg_names
    }
    kept = tuple(a for a in aligned if signature.get(a, "constexpr") != "constexpr")
    return Compilation(name, kernel, signature, constants, kept, num_warps, num_stages)
