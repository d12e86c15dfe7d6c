"""From what a user typed to a model directory: a local path, or a download from the hub."""

from __future__ import annotations

from pathlib import Path

from qinfer.checkpoint import hub
from qinfer.checkpoint.record import RECORD_NAME
from qinfer.errors import CheckpointError

PROGRESS_NAME = "qinfer-progress.json"
"""In a directory that a conversion is still writing."""


def existing_path(text: str) -> Path | None:
    """The path that a text names, if there is something.

    Raises:
        CheckpointError: It cannot be a path, or may not be looked at.
    """
    path = Path(text)
    try:
        return path if path.exists() else None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        shown = text if len(text) < 100 else f"{text[:80]}…"
        raise CheckpointError(
            f"{shown} cannot be opened: {reason}",
            hint="Check the name; it is a path, or a hub id such as org/name.",
        ) from None


def find_model(text: str, *, progress: bool = True) -> Path:
    """The directory of a model that can be run.

    Args:
        text: A directory, or a hub id such as `org/name[@revision]`.
        progress: Show download bars on stderr.

    Raises:
        CheckpointError: There is no such model, or it has to be converted first.
    """
    path = existing_path(text)
    if path is not None and path.is_dir():
        if (path / PROGRESS_NAME).is_file() and not (path / RECORD_NAME).is_file():
            raise CheckpointError(
                f"{text} is a conversion that was interrupted",
                hint="Run the same qinfer convert command again; it continues.",
            )
        return path
    ref = hub.parse(text)
    if text.lower().endswith(".gguf") or (ref is not None and ref.filename is not None):
        raise CheckpointError(
            f"{text} is a GGUF file, which is converted before it is run",
            hint=f"qinfer convert {text} OUT",
        )
    if path is not None:
        raise CheckpointError(
            f"{text} is not a directory", hint="Name the directory that holds config.json."
        )
    if ref is None:
        raise CheckpointError(
            f"{text} does not exist",
            hint="Name a converted model's directory, or a hub id such as org/name.",
        )
    return hub.download_checkpoint(ref, progress=progress)
