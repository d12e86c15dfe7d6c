"""A GGUF file as a source of a conversion, under Hugging Face names and in Hugging Face layouts.

This joins the parts of the package: header (`reader`, `split`), names (`layout`), configuration
(`config`), tokenizer (`tokenizer`) and data (`data`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qinfer.errors import UnsupportedModelError
from qinfer_converters.gguf.config import generation_config, model_config, read_dimensions
from qinfer_converters.gguf.data import is_readable, read_rows
from qinfer_converters.gguf.layout import LAYOUTS, MappedTensor, Storage, map_tensors
from qinfer_converters.gguf.split import open_gguf
from qinfer_converters.gguf.tokenizer import tokenizer_files
from qinfer_converters.gguf.vocabulary import read_vocabulary
from qinfer_converters.source import SourceTensor

_TRANSPOSE_BYTES = 16 << 20  # fp32 rows held at a time while a transposed tensor is read


class GGUFSource:
    """A GGUF model; see `qinfer_converters.source.Source` for the attributes.

    Args:
        path: The file, or the first file of a split model.
        label: What to call it in messages; the path if `None`.

    Raises:
        CheckpointError: The file is not there, not GGUF, malformed or incomplete.
        UnsupportedModelError: The architecture, tokenizer or a tensor type is not supported.
    """

    label: str
    fingerprint: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, SourceTensor]
    files: Mapping[str, Path | bytes]

    def __init__(self, path: Path, label: str | None = None) -> None:
        self.label = str(path) if label is None else label
        header = open_gguf(path)
        for info in header.tensors.values():
            if not is_readable(info.type):
                raise UnsupportedModelError(
                    f"{info.path}: tensor {info.name} is stored as {info.type.name}, "
                    "which is not supported",
                    hint="Use a file with one of the usual types, such as Q8_0, Q4_K_M or F16.",
                )
        self.fingerprint = header.fingerprint
        sizes = read_dimensions(header.metadata, header.tensors)
        self._heads = {Storage.ROTARY_Q: sizes.heads, Storage.ROTARY_K: sizes.kv_heads}
        self._mapped = map_tensors(
            LAYOUTS[sizes.arch], header.tensors, sizes.blocks, sizes.letters(), str(path)
        )
        self.tensors = {
            name: SourceTensor(name, tensor.shape, tensor.info.type.name, tensor.info.nbytes)
            for name, tensor in self._mapped.items()
        }
        vocabulary = read_vocabulary(header.metadata, sizes.vocab)
        self.config = model_config(header.metadata, sizes, header.tensors, vocabulary.special)
        self.generation_config = generation_config(vocabulary.special)
        self.files = dict(tokenizer_files(header.metadata, vocabulary))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start:stop` along the first axis of a tensor.

        Args:
            name: A key of `tensors`.
            start: First row.
            stop: One past the last row.

        Returns:
            `[stop - start, ...]`, F16 and BF16 as stored, everything else as fp32. Owns its
            memory.

        Raises:
            CheckpointError: The file cannot be read, or was changed.
        """
        tensor = self._mapped[name]
        if tensor.storage is Storage.PLAIN:
            return read_rows(tensor.info, start, stop)
        if tensor.storage is Storage.TRANSPOSED:
            return _read_transposed(tensor, start, stop)
        return _read_rotary(tensor, self._heads[tensor.storage], start, stop)


def _read_rotary(tensor: MappedTensor, heads: int, start: int, stop: int) -> Tensor:
    """Rows of a query or key projection, in the order that splits a head in two halves.

    The rows of a head are scattered over the head, so whole heads are read.
    """
    head_dim = tensor.info.shape[0] // heads
    first = start // head_dim * head_dim
    last = -(-stop // head_dim) * head_dim
    rows = read_rows(tensor.info, first, last)
    rest = rows.shape[1:]
    halves = rows.view(-1, head_dim // 2, 2, *rest).transpose(1, 2).reshape(-1, *rest)
    return halves[start - first : stop - first].clone()


def _read_transposed(tensor: MappedTensor, start: int, stop: int) -> Tensor:
    """Rows of a `Conv1D` weight: columns of what is stored, which is read piece by piece."""
    rows, columns = tensor.info.shape
    step = max(1, _TRANSPOSE_BYTES // (columns * 4))
    pieces = [
        read_rows(tensor.info, at, min(at + step, rows))[:, start:stop].t()
        for at in range(0, rows, step)
    ]
    return torch.cat(pieces, dim=1).contiguous()
