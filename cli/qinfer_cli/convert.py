"""`qinfer convert`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qinfer.errors import QInferError
from qinfer.quant.spec import GROUP_SIZES, SCHEMES
from qinfer_cli.kv_trial import try_kv_format
from qinfer_cli.options import quiet_option

if TYPE_CHECKING:
    from qinfer.quant.kv import KVFormat

_KV_BITS = click.Choice(["16", "8", "4"])


@click.command()
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--scheme",
    type=click.Choice(list(SCHEMES)),
    default="int4",
    show_default=True,
    help="Format of the weights.",
)
@click.option(
    "--group-size",
    type=click.Choice([str(g) for g in sorted(GROUP_SIZES)]),
    help="Weights that share a scale. Default: int4 32, or 64 from 3 B parameters; int8 a row.",
)
@click.option(
    "--kv-bits",
    type=_KV_BITS,
    help="Bits per number in the KV cache, recorded for when the model is run. Default: 16.",
)
@click.option("--k-bits", type=_KV_BITS, help="The same of keys alone.")
@click.option("--v-bits", type=_KV_BITS, help="The same of values alone.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--force", is_flag=True, help="Replace a converted model that OUT holds.")
@quiet_option
def convert(source: str, out: Path, **options: Any) -> None:
    """Quantize the model SOURCE and write it to the directory OUT.

    SOURCE is a Hugging Face directory, a hub id such as org/name or org/name@revision, a GGUF file,
    or one on the hub: org/name:file.gguf. An interrupted conversion continues when the same command
    is run again. With a KV cache below 16 bits, the converted model is tried with it.

    \b
    qinfer convert ./SmolLM2-135M-Instruct smol-int4
    qinfer convert Qwen/Qwen2.5-0.5B-Instruct qwen-int8 --scheme int8 --kv-bits 8
    qinfer convert model.Q8_0.gguf model-nf4 --scheme nf4 --dry-run
    """
    import numpy  # noqa: F401  (loaded by torch, it would swallow a Ctrl-C)
    from tqdm import tqdm

    from qinfer_converters import convert as streaming
    from qinfer_converters.opening import open_source
    from qinfer_converters.plan import make_plan, summary

    out, quiet, kv_format = out.absolute(), options["quiet"], _kv_format(options)
    if not options["dry_run"]:
        streaming.check_output(out, force=options["force"])
        _check_apart(Path(source), out)
    opened = open_source(source, progress=not quiet)
    group_size = int(options["group_size"]) if options["group_size"] else None
    plan = make_plan(opened, options["scheme"], group_size, kv_format=kv_format)
    if options["dry_run"] or not quiet:
        for line in summary(plan, opened):
            click.echo(line, err=not options["dry_run"])
    if options["dry_run"]:
        return
    streaming.check_disk(plan, out)
    start = time.perf_counter()
    with tqdm(
        total=plan.nbytes,
        unit="B",
        unit_scale=True,
        desc="Converting",
        disable=quiet or None,  # None: shown on a terminal only
    ) as bar:
        streaming.convert(opened, plan, out, progress=bar.update)
    if not quiet:
        click.echo(
            f"Wrote {out} in {time.perf_counter() - start:.1f} s. Try: "
            f'qinfer generate {out} "Hello!"',
            err=True,
        )
    if kv_format is not None and kv_format.is_quantized:
        try_kv_format(out, kv_format, quiet=quiet)


def _kv_format(options: dict[str, Any]) -> KVFormat | None:
    """What to record of the KV cache; None if nothing was asked for."""
    from qinfer.quant.kv import KVFormat

    both, k, v = (options[name] for name in ("kv_bits", "k_bits", "v_bits"))
    return KVFormat(int(k or both or 16), int(v or both or 16)) if both or k or v else None


def _check_apart(source: Path, out: Path) -> None:
    """Refuse an output whose replacement would take the source or the shell's directory along."""
    place = out.resolve()
    for what, path in (("SOURCE", source.resolve()), ("the current directory", Path.cwd())):
        if place == path or place in path.parents:
            raise QInferError(
                f"{out} is or contains {what}", hint="Name a directory of its own for the output."
            )
