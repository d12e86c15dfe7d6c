"""Files are read and written as the safetensors library does, and damaged ones are refused."""

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qinfer.checkpoint.safetensors import (
    DTYPES,
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    ShardWriter,
    layout_bytes,
    read_header,
    read_rows,
)
from qinfer.errors import CheckpointError, QInferError

NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters='"\\'), min_size=1, max_size=8
).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def random_tensor(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        data %= 2
    return data.view(dtype).view(shape)


TENSORS = st.dictionaries(
    NAMES,
    st.builds(random_tensor, st.sampled_from(list(DTYPES.values())), SHAPES, st.integers(0, 99)),
    max_size=6,
)


def assert_same(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    found, expected = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected))
    assert torch.equal(found, expected)


def file_bytes(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin, end, dtype="U8", shape=None):
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def assert_refused(error, path, text, hint):
    assert type(error) is CheckpointError
    assert "\n" not in str(error)
    assert str(path) in str(error)
    assert text in str(error)
    assert hint in error.hint


@settings(deadline=None, max_examples=60)
@given(TENSORS)
def test_reads_what_the_library_writes(tensors):
    with tempfile.TemporaryDirectory() as directory:
        save_file(tensors, Path(directory, SINGLE_NAME), metadata={"a": "b"})
        checkpoint = Checkpoint(Path(directory))
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, expected in tensors.items():
            info = checkpoint[name]
            assert info.torch_dtype == expected.dtype
            assert info.shape == expected.shape
            assert info.nbytes == expected.nbytes
            assert_same(checkpoint.tensor(name), expected)


@settings(deadline=None, max_examples=60)
@given(TENSORS, st.randoms())
def test_the_library_reads_what_is_written_in_any_order_of_rows(tensors, random):
    declared = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    jobs = []
    for name, tensor in tensors.items():
        rows = len(tensor) if tensor.ndim else 1
        cut = random.randint(0, rows) if tensor.ndim else 0
        for start, stop in ((0, cut), (cut, rows)):
            if stop > start:
                jobs.append((name, start, tensor[start:stop] if tensor.ndim else tensor))
    random.shuffle(jobs)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, SINGLE_NAME)
        writer = ShardWriter(path, declared)
        for job in jobs:
            writer.write(*job)
        writer.close()
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert header % 8 == 0
        assert path.stat().st_size == 8 + header + layout_bytes(declared)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == tensors.keys()
        for name, found in load_file(path).items():
            assert_same(found, tensors[name])
        checkpoint = Checkpoint(Path(directory))
        for name, info in checkpoint.tensors.items():
            assert info.offset % info.torch_dtype.itemsize == 0
            assert_same(checkpoint.tensor(name), tensors[name])


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(DTYPES.values())),
    st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(1, 3)),
    st.data(),
)
def test_rows_equal_slices(dtype, shape, data):
    start = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(start, shape[0]))
    expected = random_tensor(dtype, shape, 3)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x.safetensors")
        save_file({"a": torch.ones(3), "t": expected, "u": torch.ones(2)}, path)
        found = read_rows(read_header(path)["t"], start, stop)
        assert_same(found, expected[start:stop])
        found.fill_(1)  # memory of its own
        assert_same(read_rows(read_header(path)["t"], start, stop), expected[start:stop])


def test_a_mapped_tensor_is_not_read_before_it_is_used(tmp_path):
    save_file({"t": torch.arange(4.0)}, tmp_path / SINGLE_NAME)
    checkpoint = Checkpoint(tmp_path)
    tensor = checkpoint.tensor("t")
    with (tmp_path / SINGLE_NAME).open("r+b") as file:
        file.seek(checkpoint["t"].offset)
        file.write(torch.tensor([9.0]).numpy().tobytes())
    assert tensor.tolist() == [9.0, 1.0, 2.0, 3.0]


def test_a_mapped_tensor_never_changes_the_file(tmp_path):
    save_file({"t": torch.arange(4.0)}, tmp_path / SINGLE_NAME)
    Checkpoint(tmp_path).tensor("t").fill_(7)
    assert load_file(tmp_path / SINGLE_NAME)["t"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_header_beyond_the_limit_of_the_format_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)  # takes no disk
    with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
        read_header(path)


def test_misaligned_tensors_are_mapped_right(tmp_path):
    values = torch.tensor([1.5, -2.0, 3.25])
    header = {"a": entry(0, 3), "b": entry(3, 15, "F32", [3])}
    data = b"abc" + values.numpy().tobytes()
    for padding in range(4):
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 4 + padding)
        (tmp_path / SINGLE_NAME).write_bytes(file_bytes(text, data))
        checkpoint = Checkpoint(tmp_path)
        assert checkpoint["b"].offset % 4 == (padding + 3) % 4
        assert torch.equal(checkpoint.tensor("b"), values)
        assert torch.equal(read_rows(checkpoint["b"], 0, 3), values)


