"""`qinfer eval`: perplexity of a model, and what its KV cache or its weights change."""

from __future__ import annotations

import codecs
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qinfer.errors import PromptError
from qinfer_cli.loading import load_model
from qinfer_cli.options import (
    device_option,
    json_option,
    kv_options,
    quiet_option,
    threads_option,
)
from qinfer_cli.tables import aligned

if TYPE_CHECKING:
    from qinfer.engine.evaluation import Comparison
    from qinfer.generation import LanguageModel

_TOKENS = 4096
_TOKENS_PER_LAYER = 512  # a pass per layer
_BYTES_PER_TOKEN = 64  # of a file at most; the rest of it is not read
_UNKNOWN_TEXT = "Use plain text in UTF-8; iconv -t UTF-8 converts other encodings."


@click.command("eval")
@click.argument("model")
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="A UTF-8 text to predict; - is stdin. Default: a built-in one of about 2,000 tokens.",
)
@kv_options
@click.option(
    "--per-layer", is_flag=True, help="Also what each layer's cache changes if it alone is like it."
)
@click.option(
    "--tokens",
    type=click.IntRange(2),
    help=f"Most tokens of the text. Default: {_TOKENS}, or {_TOKENS_PER_LAYER} with --per-layer.",
)
@click.option(
    "--ctx-size",
    type=click.IntRange(2),
    help="Tokens of a window, each a text of its own. Default: 1024, or what the model allows.",
)
@click.option(
    "--against",
    metavar="DIRECTORY",
    help="Also compare with this model, such as the 16-bit original.",
)
@device_option
@threads_option
@json_option
@quiet_option
def evaluate(**options: Any) -> None:
    """Measure how well MODEL, a directory or a hub id, predicts a text.

    Prints the perplexity: a lower one is better. If the KV cache has fewer than 16 bits, also how
    its predictions differ from those with 16: KL divergence in nats, and how often both hold the
    same token most likely.

    \b
    qinfer eval smol-int4
    qinfer eval smol-int4 --kv-bits 4 --text book.txt --tokens 8192
    qinfer eval smol-int4 --k-bits 8 --v-bits 4 --per-layer --json
    qinfer eval smol-int4 --against ./SmolLM2-135M-Instruct
    """
    tokens = options["tokens"] or (_TOKENS_PER_LAYER if options["per_layer"] else _TOKENS)
    text = None if options["text_file"] is None else _read(options["text_file"], tokens)
    model = _open(options["model"], options)
    if options["per_layer"] and not model.kv_format.is_quantized:
        raise click.UsageError("--per-layer needs a KV cache of 8 or 4 bits: --kv-bits 4.")
    other = None if options["against"] is None else _open(options["against"], options, model)
    report = _report(model, other, text, tokens, options)
    if options["as_json"]:
        click.echo(json.dumps(report, ensure_ascii=False))
        return
    for line in _lines(report):
        click.echo(line)


def _read(path: Path, tokens: int) -> str:
    """As much of a file as the tokens can take up."""
    name, limit = "stdin" if str(path) == "-" else str(path), tokens * _BYTES_PER_TOKEN
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(limit)
        else:
            with path.open("rb") as file:
                data = file.read(limit)
    except OSError as error:
        raise PromptError(
            f"{name} cannot be read: {error.strerror}", hint="Name a file of plain text."
        ) from None
    try:  # a character that the limit cuts is left out
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, len(data) < limit)
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is not UTF-8 text: byte {error.start} is invalid", hint=_UNKNOWN_TEXT
        ) from None
    if "\0" in text:
        raise PromptError(f"{name} is not text: it holds NUL characters", hint=_UNKNOWN_TEXT)
    return text


def _open(
    name: str, options: dict[str, Any], subject: LanguageModel | None = None
) -> LanguageModel:
    """Open a model; one that is the reference of a subject gets its context and a 16-bit cache."""
    from qinfer.checkpoint.opening import find_model

    directory = find_model(name, progress=not options["quiet"])
    if subject is not None:
        reference = options | {"kv_bits": (16, 16)}
        context = subject.context_tokens
        return load_model(directory, reference, context_tokens=context, max_sequences=1)

    import numpy  # noqa: F401  (loaded by torch, it would swallow a Ctrl-C)

    from qinfer.quality import default_window

    context = options["ctx_size"] or default_window(directory)
    return load_model(directory, options, context_tokens=context, max_sequences=1)


