"""Reading the lines of an input: plain or gzip, a file or a pipe, in constant memory.

What a line means is not known here.
"""

from __future__ import annotations

import gzip
import io
import os
import select
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from qinfer.errors import QInferError

MAX_LINE_BYTES = 16 << 20
"""A longer line is skipped without being held in memory."""

_SNIFFED_BYTES = 8192
_BUFFER_BYTES = 128 << 10
_SKIPPED_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"


class Line(NamedTuple):
    """A line that is not blank: its number from 1, and its bytes without the line end.

    The bytes are None where there are more than `MAX_LINE_BYTES`.
    """

    number: int
    data: bytes | None


class Input:
    """An input that is open. Iterate for its lines, once.

    Attributes:
        name: For messages.
        fd: Of a regular file, which can be read again; None of a pipe or standard input.
        size_bytes: Of the regular file, compressed as it is; else None.
        jsonl: Whether lines are JSON; None until a pipe's first line has told.
        before_read: Called with an offset in the file before any byte up to it is used.

    Raises:
        QInferError: It cannot be read, is empty, or is not text.
    """

    def __init__(self, path: Path) -> None:
        self.name = "stdin" if str(path) == "-" else str(path)
        self.jsonl: bool | None = None
        self.fd: int | None = None
        self.size_bytes: int | None = None
        self.before_read: Callable[[int], None] = lambda end: None
        self._opened: int | None = None
        self._consumed_bytes = 0
        self._file: _Observed | None = None
        if str(path) == "-":
            if sys.stdin is None:
                raise QInferError("stdin is closed")
            self._gzip = False
            self._stream: BinaryIO | _Pipe = _standard_input()
        else:
            self._open(path)

    def _open(self, path: Path) -> None:
        self._gzip = path.suffix == ".gz"
        kind = Path(path.stem).suffix if self._gzip else path.suffix
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise QInferError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self._open_descriptor(path, fd, kind)
            self._opened = fd
        except BaseException:
            os.close(fd)
            raise

    def _open_descriptor(self, path: Path, fd: int, kind: str) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise QInferError(
                f"{path} cannot be read: Is a directory", hint="Name a .txt or .jsonl file in it."
            )
        regular = stat.S_ISREG(status.st_mode)
        if kind in (".txt", ".jsonl"):
            self.jsonl = kind == ".jsonl"
        elif regular:
            raise QInferError(
                f"{path}: prompts come as .txt (one a line) or .jsonl, or either with .gz",
                hint="Rename the file, or use -f for one prompt of many lines.",
            )
        if regular:
            _check_content(path, fd, compressed=self._gzip)
            self.fd, self.size_bytes = fd, status.st_size
            self._file = _Observed(fd, lambda end: self.before_read(end))
            buffered: BinaryIO = io.BufferedReader(self._file, _BUFFER_BYTES)
        elif self._gzip:
            buffered = io.BufferedReader(io.FileIO(fd, closefd=False))
        else:
            self._stream = _Pipe(fd)
            return
        self._stream = (
            cast(BinaryIO, gzip.GzipFile(fileobj=buffered, mode="rb")) if self._gzip else buffered
        )

    @property
    def position_bytes(self) -> int:
        """How much of `size_bytes` has been used."""
        return self._file.tell() if self._gzip and self._file else self._consumed_bytes

    def is_ready(self) -> bool:
        """Whether the next line is there, without waiting for who writes into a pipe.

        Of compressed pipes this is not known, and True.
        """
        try:
            return not isinstance(self._stream, _Pipe) or self._stream.is_ready(_limit_bytes())
        except OSError:
            return True  # for reading the line to fail

    def __enter__(self) -> Input:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            os.close(self._opened)

    def __iter__(self) -> Iterator[Line]:
        """Yield the lines that are not blank.

        Raises:
            QInferError: The input ends in an error, or is damaged gzip.
        """
        number = 0
        while (data := self._readline(_limit_bytes())) != b"":
            number += 1
            self._consumed_bytes += len(data)
            if number == 1:
                data = data.removeprefix(_BOM)
            ended, data = data.endswith(b"\n"), data.rstrip(b"\r\n")
            if len(data) > MAX_LINE_BYTES:
                del data
                if not ended:
                    self._skip_line()
                yield Line(number, None)
            elif stripped := data.strip():
                if self.jsonl is None:
                    self.jsonl = stripped.startswith(b"{")
                yield Line(number, data)

    def _skip_line(self) -> None:
        while (piece := self._readline(_SKIPPED_BYTES)) and not piece.endswith(b"\n"):
            self._consumed_bytes += len(piece)
        self._consumed_bytes += len(piece)

    def _readline(self, limit: int) -> bytes:
        try:
            return self._stream.readline(limit)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise QInferError(
                f"{self.name} is damaged gzip: {error}",
                hint="What came before the damage is answered; repair the file and use --resume.",
            ) from None
        except OSError as error:
            raise QInferError(f"{self.name} cannot be read: {error.strerror}") from None


def _limit_bytes() -> int:
    """How much is read to tell whether a line is too long: its end counts too."""
    return MAX_LINE_BYTES + len(b"\r\n")


def _standard_input() -> BinaryIO | _Pipe:
    try:
        return _Pipe(sys.stdin.fileno())
    except io.UnsupportedOperation:  # replaced by something in memory
        return sys.stdin.buffer


class _Pipe:
    """The lines of a pipe, terminal or the like, which can be asked whether one is there."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data = bytearray()
        self._ended = False

    def readline(self, limit: int) -> bytes:
        """Wait for a line; at the end of the pipe b""."""
        while not self._has_line(limit):
            self._read()
        end = self._data.find(b"\n", 0, limit) + 1 or limit
        line = bytes(self._data[:end])
        del self._data[:end]
        return line

    def is_ready(self, limit: int) -> bool:
        """Whether `readline` would return at once."""
        while not self._has_line(limit) and select.select([self._fd], [], [], 0)[0]:
            self._read()
        return self._has_line(limit)

    def _has_line(self, limit: int) -> bool:
        return self._ended or len(self._data) >= limit or b"\n" in self._data

    def _read(self) -> None:
        data = os.read(self._fd, _BUFFER_BYTES)
        self._data += data
        self._ended = not data


class _Observed(io.RawIOBase):
    """A file that says how far it is going to be read, before it is."""

    def __init__(self, fd: int, before_read: Callable[[int], None]) -> None:
        super().__init__()
        self._fd = fd
        self._before_read = before_read
        self._offset = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._before_read(self._offset + len(buffer))
        data = os.pread(self._fd, len(buffer), self._offset)
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)


def _check_content(path: Path, fd: int, *, compressed: bool) -> None:
    """Refuse what is no text at all, judged by its beginning."""
    head = os.pread(fd, _SNIFFED_BYTES, 0)
    if compressed and head:
        try:
            with closing(gzip.open(path)) as file:
                head = file.read(_SNIFFED_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            if not head.startswith(_GZIP_MAGIC):
                raise QInferError(
                    f"{path} is not gzip: {error}", hint="Rename it without .gz."
                ) from None
            return  # damaged further on: reading says so when it gets there
    if not head:
        raise QInferError(f"{path} is empty", hint="Write a prompt on each of its lines.")
    if head.startswith(_GZIP_MAGIC):
        raise QInferError(f"{path} is gzip", hint=f"Rename it to {path.name}.gz.")
    if b"\0" in head:
        raise QInferError(
            f"{path} is not UTF-8 text: it has zero bytes, as binary files and UTF-16 do",
            hint="Convert it, for example with iconv -f UTF-16 -t UTF-8.",
        )
