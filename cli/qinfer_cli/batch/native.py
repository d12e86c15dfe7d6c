"""qinfer's own lines: `{"id", "prompt" | "messages", …}`, and the records that answer them.

A choice is `{"id", "index", "text", "finish_reason", "prompt_tokens", "completion_tokens",
"seed"}`, a failure `{"id", "index", "error": {"type", "message", "line"}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qinfer.errors import PromptError, QInferError
from qinfer_cli.batch.answer import Choice
from qinfer_cli.batch.request import (
    MAX_CHOICES,
    SAMPLING_FIELDS,
    Request,
    as_count,
    as_messages,
    as_sampling,
    as_stop,
    as_text,
    given,
    refuse_unknown,
    shown,
)

_FIELDS = ("id", "prompt", "messages", "system", "max_tokens", "stop", "n", *SAMPLING_FIELDS)


def line_id(record: Mapping[str, Any], line: int) -> str | int:
    """The id of a line, its number if it has none.

    Raises:
        PromptError: It is neither text nor a whole number.
    """
    value = record.get("id")
    if value is None:
        return line
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise PromptError(f'"id" must be text or an integer, got {shown(value)}')
    return value


def parse(record: Mapping[str, Any], line: int) -> Request:
    """Make a request of a line.

    Raises:
        PromptError: It is none; names the field.
    """
    record = given(record)
    refuse_unknown(record, _FIELDS)
    if ("prompt" in record) == ("messages" in record):
        raise PromptError('the line needs a "prompt" text or "messages", one of them')
    messages = as_messages(record["messages"]) if "messages" in record else None
    if messages is not None and "system" in record:
        raise PromptError('"system" goes with "prompt"; put it into "messages"')
    return Request(
        line=line,
        id=line_id(record, line),
        prompt=messages if messages is not None else as_text(record["prompt"], "prompt"),
        system=as_text(record["system"], "system") if "system" in record else None,
        sampling=as_sampling(record),
        max_tokens=as_count(record["max_tokens"], "max_tokens") if "max_tokens" in record else None,
        stop=as_stop(record["stop"]) if "stop" in record else None,
        n=as_count(record.get("n", 1), "n", MAX_CHOICES),
    )


def result(request: Request, index: int, choice: Choice) -> dict[str, Any]:
    """The record of a choice."""
    return {
        "id": request.id,
        "index": index,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "prompt_tokens": choice.prompt_tokens,
        "completion_tokens": choice.completion_tokens,
        "seed": choice.seed,
    }


def failure(id: str | int, index: int, line: int, error: QInferError) -> dict[str, Any]:
    """The record of a choice, or of a line, that could not be answered."""
    details = {"type": type(error).__name__, "message": str(error), "line": line}
    return {"id": id, "index": index, "error": details}
