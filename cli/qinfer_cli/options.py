"""Options shared by several commands."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import click

from qinfer.sampling import PRESETS, SamplingParams

Command = Callable[..., Any]

_KV_BITS = ["4", "8", "16", "32"]
_KV_BITS_DEFAULT = 16  # of keys or values where only the others are given
_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in ((letter, 1024), (letter + "ib", 1024), (letter + "b", 1000))
}
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


def numbers(minimum: int) -> Callable[[str], tuple[int, ...]]:
    """The type of options such as `1,8`: a tuple of numbers from a minimum on, each once."""

    def parse(text: str) -> tuple[int, ...]:
        words = [word.strip() for word in text.split(",")]
        if not all(re.fullmatch(r"\d{1,9}", word, re.ASCII) for word in words):
            raise click.BadParameter(f"{text!r} is not a number, or a list such as 1,8.")
        found = tuple(dict.fromkeys(map(int, words)))
        if min(found) < minimum:
            raise click.BadParameter(f"{min(found)} is less than {minimum}.")
        return found

    return parse


def kv_bits_list(text: str) -> tuple[tuple[int, int], ...]:
    """Of `16,k8v4`, the bits of keys and of values: (16, 16), (8, 4)."""
    bits = "|".join(_KV_BITS)
    found = [re.fullmatch(f"({bits})|k({bits})v({bits})", word.strip()) for word in text.split(",")]
    pairs = [(int(m[1] or m[2]), int(m[1] or m[3])) for m in found if m]
    if len(pairs) < len(found):
        raise click.BadParameter(
            f"{text!r} is not one of {', '.join(_KV_BITS)} or k8v4, nor a list of them."
        )
    return tuple(dict.fromkeys(pairs))


def kv_options(command: Command) -> Command:
    """Add `--kv-bits`, `--k-bits` and `--v-bits`.

    The command gets `kv_bits`, those of keys and of values; None if nothing was given.
    """

    @functools.wraps(command)
    def wrapper(**kwargs: Any) -> Any:
        both, k, v = (kwargs.pop(name) for name in ("kv_bits", "k_bits", "v_bits"))
        bits = None
        if both or k or v:
            bits = int(k or both or _KV_BITS_DEFAULT), int(v or both or _KV_BITS_DEFAULT)
        return command(kv_bits=bits, **kwargs)

    for flag, text in (
        ("--v-bits", "The same of values alone; keys are then 16 bits wide if nothing says more."),
        ("--k-bits", "The same of keys alone; values are then 16 bits wide if nothing says more."),
        ("--kv-bits", "Bits per number in the cache. Default: as the model was converted, or 16."),
    ):
        wrapper = click.option(flag, type=click.Choice(_KV_BITS), help=text)(wrapper)
    return wrapper


def size(text: str) -> int:
    """Bytes of 6GiB, 500MB (powers of 1000), 2g (the same as 2GiB) or 1048576."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip().lower(), re.ASCII)
    size_bytes = int(Fraction(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size_bytes < 1:
        raise click.BadParameter(f"{text!r} is not a size such as 6GiB, 500MB or 2g.")
    return size_bytes


memory_option = click.option(
    "--memory",
    type=size,
    help="Most memory for weights, cache and work, such as 6GiB. Default: what is free.",
)
context_policy_option = click.option(
    "--context-policy",
    type=click.Choice(["stop", "slide", "sinks"]),
    default="stop",
    show_default=True,
    help="At the end of the context: stop, drop the oldest tokens, or the same but keep the "
    "first 4.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print results and errors only.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to run; auto takes a GPU if there is one.",
)


def device_options(command: Command) -> Command:
    """Add `--device` and `--deterministic`, and what a GPU alone has.

    The command gets `device`, and in `device_options` the arguments of `qinfer.ops.DeviceOptions`.
    """

    @functools.wraps(command)
    def wrapper(**kwargs: Any) -> Any:
        options = {
            "deterministic": kwargs.pop("deterministic"),
            "embeddings_on_host": kwargs.pop("embeddings") == "host",
            "int8_by_bitsandbytes": kwargs.pop("int8_kernel") == "bnb",
            "graphs": not kwargs.pop("no_graph"),
        }
        return command(device_options=options, **kwargs)

    for option in (
        click.option(
            "--no-graph", is_flag=True, help="On a GPU: launch a step's kernels one by one."
        ),
        click.option(
            "--int8-kernel",
            type=click.Choice(["triton", "bnb"]),
            default="triton",
            show_default=True,
            help="On a GPU: what multiplies int8 weights; bnb is LLM.int8 of bitsandbytes.",
        ),
        click.option(
            "--embeddings",
            type=click.Choice(["device", "host"]),
            default="device",
            show_default=True,
            help="On a GPU: where 16-bit embeddings are; host saves its memory.",
        ),
        click.option(
            "--deterministic",
            is_flag=True,
            help="A prompt's tokens never depend on its neighbours. Slower; needless on a CPU with "
            "compiled kernels.",
        ),
        device_option,
    ):
        wrapper = option(wrapper)
    return wrapper


threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads; all physical cores if not given."
)