def test_tensors_may_lie_in_another_order_than_the_header(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"b": entry(2, 3), "a": entry(0, 2)}, b"xyz"))
    assert bytes(read_rows(read_header(path)["b"], 0, 1).tolist()) == b"z"


def test_empty_tensors_may_lie_between_others(tmp_path):
    path = tmp_path / "x.safetensors"
    header = {"a": entry(0, 2), "e": entry(2, 2, shape=[0, 7]), "b": entry(2, 3)}
    path.write_bytes(file_bytes(header, b"xyz"))
    assert read_header(path)["e"].shape == (0, 7)


def test_a_file_without_tensors_is_a_file(tmp_path):
    (tmp_path / SINGLE_NAME).write_bytes(file_bytes({}))
    assert Checkpoint(tmp_path).tensors == {}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(b"", "is empty (0 bytes)", id="empty"),
        pytest.param(b"\x08\0\0", "is not a complete safetensors file (3 bytes)", id="no length"),
        pytest.param(file_bytes({"t": ENTRY}, b"1234")[:20], "is not a complete", id="in header"),
        pytest.param(file_bytes({}, length=2**63), "is not a complete", id="huge length"),
        pytest.param(
            file_bytes({}, b"x" * 100, length=99), "header is not JSON", id="length into data"
        ),
        pytest.param(file_bytes(b""), "header is not JSON", id="no header"),
        pytest.param(file_bytes(b"<html></html>"), "header is not JSON", id="html"),
        pytest.param(file_bytes(b"[" * 100_000), "header is not JSON", id="nested"),
        pytest.param(file_bytes(b'{"\xff": 1}'), "header is not JSON", id="not utf-8"),
        pytest.param(
            file_bytes(json.dumps({"t": ENTRY}).encode("utf-16-le"), b"1234"),
            "header is not JSON",
            id="utf-16",
        ),
        pytest.param(file_bytes([]), "header is not a JSON object", id="array"),
        pytest.param(file_bytes({"t": ENTRY}, b"123"), "is truncated", id="truncated data"),
        pytest.param(file_bytes({"t": ENTRY}, b"12345"), "bytes left over", id="trailing"),
        pytest.param(file_bytes({}, b"1"), "bytes left over", id="only trailing"),
        pytest.param(
            file_bytes({"t": ENTRY, "u": entry(2, 6)}, b"123456"), "overlaps", id="overlap"
        ),
        pytest.param(file_bytes({"t": ENTRY, "u": ENTRY}, b"1234"), "overlaps", id="same bytes"),
        pytest.param(
            file_bytes({"t": ENTRY, "u": entry(5, 7)}, b"1234567"), "leaves a gap", id="gap"
        ),
        pytest.param(file_bytes({"t": entry(1, 5)}, b"12345"), "leaves a gap", id="gap first"),
        pytest.param(
            file_bytes(
                b'{"t":%s,"t":%s}' % (json.dumps(ENTRY).encode(), json.dumps(entry(4, 8)).encode()),
                b"12345678",
            ),
            "leaves a gap",
            id="duplicate",
        ),
        pytest.param(
            file_bytes({"t": entry(0, 4, shape=[5])}, b"1234"),
            "shape [5] and dtype U8 cannot take 4 bytes",
            id="shape",
        ),
        pytest.param(
            file_bytes({"t": entry(0, 4, "F32", [4])}, b"1234"), "dtype F32 cannot", id="dtype"
        ),
        pytest.param(
            file_bytes({"t": entry(0, 1, shape=[2**40, 2**40])}, b"1"), "cannot take", id="huge"
        ),
        pytest.param(
            file_bytes({"t": {**ENTRY, "data_offsets": [4, 0]}}, b"1234"), "cannot", id="backwards"
        ),
        pytest.param(
            file_bytes({"t": entry(4, 0, "F8_E4M3", [4])}, b"1234"), "overlaps", id="backwards f8"
        ),
    ],
)
def test_a_damaged_file_is_refused(content, text, tmp_path):
    path = tmp_path / SINGLE_NAME
    path.write_bytes(content)
    with pytest.raises(QInferError) as caught:
        Checkpoint(tmp_path)
    assert_refused(caught.value, path, text, "fetch it again")


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        "U8",
        {},
        {"dtype": "U8", "shape": [4]},
        {**ENTRY, "dtype": 3},
        {**ENTRY, "dtype": None},
        {**ENTRY, "shape": None},
        {**ENTRY, "shape": 4},
        {**ENTRY, "shape": "4"},
        {**ENTRY, "shape": {}},
        {**ENTRY, "shape": [4.0]},
        {**ENTRY, "shape": [-4]},
        {**ENTRY, "shape": [-2, -2]},
        {**ENTRY, "shape": [4, True]},
        {**ENTRY, "shape": [[4]]},
        {**ENTRY, "data_offsets": None},
        {**ENTRY, "data_offsets": [0]},
        {**ENTRY, "data_offsets": [0, 4, 8]},
        {**ENTRY, "data_offsets": [-4, 0]},
        {**ENTRY, "data_offsets": [0, 4.0]},
        {**ENTRY, "data_offsets": [False, 4]},
        {**ENTRY, "data_offsets": "04"},
    ],
    ids=str,
)
def test_a_malformed_entry_is_refused(broken, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"name.weight": broken}, b"1234"))
    with pytest.raises(QInferError) as caught:
        read_header(path)
    assert_refused(caught.value, path, "header entry of name.weight is malformed", "fetch it")


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_flipped_byte_of_the_header_never_crashes(data):
    content = bytearray(
        file_bytes({"a": entry(0, 8, "F32", [2]), "b": entry(8, 12, "BF16", [1, 2])}, b"x" * 12)
    )
    at = data.draw(st.integers(0, len(content) - 13))
    content[at] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, SINGLE_NAME)
        path.write_bytes(content)
        with contextlib.suppress(CheckpointError):  # nothing else may be raised
            checkpoint = Checkpoint(Path(directory))
            for name in checkpoint.tensors:
                checkpoint.tensor(name)


