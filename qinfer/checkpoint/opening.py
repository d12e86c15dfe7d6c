"""From what a user typed to a model directory: a local path, or a download from the hub."""

from __future__ import annotations

from pathlib import Path

from qinfer.checkpoint import hub
from qinfer.errors import CheckpointError


def find_model(text: str, *, progress: bool = True) -> Path:
    """The directory of a model that can be run.

    Args:
        text: A directory, or a hub id such as `org/name[@revision]`.
        progress: Show download bars on stderr.

    Raises:
        CheckpointError: There is no such model, or it has to be converted first.
    """
    path = Path(text)
    if path.is_dir():
        return path
    ref = hub.parse(text)
    if path.suffix.lower() == ".gguf" or (ref is not None and ref.filename is not None):
        raise CheckpointError(
            f"{text} is a GGUF file, which is converted before it is run",
            hint=f"qinfer convert {text} OUT",
        )
    if path.exists():
        raise CheckpointError(
            f"{text} is not a directory", hint="Name the directory that holds config.json."
        )
    if ref is None:
        raise CheckpointError(
            f"{text} does not exist",
            hint="Name a converted model's directory, or a hub id such as org/name.",
        )
    return hub.download_checkpoint(ref, progress=progress)
