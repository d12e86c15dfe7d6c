"""The requests in flight: given to the model, their records not yet all written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qinfer.errors import QInferError
from qinfer_cli.batch import native, openai
from qinfer_cli.batch.answer import Answerer, Choice
from qinfer_cli.batch.request import BadLine, Request

if TYPE_CHECKING:
    from qinfer.generation import Completion, LanguageModel

# Both are times the sequences that the model runs at once.
_IN_FLIGHT = 2  # choices: whenever one ends there is another to start
_UNWRITTEN = 8  # records with --ordered: how far others may get ahead of a slow one


@dataclass(slots=True, eq=False)
class Slot:
    """The place of a record to come: of a choice, or of all the choices of an OpenAI line.

    Attributes:
        asked: The line.
        index: Of the choice; 0 where the record has them all.
        running: The completions that it waits for.
        choices: Those that ended well, by index.
        error: The first failure, which is the record's.
    """

    asked: Request | BadLine
    index: int = 0
    running: set[Completion] = field(default_factory=set)
    choices: dict[int, Choice] = field(default_factory=dict)
    error: QInferError | None = None

    @property
    def is_done(self) -> bool:
        """Whether the record can be made."""
        return not self.running

    def record(self, model: str) -> dict[str, Any]:
        """The record, once it is done; `model` is what an answer calls the model."""
        asked, error = self.asked, self.error
        if error is not None and asked.is_openai:
            return openai.failure(asked.id, asked.line, error)
        if error is not None:
            return native.failure(asked.id, self.index, asked.line, error)
        assert isinstance(asked, Request)
        if asked.is_openai:
            return openai.result(asked, [self.choices[i] for i in range(asked.n)], model=model)
        return native.result(asked, self.index, self.choices[self.index])


class Window:
    """What is in flight. How much that is is bounded, however long the input.

    Args:
        model: The model.
        answerer: That gives it requests.
        ordered: Whether records come in the order of their requests, or as they are done.
    """

    def __init__(self, model: LanguageModel, answerer: Answerer, *, ordered: bool) -> None:
        self._model = model
        self._answerer = answerer
        self._ordered = ordered
        self._flights: dict[Completion, tuple[Slot, int]] = {}
        self._queue: deque[Slot] = deque()  # in the order of their records

    def __len__(self) -> int:
        """How many choices are in flight."""
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        """Whether another line may be submitted."""
        at_once = self._model.max_sequences
        return len(self) < _IN_FLIGHT * at_once and len(self._queue) < _UNWRITTEN * at_once

    def submit(self, asked: Request | BadLine, pending: Iterable[int]) -> None:
        """Give a line to the model: the choices that have no record, or all of an OpenAI line."""
        if isinstance(asked, BadLine):
            self._add(slot := Slot(asked))
            self._fail(slot, asked.error)
        elif asked.is_openai:
            self._add(slot := Slot(asked))
            self._start(asked, dict.fromkeys(range(asked.n), slot))
        else:
            slots = {index: Slot(asked, index) for index in pending}
            for slot in slots.values():
                self._add(slot)
            self._start(asked, slots)

    def settle(self, ended: Iterable[Completion]) -> None:
        """Take over the completions that have ended."""
        for completion in ended:
            if completion not in self._flights:  # its line failed earlier in this step
                continue
            slot, index = self._flights.pop(completion)
            slot.running.remove(completion)
            if completion.error is not None:
                self._fail(slot, completion.error)
                continue
            slot.choices[index] = Choice.of(completion)
            if slot.is_done:
                self._finish(slot)

    def ready(self) -> Iterator[Slot]:
        """Take out those whose records can be written now."""
        while self._queue and self._queue[0].is_done:
            yield self._queue.popleft()

    def tokens(self) -> tuple[int, int]:
        """Tokens in flight: of the prompts that are read, and those sampled so far."""
        read = [c.sequence for c in self._flights if c.sequence.new_tokens]
        return sum(s.prompt_tokens for s in read), sum(s.new_tokens for s in read)

    def _start(self, request: Request, slots: dict[int, Slot]) -> None:
        for index, outcome in self._answerer.submit(request, slots):
            slot = slots[index]
            if not isinstance(outcome, QInferError):
                self._flights[outcome] = slot, index
                slot.running.add(outcome)
                continue
            self._fail(slot, outcome)
            if request.is_openai:
                return

    def _fail(self, slot: Slot, error: QInferError) -> None:
        slot.error = error
        for other in slot.running:
            del self._flights[other]
            if other.finish_reason is None:
                self._model.cancel(other)
        slot.running.clear()
        self._finish(slot)

    def _add(self, slot: Slot) -> None:
        if self._ordered:
            self._queue.append(slot)

    def _finish(self, slot: Slot) -> None:
        if not self._ordered:
            self._queue.append(slot)
