"""The numeric operations under the decoder, and the choice of their backend."""

from __future__ import annotations

import torch

from qinfer.errors import QInferError
from qinfer.ops.cpu.ops import CPUOps
from qinfer.ops.reference import ReferenceOps


def select(device: str, *, deterministic: bool = False) -> ReferenceOps:
    """Choose the operations for a device: `auto`, `cpu` or `cuda`.

    Activations are fp32 on a CPU; on a GPU bf16 where the card has it, else fp16. With
    `deterministic` a token's result does not depend on those computed beside it, which the CPU
    kernels promise anyway.

    Raises:
        QInferError: `cuda` was asked for and is not there.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise QInferError(
            "no CUDA device is available to this torch",
            hint="Leave --device out to run on the CPU, or install a CUDA build of torch.",
        )
    if device == "cpu" or not available:
        return CPUOps(deterministic=deterministic)
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if native else torch.float16
    return ReferenceOps(torch.device("cuda"), dtype, half=dtype, deterministic=deterministic)
