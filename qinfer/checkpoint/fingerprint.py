"""Telling whether a model directory is the one it was, without reading its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from qinfer.checkpoint.record import RECORD_NAME
from qinfer.errors import CheckpointError

_WEIGHTS = (".safetensors",)
_READ = (".json", ".jinja", ".txt", ".model")


def fingerprint(directory: Path) -> str:
    """A digest of what a model's answers depend on.

    Configuration, tokenizer and template are read; of weights the name and size count, and the time
    of the last change too, unless `qinfer.json` has their digests: a converted model is the same
    wherever it is copied.

    Raises:
        CheckpointError: A file cannot be read.
    """
    found = hashlib.sha256()
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file())
        recorded = any(path.name == RECORD_NAME for path in files)
        for path in files:
            if path.suffix in _READ:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            elif path.suffix in _WEIGHTS:
                status = path.stat()
                content = f"{status.st_size}" + ("" if recorded else f" {status.st_mtime_ns}")
            else:
                continue
            found.update(f"{path.name}\0{content}\0".encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from None
    return found.hexdigest()
