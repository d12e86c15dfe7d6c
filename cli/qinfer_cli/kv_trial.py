"""Trying a converted model with the KV cache that was asked for, and saying what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qinfer.errors import QInferError

if TYPE_CHECKING:
    from qinfer.quant.kv import KVFormat


def try_kv_format(directory: Path, kv_format: KVFormat, *, quiet: bool) -> None:
    """Compare a model's predictions with those of a 16-bit KV cache; warn if they suffer.

    The figures go to stderr. What prevents the trial is a warning too: the model is there.

    Args:
        directory: The converted model.
        kv_format: Below 16 bits.
        quiet: Say nothing unless it is a warning.
    """
    from tqdm import tqdm

    from qinfer import quality
    from qinfer.ops.cpu.threads import set_threads

    set_threads(None)
    try:
        with tqdm(
            total=2 * quality.TRIAL_TOKENS,
            unit="tok",
            unit_scale=True,
            desc="Trying the KV cache",
            disable=quiet or None,
        ) as bar:
            found = quality.try_kv_format(directory, kv_format, progress=bar.update)
    except QInferError as error:
        click.echo(f"Warning: the KV cache could not be tried: {error}", err=True)
        if error.hint:
            click.echo(f"Hint: {error.hint}", err=True)
        return
    figures = (
        f"KL {found.kl_mean:.4f} nats, the same token most likely in {found.top1_agreement:.1%} of "
        f"{found.tokens} places"
    )
    name = f"keys at {kv_format.k_bits} bits and values at {kv_format.v_bits}"
    if quality.hurts(found):
        click.echo(
            f"Warning: with {name}, the model predicts noticeably otherwise than with 16 bits: "
            f"{figures}",
            err=True,
        )
        click.echo(f"Hint: {_hint(kv_format)}", err=True)
    elif not quiet:
        click.echo(f"KV cache with {name} against 16 bits: {figures}", err=True)


def _hint(kv_format: KVFormat) -> str:
    """Formats that lose less; keys are the more sensitive of the two."""
    if kv_format.k_bits == 4 and kv_format.v_bits < 16:
        better = "--k-bits 8 --v-bits 4, or --kv-bits 8"
    else:
        better = "--kv-bits 16" if min(kv_format.k_bits, kv_format.v_bits) == 8 else "--kv-bits 8"
    return f"convert again with {better}; qinfer generate takes these options too."
