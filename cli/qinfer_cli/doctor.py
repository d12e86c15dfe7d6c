"""`qinfer doctor`: what this installation can do, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from qinfer_cli.options import json_option, kv_options, quiet_option
from qinfer_cli.tables import aligned

if TYPE_CHECKING:
    from qinfer.doctor import Finding

_UNUSABLE = 1  # as an expected failure


@click.command("doctor")
@click.argument("model", required=False)
@kv_options
@json_option
@quiet_option
@click.pass_context
def doctor(
    context: click.Context,
    model: str | None,
    kv_bits: tuple[int, int] | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check this installation: versions, CPU, kernels, GPU, memory, hub.

    With MODEL, a directory or a hub id, also whether it would run here, and with how long a
    context. The exit code is 1 if nothing can be run, or not the model.

    \b
    qinfer doctor
    qinfer doctor smol-int4
    qinfer doctor --json
    """
    if model is None and kv_bits is not None:
        raise click.UsageError("--kv-bits, --k-bits and --v-bits go with a MODEL.")
    from qinfer.doctor import examine

    findings = list(examine())
    usable = not any(finding.is_fatal for finding in findings)
    if usable and model is not None:
        findings.append(_fit(model, kv_bits, quiet=quiet))
    if as_json:
        click.echo(json.dumps(_report(findings), ensure_ascii=False))
    else:
        for line in _lines(findings):
            click.echo(line)
    if any(finding.is_fatal for finding in findings):
        context.exit(_UNUSABLE)


def _fit(model: str, kv_bits: tuple[int, int] | None, *, quiet: bool) -> Finding:
    """Whether a model would run.

    Raises:
        QInferError: There is no such model, or it cannot be run anywhere.
    """
    from qinfer.checkpoint.opening import find_model

    directory = find_model(model, progress=not quiet)

    from qinfer.doctor import fit
    from qinfer.inspection import inspect
    from qinfer.quant.kv import KVFormat

    found = inspect(directory, kv_format=KVFormat(*kv_bits) if kv_bits else None)
    return fit(directory, found.config, found.kv.kv_format)


def _report(findings: list[Finding]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "usable": not any(finding.is_fatal for finding in findings),
        "checks": [
            {
                "name": its.name,
                "state": its.state,
                "text": its.text,
                "hint": its.hint,
                "facts": its.facts,
            }
            for its in findings
        ],
    }


def _lines(findings: list[Finding]) -> Iterator[str]:
    """The same for people: a line for each check, and under it the hint."""
    rows = aligned([(its.state, its.name, its.text) for its in findings], left=3)
    for its, row in zip(findings, rows, strict=True):
        yield row
        if its.hint:
            yield f"         Hint: {its.hint}"