def _report(
    model: LanguageModel,
    other: LanguageModel | None,
    text: str | None,
    tokens: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """What `--json` prints; behind a progress bar."""
    from tqdm import tqdm

    from qinfer import quality

    origin = "the built-in text" if text is None else str(options["text_file"])
    text = quality.probe_text() if text is None else text
    windows = quality.windows_of(model, text, tokens=tokens, origin=origin)
    if other is not None:
        quality.require_same_tokenizer(model, other)  # before anything that takes long
    count, per_layer = sum(map(len, windows)), options["per_layer"]
    with tqdm(
        total=count * _passes(model, other, per_layer),
        unit="tok",
        unit_scale=True,
        desc="Evaluating",
        disable=options["quiet"] or None,  # None: shown on a terminal only
    ) as bar:
        figures = _measure(model, other, windows, per_layer, bar.update)
    return {
        "model": str(model.directory),
        "kv_cache": dataclasses.asdict(model.kv_format),
        "text": origin,
        "tokens": count,
        "windows": len(windows),
        "window_tokens": len(windows[0]),
        **figures,
    }


def _passes(model: LanguageModel, other: LanguageModel | None, per_layer: bool) -> int:
    """How often the text goes through a model."""
    of_layers = model.config.num_hidden_layers + 1 if per_layer else 0
    pairs = model.kv_format.is_quantized + (other is not None)
    return 2 * pairs + of_layers or 1


def _measure(
    model: LanguageModel,
    other: LanguageModel | None,
    windows: list[list[int]],
    per_layer: bool,
    progress: Callable[[int], object],
) -> dict[str, Any]:
    from qinfer import quality

    kv = weights = layers = None
    if model.kv_format.is_quantized:
        kv = quality.against_16_bit_kv(model, windows, progress=progress)
    if other is not None:
        weights = quality.against(model, other, windows, progress=progress)
    if per_layer:
        layers = quality.layer_by_layer(model, windows, progress=progress)
    found = kv or weights
    return {
        "perplexity": found.perplexity
        if found
        else quality.perplexity_of(model, windows, progress=progress),
        "against_16_bit_kv": _figures(kv) if kv else None,
        "against": {"model": str(other.directory), **_figures(weights)}
        if other and weights
        else None,
        "layers": [{"layer": i, **_figures(its)} for i, its in enumerate(layers)]
        if layers
        else None,
    }


def _figures(found: Comparison) -> dict[str, Any]:
    return {
        "perplexity": found.perplexity,
        "reference_perplexity": found.reference_perplexity,
        "kl_mean_nats": found.kl_mean,
        "kl_p99_nats": found.kl_p99,
        "kl_max_nats": found.kl_max,
        "top1_agreement": found.top1_agreement,
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    """The report for people."""
    yield from aligned(
        [
            ("model", report["model"]),
            ("KV cache", "keys {k_bits} bits, values {v_bits} bits".format(**report["kv_cache"])),
            (
                "text",
                f"{report['text']}: {report['tokens']:,} tokens, windows of "
                f"{report['window_tokens']:,}",
            ),
            ("perplexity", f"{report['perplexity']:.3f}"),
        ],
        left=2,
    )
    against = [("16-bit KV cache", report["against_16_bit_kv"])]
    if report["against"]:
        against.append((report["against"]["model"], report["against"]))
    rows = [
        (name, f"{its['reference_perplexity']:.3f}", *_differences(its))
        for name, its in against
        if its
    ]
    if rows:
        yield ""
        yield from aligned([("against", "its perplexity", *_DIFFERENCES), *rows])
    if report["layers"]:
        yield ""
        yield from aligned(
            [
                ("layer", "perplexity", *_DIFFERENCES),
                *(
                    (str(its["layer"]), f"{its['perplexity']:.3f}", *_differences(its))
                    for its in report["layers"]
                ),
            ]
        )


_DIFFERENCES = ("KL mean (nats)", "KL p99", "KL max", "same top token")


def _differences(figures: dict[str, Any]) -> tuple[str, ...]:
    kl = (f"{figures[f'kl_{name}_nats']:.5f}" for name in ("mean", "p99", "max"))
    return *kl, f"{figures['top1_agreement']:.1%}"
