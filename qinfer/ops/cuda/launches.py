"""A kernel with its arguments: what is run on a device is what is compiled without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from qinfer.ops.cuda.compilation import Compilation

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of a kernel.

    Attributes:
        kernel: A function under `triton.jit`.
        grid: How many programs, on three axes.
        arguments: In the order of its parameters; None is a constant.
        num_warps: Of a program.
        num_stages: Of its pipelined loops.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        """Queue it on the current stream."""
        self.kernel[self.grid](
            **self.arguments, num_warps=self.num_warps, num_stages=self.num_stages
        )

    def compilation(self, name: str) -> Compilation:
        """The same for the compiler; tensors may be of the "meta" device."""
        types = {key: _type(key, value) for key, value in self.arguments.items()}
        return Compilation(
            name=name,
            kernel=self.kernel,
            signature=types,
            constants={k: v for k, v in self.arguments.items() if types[k] == "constexpr"},
            aligned=tuple(
                key
                for key, value in self.arguments.items()
                if isinstance(value, Tensor) or (types[key] == "i32" and value % 16 == 0)
            ),
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )


def _type(name: str, value: object) -> str:
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if name.isupper() or value is None or isinstance(value, tl.dtype):
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"
