"""Reading rows of tensor data from a GGUF file, dequantized where they are quantized.

Only the rows asked for are read, without a memory map, so that peak memory is the caller's choice.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from qinfer.errors import CheckpointError
from qinfer_converters.gguf.reader import TensorInfo

# Types by name, since an older gguf package may not know the latest.
# fmt: off
_READABLE = frozenset({
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S",
    "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
})
# fmt: on


def is_readable(kind: GGMLQuantizationType) -> bool:
    """Whether `read_rows` can turn data of this type into floating-point numbers."""
    return kind.name in _READABLE


def read_rows(info: TensorInfo, start: int, stop: int) -> Tensor:
    """Read rows `start:stop` along the slowest axis; along the only axis of a vector.

    Args:
        info: A tensor of a readable type.
        start: First row.
        stop: One past the last row.

    Returns:
        `[stop - start, ...]`, F16 and BF16 as they are, everything else as fp32. Owns its memory.

    Raises:
        CheckpointError: The file cannot be read, or is shorter than it was.
    """
    if not 0 <= start <= stop <= info.shape[0]:
        raise IndexError(f"rows {start}:{stop} of {info.name}, which has {info.shape[0]}")
    if len(info.shape) == 1:  # a vector may be one quantized row: read it whole
        return _decode(_read(info, 0, info.nbytes), info).reshape(-1)[start:stop].clone()
    row_bytes = info.nbytes // info.shape[0]
    data = _read(info, start * row_bytes, (stop - start) * row_bytes)
    return _decode(data, info).reshape(stop - start, *info.shape[1:])


def _read(info: TensorInfo, start: int, count: int) -> NDArray[np.uint8]:
    """`count` bytes of the tensor's data from byte `start`."""
    data = np.empty(count, dtype=np.uint8)
    view = data.data
    filled = 0
    try:
        with info.path.open("rb", buffering=0) as file:
            file.seek(info.offset + start)
            while filled < count:
                got = file.readinto(view[filled:])
                if not got:
                    break
                filled += got
    except OSError as error:
        raise CheckpointError(f"cannot read {info.path}: {error.strerror or error}") from error
    if filled < count:
        raise CheckpointError(
            f"{info.path}: tensor {info.name} ends after {start + filled} of {info.nbytes} bytes",
            hint="The file was changed while it was read; try again.",
        )
    return data


def _decode(data: NDArray[np.uint8], info: TensorInfo) -> Tensor:
    """Stored bytes of whole rows to numbers, `[rows, columns]`."""
    block, block_bytes = GGML_QUANT_SIZES[info.type]
    data = data.reshape(-1, info.shape[-1] // block * block_bytes)
    if not math.prod(data.shape):
        return torch.empty(0, info.shape[-1])
    if info.type == GGMLQuantizationType.F16:
        return torch.from_numpy(data.view(np.float16))
    if info.type == GGMLQuantizationType.BF16:
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    values = np.ascontiguousarray(dequantize(data, info.type), dtype=np.float32)
    return torch.from_numpy(values)
