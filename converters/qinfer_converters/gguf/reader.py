"""Parsing GGUF headers: the key-value block and the tensor table, but no tensor data.

Everything is checked before it is believed, so that a malformed file of any kind ends in a
`CheckpointError`. What keys and tensors mean is decided elsewhere.

The format, versions 2 and 3, all integers little-endian:

    bytes 0-3     "GGUF"
    uint32        version (a big-endian file shows here: its low 16 bits are zero)
    uint64        number of tensors
    uint64        number of key-value pairs
    per pair:     string key, uint32 type, value
    per tensor:   string name, uint32 number of dimensions (1 to 4), uint64 per dimension
                  (fastest-varying first), uint32 tensor type, uint64 offset
    padding to the next multiple of the alignment
    tensor data; each tensor at its offset from here, a multiple of the alignment

    string        uint64 length in bytes, then UTF-8 without terminator
    value types   0 uint8, 1 int8, 2 uint16, 3 int16, 4 uint32, 5 int32, 6 float32,
                  7 bool (one byte, 0 or 1), 8 string, 9 array, 10 uint64, 11 int64, 12 float64
    array         uint32 element type (arrays of arrays are not supported), uint64 count, elements

The alignment is the value of the key `general.alignment`, 32 without it. A tensor of n elements
takes n / block * bytes-per-block of its type; its fastest dimension is a multiple of the block.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from qinfer.errors import CheckpointError
from qinfer_converters.gguf.metadata import Metadata, Value

_MAX_HEADER_BYTES = 256 << 20  # the largest vocabularies take about 20 MB
_MAX_STRINGS = 1 << 22  # in one array
_MAX_DIMENSIONS = 4
_CHUNK_BYTES = 4 << 20
_AGAIN = "The file is damaged or incomplete; download it again."
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_TENSOR_TYPES = {int(kind): kind for kind in GGMLQuantizationType}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table.

    Attributes:
        path: The file that holds the data.
        name: GGUF name, such as `blk.0.attn_q.weight`.
        shape: Slowest-varying axis first, as numpy and torch have it.
        type: How the data is stored.
        offset: Where the data starts, from the start of the file.
        nbytes: Size of the data.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of one GGUF file declares.

    Attributes:
        metadata: The key-value pairs.
        tensors: By GGUF name, in file order.
        fingerprint: Changes when the header, the size or the modification time does.
    """

    metadata: Metadata
    tensors: dict[str, TensorInfo]
    fingerprint: str


