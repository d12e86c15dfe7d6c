"""`qinfer bench`: how fast a model prefills and decodes, beside what the machine can do."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qinfer_cli.loading import load_model
from qinfer_cli.options import (
    device_options,
    json_option,
    kv_bits_list,
    numbers,
    quiet_option,
    threads_option,
)
from qinfer_cli.results import check_target, csv_text, require_matplotlib, write_file
from qinfer_cli.tables import aligned

if TYPE_CHECKING:
    from qinfer.benchmark import Benchmark, Case, Result

_PLOTS = (".png", ".svg")
_COLUMNS = (  # title and width
    ("test", 12),
    ("depth", 6),
    ("batch", 5),
    ("KV", 4),
    ("tok/s", 8),
    ("min–max", 15),  # noqa: RUF001
    ("latency", 13),
    ("read/token", 10),
    ("achieved", 15),
    ("peak", 8),
)


def _plot_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix.lower() not in _PLOTS:
        raise click.BadParameter(f"{str(value)!r} must end with {' or '.join(_PLOTS)}.")
    return value


@click.command()
@click.argument("model")
@click.option(
    "-p",
    "--prompt",
    "prompts",
    type=numbers(0),
    metavar="N,…",
    help="Tokens of the prompts to prefill; 0 leaves prefill out. Default: 512, or what the model "
    "allows.",
)
@click.option(
    "-n",
    "--new-tokens",
    type=numbers(0),
    metavar="N,…",
    default="64",
    show_default=True,
    help="Tokens to decode; 0 leaves decoding out.",
)
@click.option(
    "-d",
    "--depth",
    "depths",
    type=numbers(0),
    metavar="N,…",
    default="0",
    show_default=True,
    help="Tokens in the cache before, rounded up to whole blocks of 32.",
)
@click.option(
    "-b",
    "--batch",
    "batches",
    type=numbers(1),
    metavar="N,…",
    default="1",
    show_default=True,
    help="Sequences at once.",
)
@click.option(
    "--kv-bits",
    type=kv_bits_list,
    metavar="BITS,…",
    help="Bits per number in the KV cache; k8v4 is 8 for keys and 4 for values. Default: as the "
    "model was converted, or 16.",
)
@click.option(
    "-r",
    "--repetitions",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Runs of each test, after one to warm up that does not count.",
)
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Also write the results as CSV; - prints CSV instead of the table.",
)
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(path_type=Path),
    callback=_plot_file,
    help="Also plot tok/s against depth and batch: a .png or .svg file. Needs matplotlib.",
)
@device_options
@threads_option
@json_option
@quiet_option
def bench(**options: Any) -> None:
    """Measure how fast MODEL, a directory or a hub id, prefills and decodes.

    Lists, with commas, are combined: each prompt length and number of new tokens at each depth,
    batch and KV bits. Tokens are random. Decoding is set beside the memory bandwidth measured here:
    to decode a token, the weights and the cache have to be read.

    \b
    qinfer bench smol-int4
    qinfer bench smol-int4 --depth 0,4096 --batch 1,8 --kv-bits 16,8 --threads 2
    qinfer bench smol-int4 -p 0 -n 128 -d 0,1024,2048,4096 --plot decode.svg
    qinfer bench smol-int4 --json
    """
    prints_csv = str(options["csv_file"]) == "-"
    if prints_csv and options["as_json"]:
        raise click.UsageError("--json and --csv - both print on stdout: give --csv a file.")
    if options["prompts"] == options["new_tokens"] == (0,):
        raise click.UsageError("Nothing to measure: give --prompt or --new-tokens.")
    for file in (options["plot_file"], None if prints_csv else options["csv_file"]):
        if file is not None:
            check_target(file)
    if options["plot_file"] is not None:
        require_matplotlib()
    report = _measure(options, prints_table=not options["as_json"] and not prints_csv)
    if options["as_json"]:
        click.echo(json.dumps(report, ensure_ascii=False))
    if prints_csv:
        click.echo(csv_text(report), nl=False)
    elif options["csv_file"] is not None:
        write_file(options["csv_file"], csv_text(report).encode())
    if options["plot_file"] is not None:
        from qinfer_cli.plot import plot

        suffix = options["plot_file"].suffix.lower().removeprefix(".")
        write_file(options["plot_file"], plot(report, suffix))


def _measure(options: dict[str, Any], *, prints_table: bool) -> dict[str, Any]:
    """What `--json` prints; on the way the table, a line when it is known, and a progress bar."""
    subject, cases, limit = _prepare(options)

    from tqdm import tqdm

    report = _circumstances(subject, options) | {"read_limit_bytes_per_s": limit, "results": []}
    if prints_table:
        for line in _heading(report):
            click.echo(line)
    with tqdm(
        total=len(cases) * (1 + options["repetitions"]),
        unit="run",
        leave=False,
        disable=options["quiet"] or None,  # None: shown on a terminal only
    ) as bar:
        for result in subject.run(
            cases,
            repetitions=options["repetitions"],
            on_case=lambda case: bar.set_description(str(case)),
            on_run=bar.update,
        ):
            figures = _figures(result, limit)
            report["results"].append(figures)
            if prints_table:
                with tqdm.external_write_mode():
                    click.echo(_row(_cells(figures)))
    return report


def _prepare(options: dict[str, Any]) -> tuple[Benchmark, list[Case], float]:
    """The model, the tests to run on it, and the bandwidth of its memory in bytes per second.

    What cannot be run is refused before weights are loaded.
    """
    from qinfer.checkpoint.opening import find_model

    directory = find_model(options["model"], progress=not options["quiet"])

    import numpy  # noqa: F401  (loaded by torch, it would swallow a Ctrl-C)

    from qinfer import benchmark
    from qinfer.config import ModelConfig
    from qinfer.ops.cpu.threads import set_threads
    from qinfer.quant.kv import KVFormat

    set_threads(options["threads"])
    config, asked = ModelConfig.read(directory), options["kv_bits"]
    cases = benchmark.cases_of(
        config,
        [KVFormat(*bits) for bits in asked] if asked else [KVFormat.stored(directory)],
        prompts=options["prompts"],
        new_tokens=options["new_tokens"],
        depths=options["depths"],
        batches=options["batches"],
    )
    benchmark.require_memory(directory, config, cases, device=options["device"])
    limit = benchmark.limit_bytes_per_s(options["device"])  # its buffer is gone when weights come
    model = load_model(directory, options | {"kv_bits": None}, context_tokens=1, max_sequences=1)
    return benchmark.Benchmark(model), cases, limit


def _circumstances(subject: Benchmark, options: dict[str, Any]) -> dict[str, Any]:
    """What the results depend on beside the tests."""
    from importlib.metadata import version

    import torch

    from qinfer.benchmark import device_name
    from qinfer.ops.cpu.kernels import library

    device = subject.model.engine.decoder.ops.device
    return {
        "model": str(subject.model.directory),
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "cpu_kernels": library() is not None,
        "versions": {
            "qinfer": version("qinfer"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "repetitions": options["repetitions"],
        "weights_bytes": subject.weights_bytes,
    }


def _figures(result: Result, limit_bytes_per_s: float) -> dict[str, Any]:
    """A result as JSON and CSV have it."""
    case, rate, read = result.case, result.tokens_per_s, result.read_bytes_per_s
    latency = {"": result.latency_s.median, "_min": result.latency_s.low}
    latency["_max"] = result.latency_s.high
    is_prefill = case.phase == "prefill"
    return {
        "phase": case.phase,
        "tokens": case.tokens,
        "depth": case.depth,
        "batch": case.batch,
        "k_bits": case.kv_format.k_bits,
        "v_bits": case.kv_format.v_bits,
        "tokens_per_s": rate.median,
        "tokens_per_s_min": rate.low,
        "tokens_per_s_max": rate.high,
        **{f"ttft_s{end}": value if is_prefill else None for end, value in latency.items()},
        **{f"tpot_s{end}": None if is_prefill else value for end, value in latency.items()},
        "flops_per_s": result.flops_per_s,
        "bytes_per_token": result.bytes_per_token,
        "read_bytes_per_s": read,
        "read_share": None if read is None else read / limit_bytes_per_s,
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def _heading(report: dict[str, Any]) -> Iterator[str]:
    """What stands above the rows."""
    threads = f", {report['threads']} threads" if report["device"] == "cpu" else ""
    runs = report["repetitions"]
    yield from aligned(
        [
            ("model", f"{report['model']}, {report['weights_bytes'] / 1e6:,.1f} MB of weights"),
            ("device", f"{report['device']}: {report['device_name']}{threads}"),
            ("memory reads", f"{report['read_limit_bytes_per_s'] / 1e9:,.1f} GB/s, as measured"),
            ("runs", f"{runs} of each, after a warm-up; medians are shown"),
        ],
        left=2,
    )
    yield ""
    yield _row([title for title, _ in _COLUMNS])


def _row(cells: list[str]) -> str:
    first, *others = zip(cells, (width for _, width in _COLUMNS), strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def _cells(figures: dict[str, Any]) -> list[str]:
    k_bits, v_bits = figures["k_bits"], figures["v_bits"]
    low, high = figures["tokens_per_s_min"], figures["tokens_per_s_max"]
    if figures["phase"] == "prefill":
        latency = f"TTFT {_ms(figures['ttft_s'])}"
        read, achieved = "", f"{_number(figures['flops_per_s'] / 1e9)} GFLOP/s"
    else:
        latency = f"TPOT {_ms(figures['tpot_s'])}"
        read = f"{_number(figures['bytes_per_token'] / 1e6)} MB"
        share = f"{figures['read_share']:.0%}"
        achieved = f"{_number(figures['read_bytes_per_s'] / 1e9)} GB/s, {share}"
    return [
        f"{figures['phase']} {figures['tokens']}",
        f"{figures['depth']:,}",
        f"{figures['batch']:,}",
        f"{k_bits}" if k_bits == v_bits else f"k{k_bits}v{v_bits}",
        _number(figures["tokens_per_s"]),
        f"{_number(low)}–{_number(high)}",  # noqa: RUF001
        latency,
        read,
        achieved,
        f"{figures['peak_memory_bytes'] / 1e6:,.0f} MB",
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms"
