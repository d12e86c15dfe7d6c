"""The results of an earlier run: which requests it answered, and its file made whole again."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qinfer.errors import QInferError
from qinfer_cli.batch.digests import DigestSet, digest
from qinfer_cli.batch.output import cannot_write, sync_directory

_PIECE_BYTES = 1 << 20
_GZIP = 31


@dataclass(slots=True)
class Previous:
    """What an earlier run has left.

    Attributes:
        results: Records with an answer.
        errors: Records of failures.
        keys: Of every record: by `result_key` an answer, by `error_key` a failure.
    """

    results: int = 0
    errors: int = 0
    keys: DigestSet = field(default_factory=DigestSet)

    def has_result(self, id: str | int, index: int) -> bool:
        """Whether a request's choice is answered."""
        return result_key(id, index) in self.keys

    def has_error(self, line: int, index: int) -> bool:
        """Whether there is a record of the failure of a line's choice."""
        return error_key(line, index) in self.keys


def result_key(id: str | int, index: int) -> bytes:
    """What stands for the answer to a request's choice."""
    return digest("result", id, index)


def error_key(line: int, index: int) -> bytes:
    """What stands for the failure of a line's choice: ids of bad lines need not be unique."""
    return digest("error", line, index)


class Results:
    """The result file of an earlier run.

    Args:
        path: Of the file, which nobody writes meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._compressed = path.suffix == ".gz"
        self._whole_bytes = 0  # of the text
        self._is_torn = False

    def repair(self, *, drop_errors: bool) -> tuple[Previous, int | None]:
        """Read the file; rewrite it where that is needed to continue it.

        A last record that was not written to its end is left out, and with `drop_errors` the
        records of failures are. Until the rewritten file is complete the old one stays.

        Returns:
            What there is; and for a file that only has to be cut, how long the good part is.

        Raises:
            QInferError: A line is not a result, or the file cannot be read or rewritten.
        """
        previous = Previous()
        for number, line in enumerate(self._lines(), 1):
            self._note(previous, self._record(line, number))
        dropping = drop_errors and previous.errors > 0
        if dropping or (self._is_torn and self._compressed):
            self._rewrite(drop_errors=dropping)
            kept = Previous()
            for number, line in enumerate(self._lines(), 1):
                self._note(kept, self._record(line, number))
            return kept, None
        return previous, self._whole_bytes if self._is_torn else None

    def _note(self, previous: Previous, record: dict[str, Any]) -> None:
        id = record["custom_id"] if "custom_id" in record else record["id"]
        index = record.get("index", 0)
        if record.get("error") is None:
            previous.results += 1
            previous.keys.add(result_key(id, index))
        else:
            previous.errors += 1
            previous.keys.add(error_key(record["error"]["line"], index))

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        """A result record, checked as far as `_note` relies on it."""
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if _is_result(record):
                return record  # type: ignore[no-any-return]
        raise QInferError(
            f"{self._path}: line {number} is not a result of a batch",
            hint="Name another output, or remove that line.",
        )

    def _rewrite(self, *, drop_errors: bool) -> None:
        part = self._path.with_name(self._path.name + ".part")
        packer: Any = zlib.compressobj(wbits=_GZIP) if self._compressed else None
        try:
            with part.open("wb") as file:
                for number, line in enumerate(self._lines(), 1):
                    if not drop_errors or self._record(line, number).get("error") is None:
                        file.write(packer.compress(line) if packer else line)
                file.write(packer.flush() if packer else b"")
                file.flush()
                os.fsync(file.fileno())
            part.chmod(self._path.stat().st_mode & 0o7777)
            part.replace(self._path)
            sync_directory(self._path.parent)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise cannot_write(part, error) from None

    def _lines(self) -> Iterator[bytes]:
        """Yield the whole lines, their ends included; note whether more is behind them."""
        self._whole_bytes, self._is_torn = 0, False
        rest = b""
        for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self._whole_bytes += len(line) + 1
                yield line + b"\n"
        self._is_torn = self._is_torn or rest != b""

    def _pieces(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
                yield from self._inflated(pieces) if self._compressed else pieces
        except OSError as error:
            raise QInferError(f"{self._path} cannot be read: {error.strerror}") from None

    def _inflated(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Decompress members, the last one as far as it goes."""
        member, started = zlib.decompressobj(wbits=_GZIP), False
        for piece in pieces:
            while piece:
                try:
                    yield member.decompress(piece)
                except zlib.error:
                    self._is_torn = True
                    return
                piece, started = member.unused_data, not member.eof
                if member.eof:
                    member = zlib.decompressobj(wbits=_GZIP)
        self._is_torn = started


def _is_result(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("index", 0), int):
        return False
    error = record.get("error")
    if error is not None:
        return isinstance(error, dict) and isinstance(error.get("line"), int)
    id = record.get("custom_id", record.get("id"))
    return isinstance(id, str | int) and ("text" in record or "response" in record)
