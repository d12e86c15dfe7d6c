"""Triton's interpreter, made to round and multiply bf16 as a GPU does.

Version 3.7 truncates where it should round to nearest, loses a carry into the exponent where it
rounds, and multiplies matrices of bf16 as if their bits were integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def to_bfloat16(data: np.ndarray) -> np.ndarray:
    """fp32 to the bits of bf16 as uint16, to nearest even."""
    values = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


def to_float32(data: np.ndarray) -> np.ndarray:
    """The bits of bf16 as uint16 to fp32."""
    return (data.astype(np.uint32) << 16).view(np.float32)


@contextmanager
def correct_bfloat16() -> Iterator[None]:
    """Replaces the interpreter's conversion, its product and its arithmetic."""
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    binary = interpreter.InterpreterBuilder.binary_op

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            return to_bfloat16(data)
        return convert(data, source, target, rounding)

    def create_dot(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        return dot(self, widened(a), widened(b), *arguments)

    def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16 or b.dtype.scalar != tl.bfloat16:
            return binary(self, a, b, op)
        result = op(to_float32(a.data), to_float32(b.data))
        if result.dtype == np.bool_:
            return binary(self, widened(a), widened(b), op)
        return interpreter.TensorHandle(to_bfloat16(result), tl.bfloat16)

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return interpreter.TensorHandle(to_float32(operand.data), tl.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_float)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter.InterpreterBuilder, "binary_op", binary_op)
        yield
