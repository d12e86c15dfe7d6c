"""How a run starts: its output anew, or continued where it is still the same run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from qinfer.errors import QInferError
from qinfer_cli.batch.lines import Input
from qinfer_cli.batch.output import FileOutput, StreamOutput, is_stream
from qinfer_cli.batch.previous import Previous, Results
from qinfer_cli.batch.sidecar import Sidecar, changes, load, sidecar_path

_STARTS_ANEW = "Name another output, or start anew with --force."


def open_output(
    options: dict[str, Any],
    source: Input,
    settings: dict[str, Any],
    held: Callable[[], AbstractContextManager[None]],
) -> tuple[FileOutput | StreamOutput, Previous]:
    """Make the output ready to be appended to, and its side file true of it.

    Args:
        options: Of `qinfer generate`.
        source: The input; reading it is made to extend the side file first.
        settings: What the answers depend on, besides the input.
        held: Puts signals off, while the side file is written.

    Returns:
        The output, and what an earlier run has left in it.

    Raises:
        QInferError: It cannot be written, is in the way, or cannot be continued.
    """
    if is_stream(options["output_file"]):
        if options["resume"]:
            raise QInferError(
                f"{options['output_file']} cannot be resumed",
                hint="Name a file with -o, and give --resume from then on.",
            )
        return StreamOutput(options["output_file"]), Previous()
    path = _behind_link(options["output_file"])
    output = FileOutput(path)
    side = Sidecar(sidecar_path(path), settings, source.fd)
    try:
        previous = _prepare(output, path, options, source, side)
        side.save()
    except BaseException:
        output.close()
        raise

    def cover(end: int) -> None:
        with held():
            side.cover(end)

    source.before_read = cover
    return output, previous


def _behind_link(path: Path) -> Path:
    """The output's path; behind a symbolic link, the file it stands for."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _prepare(
    output: FileOutput, path: Path, options: dict[str, Any], source: Input, side: Sidecar
) -> Previous:
    """Make the file end behind its last whole record, or empty."""
    if output.is_same_file(source.fd):
        raise QInferError(f"{path} is both input and output", hint="Name another output.")
    if output.size_bytes and not options["resume"]:
        if not options["force"]:
            raise QInferError(
                f"{path} exists already",
                hint="Continue it with --resume, name another output, or replace it with --force.",
            )
        output.cut(0)
    if not output.size_bytes:
        return Previous()
    other_input = _is_other_input(side, path, source, forced=options["force"])
    previous, good_bytes = Results(path).repair(drop_errors=other_input or options["retry_errors"])
    if good_bytes is not None:
        output.cut(good_bytes)
    output.follow()
    return previous


def _is_other_input(side: Sidecar, path: Path, source: Input, *, forced: bool) -> bool:
    """Refuse to continue what was begun otherwise, unless forced.

    Returns:
        Whether the input is another: then line numbers mean something else now.
    """
    record = load(sidecar_path(path))
    if record is None:
        if forced:
            return False
        raise QInferError(
            f"{path} has no {sidecar_path(path).name} beside it that says how it was begun",
            hint=f"{_STARTS_ANEW} --resume --force continues it all the same.",
        )
    if (differing := changes(record["settings"], side.settings)) and not forced:
        raise QInferError(
            f"{path} was begun with other settings: {'; '.join(differing)}",
            hint="Use the same again, name another output, or continue all the same "
            "with --resume --force.",
        )
    same_input = side.input_is_as_before(record["input"])
    if not same_input and not forced:
        raise QInferError(
            f"{source.name} has changed since {path} was begun",
            hint="Name another output, or continue all the same with --resume --force.",
        )
    return not same_input
