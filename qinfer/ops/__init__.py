"""The numeric operations under the decoder, and the choice of their backend."""

from __future__ import annotations

import torch

from qinfer.errors import QInferError
from qinfer.ops.cpu.ops import CPUOps
from qinfer.ops.reference import ReferenceOps


def select(device: str) -> ReferenceOps:
    """Choose the operations for a device: `auto`, `cpu` or `cuda`.

    Activations are fp32 on a CPU; on a GPU bf16 where the card has it, else fp16.

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
        return CPUOps()
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return ReferenceOps(torch.device("cuda"), torch.bfloat16 if native else torch.float16)
