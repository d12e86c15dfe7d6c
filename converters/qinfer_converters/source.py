"""What a converter reads from: the interface that every kind of source checkpoint offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a source, as its header declares it.

    Attributes:
        name: Hugging Face name, such as `model.layers.0.self_attn.q_proj.weight`.
        shape: In Hugging Face order, such as `(out_features, in_features)`.
        kind: The stored type for people to read, such as `BF16` or `Q4_K`.
        nbytes: Size in the source.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int


class Source(Protocol):
    """A checkpoint to convert. Opening one reads headers only, never weights.

    Attributes:
        label: What the user asked for, with the resolved revision if there is one.
        fingerprint: Changes when the source's weights or configuration do; guards resuming.
        config: Hugging Face `config.json` as a dictionary.
        generation_config: Hugging Face `generation_config.json`, empty if there is none.
        tensors: Every tensor, by Hugging Face name.
        files: Tokenizer files to place in the output: a path to copy, or the content.
    """

    label: str
    fingerprint: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, SourceTensor]
    files: Mapping[str, Path | bytes]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start:stop` along the first axis of a tensor.

        Args:
            name: A key of `tensors`.
            start: First row.
            stop: One past the last row.

        Returns:
            `[stop - start, ...]`, in the source's 16-bit or fp32 dtype; dequantized to fp32 if
            the source stores it quantized. Owns its memory.
        """
        ...
