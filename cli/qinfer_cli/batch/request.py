"""What a line of the input asks for, and the checks that every form of it shares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from qinfer.errors import PromptError
from qinfer.sampling import SamplingParams

MAX_CHOICES = 128
SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))

_MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id", "reasoning_content")
_SHOWN_CHARACTERS = 60

Form = Literal["native", "chat.completion", "text_completion"]
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Request:
    """One line, checked. None is what the command line says.

    Attributes:
        line: Its number, from 1.
        id: The line's own, else its number.
        prompt: A text, or the messages of a conversation.
        system: System message beside a `prompt`.
        sampling: Fields of `SamplingParams` that the line sets.
        max_tokens: Bound on new tokens.
        stop: Texts that end it.
        n: How many choices.
        form: How it is answered: natively, or as an object of OpenAI's.
        model: What an OpenAI request calls the model; only echoed.
    """

    line: int
    id: str | int
    prompt: str | list[Message]
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    n: int = 1
    form: Form = "native"
    model: str | None = None

    @property
    def is_openai(self) -> bool:
        """Whether the answer takes OpenAI's form: one record for all choices."""
        return self.form != "native"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request.

    Attributes:
        line: Its number, from 1.
        id: The line's own where that can be told, else its number.
        error: Why.
        is_openai: Whether the answer takes OpenAI's form.
    """

    line: int
    id: str | int
    error: PromptError
    is_openai: bool


def shown(value: object) -> str:
    """A value of the input for a message, cut if it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def given(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value: null is the same as absent."""
    return {name: value for name, value in record.items() if value is not None}


def as_text(value: object, name: str) -> str:
    """A text, or PromptError."""
    if not isinstance(value, str):
        raise PromptError(f'"{name}" must be text, got {shown(value)}')
    return value


def as_count(value: object, name: str, limit: int | None = None) -> int:
    """A whole number from 1, or PromptError."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not ok or (limit is not None and value > limit):  # type: ignore[operator]
        bounds = "of at least 1" if limit is None else f"from 1 to {limit}"
        raise PromptError(f'"{name}" must be an integer {bounds}, got {shown(value)}')
    return value  # type: ignore[return-value]


def as_stop(value: object) -> tuple[str, ...]:
    """One stop text or a list of them, or PromptError."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text for text in texts):
        raise PromptError(f'"stop" must be a text or a list of texts, got {shown(value)}')
    return tuple(texts)


def as_sampling(record: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a record, or PromptError naming the one that is wrong."""
    found: dict[str, Any] = {name: record[name] for name in SAMPLING_FIELDS if name in record}
    for name, value in found.items():
        if not isinstance(value, int | float):
            raise PromptError(f'"{name}" must be a number, got {shown(value)}')
        try:
            SamplingParams(**{name: found[name]})
        except ValueError as error:
            raise PromptError(str(error)) from None
    return found


def as_messages(value: object) -> list[Message]:
    """Messages with text contents (a list of text parts is joined), or PromptError.

    Whether roles and their order are right is for the chat template to say.
    """
    if not isinstance(value, list) or not value:
        raise PromptError(f'"messages" must be a list of messages, got {shown(value)}')
    return [_as_message(message, number) for number, message in enumerate(value, 1)]


def _as_message(value: object, number: int) -> Message:
    if not isinstance(value, dict):
        raise PromptError(f"message {number} must be an object, got {shown(value)}")
    message = given(value)
    for name in message:
        if name not in _MESSAGE_FIELDS:
            raise PromptError(
                f"message {number}: unknown field {shown(name)}; "
                f"known: {', '.join(_MESSAGE_FIELDS)}"
            )
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_as_part(part, number) for part in message["content"])
    for name in ("role", "content"):
        if name not in message:
            raise PromptError(f'message {number} has no "{name}"')
    return {name: as_text(v, f"{name} of message {number}") for name, v in message.items()}


def _as_part(part: object, number: int) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise PromptError(f"message {number} has a part that is not text: {shown(part)}")
    return as_text(part.get("text"), f"text of message {number}")


def refuse_unknown(record: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise PromptError naming the first field that is not known."""
    for name in record:
        if name not in known:
            raise PromptError(f"unknown field {shown(name)}; known: {', '.join(known)}")
