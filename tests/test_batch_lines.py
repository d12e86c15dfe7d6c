"""Reading lines: plain, gzip and pipes, in constant memory, with clear refusals."""

import gzip
import io
import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from qinfer.errors import QInferError
from qinfer_cli.batch import lines
from qinfer_cli.batch.digests import DigestSet, digest
from qinfer_cli.batch.lines import Input


def read(path):
    with Input(path) as source:
        return [tuple(line) for line in source], source.jsonl


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_are_numbered_and_blank_ones_left_out(tmp_path, suffix, end):
    content = b"\xef\xbb\xbf" + end.join([b"a", b"", b" b ", b"\t"]) + end + b"c"
    path = tmp_path / f"in{suffix}"
    path.write_bytes(gzip.compress(content, mtime=0) if suffix.endswith("gz") else content)
    assert read(path) == ([(1, b"a"), (3, b" b "), (5, b"c")], False)


def pipe(path, content):
    """A pipe with this content that is closed behind it."""
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=[content])
    writer.start()
    return writer


@pytest.mark.parametrize("is_pipe", [False, True])
@pytest.mark.parametrize(("length", "fits"), [(10, True), (11, False), (12, False), (40, False)])
@pytest.mark.parametrize("end", [b"", b"\n", b"\nz\n"])
def test_a_line_is_whole_up_to_the_bound_and_the_next_is_found(
    tmp_path, monkeypatch, length, fits, end, is_pipe
):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(lines, "_SKIPPED_BYTES", 7)
    write = pipe if is_pipe else Path.write_bytes
    write(tmp_path / "in.txt", b"x" * length + end)
    found, _ = read(tmp_path / "in.txt")
    assert found[0] == (1, b"x" * length if fits else None)
    assert found[1:] == ([(2, b"z")] if b"z" in end else [])


def test_a_line_of_100_mb_takes_little_memory(tmp_path):
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        for _ in range(100):
            file.write(b"x" * 10**6)
        file.write(b"\nnext\n")
    tracemalloc.start()
    found, _ = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(1, None), (2, b"next")]
    assert peak < 3 * lines.MAX_LINE_BYTES


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.txt", b"", "is empty"),
        ("in.jsonl.gz", gzip.compress(b"", mtime=0), "is empty"),
        ("in.csv", b"a", "prompts come as .txt"),
        ("in.gz", gzip.compress(b"a", mtime=0), "prompts come as .txt"),
        ("in.txt", b"\x7fELF\0\0", "zero bytes"),
        ("in.txt", "hi".encode("utf-16"), "zero bytes"),
        ("in.txt", gzip.compress(b"a", mtime=0), "is gzip"),
        ("in.txt.gz", b"plain", "is not gzip"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(QInferError, match=message) as caught:
        Input(tmp_path / name)
    assert caught.value.hint


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(QInferError, match="Is a directory"):
        Input(tmp_path)


def test_damaged_gzip_gives_its_lines_and_then_an_error(tmp_path):
    content = b"".join(b"line %d %s\n" % (i, os.urandom(20).hex().encode()) for i in range(2000))
    (tmp_path / "in.txt.gz").write_bytes(gzip.compress(content, mtime=0)[:-1000])
    with Input(tmp_path / "in.txt.gz") as source:
        found = iter(source)
        assert next(found).data.startswith(b"line 0 ")
        with pytest.raises(QInferError, match="damaged gzip"):
            list(found)


@pytest.mark.parametrize(("content", "jsonl"), [(b'\n  {"a"\n', True), (b"\nhi {\n", False)])
def test_the_form_of_standard_input_is_that_of_its_first_line(monkeypatch, content, jsonl):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    found, form = read(Path("-"))
    assert [line for line, _ in found] == [2]
    assert form is jsonl


@pytest.mark.parametrize("name", ["pipe", "pipe.jsonl.gz"])
def test_a_pipe_is_read_as_it_comes(tmp_path, name):
    content = b'{"prompt": "x"}\n'
    writer = pipe(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    assert read(tmp_path / name) == ([(1, content[:-1])], True)
    writer.join()


def test_a_pipe_says_whether_a_whole_line_is_there(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        source = Input(Path("-"))
        found = iter(source)
        for written, ready in [(b"a", 0), (b"b\nc\nd", 2), (b"\n" + b"e" * 11 + b"\nz", 2)]:
            os.write(writer, written)
            for _ in range(ready):
                assert source.is_ready()
                next(found)
            assert not source.is_ready()
        os.close(writer)
        assert source.is_ready()
        assert [line.data for line in found] == [b"z"]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_nothing_is_used_before_it_is_announced(tmp_path, suffix):
    content = b"".join(b"%d\n" % i for i in range(100_000))
    path = tmp_path / f"in{suffix}"
    path.write_bytes(gzip.compress(content, mtime=0) if suffix.endswith("gz") else content)
    announced = []
    with Input(path) as source:
        source.before_read = announced.append
        for _ in source:
            assert source.position_bytes <= announced[-1]
        assert source.position_bytes == source.size_bytes
    assert len(announced) > 1


def test_a_digest_set_has_what_was_added():
    found = DigestSet()
    keys = [digest("result", str(i), 0) for i in range(5000)]
    assert all(found.add(key) for key in keys[:4000])
    assert not any(found.add(key) for key in keys[:4000])
    assert [key in found for key in keys] == [True] * 4000 + [False] * 1000
    assert len(found) == 4000
    assert digest("a", 1, 0) != digest("a", "1", 0)
