"""Files of results: written whole or not at all."""

from __future__ import annotations

import csv
import errno
import importlib.util
import io
import os
from pathlib import Path
from typing import Any

from qinfer.errors import QInferError

_OF_ALL_ROWS = ("model", "device", "threads", "read_limit_bytes_per_s")


def check_target(path: Path) -> None:
    """Refuse a file that could not be written, before what goes into it takes long.

    Raises:
        QInferError: It is a directory, or its own is missing or closed to us.
    """
    try:
        directory = path.resolve().parent
        is_special = path.exists() and not path.is_file()
        if not directory.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path if is_special else directory, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _cannot_write(path, error) from None


def require_matplotlib() -> None:
    """Refuse to plot where that cannot be done.

    Raises:
        QInferError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise QInferError(
            "--plot needs matplotlib, which is not installed",
            hint="Install it: pip install 'qinfer[plot]', or pip install matplotlib.",
        )


def write_file(path: Path, data: bytes) -> None:
    """Write a file, or replace one: it has its old content until the new one is complete.

    Raises:
        QInferError: It cannot be written.
    """
    target = path.resolve()
    part = target.with_name(f"{target.name}.part")
    try:
        if target.exists() and not target.is_file():  # a device or a pipe
            target.write_bytes(data)
            return
        part.write_bytes(data)
        part.replace(target)
    except OSError as error:
        if part.is_file():
            part.unlink()
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> QInferError:
    return QInferError(
        f"{path} cannot be written: {error.strerror}",
        hint="Name a file in a directory that you can write to.",
    )


def csv_text(report: dict[str, Any]) -> str:
    """The results of a benchmark, a line each, with what they depend on."""
    common = {name: report[name] for name in _OF_ALL_ROWS}
    rows = [common | figures for figures in report["results"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
