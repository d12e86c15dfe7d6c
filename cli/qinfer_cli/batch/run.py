"""A run: every line of the input answered, each result written when it is ready."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qinfer.checkpoint.fingerprint import fingerprint
from qinfer.errors import PromptError, QInferError
from qinfer_cli.batch import native, openai
from qinfer_cli.batch.answer import Answerer
from qinfer_cli.batch.digests import DigestSet, digest
from qinfer_cli.batch.interrupt import Interrupts
from qinfer_cli.batch.lines import Input, Line
from qinfer_cli.batch.output import FileOutput, OutputError, StreamOutput, is_stream
from qinfer_cli.batch.parse import Parser
from qinfer_cli.batch.previous import Previous, Results
from qinfer_cli.batch.progress import Bar, Totals
from qinfer_cli.batch.request import BadLine, Request, shown
from qinfer_cli.batch.sidecar import Sidecar, changes, load, sidecar_path

if TYPE_CHECKING:
    from qinfer.generation import LanguageModel

SOME_FAILED = 3

_STARTS_ANEW = "Name another output, or start anew with --force."


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
        command = None if batch.output_is_stream else resume_command
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
    """One run. `run` can be left by an exception anywhere; what is written stays valid."""

    def __init__(
        self,
        model: LanguageModel,
        options: dict[str, Any],
        source: Input,
        interrupts: Interrupts,
    ) -> None:
        self.source = source
        self.totals = Totals()
        self.output_is_stream = is_stream(options["output_file"])
        self._model = model
        self._options = options
        self._interrupts = interrupts
        self._answerer = Answerer(model, options, self._pulse)
        self._ids = DigestSet()
        self._previous = Previous()
        self._output: FileOutput | StreamOutput = self._open_output()
        self.totals.kept_results = self._previous.results
        self.totals.kept_errors = self._previous.errors

    @property
    def written(self) -> str:
        """How many records the output has, in words."""
        totals = self.totals
        count = totals.answered + totals.failed + totals.kept_results + totals.kept_errors
        return f"{count:,} record{'' if count == 1 else 's'}"

    def run(self) -> None:
        """Answer what is not answered."""
        parser = Parser()
        with (
            contextlib.closing(self._output),
            Bar(self.source, self.totals, quiet=self._options["quiet"]) as bar,
        ):
            for line in self.source:
                request = self._parse(parser, line)
                pending = self._pending(request)
                for record in self._records(request, pending):
                    self._write(record)
                bar.advance(skipped=not pending)

    def _parse(self, parser: Parser, line: Line) -> Request | BadLine:
        jsonl = self.source.jsonl is True
        request = parser(line, jsonl=jsonl)
        if jsonl and isinstance(request, Request) and not self._ids.add(digest(request.id)):
            error = PromptError(f"the id {shown(request.id)} occurs in a line before")
            return BadLine(request.line, request.id, error, request.form != "native")
        return request

    def _pending(self, request: Request | BadLine) -> list[int]:
        """The choices that have no record; OpenAI's are all in one."""
        before = self._previous
        if isinstance(request, BadLine):  # its id can be that of another line, which is answered
            return [] if before.has_error(request.line, 0) else [0]
        return [
            i
            for i in range(request.n if request.form == "native" else 1)
            if not (before.has_result(request.id, i) or before.has_error(request.line, i))
        ]

    def _records(self, request: Request | BadLine, pending: list[int]) -> Iterator[dict[str, Any]]:
        if not pending:
            return
        if isinstance(request, BadLine):
            yield (
                openai.failure(request.id, request.line, request.error)
                if request.is_openai
                else native.failure(request.id, 0, request.line, request.error)
            )
        elif request.form == "native":
            for index, choice in self._answerer.choices(request, pending):
                if isinstance(choice, QInferError):
                    yield native.failure(request.id, index, request.line, choice)
                else:
                    self.totals.count(choice)
                    yield native.result(request, index, choice)
        else:
            yield self._openai_record(request)

    def _openai_record(self, request: Request) -> dict[str, Any]:
        choices = []
        for _, choice in self._answerer.choices(request, range(request.n)):
            if isinstance(choice, QInferError):
                return openai.failure(request.id, request.line, choice)
            self.totals.count(choice)
            choices.append(choice)
        return openai.result(request, choices, model=self._options["model"])

    def _write(self, record: dict[str, Any]) -> None:
        with self._interrupts.held():
            self._output.write(record)
            if record.get("error") is None:
                self.totals.answered += 1
            else:
                self.totals.failed += 1

    def _pulse(self) -> None:
        with self._interrupts.held():
            self._output.sync_if_due()

    def _open_output(self) -> FileOutput | StreamOutput:
        path, options = _output_path(self._options), self._options
        if self.output_is_stream:
            if options["resume"]:
                raise QInferError(
                    f"{options['output_file']} cannot be resumed",
                    hint="Name a file with -o, and give --resume from then on.",
                )
            return StreamOutput(options["output_file"])
        output = FileOutput(path)
        try:
            self._prepare(output, path)
        except BaseException:
            output.close()
            raise
        return output

    def _prepare(self, output: FileOutput, path: Path) -> None:
        """Make the output ready to be appended to, and the side file true of it."""
        options = self._options
        if output.is_same_file(self.source.fd):
            raise QInferError(f"{path} is both input and output", hint="Name another output.")
        if output.size_bytes and not options["resume"]:
            if not options["force"]:
                raise QInferError(
                    f"{path} exists already",
                    hint="Continue it with --resume, name another output, or replace it "
                    "with --force.",
                )
            output.cut(0)
        side = Sidecar(sidecar_path(path), self._settings(), self.source.fd)
        if output.size_bytes:
            other_input = self._is_other_input(side, path)
            self._previous, good_bytes = Results(path).repair(
                drop_errors=other_input or options["retry_errors"]
            )
            if good_bytes is not None:
                output.cut(good_bytes)
            output.follow()
        side.save()

        def cover(end: int) -> None:
            with self._interrupts.held():
                side.cover(end)

        self.source.before_read = cover

    def _is_other_input(self, side: Sidecar, path: Path) -> bool:
        """Refuse to continue what was begun otherwise, unless forced.

        Returns:
            Whether the input is another: then line numbers mean something else now.
        """
        forced = self._options["force"]
        record = load(sidecar_path(path))
        if record is None:
            if forced:
                return False
            raise QInferError(
                f"{path} has no {sidecar_path(path).name} beside it that says how it was begun",
                hint=f"{_STARTS_ANEW} --resume --force continues it all the same.",
            )
        if (differing := changes(record["settings"], self._settings())) and not forced:
            raise QInferError(
                f"{path} was begun with other settings: {'; '.join(differing)}",
                hint="Use the same again, name another output, or continue all the same "
                "with --resume --force.",
            )
        same_input = side.input_is_as_before(record["input"])
        if not same_input and not forced:
            raise QInferError(
                f"{self.source.name} has changed since {path} was begun",
                hint="Name another output, or continue all the same with --resume --force.",
            )
        return not same_input

    def _settings(self) -> dict[str, Any]:
        """What the answers depend on, besides the input."""
        options = self._options
        names = ("max_tokens", "system_prompt", "raw", "ctx_size", "truncate_prompt")
        return {
            "model": fingerprint(self._model.directory),
            **dataclasses.asdict(self._answerer.params),
            **{name: options[name] for name in names},
            "stop": list(options["stop"]),
        }


def _output_path(options: dict[str, Any]) -> Path:
    """The output's path; behind a symbolic link, the file it stands for."""
    path: Path = options["output_file"]
    return Path(os.path.realpath(path)) if path.is_symlink() else path