def test_unsupported_dtypes_are_named_when_they_are_used(tmp_path):
    path = tmp_path / SINGLE_NAME
    path.write_bytes(file_bytes({"t": ENTRY, "q": entry(4, 8, "F8_E4M3", [4])}, b"12345678"))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensor("t").tolist() == list(b"1234")
    for use in (lambda: checkpoint.tensor("q"), lambda: read_rows(checkpoint["q"], 0, 1)):
        with pytest.raises(QInferError) as caught:
            use()
        assert_refused(caught.value, path, "tensor q has dtype F8_E4M3", "BF16")


def test_a_missing_tensor_is_named(tmp_path):
    save_file({"t": torch.ones(1)}, tmp_path / SINGLE_NAME)
    checkpoint = Checkpoint(tmp_path)
    assert "t" in checkpoint
    assert "u" not in checkpoint
    with pytest.raises(QInferError) as caught:
        checkpoint.tensor("u")
    assert_refused(caught.value, tmp_path, "has no tensor u", "again")


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path):
    path = tmp_path / SINGLE_NAME
    save_file({"t": torch.ones(100)}, path)
    info = read_header(path)["t"]
    with path.open("r+b") as file:
        file.truncate(info.offset + 40)
    assert len(read_rows(info, 0, 10)) == 10
    with pytest.raises(QInferError) as caught:
        read_rows(info, 5, 15)
    assert_refused(caught.value, path, "ends within t", "fetch it again")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_rows(info, 0, 1)


def test_missing_files_and_directories_in_their_place_are_named(tmp_path):
    with pytest.raises(QInferError) as caught:
        read_header(tmp_path / "none.safetensors")
    assert_refused(caught.value, "none.safetensors", "No such file", "again")
    (tmp_path / SINGLE_NAME).mkdir()
    with pytest.raises(QInferError) as caught:
        Checkpoint(tmp_path)
    assert_refused(caught.value, SINGLE_NAME, "Is a directory", "again")


@pytest.fixture
def sharded(tmp_path):
    """Two shards with an index, and the index to change."""
    save_file({"a": torch.tensor([1.0])}, tmp_path / "one.safetensors")
    save_file({"b": torch.tensor([2.0]), "c": torch.tensor([3])}, tmp_path / "two.safetensors")
    index = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    write_index(tmp_path, index)
    return tmp_path, index


def write_index(directory, weight_map):
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_joined(sharded):
    directory, _ = sharded
    checkpoint = Checkpoint(directory)
    assert {n: checkpoint.tensor(n).tolist() for n in "abc"} == {"a": [1.0], "b": [2.0], "c": [3]}


def refusal(directory):
    with pytest.raises(QInferError) as caught:
        Checkpoint(directory)
    return caught.value


def test_a_missing_shard_is_named(sharded):
    directory, _ = sharded
    (directory / "two.safetensors").unlink()
    assert_refused(refusal(directory), INDEX_NAME, "two.safetensors, which is not there", "again")


def test_a_tensor_that_is_not_in_its_shard_is_named(sharded):
    directory, index = sharded
    write_index(directory, index | {"d": "one.safetensors"})
    assert_refused(refusal(directory), INDEX_NAME, "says that d is in one.safetensors", "again")
    write_index(directory, index | {"c": "one.safetensors"})
    assert_refused(refusal(directory), INDEX_NAME, "says that c is in one.safetensors", "again")


