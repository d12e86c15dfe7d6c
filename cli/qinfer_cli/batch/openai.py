"""Lines of OpenAI's batch files, and the records that answer them.

A request is `{"custom_id", "method": "POST", "url", "body"}` with the URL `/v1/chat/completions` or
`/v1/completions`; an answer is `{"id", "custom_id", "response": {"status_code", "request_id",
"body"}, "error": null}`, or has no response and `"error": {"code", "message", "line"}`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from qinfer.errors import PromptError, QInferError
from qinfer_cli.batch.answer import Choice
from qinfer_cli.batch.digests import digest
from qinfer_cli.batch.request import (
    MAX_CHOICES,
    SAMPLING_FIELDS,
    Form,
    Message,
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

_URLS: dict[str, Form] = {
    "/v1/chat/completions": "chat.completion",
    "/v1/completions": "text_completion",
}
_LIMITS = ("max_completion_tokens", "max_tokens")
_USED = ("messages", "prompt", "model", *_LIMITS, "stop", "n", *SAMPLING_FIELDS)
# Said to no effect: the values that change nothing, or None where any value does not.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "user": None,
    "metadata": None,
    "store": None,
    "service_tier": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "parallel_tool_calls": None,
    "stream": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "echo": (False,),
    "best_of": (1,),
}


def is_openai(record: Mapping[str, Any]) -> bool:
    """Whether a line is meant as one of OpenAI's."""
    return "custom_id" in record or "body" in record


def line_id(record: Mapping[str, Any]) -> str:
    """The `custom_id` of a line.

    Raises:
        PromptError: It has none.
    """
    return as_text(record.get("custom_id"), "custom_id")


def parse(record: Mapping[str, Any], line: int) -> Request:
    """Make a request of a line.

    Raises:
        PromptError: It is none, or asks for what qinfer cannot do; names the field.
    """
    refuse_unknown(record, ("custom_id", "method", "url", "body"))
    if record.get("method", "POST") != "POST":
        raise PromptError(f'"method" must be POST, got {shown(record["method"])}')
    url = record.get("url")
    form = _URLS.get(url) if isinstance(url, str) else None
    if form is None:
        raise PromptError(f'"url" must be {" or ".join(_URLS)}, got {shown(url)}')
    if not isinstance(record.get("body"), dict):
        raise PromptError(f'"body" must be an object, got {shown(record.get("body"))}')
    body = _with_effect(given(record["body"]))
    limits = [as_count(body[name], name) for name in _LIMITS if name in body]
    return Request(
        line=line,
        id=line_id(record),
        prompt=_prompt(body, form),
        sampling=as_sampling(body),
        max_tokens=min(limits, default=None),
        stop=as_stop(body["stop"]) if "stop" in body else None,
        n=as_count(body.get("n", 1), "n", MAX_CHOICES),
        form=form,
        model=as_text(body["model"], "model") if "model" in body else None,
    )


def _with_effect(body: dict[str, Any]) -> dict[str, Any]:
    """Leave out what changes nothing.

    Raises:
        PromptError: A field is not known, or has a value that cannot be honoured.
    """
    for name, value in body.items():
        harmless = _WITHOUT_EFFECT.get(name, ())
        if name in _USED or harmless is None:
            continue
        if name not in _WITHOUT_EFFECT:
            raise PromptError(f"unknown field {shown(name)} in the body")
        if value not in harmless:
            raise PromptError(f'"{name}" cannot be {shown(value)}: qinfer does not have it')
    return {name: value for name, value in body.items() if name in _USED}


def _prompt(body: Mapping[str, Any], form: Form) -> str | list[Message]:
    name, other = ("messages", "prompt") if form == "chat.completion" else ("prompt", "messages")
    if name not in body or other in body:
        raise PromptError(f'the body needs "{name}", and no "{other}", for this url')
    if name == "messages":
        return as_messages(body[name])
    prompt = body[name]
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return as_text(prompt, name)


def result(request: Request, choices: Sequence[Choice], *, model: str) -> dict[str, Any]:
    """The record of a request, all of its choices together."""
    key = digest(request.id).hex()
    chat = request.form == "chat.completion"
    prompt_tokens = choices[0].prompt_tokens
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{key}",
        "object": request.form,
        "created": int(time.time()),
        "model": request.model or model,
        "choices": [_choice(choice, index, chat=chat) for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    return {
        "id": f"batch_req_{key}",
        "custom_id": request.id,
        "response": {"status_code": 200, "request_id": f"req_{key}", "body": body},
        "error": None,
    }


def _choice(choice: Choice, index: int, *, chat: bool) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": choice.text}}
        if chat
        else {"text": choice.text}
    )
    return {"index": index, **said, "logprobs": None, "finish_reason": choice.finish_reason}


def failure(id: str | int, line: int, error: QInferError) -> dict[str, Any]:
    """The record of a request that could not be answered."""
    return {
        "id": f"batch_req_{digest(id).hex()}",
        "custom_id": id if isinstance(id, str) else None,
        "response": None,
        "error": {"code": type(error).__name__, "message": str(error), "line": line},
    }
