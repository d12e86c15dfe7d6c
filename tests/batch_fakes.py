"""A model that answers at once, without torch: batch tests are about files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qinfer.errors import PromptError
from qinfer.sampling import SamplingParams
from qinfer_cli.batch.run import run_batch

CONTEXT_TOKENS = 100


class FakeCompletion:
    def __init__(self, text: str, seed: int) -> None:
        self._pieces = [text[:3], text[3:]]
        self.error: Exception | None = None
        self.finish_reason = "stop"
        self.seed = seed
        self.usage = SimpleNamespace(
            prompt_tokens=3, completion_tokens=5, ttft_s=0.01, decode_s=0.02
        )

    def __iter__(self):
        yield from self._pieces


class FakeModel:
    """Answers `PROMPT` with `<PROMPT>` and the seed; `calls` has all it was asked for."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text("{}")
        self.directory = directory
        self.generation_config: dict[str, Any] = {}
        self.chat_template = "chat"
        self.engine = SimpleNamespace(context_tokens=CONTEXT_TOKENS)
        self.calls: list[dict[str, Any]] = []
        self.before_answer = lambda prompt: None

    def prompt_ids(self, prompt, *, system=None, raw=False):
        if prompt == "":
            raise PromptError("the prompt is empty")
        self._prompt, self._system, self._raw = prompt, system, raw
        return [1, 2, 3]

    def complete(self, prompt_ids, params: SamplingParams, *, max_tokens, stop, continues):
        self.calls.append(
            {
                "prompt": self._prompt,
                "system": self._system,
                "raw": self._raw,
                "params": params,
                "max_tokens": max_tokens,
                "stop": tuple(stop),
                "continues": continues,
            }
        )
        self.before_answer(self._prompt)
        seed = 77 if params.seed is None else params.seed
        return FakeCompletion(f"<{self._prompt}> {seed}", seed)


def options(source: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Those of `qinfer generate MODEL -i SOURCE -o OUT -q`."""
    return {
        "model": "m",
        "input_file": Path(source),
        "output_file": Path(out),
        "sampling": {},
        "preset": None,
        "system_prompt": None,
        "raw": False,
        "max_tokens": 9,
        "stop": (),
        "ctx_size": None,
        "truncate_prompt": None,
        "resume": False,
        "retry_errors": False,
        "force": False,
        "as_json": False,
        "quiet": True,
    } | changes


def run(model: Any, source: Path, out: Path, **changes: Any) -> None:
    run_batch(model, options(source, out, **changes), resume_command="RESUME")


def records(data: bytes) -> list[dict[str, Any]]:
    """Every line is one JSON object, and the last one is ended too."""
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]
