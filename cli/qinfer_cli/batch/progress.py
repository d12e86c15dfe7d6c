"""What a run has done so far: the bar while it goes on, the totals at its end."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from qinfer_cli.batch.answer import Choice
    from qinfer_cli.batch.lines import Input


@dataclass(slots=True)
class Totals:
    """Counts records, so a prompt with n choices counts n times.

    Attributes:
        answered: Results of this run.
        failed: Failures of this run.
        kept_results: Results of the runs before.
        kept_errors: Failures of the runs before that stay.
    """

    answered: int = 0
    failed: int = 0
    kept_results: int = 0
    kept_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)

    def count(self, choice: Choice) -> None:
        """Count what a choice took."""
        self.prompt_tokens += choice.prompt_tokens
        self.completion_tokens += choice.completion_tokens
        self.prefill_s += choice.prefill_s
        self.decode_s += choice.decode_s

    def report(self) -> dict[str, Any]:
        """The totals as `--json` prints them."""
        elapsed_s = time.monotonic() - self.started_s
        return {
            "answered": self.answered,
            "failed": self.failed,
            "kept_results": self.kept_results,
            "kept_errors": self.kept_errors,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "elapsed_s": elapsed_s,
            "prompt_tokens_per_s": _rate(self.prompt_tokens, self.prefill_s),
            "completion_tokens_per_s": _rate(self.completion_tokens, elapsed_s),
        }

    def show(self, *, as_json: bool, quiet: bool, results_on_stdout: bool) -> None:
        """Print the totals: to stderr, or as JSON to stdout unless the results are there."""
        report = self.report()
        if as_json:
            click.echo(json.dumps(report), err=results_on_stdout)
        elif not quiet:
            kept = self.kept_results + self.kept_errors
            before = f" ({kept:,} records were there before)" if kept else ""
            click.echo(
                f"{self.answered:,} answered, {self.failed:,} failed{before}: "
                f"{self.prompt_tokens:,} prompt tokens, {self.completion_tokens:,} new "
                f"in {report['elapsed_s']:.1f} s "
                f"({report['prompt_tokens_per_s'] or 0:.1f} tok/s prompt, "
                f"{report['completion_tokens_per_s'] or 0:.1f} tok/s output)",
                err=True,
            )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


class Bar:
    """A tqdm bar that counts prompts; how many there will be is judged by the bytes read."""

    def __init__(self, source: Input, totals: Totals, *, quiet: bool) -> None:
        from tqdm import tqdm

        self._source = source
        self._totals = totals
        self._bar = tqdm(unit=" prompts", disable=quiet or None, smoothing=0)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, *, skipped: bool) -> None:
        """Count a prompt; one that was answered before takes no part in the speed."""
        if self._bar.disable:
            return
        if skipped:
            self._bar.initial += 1
        if self._source.size_bytes and self._source.position_bytes:
            share = self._source.position_bytes / self._source.size_bytes
            self._bar.total = round((self._bar.n + 1) / min(share, 1.0))
        report = self._totals.report()
        self._bar.set_postfix_str(
            f"prompt {report['prompt_tokens_per_s'] or 0:.0f} tok/s, "
            f"output {report['completion_tokens_per_s'] or 0:.0f} tok/s",
            refresh=False,
        )
        self._bar.update()
