"""`qinfer convert`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from qinfer.errors import QInferError
from qinfer.quant.spec import GROUP_SIZES, SCHEMES
from qinfer_cli.options import quiet_option


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
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--force", is_flag=True, help="Replace a converted model that OUT holds.")
@quiet_option
def convert(
    source: str,
    out: Path,
    scheme: str,
    group_size: str | None,
    dry_run: bool,
    force: bool,
    quiet: bool,
) -> None:
    """Quantize the model SOURCE and write it to the directory OUT.

    SOURCE is a Hugging Face directory, a hub id such as org/name or org/name@revision, a GGUF file,
    or one on the hub: org/name:file.gguf. An interrupted conversion continues when the same command
    is run again.

    \b
    qinfer convert ./SmolLM2-135M-Instruct smol-int4
    qinfer convert Qwen/Qwen2.5-0.5B-Instruct qwen-int8 --scheme int8
    qinfer convert model.Q8_0.gguf model-nf4 --scheme nf4 --dry-run
    """
    import numpy  # noqa: F401  (loaded by torch, it would swallow a Ctrl-C)
    from tqdm import tqdm

    from qinfer_converters import convert as streaming
    from qinfer_converters.opening import open_source
    from qinfer_converters.plan import make_plan, summary

    out = out.absolute()
    if not dry_run:
        streaming.check_output(out, force=force)
        _check_apart(Path(source), out)
    opened = open_source(source, progress=not quiet)
    plan = make_plan(opened, scheme, int(group_size) if group_size else None)
    if dry_run or not quiet:
        for line in summary(plan, opened):
            click.echo(line, err=not dry_run)
    if dry_run:
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


def _check_apart(source: Path, out: Path) -> None:
    """Refuse an output whose replacement would take the source or the shell's directory along."""
    place = out.resolve()
    for what, path in (("SOURCE", source.resolve()), ("the current directory", Path.cwd())):
        if place == path or place in path.parents:
            raise QInferError(
                f"{out} is or contains {what}", hint="Name a directory of its own for the output."
            )
