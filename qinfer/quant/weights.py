"""The weight of a linear layer in memory, whatever its format, and how it comes from a checkpoint.

A layer is quantized if and only if the checkpoint holds its scales; nothing is guessed from names
or paths. Tensors stay as they are on disk, mapped, and every class can give its rows in fp32: that
is the definition of what a kernel computes with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.quant import affine, nf4


class Weight(Protocol):
    """A matrix of N outputs and K inputs."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Output rows `start:stop` in fp32.

        Returns:
            [stop - start, K], not to be written to.
        """
        ...

    def to(self, device: torch.device) -> Weight:
        """The same weight, its stored tensors on `device`."""
        ...


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Not quantized.

    Attributes:
        data: [N, K], any float dtype, any strides.
    """

    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.data.shape[0], self.data.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Output rows in fp32, [stop - start, K]."""
        return self.data[start:stop].float()

    def to(self, device: torch.device) -> DenseWeight:
        """The same weight on `device`."""
        return DenseWeight(self.data.to(device))


@dataclass(frozen=True, slots=True)
class AffineWeight:
    """Integers, see `qinfer.quant.affine`.

    Attributes:
        packed: int32 [N, ceil(K · bits / 32)].
        scale: bf16, fp16 or fp32 [N, groups].
        bits: 4 or 8.
        columns: K.
        zero: int8 [N, groups], what stands for 0; None if that is 0.
    """

    packed: Tensor
    scale: Tensor
    bits: int
    columns: int
    zero: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.packed.shape[0], self.columns

    def rows(self, start: int, stop: int) -> Tensor:
        """Output rows in fp32, [stop - start, K]."""
        zero = None if self.zero is None else self.zero[start:stop]
        return affine.dequantize(
            self.packed[start:stop], self.scale[start:stop], self.bits, self.columns, zero
        )

    def to(self, device: torch.device) -> AffineWeight:
        """The same weight on `device`."""
        zero = None if self.zero is None else self.zero.to(device)
        return AffineWeight(
            self.packed.to(device), self.scale.to(device), self.bits, self.columns, zero
        )


@dataclass(frozen=True, slots=True)
class NF4Weight:
    """4-bit NormalFloat, see `qinfer.quant.nf4`.

    Attributes:
        packed: uint8 [ceil(N · K / 2), 1].
        absmax: fp32 [blocks].
        code: fp32 [16].
        shape: (N, K).
        block_size: Weights a block.
    """

    packed: Tensor
    absmax: Tensor
    code: Tensor
    shape: tuple[int, int]
    block_size: int

    def rows(self, start: int, stop: int) -> Tensor:
        """Output rows in fp32, [stop - start, K]."""
        columns, block = self.shape[1], self.block_size
        first = start * columns // (2 * block)  # in pairs of blocks: a whole number of bytes
        last = -(-stop * columns // (2 * block))
        begin, end = first * 2 * block, min(last * 2 * block, self.shape[0] * columns)
        values = nf4.dequantize(
            self.packed[begin // 2 : -(-end // 2)],
            self.absmax[2 * first : 2 * last],
            self.code,
            (1, end - begin),
            block,
        ).view(-1)
        return values[start * columns - begin : stop * columns - begin].view(-1, columns)

    def to(self, device: torch.device) -> NF4Weight:
        """The same weight on `device`."""
        return NF4Weight(
            self.packed.to(device),
            self.absmax.to(device),
            self.code.to(device),
            self.shape,
            self.block_size,
        )


def load_weight(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], *, transposed: bool = False
) -> Weight:
    """Find the weight of a linear layer in a checkpoint.

    Args:
        checkpoint: Where it is.
        name: The layer, such as `model.layers.0.mlp.down_proj`.
        shape: The (N, K) that the configuration implies.
        transposed: A dense weight is stored [K, N], as GPT-2 does. Quantized ones never are.

    Raises:
        CheckpointError: Absent, or of another shape.
        UnsupportedModelError: Quantized in a way that is not covered.
    """
    weight: Weight
    if f"{name}.weight_packed" in checkpoint:
        weight = _load_affine(checkpoint, name)
    elif f"{name}.weight.{nf4.STATE_SUFFIX}" in checkpoint:
        weight = _load_nf4(checkpoint, name)
    else:
        data = checkpoint.tensor(f"{name}.weight")
        if data.ndim != 2 or not data.is_floating_point():
            raise UnsupportedModelError(
                f"{name}.weight is {data.dtype} of shape {list(data.shape)}, "
                "a format that is not supported",
                hint="Convert the model's original 16-bit weights: qinfer convert SOURCE OUT",
            )
        weight = DenseWeight(data.t() if transposed else data)
    if weight.shape != shape:
        raise CheckpointError(
            f"{name} has shape {list(weight.shape)}, config.json implies {list(shape)}",
            hint="Weights and config.json do not belong together; download the model again.",
        )
    return weight


def _load_affine(checkpoint: Checkpoint, name: str) -> AffineWeight:
    if f"{name}.weight_g_idx" in checkpoint:
        raise UnsupportedModelError(
            f"{name} is quantized with activation-ordered groups, which is not supported",
            hint="Convert the model's original 16-bit weights: qinfer convert SOURCE OUT",
        )
    packed = checkpoint.tensor(f"{name}.weight_packed")
    scale = checkpoint.tensor(f"{name}.weight_scale")
    declared = checkpoint.tensor(f"{name}.weight_shape").flatten().tolist()
    damaged = CheckpointError(
        f"{name}: weight_packed {list(packed.shape)}, weight_scale {list(scale.shape)} and "
        f"weight_shape {declared} do not fit together",
        hint="The checkpoint is damaged; convert or download it again.",
    )
    if packed.ndim != 2 or packed.dtype != torch.int32 or len(declared) != 2:
        raise damaged
    if scale.ndim != 2 or not scale.is_floating_point():
        raise damaged
    rows, columns = declared
    widths = {-(-columns // 8): 4, -(-columns // 4): 8}
    if (
        packed.shape[0] != rows
        or scale.shape[0] != rows
        or packed.shape[1] not in widths
        or scale.shape[1] == 0
        or columns % scale.shape[1]
    ):
        raise damaged
    bits = widths[packed.shape[1]]
    return AffineWeight(packed, scale, bits, columns, _zero_point(checkpoint, name, scale, bits))


def _zero_point(checkpoint: Checkpoint, name: str, scale: Tensor, bits: int) -> Tensor | None:
    if f"{name}.weight_zero_point" not in checkpoint:
        return None
    packed = checkpoint.tensor(f"{name}.weight_zero_point")
    rows, groups = scale.shape
    if packed.dtype != torch.int32 or packed.shape != (-(-rows * bits // 32), groups):
        raise CheckpointError(
            f"{name}: weight_zero_point is {packed.dtype} {list(packed.shape)}, which does not fit "
            f"weight_scale {list(scale.shape)}",
            hint="The checkpoint is damaged; convert or download it again.",
        )
    packed_by_group = packed.t().clone(memory_format=torch.contiguous_format)
    return affine.unpack(packed_by_group, bits, rows).t().contiguous()


def _load_nf4(checkpoint: Checkpoint, name: str) -> NF4Weight:
    weight = f"{name}.weight"
    state = _quant_state(checkpoint, weight)
    try:
        rows, columns = (_positive(n) for n in state["shape"])
        block_size = _positive(state["blocksize"])
        kind = state["quant_type"]
        absmax = _absmax(checkpoint, weight, state)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{weight}.{nf4.STATE_SUFFIX} is incomplete",
            hint="The checkpoint is damaged; convert or download it again.",
        ) from None
    if kind != "nf4":
        raise UnsupportedModelError(
            f"{name} is quantized as {kind}, which is not supported",
            hint="Convert the model's original 16-bit weights: qinfer convert SOURCE OUT",
        )
    packed, code = checkpoint.tensor(weight), checkpoint.tensor(f"{weight}.quant_map")
    found = packed.dtype, packed.numel(), absmax.shape, code.shape
    count = rows * columns
    if found != (torch.uint8, -(-count // 2), (-(-count // block_size),), (16,)):
        raise CheckpointError(
            f"{weight}, its absmax and its quant_map do not fit shape {[rows, columns]}",
            hint="The checkpoint is damaged; convert or download it again.",
        )
    return NF4Weight(packed.view(-1, 1), absmax.float(), code, (rows, columns), block_size)


def _positive(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError
    return value


def _absmax(checkpoint: Checkpoint, weight: str, state: Mapping[str, Any]) -> Tensor:
    """The block maxima, [blocks]; undoes double quantization."""
    absmax = checkpoint.tensor(f"{weight}.absmax")
    if absmax.dtype != torch.uint8:
        return absmax
    nested = checkpoint.tensor(f"{weight}.nested_absmax")
    code = checkpoint.tensor(f"{weight}.nested_quant_map")
    size, offset = _positive(state["nested_blocksize"]), float(state["nested_offset"])
    if absmax.ndim != 1 or nested.shape != (-(-len(absmax) // size),) or code.shape != (256,):
        raise CheckpointError(
            f"{weight}.absmax and its nested_absmax and nested_quant_map do not fit together",
            hint="The checkpoint is damaged; convert or download it again.",
        )
    return code[absmax.int()] * nested.repeat_interleave(size)[: len(absmax)] + offset


def _quant_state(checkpoint: Checkpoint, weight: str) -> Mapping[str, Any]:
    data = checkpoint.tensor(f"{weight}.{nf4.STATE_SUFFIX}")
    try:
        state = json.loads(bytes(data.tolist()))
    except ValueError:
        state = {}
    return state if isinstance(state, dict) else {}
