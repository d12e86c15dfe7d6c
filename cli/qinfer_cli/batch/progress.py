"""What a run has done so far: the bar while it goes on, the totals at its end."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from qinfer.generation import LanguageModel
    from qinfer_cli.batch.answer import Choice
    from qinfer_cli.batch.lines import Input
    from qinfer_cli.batch.window import Window

_REFRESH_S = 0.5


@dataclass(slots=True)
class Totals:
    """Counts records, so a prompt with n choices counts n times.

    Attributes:
        answered: Results of this run.
        failed: Failures of this run.
        kept_results: Results of the runs before.
        kept_errors: Failures of the runs before that stay.
        reused_tokens: Prompt tokens found in the cache instead of computed.
        preemptions: How often a sequence had to make room for others, and was computed again.
    """

    answered: int = 0
    failed: int = 0
    kept_results: int = 0
    kept_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def records(self) -> int:
        """How many the output has."""
        return self.answered + self.failed + self.kept_results + self.kept_errors

    def count(self, choice: Choice) -> None:
        """Count what a choice took."""
        self.prompt_tokens += choice.prompt_tokens
        self.completion_tokens += choice.completion_tokens
        self.reused_tokens += choice.reused_tokens

    def per_s(self, tokens: int) -> float | None:
        """A number of tokens by the time since the start: prompts are computed side by side."""
        elapsed_s = time.monotonic() - self.started_s
        return tokens / elapsed_s if elapsed_s > 0 else None

    def report(self) -> dict[str, Any]:
        """The totals as `--json` prints them."""
        return {
            "answered": self.answered,
            "failed": self.failed,
            "kept_results": self.kept_results,
            "kept_errors": self.kept_errors,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "reused_tokens": self.reused_tokens,
            "elapsed_s": time.monotonic() - self.started_s,
            "prompt_tokens_per_s": self.per_s(self.prompt_tokens),
            "completion_tokens_per_s": self.per_s(self.completion_tokens),
            "preemptions": self.preemptions,
        }

    def show(self, *, as_json: bool, quiet: bool, results_on_stdout: bool) -> None:
        """Print the totals: to stderr, or as JSON to stdout unless the results are there."""
        if as_json:
            click.echo(json.dumps(self.report()), err=results_on_stdout)
        elif not quiet:
            click.echo(self._sentence(), err=True)

    def _sentence(self) -> str:
        report = self.report()
        kept = self.kept_results + self.kept_errors
        before = f" ({kept:,} records were there before)" if kept else ""
        reused = f" ({self.reused_tokens:,} of them cached)" if self.reused_tokens else ""
        preempted = f", {self.preemptions:,} preemptions" if self.preemptions else ""
        return (
            f"{self.answered:,} answered, {self.failed:,} failed{before}: "
            f"{self.prompt_tokens:,} prompt tokens{reused}, {self.completion_tokens:,} new "
            f"in {report['elapsed_s']:.1f} s "
            f"({report['prompt_tokens_per_s'] or 0:.1f} tok/s prompt, "
            f"{report['completion_tokens_per_s'] or 0:.1f} tok/s output){preempted}"
        )


class Bar:
    """A tqdm bar that counts prompts; how many there will be is judged by the bytes read.

    Args:
        source: The input.
        totals: Of what is written.
        window: What is in flight.
        model: That runs it.
        quiet: Show nothing.
    """

    def __init__(
        self,
        source: Input,
        totals: Totals,
        window: Window,
        model: LanguageModel,
        *,
        quiet: bool,
    ) -> None:
        from tqdm import tqdm

        self._source = source
        self._totals = totals
        self._window = window
        self._model = model
        self._lines = 0
        self._refreshed_s = 0.0
        self._bar = tqdm(unit=" prompts", disable=quiet or None, smoothing=0)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def read(self) -> None:
        """Count a line that was read, of which it may be long until it is answered."""
        self._lines += 1
        if self._source.size_bytes and self._source.position_bytes:
            share = self._source.position_bytes / self._source.size_bytes
            self._bar.total = round(self._lines / min(share, 1.0))

    def advance(self, *, skipped: bool) -> None:
        """Count a line that is done; one that was answered before takes no part in the speed."""
        if skipped and not self._bar.disable:
            self._bar.initial += 1
        self._bar.update()

    def refresh(self) -> None:
        """Show the figures anew, if it is time to."""
        now = time.monotonic()
        if self._bar.disable or now - self._refreshed_s < _REFRESH_S:
            return
        self._refreshed_s = now
        prompt_tokens, completion_tokens = self._window.tokens()
        prompt = self._totals.per_s(self._totals.prompt_tokens + prompt_tokens)
        output = self._totals.per_s(self._totals.completion_tokens + completion_tokens)
        stats = self._model.stats
        self._bar.set_postfix_str(
            f"prompt {prompt or 0:.0f} tok/s, output {output or 0:.0f} tok/s, "
            f"{stats.running} running, KV {stats.kv_used:.0%}"
        )
