"""From the bytes of a line to a request. Never raises: a line that is no request is a `BadLine`."""

from __future__ import annotations

import json
from typing import Any

from qinfer.errors import PromptError
from qinfer_cli.batch import native, openai
from qinfer_cli.batch.lines import MAX_LINE_BYTES, Line
from qinfer_cli.batch.request import BadLine, Request


class Parser:
    """Makes requests of lines. A line that says nothing of its form has that of the one before."""

    def __init__(self) -> None:
        self._openai = False

    def __call__(self, line: Line, *, jsonl: bool) -> Request | BadLine:
        """Make a request of a line."""
        id: str | int = line.number
        try:
            text = _decoded(line)
            if not jsonl:
                return Request(line=line.number, id=line.number, prompt=text)
            record = _object(text)
            self._openai = openai.is_openai(record)
            if self._openai:
                id = openai.line_id(record)
                return openai.parse(record, line.number)
            id = native.line_id(record, line.number)
            return native.parse(record, line.number)
        except PromptError as error:
            return BadLine(line.number, id, error, self._openai)


def _decoded(line: Line) -> str:
    if line.data is None:
        raise PromptError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        return line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"the line is not UTF-8 text: byte {error.start} is invalid") from None


def _object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"the line is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise PromptError('the line is not a JSON object with a "prompt"')
    return record
