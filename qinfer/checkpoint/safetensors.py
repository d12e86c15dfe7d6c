"""The safetensors file format, and a checkpoint directory made of such files.

A file is: 8 bytes, the header's length N as a little-endian unsigned integer; N bytes of UTF-8
JSON, `{"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …, "__metadata__":
{str: str}}`, padded with spaces; then the tensors' bytes, little-endian, row-major, without gaps,
at the offsets given relative to the end of the header (safetensors format, version 0.x).

Here: headers read and checked, tensors mapped or read by rows, files written tensor by tensor.
The `safetensors` package does the same for whole tensors; a converter that must stay within a
fixed memory needs rows, and users need errors that name the file. What tensors mean is not here.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qinfer.config import read_json
from qinfer.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_DAMAGED = "The file is damaged or was not downloaded completely; fetch it again."
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        name: Its name.
        dtype: As stored, a key of `DTYPES`, or another of the format's names.
        shape: Row-major.
        path: The file.
        offset: Of the first byte, from the start of the file.
        nbytes: Size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch.

        Raises:
            CheckpointError: torch or qinfer has no such type (float8 and the like).
        """
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {self.name} has dtype {self.dtype}, which is not supported",
                hint=f"Supported: {', '.join(DTYPES)}",
            )
        return DTYPES[self.dtype]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header of one file.

    Raises:
        CheckpointError: The file is missing, truncated, or contradicts itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                what = "is empty" if size == 0 else "is not a complete safetensors file"
                raise CheckpointError(f"{path} {what} ({size:,} bytes)", hint=_DAMAGED)
            header = json.loads(file.read(length).decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", hint=_DAMAGED) from None
    except (ValueError, RecursionError):
        raise CheckpointError(
            f"{path} is not a safetensors file: its header is not JSON", hint=_DAMAGED
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object", hint=_DAMAGED)
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(path, name, v, 8 + length) for name, v in header.items()}
    _check_layout(path, tensors.values(), start=8 + length, size=size)
    return tensors


def _tensor_info(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        numbers = [None]
    sound = all(type(n) is int and n >= 0 for n in numbers)  # true and false are no numbers here
    if not sound or not isinstance(shape, list) or not isinstance(dtype, str):
        raise CheckpointError(f"{path}: the header entry of {name} is malformed", hint=_DAMAGED)
    info = TensorInfo(name, dtype, tuple(shape), path, base + begin, end - begin)
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != info.nbytes:
        raise CheckpointError(
            f"{path}: {name} of shape {list(shape)} and dtype {dtype} cannot take "
            f"{info.nbytes:,} bytes",
            hint=_DAMAGED,
        )
    return info


def _check_layout(path: Path, tensors: Iterable[TensorInfo], *, start: int, size: int) -> None:
    position = start
    for info in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if info.offset != position or info.nbytes < 0:
            raise CheckpointError(
                f"{path}: {info.name} overlaps another tensor or leaves a gap", hint=_DAMAGED
            )
        position += info.nbytes
    if position != size:
        raise CheckpointError(
            f"{path} is truncated or has bytes left over: the header describes {position:,} bytes, "
            f"the file has {size:,}",
            hint=_DAMAGED,
        )


class Checkpoint:
    """The safetensors files of a directory. Opening reads headers only.

    Attributes:
        directory: Where it is.
        tensors: Every tensor by name.
    """

    def __init__(self, directory: Path) -> None:
        """Find the files and read their headers.

        Raises:
            CheckpointError: No safetensors weights, or files that are damaged or contradict the
                index.
        """
        self.directory = directory
        self.tensors: dict[str, TensorInfo] = {}
        self._mapped: dict[Path, Tensor] = {}
        index_path = directory / INDEX_NAME
        if index_path.exists():
            self._read_index(index_path)
        elif (directory / SINGLE_NAME).exists():
            self.tensors = read_header(directory / SINGLE_NAME)
        else:
            raise _no_weights(directory)

    def _read_index(self, index_path: Path) -> None:
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path} has no weight_map", hint=_DAMAGED)
        names_by_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            names_by_file.setdefault(check_shard_name(file, index_path), []).append(name)
        for file, names in names_by_file.items():
            path = self.directory / file
            if not path.exists():
                raise CheckpointError(
                    f"{index_path} names {file}, which is not there",
                    hint="A shard is missing; download the model again.",
                )
            header = read_header(path)
            for name in names:
                if name not in header:
                    raise CheckpointError(
                        f"{index_path} says that {name} is in {file}, but it is not",
                        hint="Index and shards do not belong together; download the model again.",
                    )
            for name in header.keys() - names:
                raise CheckpointError(
                    f"{file} holds {name}, which {index_path} does not list",
                    hint="Index and shards do not belong together; download the model again.",
                )
            self.tensors |= header

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.directory} has no tensor {name}",
                hint="Weights are missing; download or convert the model again.",
            ) from None

    def tensor(self, name: str) -> Tensor:
        """Map a tensor: it shares the file's pages and must not be written to.

        Returns:
            The whole tensor; pages are read from disk when touched.

        Raises:
            CheckpointError: No such tensor, or a dtype that is not supported.
        """
        info = self[name]
        dtype = info.torch_dtype
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        if info.path not in self._mapped:
            size = info.path.stat().st_size
            self._mapped[info.path] = torch.from_file(
                str(info.path), shared=False, size=size, dtype=torch.uint8
            )
        data = self._mapped[info.path][info.offset : info.offset + info.nbytes]
        if info.offset % dtype.itemsize:
            data = data.clone()  # views need alignment; only foreign writers leave it out
        return data.view(dtype).view(info.shape)

    def drop_pages(self) -> None:
        """Let go of the memory in which mapped tensors lie; they are read again when touched.

        Of tensors that were copied, pages would otherwise count as this process's to the end.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for mapped in self._mapped.values():  # of files, privately and never written: none is lost
            start, size = ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes)
            ctypes.CDLL(None).madvise(start, size, mmap.MADV_DONTNEED)


def check_shard_name(file: Any, index_path: Path) -> str:
    """Accept only plain file names from an index.

    Raises:
        CheckpointError: The name leads out of the directory or is not a safetensors file.
    """
    if not isinstance(file, str) or Path(file).name != file or "\\" in file or len(file) > 200:
        raise CheckpointError(
            f"{index_path} points outside its directory: {file!r}",
            hint="Do not use this checkpoint; a sound index holds plain file names.",
        )
    if not file.endswith(".safetensors"):
        raise _pickle_error(index_path.parent / file)
    return file


def _pickle_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a safetensors file, and pickle files are never loaded",
        hint="Pickle can run code. Use a safetensors version of the model (most have one), or "
        "convert it with transformers' save_pretrained(..., safe_serialization=True).",
    )


def _no_weights(directory: Path) -> CheckpointError:
    for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt"):
        for path in sorted(directory.glob(pattern)):
            return _pickle_error(path)
    return CheckpointError(
        f"{directory} has no {SINGLE_NAME} and no {INDEX_NAME}",
        hint="Name a Hugging Face directory with safetensors weights, or a .gguf file.",
    )


def read_rows(info: TensorInfo, start: int, stop: int) -> Tensor:
    """Read rows of a tensor into memory of their own, without mapping the file.

    Args:
        info: The tensor.
        start: First row along the first axis.
        stop: One past the last row.

    Returns:
        `[stop - start, ...]`.

    Raises:
        CheckpointError: The file ends early or cannot be read.
    """
    dtype = info.torch_dtype
    shape = (stop - start, *info.shape[1:])
    row_bytes = math.prod(info.shape[1:]) * dtype.itemsize
    buffer = bytearray(math.prod(shape) * dtype.itemsize)
    try:
        with info.path.open("rb", buffering=0) as file:
            file.seek(info.offset + start * row_bytes)
            view = memoryview(buffer)
            while view:
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(f"{info.path} ends within {info.name}", hint=_DAMAGED)
                view = view[count:]
    except OSError as error:
        raise CheckpointError(f"{info.path} cannot be read: {error.strerror}") from None
    if not buffer:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class ShardWriter:
    """Writes one safetensors file of known names, shapes and dtypes, in any order of rows.

    The header is written first; then `write` places each tensor's rows where they belong, so a
    file takes no more memory than the rows at hand. `close` fsyncs; the caller renames.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        """Create the file and write its header.

        Args:
            path: File to create; an existing one is overwritten.
            tensors: Dtype and shape by name. Laid out by falling alignment, then name.
        """
        self._base, self._offsets, header = _layout(tensors)
        self._dtypes = {name: dtype for name, (dtype, _) in tensors.items()}
        self._row_bytes = {
            name: math.prod(shape[1:]) * dtype.itemsize for name, (dtype, shape) in tensors.items()
        }
        self._file = path.open("wb", buffering=0)
        try:
            _write_all(self._file.fileno(), header, 0)
            os.ftruncate(self._file.fileno(), self._base + layout_bytes(tensors))
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, start: int, rows: Tensor) -> None:
        """Place rows of a tensor.

        Args:
            name: A declared tensor.
            start: First row along the first axis.
            rows: `[n, ...]` of the declared dtype.
        """
        if rows.dtype != self._dtypes[name]:
            raise ValueError(f"{name} was declared {self._dtypes[name]}, got {rows.dtype}")
        data: Any = rows.contiguous().reshape(-1).view(torch.uint8).numpy()
        offset = self._base + self._offsets[name] + start * self._row_bytes[name]
        _write_all(self._file.fileno(), memoryview(data), offset)

    def close(self) -> None:
        """Flush to the disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close without flushing."""
        self._file.close()


def layout_bytes(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    """Bytes that the data of these tensors takes."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors.values())


def _layout(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[int, dict[str, int], bytes]:
    offsets: dict[str, int] = {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in sorted(tensors, key=lambda n: (-tensors[n][0].itemsize, n)):
        dtype, shape = tensors[name]
        end = position + dtype.itemsize * math.prod(shape)
        offsets[name] = position
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return 8 + len(text), offsets, len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
