"""A result of `gpu_bench.py` as Markdown, and what became of the goals.

    python scripts/gpu_table.py docs/gpu-results/2026-01-31-nvidia-h200.json

Nothing is measured here, and torch is not needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Data = dict[str, Any]

SHARES = {"int4": 0.55, "int8": 0.65, "bf16": 0.80}
"""Of the copy bandwidth that decoding shall reach: 8 B, one sequence, empty cache."""

TIMES_TRANSFORMERS = 4.0
TIMES_BATCH = 8.0
WIDE = 16
DEEP = 16384
SPARE_BYTES = 600e6
"""Memory beside weights and cache."""

_DEEP_OF_TINY = 64
_HEADS = ("model", "test", "depth", "batch", "KV", "tok/s", "lowest–highest", "read", "share")  # noqa: RUF001
_MEMORY_HEADS = ("model", "weights", "KV cache", "peak", "beside")


class Results:
    """What can be asked of a result.

    Attributes:
        data: As `gpu_bench.py` wrote it.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self._by_key: dict[str, Data] = {r["key"]: r for r in data["results"]}
        self._deep = _DEEP_OF_TINY if data.get("tiny") else DEEP

    def speed(
        self, model: str, *, batch: int = 1, deep: bool = False, kv: int = 16, phase: str = "decode"
    ) -> Data | None:
        """The measurement of a model with graphs, greedy; None if there is none."""
        depth = self._deep if deep else 0
        asked = phase, depth, batch, kv, True, False
        for result in self.data["results"]:
            its = result.get("speed")
            if its is None or not result["key"].startswith(f"{model} "):
                continue
            case = its["case"]
            found = case["phase"], case["depth"], case["batch"], case["kv_format"]["k_bits"]
            if (*found, its["graphs"], its["sampled"]) == asked:
                return dict(its)
        return None

    def rate(self, model: str, **asked: Any) -> float | None:
        """Its tokens per second."""
        its = self.speed(model, **asked)
        return None if its is None else float(its["tokens_per_s"]["median"])

    def transformers_rate(self, shape: str) -> float | None:
        """Tokens per second of transformers with bitsandbytes."""
        its = self._by_key.get(f"{shape} transformers", {}).get("transformers")
        return None if its is None else float(its["tokens_per_s"]["median"])

    def memories(self) -> list[tuple[str, Data]]:
        """Models and what they took, when they were opened for the first time."""
        found: dict[str, Data] = {}
        for result in self.data["results"]:
            if "memory" in result:
                found.setdefault(result["key"].partition(" memory")[0], result["memory"])
        return list(found.items())


def goals(data: Data) -> list[Data]:
    """What was to be reached, what was found, and whether it holds: None if it was not measured."""
    results = Results(data)
    rows = [
        *(_share(results, scheme, share) for scheme, share in SHARES.items()),
        *(_ratio_to_transformers(results, scheme) for scheme in ("int4", "nf4")),
        _ratio(
            f"8b int4, depth {DEEP}: int8 KV faster than 16-bit KV",
            results.rate("8b int4", deep=True, kv=8),
            results.rate("8b int4", deep=True, kv=16),
            lambda ratio: ratio > 1,
        ),
        _ratio(
            f"8b int4: batch {WIDE} at least {TIMES_BATCH:.0f} times the throughput of batch 1",
            results.rate("8b int4", batch=WIDE),
            results.rate("8b int4"),
            lambda ratio: ratio >= TIMES_BATCH,
        ),
        *(_memory(model, its) for model, its in results.memories()),
        _tests(data.get("tests")),
    ]
    return [{"goal": goal, "found": found, "holds": holds} for goal, found, holds in rows]


Row = tuple[str, str, bool | None]


def _share(results: Results, scheme: str, least: float) -> Row:
    goal = f"8b {scheme}, batch 1: at least {least:.0%} of the copy bandwidth"
    its = results.speed(f"8b {scheme}")
    if its is None:
        return goal, "not measured", None
    return goal, f"{its['read_share']:.1%}", its["read_share"] >= least


def _ratio_to_transformers(results: Results, scheme: str) -> Row:
    return _ratio(
        f"8b {scheme}: at least {TIMES_TRANSFORMERS:.0f} times transformers with bitsandbytes nf4",
        results.rate(f"8b {scheme}"),
        results.transformers_rate("8b"),
        lambda ratio: ratio >= TIMES_TRANSFORMERS,
    )


def _ratio(
    goal: str, ours: float | None, others: float | None, holds: Callable[[float], bool]
) -> Row:
    if ours is None or others is None:
        return goal, "not measured", None
    ratio = ours / others
    return goal, f"{ratio:.2f} times ({ours:,.1f} and {others:,.1f} tok/s)", holds(ratio)


