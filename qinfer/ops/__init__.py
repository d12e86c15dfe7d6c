"""The numeric operations under the decoder, and the choice of their backend."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from qinfer.errors import QInferError
from qinfer.ops.cpu.ops import CPUOps
from qinfer.ops.reference import ReferenceOps

LEAST_CAPABILITY = (7, 0)
"""Of a CUDA device: cards before Volta are slow in fp16, and torch has left them."""


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a device is used.

    Attributes:
        deterministic: A token's result does not depend on those computed beside it, which the CPU
            kernels promise anyway.
        embeddings_on_host: On a GPU, leave 16-bit embeddings in host memory.
        int8_by_bitsandbytes: On a GPU, multiply int8 weights as LLM.int8 does, instead of with the
            kernels here.
        graphs: On a GPU, capture decoding steps as CUDA graphs.
    """

    deterministic: bool = False
    embeddings_on_host: bool = False
    int8_by_bitsandbytes: bool = False
    graphs: bool = True


DEFAULT = DeviceOptions()


def select(device: str, options: DeviceOptions = DEFAULT) -> ReferenceOps:
    """Choose the operations for a device: `auto`, `cpu` or `cuda`.

    Activations are fp32 on a CPU; on a GPU bf16 where the card has it, else fp16. A GPU without
    Triton, or that must be deterministic, runs the reference operations.

    Raises:
        QInferError: `cuda` was asked for and is not there, or the card is too old.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise QInferError(
            "no CUDA device is available to this torch",
            hint="Leave --device out to run on the CPU, or install a CUDA build of torch.",
        )
    if device == "cpu" or not available:
        return CPUOps(deterministic=options.deterministic)
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        if device == "auto":
            return CPUOps(deterministic=options.deterministic)
        raise QInferError(
            f"{torch.cuda.get_device_name()} has compute capability "
            f"{'.'.join(map(str, capability))}, and {'.'.join(map(str, LEAST_CAPABILITY))} is the "
            "least that is supported",
            hint="Leave --device out to run on the CPU.",
        )
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    where, dtype = torch.device("cuda", 0), torch.bfloat16 if native else torch.float16
    if options.deterministic or not has_triton():
        return ReferenceOps(where, dtype, half=dtype, deterministic=options.deterministic)
    from qinfer.ops.cuda.ops import CUDAOps  # imports Triton

    return CUDAOps(
        where,
        dtype,
        embeddings_on_host=options.embeddings_on_host,
        int8_by_bitsandbytes=options.int8_by_bitsandbytes,
    )


def has_triton() -> bool:
    """Whether Triton, which kernels for GPUs are written in, is installed."""
    return importlib.util.find_spec("triton") is not None
