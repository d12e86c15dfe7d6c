"""`qinfer generate -i IN -o OUT`: a file of prompts, one after another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import click

from qinfer.errors import NumericsError, PromptError, QInferError
from qinfer_cli.generate import fit_prompt, merged_params

if TYPE_CHECKING:
    from qinfer.generation import LanguageModel
    from qinfer.sampling import SamplingParams

SOME_FAILED = 3
_FIELDS = ("id", "prompt")


def run_batch(model: LanguageModel, options: dict[str, Any]) -> None:
    """Answer every prompt of the input file; a bad line becomes an error record.

    Each result is one JSON object on a line of its own, written and flushed when it is ready:
    `id` (the input's, else the line number), `text`, `finish_reason`, `prompt_tokens` and
    `completion_tokens`, or `id` and `error`.

    Raises:
        QInferError: A file cannot be read or written.
    """
    from tqdm import tqdm

    source, out = options["input_file"], options["output_file"]
    params = merged_params(options, model)
    failed = 0
    with (
        _open_input(source) as lines,
        _open_output(out) as results,
        tqdm(_nonempty(lines), unit=" prompts", disable=options["quiet"] or None) as bar,
    ):
        for number, line in bar:
            record = _answer(model, options, params, number, line)
            failed += "error" in record
            try:
                results.write(json.dumps(record, ensure_ascii=False) + "\n")
                results.flush()
            except OSError as error:
                raise QInferError(f"{out} cannot be written: {error.strerror}") from None
    if failed:
        click.echo(f"{failed} prompts failed; see their error records in {out}.", err=True)
        click.get_current_context().exit(SOME_FAILED)


def _open_input(path: Path) -> BinaryIO:
    if path.suffix not in (".txt", ".jsonl"):
        raise QInferError(
            f"{path}: prompts come as .txt (one a line) or .jsonl",
            hint="Rename the file, or use -f for one prompt of many lines.",
        )
    try:
        return path.open("rb")
    except OSError as error:
        raise QInferError(f"{path} cannot be read: {error.strerror}") from None


def _open_output(path: Path) -> TextIO:
    try:  # of the characters that JSON can spell and UTF-8 cannot, the JSON spelling is left
        return path.open("x", encoding="utf-8", errors="backslashreplace")
    except FileExistsError:
        raise QInferError(
            f"{path} exists already", hint="Name another output, or remove it first."
        ) from None
    except OSError as error:
        raise QInferError(f"{path} cannot be written: {error.strerror}") from None


def _nonempty(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that have text, numbered from 1, without their ends."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def _answer(
    model: LanguageModel,
    options: dict[str, Any],
    params: SamplingParams,
    number: int,
    line: bytes,
) -> dict[str, Any]:
    """The result record of one line."""
    record: dict[str, Any] = {"id": number}
    try:
        request = _parse(line, jsonl=options["input_file"].suffix == ".jsonl")
        record["id"] = request.get("id", number)
        ids = model.prompt_ids(
            request["prompt"], system=options["system_prompt"], raw=options["raw"]
        )
        completion = model.complete(
            fit_prompt(ids, model, options),
            params,
            max_tokens=options["max_tokens"],
            stop=options["stop"],
            continues=options["raw"] or model.chat_template is None,
        )
        text = "".join(completion)
        if completion.error is not None:
            raise completion.error
        usage = completion.usage
    except (PromptError, NumericsError) as error:
        return record | {"error": {"type": type(error).__name__, "message": f"{error}"}}
    return record | {
        "text": text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def _parse(line: bytes, *, jsonl: bool) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise PromptError("the line is not UTF-8 text") from None
    if not jsonl:
        return {"prompt": text}
    try:
        request = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"the line is not JSON: {error}") from None
    if not isinstance(request, dict) or not isinstance(request.get("prompt"), str):
        raise PromptError('the line has no "prompt" text')
    for name in request:
        if name not in _FIELDS:
            raise PromptError(f"unknown field {name!r}; known: {', '.join(_FIELDS)}")
    return request
