"""`qinfer.json`: what a converted model says of itself beside its `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qinfer.config import read_json

RECORD_NAME = "qinfer.json"
"""In a converted model; written last."""


def read_record(directory: Path) -> dict[str, Any] | None:
    """The record of a converted model; None of any other directory.

    Raises:
        CheckpointError: It is damaged.
    """
    path = directory / RECORD_NAME
    return dict(read_json(path)) if path.is_file() else None