def _memory(model: str, its: Data) -> Row:
    goal = f"{model}: at most {SPARE_BYTES / 1e6:.0f} MB of memory beside weights and cache"
    beside = its["reserved_bytes"] - its["weights_bytes"] - its["kv_bytes"]
    return goal, f"{beside / 1e6:,.0f} MB", beside <= SPARE_BYTES


def _tests(its: Data | None) -> Row:
    goal = "pytest -m gpu: all pass"
    if its is None:
        return goal, "not run", None
    failed = its["failed"] + its["errors"]
    found = f"{its['passed']} passed, {failed} failed, {its['skipped']} skipped"
    return goal, found, failed == 0 and its["passed"] > 0


def markdown(data: Data) -> str:
    """All of it for people."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: Data) -> Iterator[str]:
    device, versions = data["device"], data["versions"]
    made_of = ", ".join(f"{name} {its}" for name, its in versions.items() if its)
    yield f"{device['name']}, {data['date'][:10]}, {made_of}."
    yield f"A copy in its memory moves {data['copy_bytes_per_s'] / 1e9:,.0f} GB/s."
    if data.get("commit"):
        yield f"Sources: {data['commit']}."
    if data.get("tiny"):
        yield "Of tiny shapes: **the figures mean nothing**."
    words = {True: "yes", False: "**no**", None: "not measured"}
    yield from ["", *_table(("goal", "found", "holds"), _goal_cells(data["goals"], words))]
    yield from ["", *_table(_HEADS, _speed_cells(data))]
    yield from ["", *_table(_MEMORY_HEADS, _memory_cells(data))]
    failed = [(r["key"], r["error"]) for r in data["results"] if "error" in r]
    if failed:
        yield from ["", "Failed:", "", *(f"- {key}: `{_short(error)}`" for key, error in failed)]
    tests = data.get("tests")
    if tests and tests["failures"]:
        yield from ["", "Tests that failed:", "", *(f"- `{name}`" for name in tests["failures"])]
    if data.get("not_run"):
        yield from ["", "The time did not suffice for:", ""]
        yield from (f"- {key}" for key in data["not_run"])


def _goal_cells(rows: Sequence[Data], words: dict[bool | None, str]) -> Iterator[list[str]]:
    for row in rows:
        yield [row["goal"], row["found"], words[row["holds"]]]


def _speed_cells(data: Data) -> Iterator[list[str]]:
    for result in data["results"]:
        if "transformers" in result:
            its = result["transformers"]
            rates = _rates(its["tokens_per_s"])
            name = f"{result['key']} + bitsandbytes nf4"
            yield [name, f"decode {its['new_tokens']}", "0", "1", "16", *rates, "", ""]
        if "speed" not in result:
            continue
        its = result["speed"]
        case, kv = its["case"], its["case"]["kv_format"]
        model = " ".join(result["key"].split()[:2])
        bits = [kv["k_bits"], kv["v_bits"]]
        test = f"{case['phase']} {case['tokens']}" + ("" if its["graphs"] else ", no graph")
        test += ", sampled" if its["sampled"] else ""
        if its["bytes_per_token"] is None:
            read, share = f"{its['flops_per_s'] / 1e12:,.0f} TFLOP/s", ""
        else:
            rate = its["bytes_per_token"] * its["tokens_per_s"]["median"]
            read, share = f"{rate / 1e9:,.0f} GB/s", f"{its['read_share']:.0%}"
        yield [
            model,
            test,
            f"{case['depth']:,}",
            str(case["batch"]),
            "/".join(map(str, dict.fromkeys(bits))),
            *_rates(its["tokens_per_s"]),
            read,
            share,
        ]


def _rates(its: Data) -> list[str]:
    return [_number(its["median"]), f"{_number(its['low'])}–{_number(its['high'])}"]  # noqa: RUF001


def _memory_cells(data: Data) -> Iterator[list[str]]:
    for model, its in Results(data).memories():
        beside = its["reserved_bytes"] - its["weights_bytes"] - its["kv_bytes"]
        sizes = its["weights_bytes"], its["kv_bytes"], its["reserved_bytes"], beside
        yield [model, *(f"{size / 1e6:,.0f} MB" for size in sizes)]


def _table(heads: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _short(error: str) -> str:
    line = " ".join(error.replace("`", "'").split())
    return line if len(line) <= 200 else f"{line[:200]}…"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    data = json.loads(parser.parse_args().result.read_text(encoding="utf-8"))
    print(markdown(data | {"goals": goals(data)}), end="")


if __name__ == "__main__":
    main()
