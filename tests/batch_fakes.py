"""A model without torch, which answers when it is told to: batch tests are about files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qinfer.errors import NumericsError, PromptError, QInferError
from qinfer.sampling import SamplingParams
from qinfer_cli.batch.run import run_batch

CONTEXT_TOKENS = 100
PROMPT_TOKENS, COMPLETION_TOKENS, REUSED_TOKENS = 3, 5, 1


class Killed(BaseException):
    """The process is gone: nothing may handle this."""


class FakeCompletion:
    """Ends after a number of steps."""

    def __init__(self, prompt: str, seed: int, steps: int) -> None:
        self.prompt = prompt
        self.seed = seed
        self.steps_left = steps
        self.started = False
        self.text = ""
        self.sequence = SimpleNamespace(prompt_tokens=PROMPT_TOKENS, new_tokens=0)
        self.error: QInferError | None = None
        self.finish_reason: str | None = None

    def advance(self) -> None:
        self.sequence.new_tokens += 1
        self.steps_left -= 1
        if self.steps_left == 0:
            self.text = f"<{self.prompt}> {self.seed}"
            self.finish_reason = "stop"

    def fail(self, error: QInferError) -> None:
        self.error, self.finish_reason = error, "error"

    @property
    def usage(self):
        assert self.finish_reason is not None
        return SimpleNamespace(
            prompt_tokens=PROMPT_TOKENS,
            completion_tokens=COMPLETION_TOKENS,
            reused_tokens=REUSED_TOKENS,
            ttft_s=0.01,
            decode_s=0.02,
        )


class FakeModel:
    """Answers `PROMPT` with `<PROMPT>` and the seed.

    Without an `order` a completion takes one step; with one, which is a seed, up to six, and those
    of a step end in any order.

    Attributes:
        steps_of: How many steps a prompt takes.
        calls: All it was asked for.
        cancelled: The completions that were.
        before_answer: Called with a prompt when it starts to run; may raise its failure.
        fails: Whether the completion of a prompt and a seed comes to nothing in its last step.
        steps: How often it was stepped.
        dies_at: In which step it raises `Killed`.
        most_in_flight: Queued or running at once.
    """

    def __init__(
        self, directory: Path, *, max_sequences: int = 4, order: int | None = None
    ) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text("{}")
        self.directory = directory
        self.generation_config: dict[str, Any] = {}
        self.chat_template = "chat"
        self.engine = SimpleNamespace(context_tokens=CONTEXT_TOKENS)
        self.kv_format = "k16v16"
        self.max_sequences = max_sequences
        self.calls: list[dict[str, Any]] = []
        self.cancelled: list[FakeCompletion] = []
        self.before_answer = lambda prompt: None
        self.fails = lambda prompt, seed: False
        self._order = None if order is None else random.Random(order)
        self.steps_of = lambda prompt: self._order.randint(1, 6) if self._order else 1
        self.steps = 0
        self.dies_at: int | None = None
        self.most_in_flight = 0
        self._queue: list[FakeCompletion] = []

    def prompt_ids(self, prompt, *, system=None, raw=False):
        if prompt == "":
            raise PromptError("the prompt is empty")
        self._prompt, self._system, self._raw = prompt, system, raw
        return [1] * PROMPT_TOKENS

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
        seed = 77 if params.seed is None else params.seed
        completion = FakeCompletion(self._prompt, seed, self.steps_of(self._prompt))
        self._queue.append(completion)
        self.most_in_flight = max(self.most_in_flight, len(self._queue))
        return completion

    def step(self):
        self.steps += 1
        if self.steps == self.dies_at:
            raise Killed
        running = self._queue[: self.max_sequences]
        for completion in running:
            self._advance(completion)
        self._queue = [c for c in self._queue if c.finish_reason is None]
        ended = [c for c in running if c.finish_reason is not None]
        if self._order:
            self._order.shuffle(ended)
        return ended

    def _advance(self, completion):
        try:
            if not completion.started:
                completion.started = True
                self.before_answer(completion.prompt)
            completion.advance()
            if completion.finish_reason and self.fails(completion.prompt, completion.seed):
                raise NumericsError("NaN in layer 3")
        except QInferError as error:
            completion.fail(error)

    def cancel(self, completion):
        self._queue.remove(completion)  # raises if it has ended
        self.cancelled.append(completion)

    @property
    def stats(self):
        running = min(len(self._queue), self.max_sequences)
        return SimpleNamespace(
            running=running,
            waiting=len(self._queue) - running,
            kv_used=running / self.max_sequences,
            reused_tokens=0,
            preemptions=2,
        )


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
        "ordered": False,
        "context_policy": "stop",
        "as_json": False,
        "quiet": True,
    } | changes


def run(model: Any, source: Path, out: Path, **changes: Any) -> None:
    run_batch(model, options(source, out, **changes), resume_command="RESUME")


def records(data: bytes) -> list[dict[str, Any]]:
    """Every line is one JSON object, and the last one is ended too."""
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]
