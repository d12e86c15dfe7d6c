"""`qinfer inspect`: what a model directory holds, and what its KV cache takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from qinfer_cli.options import json_option, kv_options, quiet_option
from qinfer_cli.tables import aligned

if TYPE_CHECKING:
    from qinfer.inspection import Inspection, KVSize

_KINDS = {"norms": "norms and biases", "unused": "not used"}


@click.command("inspect")
@click.argument("model")
@kv_options
@click.option(
    "--ctx-size",
    type=click.IntRange(1),
    help="Tokens to work the KV cache out for. Default: the model's context.",
)
@json_option
@quiet_option
def inspect(
    model: str,
    kv_bits: tuple[int, int] | None,
    ctx_size: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show what MODEL is, a directory or a hub id: architecture, weights, sizes, KV cache.

    Of the weights only headers are read.

    \b
    qinfer inspect smol-int4
    qinfer inspect smol-int4 --ctx-size 4096 --kv-bits 8
    qinfer inspect HuggingFaceTB/SmolLM2-135M-Instruct --json
    """
    from qinfer.checkpoint.opening import find_model

    directory = find_model(model, progress=not quiet)

    import numpy  # noqa: F401  (loaded by torch, it would swallow a Ctrl-C)

    from qinfer import inspection
    from qinfer.quant.kv import KVFormat

    found = inspection.inspect(
        directory,
        kv_format=KVFormat(*kv_bits) if kv_bits else None,
        context_tokens=ctx_size,
    )
    if as_json:
        click.echo(json.dumps(_report(found), ensure_ascii=False))
        return
    for line in _lines(found):
        click.echo(line)


def _report(found: Inspection) -> dict[str, Any]:
    """What `--json` prints."""
    config, weights = found.config, found.weights
    return {
        "model": str(found.directory),
        "source": found.record.get("source"),
        "architecture": config.architecture,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "layer_windows": list(config.layer_windows),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "parameters": found.parameters,
        "scheme": weights.scheme,
        "group_size": weights.group_size,
        "matrices": weights.matrices,
        "bits_per_weight": round(weights.bits_per_weight, 3),
        "weights_bytes": weights.sizes | {"total": sum(weights.sizes.values())},
        "ctx_size": found.context_tokens,
        "kv_cache": _kv_report(found.kv),
        "kv_cache_at": {str(its.kv_format.k_bits): _kv_report(its) for its in found.kv_sizes},
    }


def _kv_report(size: KVSize) -> dict[str, Any]:
    return {
        "k_bits": size.kv_format.k_bits,
        "v_bits": size.kv_format.v_bits,
        "bytes_per_token": size.bytes_per_token,
        "context_bytes": size.context_bytes,
        "open_block_bytes": size.open_bytes,
    }


def _lines(found: Inspection) -> Iterator[str]:
    """The same for people."""
    yield from aligned(list(_facts(found)), left=2)
    yield ""
    sizes = found.weights.sizes
    rows = [(_KINDS.get(kind, kind), _mb(size)) for kind, size in sizes.items() if size]
    yield from aligned([("weights on disk", ""), *rows, ("total", _mb(sum(sizes.values())))])
    yield ""
    yield from aligned(
        [
            (f"KV cache of {found.context_tokens:,} tokens", "a token", "all"),
            _kv_row(found.kv),
            *(_kv_row(its) for its in found.kv_sizes if its.kv_format != found.kv.kv_format),
        ]
    )


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    config, weights = found.config, found.weights
    yield "model", str(found.directory)
    yield "converted from", str(found.record.get("source", "(not converted by qinfer)"))
    yield "architecture", config.architecture
    sizes = f"{config.hidden_size:,} wide, MLP {config.intermediate_size:,}"
    yield "layers", f"{config.num_hidden_layers}, {sizes}"
    yield (
        "attention",
        f"{config.num_attention_heads} heads on {config.num_key_value_heads} key-value heads of "
        f"{config.head_dim}{_windows(config.layer_windows)}",
    )
    yield "vocabulary", f"{config.vocab_size:,} tokens"
    yield "context", f"{config.max_position_embeddings:,} tokens"
    yield "parameters", f"{found.parameters / 1e6:,.1f} M"
    group = f", groups of {weights.group_size}" if weights.group_size else ""
    yield "scheme", f"{weights.scheme}{group}"
    yield "matrices", ", ".join(f"{count} {name}" for name, count in weights.matrices.items())
    yield "bits per weight", f"{weights.bits_per_weight:.2f}"
    yield "KV cache", _kv_name(found.kv)


def _windows(windows: tuple[int | None, ...]) -> str:
    limited = [window for window in windows if window is not None]
    if not limited:
        return ""
    sizes = "/".join(f"{size:,}" for size in sorted(set(limited)))
    return f"; a window of {sizes} tokens in {len(limited)} layers"


def _kv_row(size: KVSize) -> tuple[str, str, str]:
    return _kv_name(size), f"{size.bytes_per_token:,.0f} B", _mb(size.context_bytes)


def _kv_name(size: KVSize) -> str:
    k, v = size.kv_format.k_bits, size.kv_format.v_bits
    return f"{k} bits" if k == v else f"keys {k} bits, values {v} bits"


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
