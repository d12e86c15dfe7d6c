"""Options shared by several commands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import click

from qinfer.sampling import PRESETS, SamplingParams

Command = Callable[..., Any]

_ALIASES = {"temperature": ["--temp"], "repetition_penalty": ["--repeat-penalty"]}


def sampling_options(command: Command) -> Command:
    """Add `--preset` and an option per `SamplingParams` field.

    The command gets `sampling`, a dictionary of what was given, and `preset`.
    """
    fields = dataclasses.fields(SamplingParams)

    @functools.wraps(command)
    def wrapper(**kwargs: Any) -> Any:
        sampling = {f.name: kwargs.pop(f.name) for f in fields}
        try:  # what a range cannot refuse: NaN
            SamplingParams(**{name: v for name, v in sampling.items() if v is not None})
        except ValueError as error:
            raise click.UsageError(f"{error}.") from None
        return command(sampling=sampling, **kwargs)

    for f in reversed(fields):
        low, high = f.metadata["min"], f.metadata.get("max")
        kind = (
            click.IntRange(low, high) if f.metadata["kind"] is int else click.FloatRange(low, high)
        )
        flags = ["--" + f.name.replace("_", "-"), *_ALIASES.get(f.name, [])]
        wrapper = click.option(*flags, f.name, type=kind, help=f.metadata["help"])(wrapper)
    presets = "; ".join(
        f"{name}: {p['temperature']}/{p['top_p']}/{p['top_k']}" for name, p in PRESETS.items()
    )
    return click.option(
        "--preset",
        type=click.Choice(list(PRESETS)),
        help=f"Temperature/top-p/top-k together ({presets}); single options override it.",
    )(wrapper)


quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print results and errors only.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to run; auto takes a GPU if there is one.",
)
threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads; all physical cores if not given."
)
