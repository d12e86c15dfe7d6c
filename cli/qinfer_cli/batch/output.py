"""Appending records to the results: each is on disk as a whole, or not at all.

A plain file gets each record in one write. A gzip file gets it as one flushed piece of a member,
and a new member every few seconds, so that what a crash can damage is the last member only. A write
that fails part way is taken back.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
import zlib
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from qinfer.errors import QInferError

SYNC_INTERVAL_S = 5.0
"""Most time for which a record may be written but not yet forced to the disk."""

_GZIP = 31  # zlib's wbits of a gzip member


def encoded(record: dict[str, Any]) -> bytes:
    """A record as a line. What JSON can spell and UTF-8 cannot keeps its JSON spelling."""
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


class OutputError(QInferError):
    """A record could not be written; those before it are."""


def cannot_write(
    name: object, error: OSError, kind: type[QInferError] = QInferError
) -> QInferError:
    """The error for a file that cannot be written."""
    return kind(f"{name} cannot be written: {error.strerror}")


def is_stream(path: Path) -> bool:
    """Whether this output is standard output or a device: it cannot be resumed or be in the way."""
    return str(path) == "-" or (path.exists() and not (path.is_file() or path.is_dir()))


class StreamOutput:
    """Records to standard output, a device or a pipe."""

    def __init__(self, path: Path) -> None:
        self._name = "stdout" if str(path) == "-" else str(path)
        try:
            self._file: BinaryIO | FileIO = (
                sys.stdout.buffer if str(path) == "-" else path.open("wb", buffering=0)
            )
        except OSError as error:
            raise cannot_write(path, error) from None

    def write(self, record: dict[str, Any]) -> None:
        """Write a record and flush it."""
        try:
            self._file.write(encoded(record))
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise cannot_write(self._name, error, OutputError) from None

    def sync_if_due(self) -> None:
        """Nothing to do: nobody can resume from here."""

    def close(self) -> None:
        """Close a device; standard output stays open."""
        if self._name != "stdout":
            self._file.close()


class FileOutput:
    """Records to a regular file, which nobody else writes meanwhile.

    Args:
        path: Created if it does not exist; records go to its end. `.gz` is compressed.

    Raises:
        QInferError: It cannot be written, or another batch is writing it.
    """

    def __init__(self, path: Path) -> None:
        self._name = path
        self._compressed = path.suffix == ".gz"
        self._member: Any = None
        self._synced_s = time.monotonic()
        self._is_synced = True
        self._fd = _open_locked(path)

    def follow(self) -> None:
        """Open the file of this name, after it may have been replaced."""
        if os.path.samestat(os.fstat(self._fd), self._name.stat()):
            return
        new = _open_locked(self._name)
        os.close(self._fd)
        self._fd = new

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return os.fstat(self._fd).st_size

    def is_same_file(self, fd: int | None) -> bool:
        """Whether a descriptor is open on this file."""
        return fd is not None and os.path.sameopenfile(fd, self._fd)

    def cut(self, size_bytes: int) -> None:
        """Cut the file back."""
        os.ftruncate(self._fd, size_bytes)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record.

        Raises:
            QInferError: There is no room or the disk fails; the file is as it was before.
        """
        self._write_bytes(self._packed(encoded(record)))
        self.sync_if_due()

    def _packed(self, line: bytes) -> bytes:
        if not self._compressed:
            return line
        if self._member is None:
            self._member = zlib.compressobj(wbits=_GZIP)
        return self._member.compress(line) + self._member.flush(zlib.Z_SYNC_FLUSH)  # type: ignore[no-any-return]

    def _write_bytes(self, data: bytes) -> None:
        end = self.size_bytes
        self._is_synced = False
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            os.ftruncate(self._fd, end)
            self._member = None  # it lacks what was not written, so it must not be ended
            raise cannot_write(self._name, error, OutputError) from None

    def sync_if_due(self) -> None:
        """Force what is written to the disk, if the last time is long enough ago."""
        if not self._is_synced and time.monotonic() - self._synced_s >= SYNC_INTERVAL_S:
            self._sync()

    def _sync(self) -> None:
        if self._member is not None:
            member, self._member = self._member, None
            self._write_bytes(member.flush())
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise cannot_write(self._name, error, OutputError) from None
        self._synced_s, self._is_synced = time.monotonic(), True

    def close(self) -> None:
        """End the last member, force everything to the disk and close."""
        try:
            if not self._is_synced:
                self._sync()
        finally:
            os.close(self._fd)


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise QInferError(
            f"{path} is being written by another batch",
            hint="Wait for it, or name another output.",
        ) from None
    return fd


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that after a crash it is there as before, or as after.

    Raises:
        QInferError: It cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def sync_directory(directory: Path) -> None:
    """Make a rename in a directory last."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
