"""Opening a GGUF model that may be split over several files.

Parts are named `NAME-00001-of-00003.gguf`; each has a header of its own, with the key
`split.count`. The first one carries the metadata, every one the table of its own tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from qinfer.errors import CheckpointError
from qinfer_converters.gguf.reader import Header, read_header

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def open_gguf(path: Path) -> Header:
    """Parse the headers of all parts of a model and join them.

    Args:
        path: The file; of a split model, any of its parts.

    Raises:
        CheckpointError: A file is missing or malformed, or the parts do not belong together.
    """
    header = read_header(path)
    count = header.metadata.integer("split.count") or 1
    if count == 1:
        return header
    name = _PART.fullmatch(path.name)
    if not name or int(name[3]) != count:
        raise CheckpointError(
            f"{path}: one of {count} parts, but it is not named …-00001-of-{count:05}.gguf",
            hint="Give the parts their original names, or merge them with gguf-split --merge.",
        )
    paths = [path.with_name(f"{name[1]}-{part + 1:05}-of-{name[3]}.gguf") for part in range(count)]
    parts = [read_header(part) for part in paths]
    for index, part in enumerate(parts):
        if part.metadata.integer("split.no") != index:
            raise CheckpointError(f"{paths[index]}: not part {index + 1} of this model")
    return _join(parts)


def _join(parts: list[Header]) -> Header:
    metadata = parts[0].metadata
    tensors = {name: info for part in parts for name, info in part.tensors.items()}
    expected = metadata.integer("split.tensors.count")
    total = sum(len(part.tensors) for part in parts)
    if total != len(tensors) or expected not in (None, total):
        raise CheckpointError(
            f"{metadata.path}: its {len(parts)} parts hold {len(tensors)} tensors, "
            f"expected {total if expected is None else expected}",
            hint="The parts are from different models; download them again.",
        )
    return Header(metadata, tensors, "+".join(part.fingerprint for part in parts))
