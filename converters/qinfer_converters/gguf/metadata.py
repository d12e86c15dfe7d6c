"""Typed access to the key-value block of a GGUF file, with errors that name the key.

What the keys mean for the model or the tokenizer is decided by the callers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qinfer.errors import CheckpointError

Value = bool | int | float | str | list[str] | NDArray[Any]


class Metadata(Mapping[str, Value]):
    """The key-value pairs of one GGUF file.

    Every typed getter raises `CheckpointError` if the key is there with another type. The plain
    ones return `None` for a missing key, the `require_` ones raise `CheckpointError`.

    Args:
        path: The file, for messages.
        values: Strings and numbers as Python objects; arrays of strings as lists, other arrays as
            one-dimensional numpy arrays.
    """

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, key: str) -> int | None:
        """An integer of any width."""
        value = self.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._mistyped(key, "an integer")

    def number(self, key: str) -> float | None:
        """A floating-point number; an integer is accepted too."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self._mistyped(key, "a number")

    def flag(self, key: str) -> bool | None:
        """A boolean."""
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._mistyped(key, "a boolean")

    def string(self, key: str) -> str | None:
        """A string."""
        value = self.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._mistyped(key, "a string")

    def strings(self, key: str) -> list[str] | None:
        """An array of strings; an empty array of another type counts as one."""
        value = self.get(key)
        if value is None or isinstance(value, list):
            return value
        if isinstance(value, np.ndarray) and not value.size:
            return []
        raise self._mistyped(key, "an array of strings")

    def numbers(self, key: str) -> NDArray[Any] | None:
        """An array of numbers."""
        value = self.get(key)
        if value is None or isinstance(value, np.ndarray):
            return value
        raise self._mistyped(key, "an array of numbers")

    def require_integer(self, key: str) -> int:
        """A positive integer that must be there."""
        value = self.integer(key)
        if value is None:
            raise self.missing(key)
        if value <= 0:
            raise CheckpointError(f"{self.path}: key {key} is {value}, expected a positive integer")
        return value

    def require_number(self, key: str) -> float:
        """A number that must be there."""
        value = self.number(key)
        if value is None:
            raise self.missing(key)
        return value

    def require_string(self, key: str) -> str:
        """A string that must be there."""
        value = self.string(key)
        if value is None:
            raise self.missing(key)
        return value

    def require_strings(self, key: str) -> list[str]:
        """An array of strings that must be there."""
        value = self.strings(key)
        if value is None:
            raise self.missing(key)
        return value

    def missing(self, key: str) -> CheckpointError:
        """The error for a required key that is not there."""
        return CheckpointError(
            f"{self.path}: key {key} is missing",
            hint="The file is incomplete or of another kind; download or convert it again.",
        )

    def _mistyped(self, key: str, expected: str) -> CheckpointError:
        kind = type(self._values[key]).__name__
        return CheckpointError(f"{self.path}: key {key} holds a {kind}, expected {expected}")