def test_a_tensor_that_the_index_leaves_out_is_named(sharded):
    directory, index = sharded
    write_index(directory, {n: f for n, f in index.items() if n != "c"})
    assert_refused(refusal(directory), INDEX_NAME, "two.safetensors holds c, which", "together")


def test_a_damaged_shard_is_named(sharded):
    directory, _ = sharded
    (directory / "two.safetensors").write_bytes(b"")
    assert_refused(refusal(directory), "two.safetensors", "is empty", "fetch it again")


@pytest.mark.parametrize(
    "name",
    [
        "../one.safetensors",
        "sub/one.safetensors",
        "./one.safetensors",
        "/etc/one.safetensors",
        "..\\one.safetensors",
        "sub\\one.safetensors",
        "one.safetensors/",
        7,
        None,
        ["one.safetensors"],
    ],
)
def test_an_index_that_leads_out_of_its_directory_is_refused(name, sharded):
    directory, index = sharded
    (directory / "sub").mkdir()
    for place in (directory / "sub", directory.parent):
        save_file({"a": torch.ones(1)}, place / "one.safetensors")
    write_index(directory, index | {"a": name})
    assert_refused(refusal(directory), INDEX_NAME, "points outside its directory", "Do not use")


@pytest.mark.parametrize("name", ["one.bin", "one.pt", "one.safetensors.bin", "one", "..", ""])
def test_an_index_of_pickle_files_is_refused(name, sharded):
    directory, index = sharded
    if name.startswith("one"):
        (directory / name).write_bytes(b"\x80\x02.")
    write_index(directory, index | {"a": name})
    assert_refused(refusal(directory), directory, "pickle files are never loaded", "safetensors")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b"{", "is not valid JSON"),
        (b"[1]", "must hold a JSON object"),
        (b"\xff", "not UTF-8"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": []}', "has no weight_map"),
        (b'{"weight_map": ["one.safetensors"]}', "has no weight_map"),
    ],
)
def test_a_damaged_index_is_refused(content, text, sharded):
    directory, _ = sharded
    (directory / INDEX_NAME).write_bytes(content)
    assert_refused(refusal(directory), directory / INDEX_NAME, text, "damaged")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"]
)
def test_a_directory_with_only_pickle_files_is_refused_by_name(name, tmp_path):
    (tmp_path / name).write_bytes(b"\x80\x02.")
    error = refusal(tmp_path)
    assert_refused(error, tmp_path / name, "pickle files are never loaded", "save_pretrained")


def test_a_directory_without_weights_is_refused(tmp_path):
    assert_refused(refusal(tmp_path), tmp_path, f"has no {SINGLE_NAME}", "safetensors")


def test_writing_another_dtype_than_declared_is_a_bug(tmp_path):
    writer = ShardWriter(tmp_path / "x", {"t": (torch.float32, (2, 2))})
    with pytest.raises(ValueError, match="declared"):
        writer.write("t", 0, torch.ones(2, 2, dtype=torch.float16))
    writer.abandon()


def test_strided_rows_are_written_in_their_logical_order(tmp_path):
    rows = torch.arange(6.0).view(2, 3).t()
    writer = ShardWriter(tmp_path / "x", {"t": (torch.float32, (3, 2))})
    writer.write("t", 0, rows)
    writer.close()
    assert torch.equal(load_file(tmp_path / "x")["t"], rows)


def test_a_header_that_cannot_be_written_leaves_no_open_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qinfer.checkpoint.safetensors.os.ftruncate", full)
    with pytest.raises(OSError, match="No space"):  # and no ResourceWarning, which is an error
        ShardWriter(tmp_path / "x", {"t": (torch.float32, (2,))})


def test_pages_that_were_dropped_are_read_again(tmp_path):
    data = torch.arange(1 << 16, dtype=torch.int32)
    save_file({"a": data, "b": data + 1}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    a, b = checkpoint.tensor("a"), checkpoint.tensor("b")
    for _ in range(2):
        assert torch.equal(a, data)
        assert torch.equal(b, data + 1)
        checkpoint.drop_pages()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory is counted in /proc")
def test_dropped_pages_are_not_resident(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1 << 20)}, path)

    def resident_kb():
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        of_file = [next(y for y in lines if y.startswith("Rss:")) for x in lines if str(path) in x]
        return sum(int(line.split()[1]) for line in of_file)

    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensor("a").sum() == 1 << 20
    assert resident_kb() >= 4096
    checkpoint.drop_pages()
    assert resident_kb() == 0
