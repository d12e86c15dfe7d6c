"""A run: every line of the input answered, each result written when it is ready."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from qinfer.checkpoint.fingerprint import fingerprint
from qinfer.errors import PromptError, QInferError
from qinfer_cli.batch.answer import Answerer
from qinfer_cli.batch.digests import DigestSet, digest
from qinfer_cli.batch.interrupt import Interrupts
from qinfer_cli.batch.lines import Input, Line
from qinfer_cli.batch.output import OutputError, is_stream
from qinfer_cli.batch.parse import Parser
from qinfer_cli.batch.progress import Bar, Totals
from qinfer_cli.batch.request import BadLine, Request, shown
from qinfer_cli.batch.starting import open_output
from qinfer_cli.batch.window import Slot, Window

if TYPE_CHECKING:
    from qinfer.generation import LanguageModel

SOME_FAILED = 3


def run_batch(model: LanguageModel, options: dict[str, Any], *, resume_command: str) -> None:
    """Answer every line of the input file; a bad line becomes an error record.

    Args:
        model: The model.
        options: Of `qinfer generate`.
        resume_command: What continues this run, for messages.

    Raises:
        QInferError: A file cannot be read or written, or a run cannot be continued.
        click.exceptions.Exit: Some prompts failed, or the run was interrupted.
    """
    with Interrupts() as interrupts, Input(options["input_file"]) as source:
        batch = _Batch(model, options, source, interrupts)
        command = None if is_stream(options["output_file"]) else resume_command
        try:
            batch.run()
        except KeyboardInterrupt:
            _say_interrupted(batch, command)
            raise click.exceptions.Exit(interrupts.exit_code) from None
        except OutputError as error:
            raise QInferError(
                f"{error}; {batch.written} written before",
                hint=f"Make room, then continue: {command}" if command else None,
            ) from None
    batch.totals.show(
        as_json=options["as_json"],
        quiet=options["quiet"],
        results_on_stdout=str(options["output_file"]) == "-",
    )
    if failed := batch.totals.failed + batch.totals.kept_errors:
        where = "stdout" if str(options["output_file"]) == "-" else options["output_file"]
        click.echo(f"{failed} prompts failed; see their error records in {where}.", err=True)
        raise click.exceptions.Exit(SOME_FAILED)


def _say_interrupted(batch: _Batch, command: str | None) -> None:
    click.echo(f"Interrupted; {batch.written} written.", err=True)
    if command is not None:
        again = " with the same input" if batch.source.fd is None else ""
        click.echo(f"Continue{again}: {command}", err=True)


class _Batch:
    """One run. `run` can be left by an exception anywhere; what is written stays valid.

    What is in flight is lost then, and with `--ordered` also what is done behind it: continuing
    computes it again, and writes it in its place.
    """

    def __init__(
        self,
        model: LanguageModel,
        options: dict[str, Any],
        source: Input,
        interrupts: Interrupts,
    ) -> None:
        self.source = source
        self.totals = Totals()
        self._model = model
        self._options = options
        self._interrupts = interrupts
        self._parser = Parser()
        self._ids = DigestSet()
        self._lines = iter(source)
        self._damage: QInferError | None = None
        self._unwritten: Counter[int] = Counter()  # records, by line
        answerer = Answerer(model, options)
        self._window = Window(model, answerer, ordered=options["ordered"])
        self._output, self._previous = open_output(
            options, source, _settings(model, options, answerer), interrupts.held
        )
        self.totals.kept_results = self._previous.results
        self.totals.kept_errors = self._previous.errors
        self._bar = Bar(source, self.totals, self._window, model, quiet=options["quiet"])

    @property
    def written(self) -> str:
        """How many records the output has, in words."""
        count = self.totals.records
        return f"{count:,} record{'' if count == 1 else 's'}"

    def run(self) -> None:
        """Answer what is not answered."""
        with contextlib.closing(self._output), self._bar:
            self._fill()
            while self._window:
                ended = self._model.step()
                with self._interrupts.held():
                    self._window.settle(ended)
                    self._write_ready()
                    self._output.sync_if_due()
                self._bar.refresh()
                self._fill()
        self.totals.preemptions = self._model.stats.preemptions
        if self._damage is not None:
            raise self._damage

    def _fill(self) -> None:
        """Submit lines as long as there is room, and none has to be waited for."""
        while self._window.has_room and (not self._window or self.source.is_ready()):
            line = self._next_line()
            if line is None:
                return
            self._bar.read()
            self._submit(line)

    def _next_line(self) -> Line | None:
        try:
            return next(self._lines, None)
        except QInferError as error:  # raised when the lines before are answered
            self._damage = error
            return None

    def _submit(self, line: Line) -> None:
        asked = self._parse(line)
        pending = self._pending(asked)
        if not pending:
            self._bar.advance(skipped=True)
            return
        self._unwritten[asked.line] = len(pending)
        self._window.submit(asked, pending)
        with self._interrupts.held():
            self._write_ready()

    def _parse(self, line: Line) -> Request | BadLine:
        jsonl = self.source.jsonl is True
        request = self._parser(line, jsonl=jsonl)
        if jsonl and isinstance(request, Request) and not self._ids.add(digest(request.id)):
            error = PromptError(f"the id {shown(request.id)} occurs in a line before")
            return BadLine(request.line, request.id, error, request.is_openai)
        return request

    def _pending(self, request: Request | BadLine) -> list[int]:
        """The choices that have no record; OpenAI's are all in one."""
        before = self._previous
        if isinstance(request, BadLine):  # its id can be that of another line, which is answered
            return [] if before.has_error(request.line, 0) else [0]
        return [
            i
            for i in range(1 if request.is_openai else request.n)
            if not (before.has_result(request.id, i) or before.has_error(request.line, i))
        ]

    def _write_ready(self) -> None:
        for slot in self._window.ready():
            self._write(slot)
            self._unwritten[slot.asked.line] -= 1
            if not self._unwritten[slot.asked.line]:
                del self._unwritten[slot.asked.line]
                self._bar.advance(skipped=False)

    def _write(self, slot: Slot) -> None:
        self._output.write(slot.record(self._options["model"]))
        for choice in slot.choices.values():
            self.totals.count(choice)
        if slot.error is None:
            self.totals.answered += 1
        else:
            self.totals.failed += 1


def _settings(model: LanguageModel, options: dict[str, Any], answerer: Answerer) -> dict[str, Any]:
    """What the answers depend on, besides the input."""
    names = ("max_tokens", "system_prompt", "raw", "ctx_size", "truncate_prompt", "context_policy")
    return {
        "model": fingerprint(model.directory),
        **dataclasses.asdict(answerer.params),
        **{name: options[name] for name in names},
        "stop": list(options["stop"]),
        "kv_bits": str(model.kv_format),
    }
