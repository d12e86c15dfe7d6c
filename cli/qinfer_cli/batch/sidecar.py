"""What a run was started with, beside its results: `OUT.qinfer.json`.

One JSON object:

    {"format": "qinfer-batch", "version": 1,
     "settings": {…},                    what the answers depend on, model fingerprint included
     "input": {"bytes", "sha256", "ended"} | null}

`input` vouches for a beginning of the input file: its length, its digest, and whether it was all of
the file. It is extended and saved before a line beyond it is read, so every line that has been
answered is covered, whenever the run was killed. It is null where the input was a pipe.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from qinfer.errors import QInferError
from qinfer_cli.batch.output import replace_file

_STEP_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_HEAD = {"format": "qinfer-batch", "version": 1}


def sidecar_path(output: Path) -> Path:
    """Where the side file of an output is."""
    return output.with_name(output.name + ".qinfer.json")


def load(path: Path) -> dict[str, Any] | None:
    """Read a side file; None if there is none that can be understood."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise QInferError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        return None
    return record if _is_valid(record) else None


def _is_valid(record: Any) -> bool:
    if not isinstance(record, dict) or {k: record.get(k) for k in _HEAD} != _HEAD:
        return False
    covered = record.get("input")
    return isinstance(record.get("settings"), dict) and (
        covered is None
        or (
            isinstance(covered, dict)
            and isinstance(covered.get("bytes"), int)
            and covered.keys() == {"bytes", "sha256", "ended"}
        )
    )


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The settings that differ, as `name: before → now`."""
    names = sorted({*before, *now})
    return [
        f"{name}: {json.dumps(before.get(name))} → {json.dumps(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    ]


class Sidecar:
    """Keeps the side file of a run.

    Args:
        path: Of the side file.
        settings: What the answers depend on.
        fd: Of the input file; None of a pipe.

    Attributes:
        settings: As given.
    """

    def __init__(self, path: Path, settings: dict[str, Any], fd: int | None) -> None:
        self._path = path
        self.settings = settings
        self._fd = fd
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._ended = False

    def input_is_as_before(self, record: dict[str, Any] | None) -> bool:
        """Whether the input still begins with what an earlier run has covered."""
        if self._fd is None or record is None:
            return True
        self._extend(int(record["bytes"]))
        if (self._bytes, self._hash.hexdigest()) != (record["bytes"], record["sha256"]):
            return False
        if not record["ended"] or not self._bytes:
            return True
        around = os.pread(self._fd, 2, self._bytes - 1)  # text behind an open last line changes it
        return len(around) < 2 or around[:1] == b"\n" or around[1:] in b"\r\n"

    def save(self) -> None:
        """Write the side file, unless it is as it should be."""
        covered = {"bytes": self._bytes, "sha256": self._hash.hexdigest(), "ended": self._ended}
        known = None if self._fd is None else covered
        record = {**_HEAD, "settings": self.settings, "input": known}
        data = json.dumps(record, indent=2).encode() + b"\n"
        if not (self._path.is_file() and self._path.read_bytes() == data):
            replace_file(self._path, data)

    def cover(self, end: int) -> None:
        """Vouch for the input up to an offset at least, before it is used."""
        if end > self._bytes:
            before = (self._bytes, self._ended)
            self._extend(max(end, self._bytes + _STEP_BYTES))
            if (self._bytes, self._ended) != before:
                self.save()

    def _extend(self, end: int) -> None:
        assert self._fd is not None
        while self._bytes < end:
            piece = os.pread(self._fd, min(_PIECE_BYTES, end - self._bytes), self._bytes)
            if not piece:
                break
            self._hash.update(piece)
            self._bytes += len(piece)
        self._ended = self._bytes >= os.fstat(self._fd).st_size
