"""Plots of benchmarks. matplotlib is loaded here, so import this only where one is asked for."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_AXES = {"depth": "tokens in the cache before", "batch": "sequences at once"}
_LINES = {"tokens": "{} tokens", "depth": "depth {:,}", "batch": "batch {:,}", "kv": "KV {} bits"}


def plot(report: dict[str, Any], kind: str) -> bytes:
    """Tokens per second against depth and against batch, of each phase that was measured.

    Points are medians, bars reach from the lowest to the highest.

    Args:
        report: What `qinfer bench --json` prints.
        kind: `png` or `svg`.

    Returns:
        The content of the file.
    """
    results = [figures | {"kv": _kv(figures)} for figures in report["results"]]
    phases = list(dict.fromkeys(figures["phase"] for figures in results))
    figure = Figure(figsize=(10, 4 * len(phases)), layout="constrained")
    title = f"{report['model']}, {report['device_name']}"
    figure.suptitle(title, fontsize="medium", parse_math=False)
    panels = figure.subplots(len(phases), len(_AXES), squeeze=False)
    for row, phase in zip(panels, phases, strict=True):
        for axes, along in zip(row, _AXES, strict=True):
            _draw(axes, [f for f in results if f["phase"] == phase], along)
            axes.set_ylabel(f"{phase}, tok/s")
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=150)
    return content.getvalue()


def _draw(axes: Axes, results: list[dict[str, Any]], along: str) -> None:
    """A line for each combination of everything else."""
    others = [name for name in _LINES if name != along]
    varied = [name for name in others if len({f[name] for f in results}) > 1]
    for line in dict.fromkeys(tuple(f[name] for name in others) for f in results):
        points = [f for f in results if tuple(f[name] for name in others) == line]
        points.sort(key=lambda f: int(f[along]))
        rates = [f["tokens_per_s"] for f in points]
        errors = [
            [f["tokens_per_s"] - f["tokens_per_s_min"] for f in points],
            [f["tokens_per_s_max"] - f["tokens_per_s"] for f in points],
        ]
        label = _label(dict(zip(others, line, strict=True)), varied)
        x = [f[along] for f in points]
        axes.errorbar(x, rates, yerr=errors, marker="o", capsize=3, label=label)
    axes.set_xlabel(_AXES[along])
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if varied:
        axes.legend(fontsize="small")


def _label(values: dict[str, Any], varied: Iterable[str]) -> str:
    return ", ".join(_LINES[name].format(values[name]) for name in varied)


def _kv(figures: dict[str, Any]) -> str:
    k, v = figures["k_bits"], figures["v_bits"]
    return str(k) if k == v else f"{k}/{v}"
