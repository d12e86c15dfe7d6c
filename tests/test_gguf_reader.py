"""The GGUF header parser: what it accepts, and how it refuses everything else."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qinfer.errors import CheckpointError, QInferError
from qinfer_converters.gguf.data import read_rows
from qinfer_converters.gguf.reader import read_header
from qinfer_converters.gguf.source import GGUFSource
from qinfer_converters.gguf.split import open_gguf
from tests.gguf_files import as_f32, llama_keys, llama_tensors, write


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + numbers + struct.pack("<IQ", kind, offset)


def gguf(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    version: int = 3,
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


ARRAY_I32 = struct.pack("<I", 5)
VALID = gguf((pair(b"a", 4, b"\1\0\0\0"),), (tensor(b"t", (4, 2)),), bytes(32))


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_and_tensors_are_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "x.gguf"
    pairs = (
        pair(b"u8", 0, b"\xff"),
        pair(b"i8", 1, b"\xff"),
        pair(b"u16", 2, struct.pack("<H", 65535)),
        pair(b"i16", 3, struct.pack("<h", -2)),
        pair(b"u32", 4, struct.pack("<I", 2**32 - 1)),
        pair(b"i32", 5, struct.pack("<i", -3)),
        pair(b"f32", 6, struct.pack("<f", 0.5)),
        pair(b"bool", 7, b"\1"),
        pair(b"str", 8, string("é".encode())),
        pair(b"u64", 10, struct.pack("<Q", 2**64 - 1)),
        pair(b"i64", 11, struct.pack("<q", -(2**63))),
        pair(b"f64", 12, struct.pack("<d", 0.1)),
        pair(b"ints", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        pair(b"bools", 9, struct.pack("<IQ", 7, 2) + b"\0\1"),
        pair(b"strs", 9, struct.pack("<IQ", 8, 2) + string(b"x") + string(b"")),
    )
    values = np.arange(8, dtype=np.float32)
    path.write_bytes(gguf(pairs, (tensor(b"t", (4, 2)),), values.tobytes(), version))
    header = read_header(path)
    found = {key: header.metadata[key] for key in header.metadata}
    arrays: dict[str, Any] = {key: found.pop(key) for key in ("ints", "bools")}
    assert found == {
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -2,
        "u32": 2**32 - 1,
        "i32": -3,
        "f32": 0.5,
        "bool": True,
        "str": "é",
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 0.1,
        "strs": ["x", ""],
    }
    assert arrays["ints"].tolist() == [1, -2, 3]
    assert arrays["bools"].tolist() == [False, True]
    info = header.tensors["t"]
    assert (info.shape, info.type, info.nbytes) == ((2, 4), GGMLQuantizationType.F32, 32)
    assert read_rows(info, 1, 2).tolist() == [[4, 5, 6, 7]]


def test_alignment_key_moves_the_data(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    head = gguf((pair(b"general.alignment", 4, struct.pack("<I", 256)),), (tensor(b"t", (2,)),))
    path.write_bytes(head.ljust(256, b"\0") + struct.pack("<2f", 1.5, -2.0))
    assert read_rows(read_header(path).tensors["t"], 0, 2).tolist() == [1.5, -2.0]


def test_fingerprint_follows_the_header(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(VALID)
    before = read_header(path).fingerprint
    assert read_header(path).fingerprint == before
    path.write_bytes(VALID.replace(b"a", b"b", 1))
    assert read_header(path).fingerprint != before


HUGE = struct.pack("<Q", 2**63)
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: the magic number"),
    "short magic": (b"GG", "truncated"),
    "bad magic": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "not a GGUF file"),
    "no version": (b"GGUF\3", "truncated: the version"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0), "version 1 is not supported"),
    "version 0": (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version 0 is not supported"),
    "version 99": (gguf(version=99), "version 99"),
    "tensor count": (b"GGUF" + struct.pack("<I", 3) + HUGE + bytes(64), "the number of tensors"),
    "pair count": (b"GGUF" + struct.pack("<IQ", 3, 0) + HUGE + bytes(64), "key-value pairs"),
    "key length": (gguf((HUGE + b"abc" + bytes(40),)), "truncated: the name of key 0"),
    "key not utf-8": (gguf((pair(b"\xff\xfe", 4, bytes(4)),)), "not UTF-8"),
    "string length": (gguf((pair(b"k", 8, HUGE),)), "truncated: key k"),
    "string not utf-8": (gguf((pair(b"k", 8, string(b"\xc3")),)), "key k is not UTF-8"),
    "value type": (gguf((pair(b"k", 13, bytes(8)),)), "unknown value type 13"),
    "boolean": (gguf((pair(b"k", 7, b"\7"),)), "boolean with the value 7"),
    "array type": (gguf((pair(b"k", 9, struct.pack("<IQ", 99, 1)),)), "value type 99"),
    "nested array": (gguf((pair(b"k", 9, struct.pack("<IQ", 9, 1) + bytes(16)),)), "value type 9"),
    "array length": (gguf((pair(b"k", 9, ARRAY_I32 + HUGE),)), "the length of key k"),
    "strings length": (gguf((pair(b"k", 9, struct.pack("<I", 8) + HUGE),)), "the length of key k"),
    "truncated value": (gguf((pair(b"k", 10, b""),))[:40], "truncated: key k"),
    "duplicate key": (gguf((pair(b"k", 0, b"\0"), pair(b"k", 0, b"\0"))), "key k appears twice"),
    "alignment": (gguf((pair(b"general.alignment", 4, struct.pack("<I", 48)),)), "power of two"),
    "zero alignment": (gguf((pair(b"general.alignment", 4, bytes(4)),)), "power of two"),
    "alignment type": (gguf((pair(b"general.alignment", 8, string(b"x")),)), "expected an integer"),
    "no dimensions": (gguf(tensors=(tensor(b"t", ()),), data=bytes(32)), "0 dimensions"),
    "5 dimensions": (gguf(tensors=(tensor(b"t", (1,) * 5),), data=bytes(32)), "5 dimensions"),
    "many dimensions": (
        gguf(tensors=(string(b"t") + struct.pack("<I", 2**32 - 1) + bytes(32),)),
        "dimensions",
    ),
    "empty axis": (gguf(tensors=(tensor(b"t", (4, 0)),)), "impossible for F32"),
    "partial block": (gguf(tensors=(tensor(b"t", (33,), 2),), data=bytes(64)), "impossible for Q4"),
    "tensor type": (gguf(tensors=(tensor(b"t", (4,), 4),), data=bytes(32)), "unknown type 4"),
    "huge tensor": (gguf(tensors=(tensor(b"t", (2**40, 2**20)),), data=bytes(32)), "truncated"),
    "overflowing": (gguf(tensors=(tensor(b"t", (2**62, 2**62)),), data=bytes(32)), "truncated"),
    "offset": (gguf(tensors=(tensor(b"t", (4,), 0, 2**40),), data=bytes(32)), "truncated"),
    "misaligned": (gguf(tensors=(tensor(b"t", (4,), 0, 8),), data=bytes(64)), "not a multiple"),
    "data": (gguf(tensors=(tensor(b"t", (8,)),), data=bytes(31)), "truncated: tensor t"),
    "duplicate tensor": (
        gguf(tensors=(tensor(b"t", (8,)), tensor(b"t", (8,), 0, 32)), data=bytes(64)),
        "tensor t appears twice",
    ),
    "overlap": (
        gguf(tensors=(tensor(b"t", (16,)), tensor(b"u", (8,), 0, 32)), data=bytes(64)),
        "overlap",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint or "expected" in str(caught.value)


def test_the_file_that_the_malformed_ones_vary_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(VALID)
    assert list(read_header(path).tensors) == ["t"]


def test_missing_files_and_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "missing.gguf")
    with pytest.raises(CheckpointError, match="is not a file"):
        read_header(tmp_path)


def test_absurd_counts_end_quickly_in_a_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    strings = struct.pack("<IQ", 8, 2**30)
    path.write_bytes(gguf((pair(b"k", 9, strings),)))
    with path.open("r+b") as file:
        file.truncate(2**36)  # sparse
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="strings"):
        read_header(path)
    path.write_bytes(gguf((pair(b"k", 8, struct.pack("<Q", 2**35)),)))
    with path.open("r+b") as file:
        file.truncate(2**36)
    with pytest.raises(CheckpointError, match="larger than"):
        read_header(path)
    assert time.monotonic() - start < 5


def test_data_that_shrinks_after_opening_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(VALID)
    info = read_header(path).tensors["t"]
    path.write_bytes(VALID[:-1])
    with pytest.raises(CheckpointError, match="ends after 31 of 32 bytes"):
        read_rows(info, 0, 2)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        read_rows(info, 0, 2)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, llama_keys(), as_f32(llama_tensors()))
    GGUFSource(path)  # undamaged, it opens
    return path


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(data=st.data())
def test_damaged_headers_never_raise_anything_else(
    tmp_path: Path, small_model: Path, data: st.DataObject
) -> None:
    content = bytearray(small_model.read_bytes())
    end = read_header(small_model).tensors["token_embd.weight"].offset
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(4, end - 1))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, end)) :]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        source = GGUFSource(path)
    except QInferError:
        return
    for name, found in source.tensors.items():
        assert source.read(name, 0, 1).shape == (1, *found.shape[1:])


def split_model(directory: Path, change: Callable[[int, dict[str, Any]], None]) -> list[Path]:
    tensors = as_f32(llama_tensors())
    paths = []
    for index in range(3):
        keys = llama_keys() if index == 0 else {"general.architecture": "llama"}
        keys |= {"split.no": index, "split.count": 3, "split.tensors.count": len(tensors)}
        change(index, keys)
        path = directory / f"m-{index + 1:05}-of-00003.gguf"
        paths.append(write(path, keys, tensors[index::3]))
    return paths


def test_split_models_are_joined(tmp_path: Path, small_model: Path) -> None:
    whole = GGUFSource(small_model)
    joined = GGUFSource(split_model(tmp_path, lambda index, keys: None)[0])
    assert joined.config == whole.config
    assert set(joined.tensors) == set(whole.tensors)
    for name, found in whole.tensors.items():
        assert joined.read(name, 0, found.shape[0]).equal(whole.read(name, 0, found.shape[0]))


def test_broken_splits_are_refused(tmp_path: Path) -> None:
    paths = split_model(tmp_path, lambda index, keys: None)
    renamed = paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_gguf(renamed)
    renamed.rename(paths[0])
    paths[2].unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        open_gguf(paths[0])
    split_model(tmp_path, lambda index, keys: keys.update({"split.no": 0}))
    with pytest.raises(CheckpointError, match="not part 2"):
        open_gguf(paths[0])
    split_model(tmp_path, lambda index, keys: keys.update({"split.tensors.count": 12}))
    with pytest.raises(CheckpointError, match="hold 11 tensors, expected 12"):
        open_gguf(paths[0])