def read_header(path: Path) -> Header:
    """Parse and check the header of one GGUF file.

    Raises:
        CheckpointError: The file cannot be read, is not GGUF, or is malformed.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a file")
        with path.open("rb") as file:
            cursor = _Cursor(file, path, status.st_size)
            metadata, tensors = _parse(cursor)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    digest = hashlib.sha256(cursor.consumed()).hexdigest()
    fingerprint = f"{digest}-{status.st_size}-{status.st_mtime_ns}"
    return Header(metadata, tensors, fingerprint)


class _Cursor:
    """Reads a header front to back, never past the end of the file or a sane size."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.at = 0
        self._file = file
        self._data = bytearray()

    def error(self, message: str, hint: str = _AGAIN) -> CheckpointError:
        """A `CheckpointError` that names the file."""
        return CheckpointError(f"{self.path}: {message}", hint=hint)

    def consumed(self) -> bytes:
        """All bytes read so far."""
        return bytes(self._data[: self.at])

    def skip(self, count: int, what: str) -> int:
        """Advance over `count` bytes, which are loaded then, and return where they start."""
        start, end = self.at, self.at + count
        if end > len(self._data):
            if end > self.size:
                raise self.error(
                    f"truncated: {what} needs {count} bytes at offset {start}, "
                    f"but the file has {self.size} bytes"
                )
            if end > _MAX_HEADER_BYTES:
                raise self.error(f"{what} makes the header larger than {_MAX_HEADER_BYTES} bytes")
            self._data += self._file.read(max(end - len(self._data), _CHUNK_BYTES))
            if end > len(self._data):
                raise self.error(f"truncated while reading {what}")
        self.at = end
        return start

    def raw(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        start = self.skip(count, what)
        return bytes(self._data[start : self.at])

    def u32(self, what: str) -> int:
        """The next uint32."""
        return int(_U32.unpack_from(self._data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        """The next uint64."""
        return int(_U64.unpack_from(self._data, self.skip(8, what))[0])

    def count(self, smallest: int, what: str) -> int:
        """The next uint64, a number of items of at least `smallest` bytes each."""
        count = self.u64(what)
        if count * smallest > self.size - self.at:
            raise self.error(f"{what} is {count}, more than the file can hold")
        return count

    def string(self, what: str) -> str:
        """The next string."""
        (length,) = _U64.unpack_from(self._data, self.skip(8, what))
        start = self.skip(length, what)
        try:
            return self._data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason}") from error

    def value(self, kind: int, what: str) -> Value:
        """The next value of a type that is not an array."""
        if kind == _STRING:
            return self.string(what)
        if kind == _BOOL:
            byte = self.raw(1, what)[0]
            if byte > 1:
                raise self.error(f"{what} is a boolean with the value {byte}")
            return bool(byte)
        if kind not in _SCALARS:
            raise self.error(f"{what} has the unknown value type {kind}")
        dtype = _SCALARS[kind]
        number: int | float = np.frombuffer(self.raw(dtype.itemsize, what), dtype)[0].item()
        return number

    def array(self, what: str) -> Value:
        """The next array."""
        kind = self.u32(what)
        if kind == _STRING:
            strings = self.count(8, f"the length of {what}")
            if strings > _MAX_STRINGS:
                raise self.error(f"{what} has {strings} strings, expected at most {_MAX_STRINGS}")
            return [self.string(what) for _ in range(strings)]
        dtype = np.dtype("<u1") if kind == _BOOL else _SCALARS.get(kind)
        if dtype is None:
            raise self.error(f"{what} is an array of the unsupported value type {kind}")
        count = self.count(dtype.itemsize, f"the length of {what}")
        numbers = np.frombuffer(self.raw(count * dtype.itemsize, what), dtype)
        return numbers.astype(np.bool_) if kind == _BOOL else numbers


def _parse(cursor: _Cursor) -> tuple[Metadata, dict[str, TensorInfo]]:
    _check_preamble(cursor)
    tensor_count = cursor.count(8 + 4 + 8 + 4 + 8, "the number of tensors")
    pair_count = cursor.count(8 + 4 + 1, "the number of key-value pairs")
    values: dict[str, Value] = {}
    for index in range(pair_count):
        key = cursor.string(f"the name of key {index}")
        if key in values:
            raise cursor.error(f"key {key} appears twice")
        kind = cursor.u32(f"the type of key {key}")
        what = f"key {key}"
        values[key] = cursor.array(what) if kind == _ARRAY else cursor.value(kind, what)
    metadata = Metadata(cursor.path, values)
    alignment = metadata.integer("general.alignment")
    alignment = 32 if alignment is None else alignment
    if alignment <= 0 or alignment & (alignment - 1):
        raise cursor.error(f"key general.alignment is {alignment}, expected a power of two")
    infos = [_tensor(cursor, index, alignment) for index in range(tensor_count)]
    return metadata, _place(cursor, infos, alignment)


def _check_preamble(cursor: _Cursor) -> None:
    magic = cursor.raw(4, "the magic number")
    if magic != b"GGUF":
        hint = "Give a GGUF file, or a directory with safetensors files."
        if magic == b"vers":
            hint = "This looks like a Git LFS pointer; fetch the file itself with `git lfs pull`."
        raise cursor.error(f"not a GGUF file: it starts with {magic!r}, expected b'GGUF'", hint)
    version = cursor.u32("the version")
    if version and not version & 0xFFFF:
        raise cursor.error(
            "a big-endian GGUF file, which is not supported",
            "Convert it with gguf-convert-endian from the gguf package.",
        )
    if version not in (2, 3):
        raise cursor.error(
            f"GGUF version {version} is not supported, expected 2 or 3",
            "Download a current file of this model.",
        )


def _tensor(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    """Parse one entry; its offset still counts from the start of the tensor data."""
    name = cursor.string(f"the name of tensor {index}")
    what = f"tensor {name}"
    rank = cursor.u32(what)
    if not 1 <= rank <= _MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {rank} dimensions, expected 1 to {_MAX_DIMENSIONS}")
    shape = tuple(reversed([cursor.u64(what) for _ in range(rank)]))
    code = cursor.u32(what)
    offset = cursor.u64(what)
    kind = _TENSOR_TYPES.get(code)
    if kind is None:
        raise cursor.error(
            f"{what} has the unknown type {code}",
            "Update the gguf package, or requantize the file.",
        )
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise cursor.error(f"{what} has the shape {list(shape)}, impossible for {kind.name}")
    if offset % alignment:
        raise cursor.error(f"{what} has the offset {offset}, not a multiple of {alignment}")
    nbytes = math.prod(shape) // block * block_bytes
    return TensorInfo(cursor.path, name, shape, kind, offset, nbytes)


def _place(cursor: _Cursor, infos: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
    """Make offsets absolute, and check that tensors are distinct and inside the file."""
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        start = base + info.offset
        if start + info.nbytes > cursor.size:
            raise cursor.error(
                f"truncated: tensor {info.name} ends at byte {start + info.nbytes}, "
                f"but the file has {cursor.size} bytes"
            )
        if info.name in tensors:
            raise cursor.error(f"tensor {info.name} appears twice")
        tensors[info.name] = TensorInfo(
            info.path, info.name, info.shape, info.type, start, info.nbytes
        )
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    for left, right in itertools.pairwise(ordered):
        if left.offset + left.nbytes > right.offset:
            raise cursor.error(f"tensors {left.name} and {right.name} overlap")
    return tensors
