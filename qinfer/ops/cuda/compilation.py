"""What it takes to compile a kernel where no device is: `scripts/compile_gpu_kernels.py` reads it.

Each module of kernels has a function `compilations() -> list[Compilation]` with the cases that
matter. A launch compiles the same: Triton derives types and alignment from its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel and the types and constants it is compiled for.

    Attributes:
        name: Unique among all, for tables: the kernel and what is special about the case.
        kernel: What `triton.jit` returned.
        signature: Argument name to Triton type, as "*bf16", "i32" or "constexpr"; of every
            argument, in the kernel's order.
        constants: Value of each "constexpr".
        aligned: Arguments that are divisible by 16: pointers, strides and sizes.
        num_warps: Of a program.
        num_stages: Of its software pipelines.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
